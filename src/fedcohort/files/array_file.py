"""The readers of IDX, NPY and NPZ: arrays on disk, read without trusting the file.

Headers are checked before anything is allocated, nothing is unpickled, and a stream is read to
its very end, where checksums are.
"""

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
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fedcohort import storage
from fedcohort.exceptions import DataError
from fedcohort.files.finding import kind_of

IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
# What zipfile, gzip and NumPy's header parser raise on a damaged file.
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

    def read(self, limit: int) -> NDArray[Any]:
        """Return the whole array, if it takes at most `limit` bytes."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if self.dtype.hasobject or size > limit:
            raise DataError(
                f"{self.where}: claims {self.dtype} of shape {self.shape}; at most {limit} bytes "
                "of numbers or text are read"
            )
        whole = list(self.blocks(max(1, self.shape[0] if self.shape else 1)))
        return whole[0] if whole else np.empty(self.shape, self.dtype)


def arrays_in(path: Path) -> dict[str, ArrayFile]:
    """Return the arrays of a file by name; the only one of an NPY or IDX file is called ''."""
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


@contextmanager
def decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, through gzip if its name ends in .gz."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        yield cast("IO[bytes]", file)


@dataclass(frozen=True)
class _Npy(ArrayFile):
    start: int
    order: Literal["C", "F"]

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        for first in range(0, self.shape[0], rows):
            with reading(self.where):
                # Mapped anew each time, so that pages already read need not stay in memory.
                mapped: NDArray[Any] = np.memmap(
                    self.where, self.dtype, "r", self.start, self.shape, self.order
                )
                block = np.array(mapped[first : first + rows])
            yield block


def _npy(path: Path) -> ArrayFile:
    with path.open("rb") as file:
        header = storage.read_npy_header(file)
    if not header.shape:
        raise ValueError("it holds a single number")
    if header.dtype.hasobject or header.start + header.size != path.stat().st_size:
        raise ValueError(f"its header claims {header.size} bytes of {header.dtype}")
    order: Literal["C", "F"] = "F" if header.fortran else "C"
    return _Npy(str(path), header.shape, header.dtype, header.start, order)


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
        length = self.shape[0] if self.shape else 1
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        with reading(self.where), _opened(self.path, self.member) as file:
            _exactly(file, self.start)
            for first in range(0, length, rows):
                count = min(rows, length - first)
                data = np.frombuffer(_exactly(file, count * size), self.dtype)
                yield data.reshape((count, *self.shape[1:]) if self.shape else ())
            if file.read(1):
                raise ValueError(f"more data follow than its header promises, {self.shape}")


@contextmanager
def _opened(path: Path, member: str | None) -> Iterator[IO[bytes]]:
    if member is None:
        with decompressed(path) as file:
            yield file
    else:
        with zipfile.ZipFile(path) as archive, archive.open(member) as inside:
            yield inside


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError("it ends too early")
    return data


def _idx(path: Path) -> ArrayFile:
    with decompressed(path) as file:
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
    with archive.open(name) as file:
        shape, fortran, dtype, start = storage.read_npy_header(file)
    size = archive.getinfo(name).file_size
    if not dtype.hasobject and math.prod(shape) * dtype.itemsize != size - start:
        raise ValueError(f"{name} claims {dtype} of shape {shape} in {size} bytes")
    by_column = fortran and len(shape) > 1
    return _Stream(f"{path}[{name[:-4]}]", shape, dtype, path, name, start, by_column)
