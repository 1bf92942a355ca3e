"""IDX, NPY and NPZ files as a source, read without trusting them.

Headers are checked before anything is allocated, nothing is unpickled, and a stream is read to
its very end, where checksums are.
"""

from __future__ import annotations

import math
import struct
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.source import (
    MISSING,
    Block,
    Place,
    Reading,
    Source,
    Want,
    decompressed,
    kind_of,
    reading,
)
from fedcohort.sketch.hashing import MAX_DIM
from fedcohort.storage import read_npy_header

MAX_NAME = 4096  # bytes of a client's name in an array
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


class ArraySource(Source):
    """Rows of arrays (n, ...), flattened; several files of one shape follow each other.

    The arrays of an .npz file are its columns; a .npy or IDX file holds one array.
    """

    def __init__(self, files: Sequence[Path], want: Want, skip: int = 0) -> None:
        if want.text is not None or want.person is not None:
            raise ConfigError(f"{files[0]}: arrays hold numbers; texts and people are in tables")
        self._want, self.reading = want, Reading()
        parts = [_Part(path, want) for path in files]
        self._parts, self.dim = parts[skip:], parts[0].dim
        self.rows = sum(part.rows for part in self._parts)
        for part in parts:
            if part.dim != self.dim:
                raise DataError(f"{part.path}: rows of {part.dim} numbers, not {self.dim}")

    def blocks(self) -> Iterator[Block]:
        """Yield arrays (n, dim) of the dtype that the file has."""
        self.reading.clear()
        for part in self._parts:
            yield from part.blocks(self.reading)


class _Part:
    """The arrays of one file that are wanted: vectors, labels, clients."""

    def __init__(self, path: Path, want: Want) -> None:
        self.path, self._want = path, want
        arrays, columns = arrays_in(path), [str(column) for column in want.columns]
        if kind_of(path) != "npz" and (columns or want.label or want.by):
            raise ConfigError(f"{path}: one array has no names; put several into an .npz file")
        columns = columns or [name for name in arrays if name not in (want.label, want.by)]
        if len(columns) != 1 and not want.columns:
            raise ConfigError(
                f"{path}: choose with --columns one of {', '.join(columns) or 'none'}"
            )
        for name in (*columns, want.label, want.by):
            if name is not None and name not in arrays:
                raise ConfigError(f"{path}: no array {name!r}; there are {', '.join(arrays)}")
        self.vectors = [arrays[name] for name in columns]
        self.label = None if want.label is None else arrays[want.label]
        self.by = None if want.by is None else arrays[want.by]
        self.rows = self.vectors[0].shape[0] if self.vectors[0].shape else 0
        for array in self.vectors:
            width = math.prod(array.shape[1:])
            if array.dtype.kind not in "fiub" or len(array.shape) < 2:
                raise array.refused("a table of numbers (rows, columns) is needed")
            if array.shape[0] != self.rows or not 1 <= width <= MAX_DIM:
                raise array.refused(f"{self.rows} rows of 1 to {MAX_DIM} numbers are needed")
        self.dim = sum(math.prod(a.shape[1:]) for a in self.vectors)
        for extra, kinds in ((self.label, "iub"), (self.by, "iuUS")):
            if extra is None:
                continue
            if extra.dtype.kind not in kinds or extra.shape != (self.rows,):
                needed = f"{self.rows} whole numbers (or, for --by, texts) are needed"
                raise extra.refused(needed)
            if extra.dtype.itemsize > MAX_NAME:
                raise extra.refused("too long for names of clients")

    def blocks(self, told: Reading) -> Iterator[Block]:
        size = self._want.rows_for(self.dim)
        streams = [array.blocks(size) for array in self.vectors]
        labels = None if self.label is None else self.label.blocks(size)
        clients = None if self.by is None else self.by.blocks(size)
        for first in range(0, self.rows, size):
            flat = [part.reshape(len(part), -1) for part in map(next, streams)]
            x: NDArray[Any] = np.ascontiguousarray(np.concatenate(flat, axis=1))
            y = None if labels is None else next(labels).astype(np.int64)
            ids = None if clients is None else _texts(next(clients), self.path)
            keep = self._complete(x, Place(str(self.path), first))
            told.count(keep, self._want.label, y)
            if not keep.all():
                told.missing["values"] += int(len(keep) - keep.sum())
                x, y = x[keep], None if y is None else y[keep]
                ids = None if ids is None else ids[keep]
            yield Block(x, y, ids)
        for stream in filter(None, (*streams, labels, clients)):
            next(stream, None)  # to its very end, where checksums are

    def _complete(self, x: NDArray[Any], place: Place) -> NDArray[np.bool_]:
        """Return which rows have no missing number."""
        if x.dtype.kind != "f" or np.isfinite(x).all():
            return np.ones(len(x), bool)
        for wrong, why in ((np.isinf(x), "inf"), (np.isnan(x), MISSING)):
            if wrong.any() and (why == "inf" or self._want.nulls == "error"):
                column = int(wrong.any(axis=0).argmax())
                raise place.error(column, wrong[:, column], why)
        present: NDArray[np.bool_] = ~np.isnan(x).any(axis=1)
        return present


