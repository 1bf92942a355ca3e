"""How a CSV file is written: delimiter, decimal mark, encoding, header."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.source import CsvOptions

HEAD = 1 << 16
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
DELIMITERS = (",", ";", "\t", "|")
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


class Dialect(NamedTuple):
    """How a CSV file is written; `detected` says what of it was not stated.

    `names` are given to the columns of a file without a header.
    """

    delimiter: str
    decimal: str
    encoding: str
    names: tuple[str, ...]
    detected: tuple[str, ...]


def find_dialect(path: Path, stated: CsvOptions, null_values: Sequence[str]) -> Dialect:
    """Detect delimiter, decimal mark, encoding and header from the first lines of a file.

    A delimiter is believed if it is the only one that cuts the first lines into equally many
    parts. Numbers with a comma count as decimal only where the delimiter is not a comma. An
    encoding is believed if the file begins with its mark; all else must be UTF-8. A first row of
    numbers and missing values is data, not names; one that counts (0, 1, 2, ...) could be either,
    so it is refused.
    """
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opener(path, "rb") as file:
        head = bytes(file.read(HEAD))
    detected = []
    encoding = stated.encoding
    if encoding is None:
        encoding = next((name for mark, name in MARKS.items() if head.startswith(mark)), "utf-8")
        if encoding != "utf-8":
            detected.append(f"encoding {encoding}")
    lines = _lines(path, head, encoding)
    named = ".tsv" in path.name.lower()
    delimiter = stated.delimiter or ("\t" if named else _delimiter(lines))
    if stated.delimiter is None and not named and delimiter != ",":
        detected.append(f"delimiter {delimiter!r}")
    decimal = stated.decimal or "."
    if stated.decimal is None and delimiter != "," and _comma_is_decimal(lines, delimiter):
        decimal = ","
        detected.append("decimal comma")
    first = lines[0] if lines else ""
    cells = next(csv.reader([first], delimiter=delimiter), [])
    header = stated.header
    if header is None:
        header = _is_header(path, first, cells, decimal, null_values)
        if not header:
            detected.append(f"no header, so the columns are called c1 to c{len(cells)}")
    names = () if header else tuple(f"c{i + 1}" for i in range(len(cells)))
    return Dialect(delimiter, decimal, encoding, names, tuple(detected))


def _is_header(
    path: Path, line: str, cells: Sequence[str], decimal: str, null_values: Sequence[str]
) -> bool:
    """Whether the first row holds names: text, or in quotes."""
    missing = ("", *null_values)
    filled = [c.strip().replace(decimal, ".") for c in cells if c.strip() not in missing]
    if not filled or '"' in line or not all(NUMBER.fullmatch(c) for c in filled):
        return True
    values = [float(c) for c in filled]
    if len(values) > 1 and all(b - a == 1 for a, b in pairwise(values)):
        raise DataError(
            f"{path}: the first row counts {filled[0]}, {filled[1]}, ...: say --csv "
            "header=true if these are names of columns, header=false if they are data"
        )
    return False


def _lines(path: Path, head: bytes, encoding: str) -> list[str]:
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except LookupError:
        raise ConfigError(f"--csv encoding={encoding}: unknown to Python") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{path}: the text is not {encoding.upper()}; name the right one, such as "
            "--csv encoding=cp1252 (Excel in Western Europe)"
        ) from None
    lines = text.lstrip("\ufeff").splitlines()
    return [line for line in lines[:50] if line.strip()][: max(1, min(20, len(lines) - 1))]


def _delimiter(lines: Sequence[str]) -> str:
    counts = {d: {re.sub(r'"[^"]*"', "", line).count(d) for line in lines} for d in DELIMITERS}
    even = [d for d, numbers in counts.items() if len(numbers) == 1 and min(numbers) > 0]
    return max(even, key=lambda d: _share_of_numbers(lines, d), default=",")


def _share_of_numbers(lines: Sequence[str], delimiter: str) -> float:
    cells = [cell.strip(' "').replace(",", ".") for line in lines for cell in line.split(delimiter)]
    return sum(NUMBER.fullmatch(cell) is not None for cell in cells) / len(cells)


def _comma_is_decimal(lines: Sequence[str], delimiter: str) -> bool:
    cells = [cell.strip(' "') for line in lines[1:] for cell in line.split(delimiter)]
    comma, point = (
        any(re.fullmatch(rf"[-+]?\d+{mark}\d+([eE][-+]?\d+)?", c) for c in cells)
        for mark in (",", r"\.")
    )
    return comma and not point
