"""Where data files are looked for, and how they are read without trusting them."""

from __future__ import annotations

import gzip
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from numpy.typing import NDArray

from fedcohort import npy
from fedcohort.exceptions import DataError

VARIABLE = "FEDCOHORT_DATA"
MEMBER_LIMIT = 1 << 30
# What zipfile and NumPy's header parser raise on a file that is something else or was altered.
NOT_AN_NPZ = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
)


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


@contextmanager
def opened(path: Path, holds: str) -> Iterator[IO[bytes]]:
    """Open a file, through gzip if its name says so; what goes wrong in it becomes a DataError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield cast("IO[bytes]", file)
    except EOFError as error:
        raise damaged(path, "it ends too early", holds) from error
    except (OSError, zlib.error) as error:
        raise damaged(path, f"it cannot be read ({error})", holds) from error


def read_all(path: Path, limit: int, holds: str) -> bytes:
    """Read a whole file of at most `limit` bytes (after decompression)."""
    with opened(path, holds) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise damaged(path, f"it is longer than {limit} bytes", holds)
    return data


def read_npz(path: Path, keys: tuple[str, ...], holds: str) -> dict[str, NDArray[Any]]:
    """Read arrays of an .npz file; no pickles, and nothing is allocated that is not there."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {key: _read_member(archive, f"{key}.npy") for key in keys}
    except KeyError as error:
        raise damaged(path, str(error.args[0]), holds) from error
    except NOT_AN_NPZ as error:
        raise damaged(path, f"it cannot be read ({error})", holds) from error


def _read_member(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    size = archive.getinfo(name).file_size
    if size > MEMBER_LIMIT:
        raise ValueError(f"{name} has {size} bytes, more than {MEMBER_LIMIT}")
    return npy.decode(archive.read(name))  # checks the checksum before anything is interpreted
