"""One array on disk, read a few rows at a time without trusting the file."""

from __future__ import annotations

import gzip
import math
import struct
import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.files.finding import kind_of

IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
# What zipfile, gzip and NumPy's header parser raise on a file that is something else.
BROKEN = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    RuntimeError,
    SyntaxError,
    zlib.error,
    zipfile.BadZipFile,
    tokenize.TokenError,
    NotImplementedError,
    struct.error,
)


@dataclass(frozen=True)
class ArrayFile(ABC):
    """An array of known shape whose rows can be read in order."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield the array, `rows` rows at a time."""


def arrays_of(path: Path) -> dict[str, ArrayFile]:
    """Return the arrays of a file by name; the only one of a .npy or IDX file is called ''."""
    with reading(str(path)):
        if kind_of(path) == "npz":
            return _members(path)
        return {"": _npy(path) if kind_of(path) == "npy" else _idx(path)}
    raise AssertionError("unreachable")


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Turn what a damaged file causes into a DataError."""
    try:
        yield
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(f"{where}: cannot be read: {error or 'it ends too early'}") from None


class _Npy(ArrayFile):
    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        for first in range(0, self.shape[0], rows):
            with reading(self.where):
                # Mapped anew each time, so that pages already read need not stay in memory.
                mapped = np.load(self.where, mmap_mode="r", allow_pickle=False)
                block = np.array(mapped[first : first + rows])
            yield block


def _npy(path: Path) -> ArrayFile:
    mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    if mapped.ndim == 0:
        raise ValueError("it holds a single number")
    return _Npy(str(path), mapped.shape, mapped.dtype)


@dataclass(frozen=True)
class _Stream(ArrayFile):
    """An array that follows a header in a stream that can only be read forwards."""

    path: Path
    member: str | None
    start: int
    by_column: bool = False

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        if self.by_column:
            raise DataError(f"{self.where}: stored by columns; save np.ascontiguousarray(...)")
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        with reading(self.where), _opened(self.path, self.member) as file:
            _exactly(file, self.start)
            for first in range(0, self.shape[0], rows):
                count = min(rows, self.shape[0] - first)
                data = np.frombuffer(_exactly(file, count * size), self.dtype)
                yield data.reshape(count, *self.shape[1:])
            if file.read(1):
                raise ValueError(f"more follows than the {self.shape} numbers of its header")


@contextmanager
def _opened(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    if member is not None:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            yield file
    else:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
            yield cast("IO[bytes]", opened)


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError("it ends too early")
    return data


def _idx(path: Path) -> ArrayFile:
    with _opened(path, None) as file:
        zero, kind, axes = struct.unpack(">HBB", _exactly(file, 4))
        if zero != 0 or kind not in IDX_TYPES or not 1 <= axes <= 8:
            raise ValueError("it does not begin as an IDX file does")
        shape = struct.unpack(f">{axes}I", _exactly(file, 4 * axes))
    return _Stream(str(path), shape, np.dtype(IDX_TYPES[kind]), path, None, 4 + 4 * axes)


def _members(path: Path) -> dict[str, ArrayFile]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        return {name[:-4]: _member(path, archive, name) for name in names}


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> ArrayFile:
    where = f"{path}[{name[:-4]}]"
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{name} has format version {version}")
        parse = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = parse(file)
        start = file.tell()
    return _Stream(where, shape, dtype, path, name, start, fortran and len(shape) > 1)
