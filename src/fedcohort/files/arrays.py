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
from itertools import count
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
        wanted = [_wanted(path, want) for path in files]
        self._files, self.dim = wanted[skip:], _width(wanted[0][0])
        self.rows = sum(vectors[0].shape[0] for vectors, _ in self._files)
        for path, (vectors, _) in zip(files, wanted, strict=True):
            if (dim := _width(vectors)) != self.dim:
                raise DataError(f"{path}: rows of {dim} numbers, not {self.dim}")

    def blocks(self) -> Iterator[Block]:
        """Yield arrays (n, dim) of the dtype that the file has."""
        self.reading.clear()
        size = self._want.rows_for(self.dim)
        for vectors, more in self._files:
            arrays, path = [*vectors, *more.values()], vectors[0].path
            # To the very end of all, where checksums are.
            streams = zip(*(array.blocks(size) for array in arrays), strict=True)
            for first, parts in zip(count(0, size), streams):
                flat = [part.reshape(len(part), -1) for part in parts[: len(vectors)]]
                x: NDArray[Any] = np.ascontiguousarray(np.concatenate(flat, axis=1))
                given = dict(zip(more, parts[len(vectors) :], strict=True))
                y = given["label"].astype(np.int64) if "label" in given else None
                ids = _texts(given["by"], path) if "by" in given else None
                keep = self._complete(x, Place(str(path), first))
                self.reading.count(keep, self._want.label, y)
                if not keep.all():
                    self.reading.missing["values"] += int(len(keep) - keep.sum())
                yield Block(x, y, ids).take(keep)

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


def _wanted(path: Path, want: Want) -> tuple[list[ArrayFile], dict[str, ArrayFile]]:
    """Return the arrays of vectors, and those of labels and clients, in a file."""
    arrays, columns = arrays_in(path), [str(column) for column in want.columns]
    roles = {r: name for r, name in (("label", want.label), ("by", want.by)) if name is not None}
    if kind_of(path) != "npz" and (columns or roles):
        raise ConfigError(f"{path}: one array has no names; put several into an .npz file")
    columns = columns or [name for name in arrays if name not in roles.values()]
    if len(columns) != 1 and not want.columns:
        raise ConfigError(f"{path}: choose with --columns one of {', '.join(columns) or 'none'}")
    for name in (*columns, *roles.values()):
        if name not in arrays:
            raise ConfigError(f"{path}: no array {name!r}; there are {', '.join(arrays)}")
    vectors, more = [arrays[name] for name in columns], {r: arrays[roles[r]] for r in roles}
    rows = (*vectors[0].shape, 0)[0]
    for array in vectors:
        if array.dtype.kind not in "fiub" or len(array.shape) < 2:
            raise array.refused("a table of numbers (rows, columns) is needed")
        if array.shape[0] != rows or not 1 <= _width([array]) <= MAX_DIM:
            raise array.refused(f"{rows} rows of 1 to {MAX_DIM} numbers are needed")
    for role, array in more.items():
        if array.dtype.kind not in ("iub" if role == "label" else "iuUS") or array.shape != (rows,):
            raise array.refused(f"{rows} whole numbers (or, for --by, texts) are needed")
        if array.dtype.itemsize > MAX_NAME:
            raise array.refused("too long for names of clients")
    return vectors, more


def _width(vectors: Sequence[ArrayFile]) -> int:
    return sum(math.prod(array.shape[1:]) for array in vectors)


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
        length = (*self.shape, 1)[0]
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
                several = min(rows, length - first)
                data = np.frombuffer(_exactly(file, several * size), self.dtype)
                yield data.reshape((several, *self.shape[1:]) if self.shape else ())
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
