"""Where the files of a data set are looked for, and how they are read without trusting them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.files.arrays import arrays_in
from fedcohort.files.source import decompressed

VARIABLE = "FEDCOHORT_DATA"
MAX_ARRAY_BYTES = 1 << 30


class MissingData(DataError):
    """A data file is not where it was looked for."""


def places(root: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """List the folders to search: `root` alone if given, else $FEDCOHORT_DATA and the cache."""
    if root is not None:
        return (Path(root).expanduser(),)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    given = os.environ.get(VARIABLE)
    return tuple(Path(p).expanduser() for p in (given, f"{cache}/fedcohort") if p)


@dataclass(frozen=True)
class Folder:
    """The folder of one data set, in each of the places to search."""

    name: str
    places: tuple[Path, ...]

    def file(self, *names: str, holds: str) -> Path:
        """Find the first file of these names; `holds` says what it must contain."""
        for place in self.places:
            for name in names:
                if (path := place / self.name / name).is_file():
                    return path
        looked = " and ".join(str(place / self.name) for place in self.places)
        raise MissingData(
            f"{self.name}: file {names[0]} not found in {looked}; it must contain {holds}. "
            f"Put it there, or set {VARIABLE} (or root) to the folder that holds {self.name}/"
        )


def damaged(path: Path, problem: str, holds: str) -> DataError:
    """Say what is wrong with a file."""
    return DataError(f"{path} is damaged: {problem}; it must contain {holds}")


def read_all(path: Path, limit: int, holds: str) -> bytes:
    """Read a whole file of at most `limit` bytes (after decompression)."""
    try:
        size = limit if path.suffix == ".gz" else min(limit, path.stat().st_size)
        with decompressed(path) as file:
            data = file.read(size + 1)
    except EOFError as error:
        raise damaged(path, "it ends too early", holds) from error
    except (OSError, zlib.error) as error:
        raise damaged(path, f"it cannot be read ({error})", holds) from error
    if len(data) > limit:
        raise damaged(path, f"it is longer than {limit} bytes", holds)
    return data


def read_arrays(path: Path, names: Sequence[str], holds: str) -> dict[str, NDArray[Any]]:
    """Read whole arrays of an NPZ file, or the array '' of an IDX file."""
    try:
        arrays = arrays_in(path)
        missing = [name for name in names if name not in arrays]
        if missing:
            raise DataError(f"{path}: array {missing[0]!r} is missing")
        return {name: arrays[name].read(MAX_ARRAY_BYTES) for name in names}
    except DataError as error:
        raise DataError(f"damaged file: {error}; it must contain {holds}") from None
