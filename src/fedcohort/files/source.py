"""What every reader offers: blocks of rows, and a report of what was left out and why."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.files.columns import Column

Form = Literal["vectors", "texts", "sets"]
Nulls = Literal["error", "drop", "zero"]
BLOCK_NUMBERS = 1 << 21  # numbers per block: 16 MB as float64
BLOCK_ROWS = 1 << 16
BLOCK_TEXTS = 4096
NULL_VALUES = ("?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null")
IDENTIFIER = re.compile(r"(^|[_. -])(id|uuid|guid|mrn|row_?names?|index)$|^Unnamed: 0$", re.I)


@dataclass(frozen=True)
class CsvOptions:
    """How a CSV file is written; None is detected from its first lines, where that is safe.

    Without a header, columns are called c1, c2, ...
    """

    delimiter: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    header: bool | None = None


@dataclass(frozen=True)
class Want:
    """What to read of a file.

    Parameters
    ----------
    form : {"vectors", "texts", "sets"}
        Rows as numbers, one text per row, or rows as sets of tokens.
    columns : tuple of str or Column
        Columns of a table, by name or pattern (``p*``), or arrays of an .npz file; none means
        every column of numbers. A `Column` also says what its values become.
    text : str, optional
        The column of texts, or of lists of tokens.
    label, by : str, optional
        Columns with the class and the client of a row. For .npy and IDX: other files.
    nulls : {"error", "drop", "zero"}
        What a missing value does: stop, leave the row out, count as zero (in a set: as absent).
    batch_rows : int, optional
        Rows read at a time; by default about 16 MB.
    null_values : tuple of str
        Texts that stand for a missing value, besides the empty one.
    csv : CsvOptions
        How CSV files are written.
    """

    form: Form = "vectors"
    columns: tuple[str | Column, ...] = ()
    text: str | None = None
    label: str | None = None
    by: str | None = None
    nulls: Nulls = "error"
    batch_rows: int | None = None
    null_values: tuple[str, ...] = NULL_VALUES
    csv: CsvOptions = CsvOptions()

    def rows_for(self, dim: int) -> int:
        """How many rows to read at a time."""
        most = min(BLOCK_ROWS, BLOCK_NUMBERS // dim) if dim else BLOCK_TEXTS
        return self.batch_rows or max(1, most)


@dataclass
class Reading:
    """What one pass over the data left out, what it assumed, and what looks wrong.

    Parameters
    ----------
    rows, kept : int
        Rows read, and rows that were not left out.
    missing : Counter
        Missing values by column.
    others : Counter
        Values that are none of a category's public levels, by column.
    left_out : dict
        Columns that are not used, each with the reason.
    assumed : list of str
        What was detected in the file, such as its delimiter.
    """

    rows: int = 0
    kept: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    left_out: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    identifiers: list[str] = field(default_factory=list)

    def clear(self) -> None:
        """Begin a further pass: counts start again."""
        self.rows = self.kept = 0
        self.missing.clear()
        self.others.clear()

    def add(self, later: Reading) -> None:
        """Add what another pass, over later files of the same data, has found."""
        self.rows += later.rows
        self.kept += later.kept
        self.missing += later.missing
        self.others += later.others
        # Only the first block of a column tells whether it looks like an identifier.
        self.identifiers += [c for c in later.identifiers if c not in self.ranges]
        for name, (low, high) in later.ranges.items():
            before = self.ranges.get(name, (low, high))
            self.ranges[name] = min(low, before[0]), max(high, before[1])

    def look_at(self, column: Column, order: NDArray[np.float64], known: NDArray[Any]) -> None:
        """Remember the range of a column, and whether its first block looks like an identifier."""
        values = order[known]
        if not len(values):
            return
        low, high = float(values.min()), float(values.max())
        if column.name not in self.ranges and _identifies(column, values):
            self.identifiers.append(column.name)
        before = self.ranges.get(column.name, (low, high))
        self.ranges[column.name] = min(low, before[0]), max(high, before[1])

    def facts(self) -> dict[str, str]:
        """Return what a person must know about the data that were read."""
        facts = {}
        if self.left_out:
            reasons: dict[str, list[str]] = {}
            for name, why in self.left_out.items():
                reasons.setdefault(why, []).append(name)
            listed = [f"{', '.join(names)}: {why}" for why, names in reasons.items()]
            facts["columns left out"] = "; ".join(listed)
        if self.kept < self.rows:
            dropped = f"{self.rows - self.kept:,} of {self.rows:,}, for missing values"
            facts["rows left out"] = f"{dropped} ({_counted(self.missing)})"
        elif self.missing:
            facts["missing values"] = _counted(self.missing)
        if self.others:
            facts["other levels"] = f"{_counted(self.others)}: not among the public levels"
        if self.assumed:
            facts["detected"] = "; ".join(self.assumed)
        return facts

    def warnings(self) -> list[str]:
        """Return what makes a sketch of these data useless or misleading."""
        constant = [name for name, (low, high) in self.ranges.items() if low == high]
        messages = []
        if self.rows and self.kept < self.rows / 2:
            messages.append(
                f"only {self.kept:,} of {self.rows:,} rows are used, because others have missing "
                f"values: leave out the columns that miss most ({_counted(self.missing, 3)}), or "
                "use a spec, which marks missing values instead"
            )
        if constant:
            messages.append(f"constant in all rows, so they tell nothing: {', '.join(constant)}")
        if self.identifiers:
            names = ", ".join(self.identifiers)
            messages.append(f"look like identifiers and should not be hashed: {names}")
        return messages


def _identifies(column: Column, values: NDArray[np.float64]) -> bool:
    """Whether whole numbers, all different, are those of a counter or carry an id's name."""
    if column.kind != "number" or column.size > 1 or len(values) < 10:
        return False
    original = values * column.scale + column.center
    whole = np.rint(original)
    with np.errstate(invalid="ignore"):  # of two infinite numbers
        if (np.abs(whole - original) > 1e-6 + 1e-5 * np.abs(original)).any():
            return False
    distinct = len(np.unique(whole)) == len(whole)
    dense = np.ptp(whole) < 2 * len(whole)
    return distinct and bool(dense or len(whole) > 1000 or IDENTIFIER.search(column.name))


def _counted(counts: Counter[str], most: int | None = None) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common(most))


class Block(NamedTuple):
    """Some rows: an array (n, dim) or a list, with their labels and clients if wanted.

    `parts` are the columns one by one, as `files.encode.Encoded`.
    """

    x: Any
    y: NDArray[np.int64] | None = None
    clients: NDArray[np.object_] | None = None
    parts: Sequence[Any] = ()


class Source(ABC):
    """Data that can be read block by block, as often as needed.

    Attributes
    ----------
    form : {"vectors", "texts", "sets"}
        What the blocks hold.
    dim : int
        Numbers of a vector, 0 for texts and sets.
    columns : tuple of Column
        The columns used; empty for arrays and text files.
    rows : int or None
        Rows in all, where the files say so.
    reading : Reading
        What the last pass left out.
    """

    form: Form
    dim: int
    columns: tuple[Column, ...]
    rows: int | None
    reading: Reading

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
