"""Text files: every line is one text."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, cast

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.source import Block, Reading, Source, Want

LONGEST_LINE = 1 << 20


class TextSource(Source):
    """Lines of UTF-8 files, plain or .gz; blank lines are left out."""

    form = "texts"
    dim = 0
    columns = ()
    rows = None

    def __init__(self, files: Sequence[Path], want: Want) -> None:
        for option, value in (("--text", want.text), ("--label", want.label), ("--by", want.by)):
            if value is not None:
                raise ConfigError(f"{files[0]}: a text file has no columns; leave out {option}")
        if want.form == "vectors":
            raise ConfigError(f"{files[0]}: texts need --hash minhash")
        self._files, self._lines, self.reading = files, want.rows_for(0), Reading()

    def blocks(self) -> Iterator[Block]:
        """Yield lists of lines."""
        for path in self._files:
            lines = _lines(path)
            while block := list(islice(lines, self._lines)):
                yield Block(block)


def _lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
            file = cast("IO[bytes]", opened)
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    raise DataError(f"{path}: line {number} is longer than {LONGEST_LINE} bytes")
                if text := line.decode("utf-8").strip():
                    yield text
    except UnicodeDecodeError:
        raise DataError(f"{path}: line {number} is not UTF-8 text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
