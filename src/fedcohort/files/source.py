"""What every reader offers, and what it does about missing values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import DataError

Form = Literal["vectors", "texts", "sets"]
Nulls = Literal["error", "drop", "zero"]
BLOCK_NUMBERS = 1 << 21  # numbers of a block: 16 MB as float64
BLOCK_ROWS = 1 << 16
BLOCK_TEXTS = 4096


@dataclass(frozen=True)
class Want:
    """What to read of a file.

    Parameters
    ----------
    form : {"vectors", "texts", "sets"}
        Rows as numbers, one text a row, or rows as sets of tokens.
    columns : tuple of str
        Columns of a table, by name or pattern (``p*``), or arrays of an .npz file; none means
        every column of numbers.
    text : str, optional
        The column of texts, or of lists of tokens.
    label, by : str, optional
        Columns with the class and the client of a row. For .npy and IDX: other files.
    nulls : {"error", "drop", "zero"}
        What a missing value does: stop, leave the row out, count as zero (in a set: as absent).
    batch_rows : int, optional
        Rows read at a time; by default about 16 MB.
    """

    form: Form = "vectors"
    columns: tuple[str, ...] = ()
    text: str | None = None
    label: str | None = None
    by: str | None = None
    nulls: Nulls = "error"
    batch_rows: int | None = None

    def rows_for(self, dim: int) -> int:
        """How many rows to read at a time."""
        most = min(BLOCK_ROWS, BLOCK_NUMBERS // dim) if dim else BLOCK_TEXTS
        return self.batch_rows or max(1, most)


class Block(NamedTuple):
    """Some rows: an array (n, dim) or a list, with their labels and clients if wanted."""

    x: Any
    y: NDArray[np.int64] | None = None
    clients: NDArray[np.object_] | None = None


class Source(ABC):
    """Data that can be read block by block, as often as needed.

    Attributes
    ----------
    form : {"vectors", "texts", "sets"}
        What the blocks hold.
    dim : int
        Numbers of a vector, 0 for texts and sets.
    columns : tuple of str
        Names of the columns used; empty for arrays and texts.
    rows : int or None
        Rows in all, where the files say so.
    """

    form: Form
    dim: int
    columns: tuple[str, ...]
    rows: int | None

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield all rows, from the first."""


class Place(NamedTuple):
    """Where a block lies: its file, its first row there, and the names of its columns."""

    path: str
    first: int
    names: Sequence[str] = ()

    def name(self, column: int) -> str:
        """Name a column for a message."""
        return repr(self.names[column]) if self.names else str(column)


def fill(x: NDArray[Any], place: Place, nulls: Nulls) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Deal with NaN in vectors; return them and which rows to keep. Infinity is refused.

    Examples
    --------
    >>> x, keep = fill(np.array([[1.0, np.nan], [3.0, 4.0]]), Place("a.csv", 0), "zero")
    >>> x.tolist(), keep.tolist()
    ([[1.0, 0.0], [3.0, 4.0]], [True, True])
    """
    keep = np.ones(len(x), bool)
    if x.dtype.kind != "f" or np.isfinite(x).all():
        return x, keep
    infinite = np.isinf(x)
    if infinite.any():
        row, column = np.argwhere(infinite)[0]
        raise DataError(f"{place.path}: column {place.name(column)}, row {place.first + row}: inf")
    missing = np.isnan(x)
    if nulls == "error":
        row, column = np.argwhere(missing)[0]
        raise missing_value(place, place.name(column), int(row))
    if nulls == "drop":
        return x, ~missing.any(axis=1)
    return np.where(missing, 0, x), keep


def missing_value(place: Place, column: str, row: int) -> DataError:
    """Say where a value is missing and what can be done."""
    return DataError(
        f"{place.path}: column {column}, row {place.first + row}: the value is missing (null or "
        "NaN); choose --nulls drop or --nulls zero, or leave the column out"
    )
