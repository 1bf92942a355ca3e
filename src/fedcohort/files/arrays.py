"""One array on disk, read a few rows at a time without trusting the file.

Arrays: .npy files mapped to memory, members of .npz files and IDX files as streams.
"""

from __future__ import annotations

import gzip
import math
import struct
import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from fedcohort import npy
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.finding import kind_of
from fedcohort.files.source import Block, Place, Source, Want, fill
from fedcohort.sketch.hashing.base import MAX_DIM

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
        shape, fortran, dtype, start = npy.read_header(file)
    return _Stream(where, shape, dtype, path, name, start, fortran and len(shape) > 1)


LONGEST_NAME = 4096  # bytes of a client's name in an array


class ArraySource(Source):
    """Rows of arrays (n, ...), flattened; several files of one shape follow each other.

    The arrays of an .npz file are its columns. A .npy or IDX file holds one array, and its labels
    and clients are other such files.
    """

    form = "vectors"
    columns = ()

    def __init__(self, files: Sequence[Path], want: Want) -> None:
        if want.form != "vectors" or want.text is not None:
            raise ConfigError(f"{files[0]}: arrays hold numbers; use --hash srp or pstable")
        if len(files) > 1 and (want.label or want.by) and kind_of(files[0]) != "npz":
            raise ConfigError(f"{files[0].parent}: a folder of arrays has no --label or --by")
        self._want = want
        self.files = [_Part(path, want) for path in files]
        self.dim = self.files[0].dim
        for part in self.files:
            if part.dim != self.dim:
                raise DataError(f"{part.path}: rows of {part.dim} numbers, not {self.dim}")

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Rows in all."""
        return sum(part.rows for part in self.files)

    def blocks(self) -> Iterator[Block]:
        """Yield arrays (n, dim) of the dtype that the file has."""
        for part in self.files:
            yield from part.blocks(self._want)


class _Part:
    """The arrays of one file that are wanted: vectors, labels, clients."""

    def __init__(self, path: Path, want: Want) -> None:
        self.path = path
        arrays = arrays_of(path)
        self.vectors = [_pick(arrays, path, name) for name in _names(arrays, path, want)]
        self.rows = self.vectors[0].shape[0]
        self.dim = sum(math.prod(a.shape[1:]) for a in self.vectors)
        self.label = None if want.label is None else _pick(arrays, path, want.label)
        self.by = None if want.by is None else _pick(arrays, path, want.by)
        for array in self.vectors:
            if array.dtype.kind not in "fiub" or len(array.shape) < 2:
                raise DataError(
                    f"{array.where}: {array.dtype} of shape {array.shape}; a table of numbers "
                    "(rows, columns) is needed"
                )
            if array.shape[0] != self.rows or not 1 <= math.prod(array.shape[1:]) <= MAX_DIM:
                raise DataError(
                    f"{array.where}: of shape {array.shape}; {self.rows} rows of 1 to {MAX_DIM} "
                    "numbers are needed"
                )
        for extra, kinds in ((self.label, "iub"), (self.by, "iuUS")):
            if extra is not None and (extra.dtype.kind not in kinds or extra.shape != (self.rows,)):
                raise DataError(
                    f"{extra.where}: {extra.dtype} of shape {extra.shape}; {self.rows} whole "
                    "numbers (or, for --by, texts) are needed"
                )
            if extra is not None and extra.dtype.itemsize > LONGEST_NAME:
                raise DataError(f"{extra.where}: {extra.dtype} is too long for names of clients")

    def blocks(self, want: Want) -> Iterator[Block]:
        size = want.rows_for(self.dim)
        streams = [array.blocks(size) for array in self.vectors]
        labels = None if self.label is None else self.label.blocks(size)
        clients = None if self.by is None else self.by.blocks(size)
        for first in range(0, self.rows, size):
            x = _side_by_side([next(stream) for stream in streams])
            y = None if labels is None else next(labels).astype(np.int64)
            ids = None if clients is None else _texts(next(clients))
            x, keep = fill(x, Place(str(self.path), first), want.nulls)
            if not keep.all():
                x, y = x[keep], None if y is None else y[keep]
                ids = None if ids is None else ids[keep]
            yield Block(x, y, ids)
        for stream in filter(None, (*streams, labels, clients)):
            next(stream, None)  # to its very end, where checksums are


def _names(arrays: dict[str, ArrayFile], path: Path, want: Want) -> tuple[str, ...]:
    """Return the arrays to hash: those asked for, or the only one there is."""
    if kind_of(path) != "npz":
        if want.columns:
            raise ConfigError(f"{path}: an array has no named columns; leave out --columns")
        return ("",)
    rest = [name for name in arrays if name not in (want.label, want.by)]
    if want.columns or len(rest) == 1:
        return want.columns or (rest[0],)
    raise ConfigError(f"{path}: choose with --columns one of {', '.join(rest) or 'no arrays'}")


def _pick(arrays: dict[str, ArrayFile], path: Path, name: str) -> ArrayFile:
    """Return an array by name; besides .npz files, a name is another file."""
    if name in arrays:
        return arrays[name]
    if kind_of(path) == "npz":
        raise ConfigError(f"{path}: no array {name!r}; there are {', '.join(arrays) or 'none'}")
    other = Path(name)
    if not other.is_file() or kind_of(other) not in ("npy", "idx"):
        raise DataError(f"{name}: no such .npy or IDX file of labels or clients")
    return arrays_of(other)[""]


def _side_by_side(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Flatten rows, in this machine's byte order, and join them."""
    flat = [
        np.ascontiguousarray(part.reshape(len(part), -1), part.dtype.newbyteorder("="))
        for part in parts
    ]
    return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)


def _texts(ids: NDArray[Any]) -> NDArray[np.object_]:
    """Return client ids as Python strings."""
    plain = (i.decode("utf-8", "replace") if isinstance(i, bytes) else i for i in ids.tolist())
    return np.array([str(i) for i in plain], dtype=object)
