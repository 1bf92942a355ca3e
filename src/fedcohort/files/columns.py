"""What each column of a table becomes before it is hashed, by public parameters only.

A sketch of a table states its columns in its header, so that sketches of other columns, or of the
same columns prepared differently, are refused as unlike. Nothing here is fitted to data: levels,
centers and scales are constants that all sites agree on.

Columns are put side by side in one vector. They are scaled such that `weight` is a distance that
can be compared across kinds: two numbers that differ by one `scale`, two different categories, the
first and the last level of an ordered category, true and false, or opposite days of the year are
all `weight` apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import date
from typing import Any, Literal, get_args

from fedcohort.exceptions import InvalidSketch
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

Kind = Literal["number", "boolean", "category", "ordered", "date", "text", "value"]
Missing = Literal["error", "drop", "zero", "indicator"]
PERIODS = {"yearday": 366, "month": 12, "weekday": 7, "hour": 24}
MAX_SLOTS = 1 << 16
MAX_TEXT = 1 << 12


@dataclass(frozen=True)
class Column:
    """One column: its name, what it holds and how that becomes numbers.

    Parameters
    ----------
    name : str
    kind : {"number", "boolean", "category", "ordered", "date", "text", "value"}
        "value" is a token ``column=value`` of a set, for MinHash.
    center, scale : float
        Public constants of a number, or of the days of a date: x becomes (x - center) / scale.
    weight : float
        What a typical difference in this column counts in the joint distance.
    size : int
        Numbers per record, for a column of lists.
    levels : tuple of str
        Public levels of a category (any other value is "other") or an ordered category.
    slots : int
        For a category without public levels, or for text: how many slots its values are hashed to.
    parts : tuple of str
        Cyclic parts of a date: "yearday", "month", "weekday", "hour".
    since : str, optional
        Instead of parts: days since this public date (YYYY-MM-DD).
    format : str, optional
        How a date is written, as in ``%d/%m/%Y``; by default ISO 8601.
    missing : {"error", "drop", "zero", "indicator"}
        What a missing value does: stop, leave the record out, count as zero, or set an indicator
        column of its own (and count as the center).

    Examples
    --------
    >>> Column("age", center=50, scale=10).width, Column("sex", "category", levels=("f", "m")).width
    (1, 3)
    """

    name: str
    kind: Kind = "number"
    center: float = 0.0
    scale: float = 1.0
    weight: float = 1.0
    size: int = 1
    levels: tuple[str, ...] = ()
    slots: int = 0
    parts: tuple[str, ...] = ()
    since: str | None = None
    format: str | None = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"column: name={self.name!r} must be text")
        for name in ("levels", "parts"):
            object.__setattr__(self, name, _texts(self.name, name, getattr(self, name)))
        self._check_choices()
        self._check_numbers()
        self._check_levels()
        self._check_dates()

    def _check_choices(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("missing", get_args(Missing))):
            if getattr(self, name) not in allowed:
                raise self._wrong(name, "use one of " + ", ".join(allowed))
        for name in ("since", "format"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and len(value) < 100):
                raise self._wrong(name, "must be text")

    def _check_numbers(self) -> None:
        for name in ("center", "scale", "weight"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise self._wrong(name, "must be a number")
            if not abs(value) <= sys.float_info.max or (name != "center" and value <= 0):
                raise self._wrong(name, "must be finite" + (", above 0" * (name != "center")))
            object.__setattr__(self, name, float(value))
        for name, least in (("size", 1), ("slots", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MAX_SLOTS:
                raise self._wrong(name, f"must be a whole number from {least} to {MAX_SLOTS}")

    def _check_levels(self) -> None:
        if len(set(self.levels)) < len(self.levels):
            raise self._wrong("levels", "name each level once")
        if self.kind == "category" and bool(self.levels) == bool(self.slots):
            raise self._wrong("levels", "a category needs either its public levels or slots")
        if self.kind == "ordered" and len(self.levels) < 2:
            raise self._wrong("levels", "an ordered category needs two levels or more, in order")
        if self.kind == "text" and not self.slots:
            raise self._wrong("slots", "text needs slots, such as 64")

    def _check_dates(self) -> None:
        if self.kind != "date":
            return
        unknown = [part for part in self.parts if part not in PERIODS]
        if unknown or bool(self.parts) == bool(self.since):
            choices = ", ".join(PERIODS)
            raise self._wrong("parts", f"a date needs either parts ({choices}) or since")
        if self.since is not None:
            try:
                date.fromisoformat(self.since)
            except ValueError:
                raise self._wrong("since", "must be a date as 2020-01-31") from None

    def _wrong(self, field: str, why: str) -> ValueError:
        return ValueError(f"column {self.name!r}: {field}={getattr(self, field)!r}: {why}")

    @property
    def width(self) -> int:
        """How many numbers of the vector the column takes."""
        if self.kind == "value":
            return 0
        own = {
            "number": self.size,
            "boolean": 1,
            "category": len(self.levels) + 1 if self.levels else self.slots,
            "ordered": 1,
            "date": 2 * len(self.parts) or 1,
            "text": self.slots,
        }[self.kind]
        return own + (self.missing == "indicator")

    def spec(self) -> dict[str, Any]:
        """Return what a header states: the name, and what differs from the defaults."""
        values = asdict(self)
        stated = {
            f.name: values[f.name]
            for f in fields(self)
            if f.default is MISSING or values[f.name] != f.default
        }
        return {k: list(v) if isinstance(v, tuple) else v for k, v in stated.items()}


def _texts(column: str, field: str, values: Any) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"column {column!r}: {field}={values!r} must be a list of texts")
    texts = tuple(values)
    if len(texts) > MAX_SLOTS or not all(
        isinstance(t, str) and 0 < len(t) <= MAX_TEXT for t in texts
    ):
        raise ValueError(f"column {column!r}: {field} must be a list of texts")
    return texts


def columns_from_spec(spec: Any) -> tuple[Column, ...]:
    """Rebuild columns from their `spec`; ValueError or TypeError for anything else."""
    if not isinstance(spec, list) or not all(isinstance(c, dict) for c in spec):
        raise ValueError("columns must be a list of objects")
    columns = tuple(Column(**c) for c in spec)
    check_names(columns)
    return columns


def check_names(columns: Sequence[Column]) -> None:
    """Refuse two columns of one name."""
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"column {twice!r} is named twice; name each column once")


def columns_width(columns: Sequence[Column]) -> int:
    """How many numbers a record of these columns takes."""
    return sum(column.width for column in columns)


def columns_of(sketch: RaceSketch) -> tuple[Column, ...]:
    """Return the columns that a sketch states; InvalidSketch if they do not make its vectors."""
    try:
        columns = columns_from_spec(list(sketch.columns))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidSketch(f"the header is wrong: {error}") from None
    step, dim = sketch.transform, getattr(sketch.family, "dim", None)
    labels = step.classes if isinstance(step, Transform) else 0
    if columns and dim is not None and columns_width(columns) + labels != dim:
        raise InvalidSketch(
            f"the header is wrong: columns of {columns_width(columns)} numbers for dim={dim}"
        )
    return columns