def _texts(ids: NDArray[Any], path: Path) -> NDArray[np.object_]:
    if ids.dtype.kind == "U" and ids.size:
        letters = np.ascontiguousarray(ids).astype(ids.dtype.newbyteorder("=")).view(np.uint32)
        if letters.size and letters.max() > sys.maxunicode:
            raise DataError(f"{path}: {letters.max():#x} is not a letter of a name")
    plain = (i.decode("utf-8", "replace") if isinstance(i, bytes) else i for i in ids.tolist())
    return np.array([str(i) for i in plain], dtype=object)


@dataclass(frozen=True)
class ArrayFile:
    """An array of known shape whose rows are read in order.

    The values begin at `start` of the file or, in an .npz file, of its `member`. Only a plain .npy
    file is mapped; the others are streams that can only be read forwards.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    member: str = ""
    fortran: bool = False

    @property
    def where(self) -> str:
        """The file, and the array in it, for messages."""
        return f"{self.path}[{self.member[:-4]}]" if self.member else str(self.path)

    def refused(self, why: str) -> DataError:
        """Say why the array cannot be used."""
        return DataError(f"{self.where}: {self.dtype} of shape {self.shape}; {why}")

    def read(self, limit: int) -> NDArray[Any]:
        """Return the whole array, if it takes at most `limit` bytes."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if self.dtype.hasobject or size > limit:
            raise self.refused(f"at most {limit} bytes of numbers or text are read")
        whole = list(self.blocks(max((1, *self.shape[:1]))))
        return whole[0] if whole else np.empty(self.shape, self.dtype)

    def blocks(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield the array, `rows` rows at a time."""
        length = self.shape[0] if self.shape else 1
        if kind_of(self.path) == "npy":
            order: Literal["C", "F"] = "F" if self.fortran else "C"
            for first in range(0, length, rows):
                with reading(self.where):
                    # Mapped anew each time, so that pages already read need not stay in memory.
                    mapped: NDArray[Any] = np.memmap(
                        self.path, self.dtype, "r", self.start, self.shape, order
                    )
                    block = np.array(mapped[first : first + rows])
                yield block
            return
        if self.fortran and len(self.shape) > 1:
            raise DataError(f"{self.where}: stored by columns; save np.ascontiguousarray(...)")
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        with reading(self.where), self._opened() as file:
            _exactly(file, self.start)
            for first in range(0, length, rows):
                count = min(rows, length - first)
                data = np.frombuffer(_exactly(file, count * size), self.dtype)
                yield data.reshape((count, *self.shape[1:]) if self.shape else ())
            if file.read(1):
                raise ValueError(f"more data follow than its header promises, {self.shape}")

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        if not self.member:
            with decompressed(self.path) as file:
                yield file
            return
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as inside:
            yield inside


def arrays_in(path: Path) -> dict[str, ArrayFile]:
    """Return the arrays of a file by name; the only one of an NPY or IDX file is called ''."""
    with reading(path):
        if kind_of(path) == "idx":
            return {"": _idx(path)}
        if kind_of(path) == "npy":
            with path.open("rb") as file:
                return {"": _npy(path, file, path.stat().st_size)}
        arrays: dict[str, ArrayFile] = {}
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(".npy"):
                    with archive.open(member) as inside:
                        array = _npy(path, inside, member.file_size, member.filename)
                    arrays[member.filename[:-4]] = array
    return arrays


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError("it ends too early")
    return data


def _npy(path: Path, file: IO[bytes], size: int, member: str = "") -> ArrayFile:
    header = read_npy_header(file)
    array = ArrayFile(path, header.shape, header.dtype, header.start, member, header.fortran)
    if not header.dtype.hasobject and header.start + header.size != size:
        raise array.refused(f"its header promises {header.size:,} bytes of a file of {size:,}")
    return array


def _idx(path: Path) -> ArrayFile:
    with decompressed(path) as file:
        zero, kind, axes = struct.unpack(">HBB", _exactly(file, 4))
        if zero != 0 or kind not in IDX_TYPES or not 1 <= axes <= 8:
            raise ValueError("it does not begin as an IDX file does")
        shape = struct.unpack(f">{axes}I", _exactly(file, 4 * axes))
    return ArrayFile(path, shape, np.dtype(IDX_TYPES[kind]), 4 + 4 * axes)
