"""What each column of a table becomes before it is hashed, by public parameters only.

Levels, centers and scales are constants that all sites agree on, and that a sketch states in its
header. Columns are put side by side in one vector. Two numbers that differ by one `scale`, two
categories, the first and the last of ordered levels, true and false, or opposite days of the year
are all `weight` apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from typing import Annotated, Any, Literal

from fedcohort.exceptions import ConfigError, InvalidSketch
from fedcohort.options import Positive, Range, check_fields
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

Part = Literal["yearday", "month", "weekday", "hour"]
Kind = Literal["number", "boolean", "category", "ordered", "date", "text"]
Missing = Literal["error", "drop", "indicator"]
PERIODS = {"yearday": 366, "month": 12, "weekday": 7, "hour": 24}
MAX_SLOTS = 1 << 16
UNITS = {
    2.54: "inches and cm",
    0.4536: "pounds and kg",
    88.4: "creatinine in mg/dL and µmol/L",
    18.02: "glucose in mmol/L and mg/dL",
    38.67: "cholesterol in mmol/L and mg/dL",
    88.57: "triglycerides in mmol/L and mg/dL",
    17.1: "bilirubin in mg/dL and µmol/L",
    7.5006: "kPa and mmHg",
    365.25: "years and days",
    12.0: "years and months",
    10.0: "a factor of 10",
    100.0: "a factor of 100",
    1000.0: "a factor of 1000",
}
FACTORS = UNITS | {1 / factor: units for factor, units in UNITS.items()}


@dataclass(frozen=True)
class Column:
    """One column: its name, what it holds and how that becomes numbers.

    Parameters
    ----------
    name : str
    kind : {"number", "boolean", "category", "ordered", "date", "text"}
    center, scale : float
        Public constants of a number, or of the days of a date: x becomes (x - center) / scale.
    weight : float
        What a typical difference in this column counts in the joint distance.
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
    missing : {"error", "drop", "indicator"}
        What a missing value does: stop, leave the record out, or set an indicator column of its
        own (and count as the center).

    Examples
    --------
    >>> Column("age", center=50, scale=10).width, Column("sex", "category", levels=("f", "m")).width
    (1, 3)
    """

    name: str
    kind: Kind = "number"
    center: float = 0.0
    scale: Positive = 1.0
    weight: Positive = 1.0
    levels: tuple[str, ...] = ()
    slots: Annotated[int, Range(0, MAX_SLOTS)] = 0
    parts: tuple[Part, ...] = ()
    since: str | None = None
    format: str | None = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        check_fields(self, f"column {self.name!r}")
        kind, levels = self.kind, self.levels
        either = kind == "category" and bool(levels) == bool(self.slots)
        neither = kind == "date" and bool(self.parts) == bool(self.since)
        wrong = {
            "name: must be text": not self.name,
            "levels: name each level once": len(set(levels)) < len(levels),
            "levels: a category needs either its public levels or slots": either,
            "levels: two levels or more are needed": kind == "ordered" and len(levels) < 2,
            "slots: text needs slots, such as 64": kind == "text" and not self.slots,
            f"parts: a date needs either parts ({', '.join(PERIODS)}) or since": neither,
        }
        try:
            date.fromisoformat(self.since or "2020-01-31")
        except ValueError:
            wrong["since: must be a date as 2020-01-31"] = True
        for name, _, why in (message.partition(": ") for message in wrong if wrong[message]):
            raise ConfigError(f"column {self.name!r}: {name}={getattr(self, name)!r}: {why}")

    @property
    def width(self) -> int:
        """How many numbers of the vector the column takes."""
        several = {
            "category": len(self.levels) + 1 if self.levels else self.slots,
            "date": 2 * len(self.parts) or 1,
            "text": self.slots,
        }
        return several.get(self.kind, 1) + (self.missing == "indicator")

    def spec(self) -> dict[str, Any]:
        """Return what a header states: the name, and what differs from the defaults."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        stated = {name: value for name, (value, default) in values.items() if value != default}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in stated.items()}


@dataclass(frozen=True)
class SiteColumn:
    """How one site writes a column of the spec; nothing of it is in a sketch.

    `column` is the site's name, `codes` give its values those of the spec (``{"1": "male"}``),
    `format` is that of dates, and numbers are multiplied by `factor`, such as 2.54 for inches.
    """

    column: str | None = None
    codes: Mapping[str, str] = field(default_factory=dict)
    format: str | None = None
    factor: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "site")
        if not all(isinstance(text, str) for pair in self.codes.items() for text in pair):
            raise ConfigError("site: codes must be a table of texts")


def columns_width(columns: Sequence[Column]) -> int:
    """How many numbers a record of these columns takes."""
    return sum(column.width for column in columns)


def columns_of(sketch: RaceSketch) -> tuple[Column, ...]:
    """Return the columns that a sketch states; InvalidSketch if they do not make its vectors."""
    try:
        columns = tuple(Column(**column) for column in sketch.columns)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidSketch(f"the header is wrong: {error}") from None
    step, dim = sketch.transform, getattr(sketch.family, "dim", None)
    labels = step.classes if isinstance(step, Transform) else 0
    if columns and dim is not None and columns_width(columns) + labels != dim:
        raise InvalidSketch(
            f"the header is wrong: columns of {columns_width(columns)} numbers for dim={dim}"
        )
    return columns
