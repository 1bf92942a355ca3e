"""NPY, NPZ and IDX files as a source of vectors, labels and client ids."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.array_file import ArrayFile, arrays_in
from fedcohort.files.finding import kind_of
from fedcohort.files.source import Block, Place, Reading, Source, Want, fill
from fedcohort.sketch.hashing import MAX_DIM

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
        self._want, self.reading = want, Reading()
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
        self.reading.clear()
        for part in self.files:
            yield from part.blocks(self._want, self.reading)


class _Part:
    """The arrays of one file that are wanted: vectors, labels, clients."""

    def __init__(self, path: Path, want: Want) -> None:
        self.path = path
        arrays = arrays_in(path)
        self.vectors = [_pick(arrays, path, name) for name in _names(arrays, path, want)]
        self.label = None if want.label is None else _pick(arrays, path, want.label)
        self.by = None if want.by is None else _pick(arrays, path, want.by)
        for array in self.vectors:
            if array.dtype.kind not in "fiub" or len(array.shape) < 2:
                raise DataError(
                    f"{array.where}: {array.dtype} of shape {array.shape}; a table of numbers "
                    "(rows, columns) is needed"
                )
        self.rows = self.vectors[0].shape[0]
        self.dim = sum(math.prod(a.shape[1:]) for a in self.vectors)
        for array in self.vectors:
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

    def blocks(self, want: Want, reading: Reading) -> Iterator[Block]:
        size = want.rows_for(self.dim)
        streams = [array.blocks(size) for array in self.vectors]
        labels = None if self.label is None else self.label.blocks(size)
        clients = None if self.by is None else self.by.blocks(size)
        for first in range(0, self.rows, size):
            x = _side_by_side([next(stream) for stream in streams])
            y = None if labels is None else next(labels).astype(np.int64)
            ids = (
                None if clients is None or self.by is None else _texts(next(clients), self.by.where)
            )
            x, keep = fill(x, Place(str(self.path), first), want.nulls)
            reading.rows += len(keep)
            reading.kept += int(keep.sum())
            reading.missing["values"] += int(len(keep) - keep.sum())
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
        return tuple(str(name) for name in want.columns) or (rest[0],)
    raise ConfigError(f"{path}: choose with --columns one of {', '.join(rest) or 'no arrays'}")


def _pick(arrays: dict[str, ArrayFile], path: Path, name: str) -> ArrayFile:
    """Return an array by name; unless the file is an .npz, a name is another file."""
    if name in arrays:
        return arrays[name]
    if kind_of(path) == "npz":
        raise ConfigError(f"{path}: no array {name!r}; there are {', '.join(arrays) or 'none'}")
    other = Path(name)
    if not other.is_file() or kind_of(other) not in ("npy", "idx"):
        raise DataError(f"{name}: no such .npy or IDX file of labels or clients")
    return arrays_in(other)[""]


def _side_by_side(parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Flatten rows, in this machine's byte order, and join them."""
    flat = [
        np.ascontiguousarray(part.reshape(len(part), -1), part.dtype.newbyteorder("="))
        for part in parts
    ]
    return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)


def _texts(ids: NDArray[Any], where: str) -> NDArray[np.object_]:
    """Return client ids as Python strings."""
    if ids.dtype.kind == "U" and ids.size:
        letters = np.ascontiguousarray(ids).astype(ids.dtype.newbyteorder("=")).view(np.uint32)
        if letters.size and letters.max() > sys.maxunicode:
            raise DataError(f"{where}: {letters.max():#x} is not a letter of a name")
    plain = (i.decode("utf-8", "replace") if isinstance(i, bytes) else i for i in ids.tolist())
    return np.array([str(i) for i in plain], dtype=object)
