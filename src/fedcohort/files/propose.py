"""Propose a spec from one site's table, and check a table against a spec.

A proposal holds names, types and roles of columns, and no value of the table. Levels, centers and
scales are left open, unless they are estimated privately (`privacy.quantiles`) between public
bounds. A check is local, so it costs no privacy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.columns import FACTORS, Column
from fedcohort.files.source import (
    IDENTIFIER,
    NULL_VALUES,
    Source,
    Want,
    find_files,
    kind_of,
    open_source,
)
from fedcohort.files.spec import Limits, SketchSpec
from fedcohort.files.tables import FORMATS, Table, open_table
from fedcohort.options import parse_options
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.quantiles import (
    CELLS,
    Constants,
    constants_release,
    private_constants,
    quartile_error,
)

DATE_FORMATS = (
    *("%Y-%m-%d", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S"),
    *("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d.%m.%Y %H:%M"),
)
FEW = 12  # different values; a column of whole numbers or texts with no more is a category
HEAD = """# How all sites make their sketches. {source}
# Fill in what is marked TODO with public constants, delete the columns that should not be
# compared, and give this file to all sites:
#   fedcohort spec check data.csv --spec THIS.toml
#   fedcohort sketch data.csv --spec THIS.toml -o NAME.sketch

[sketch]
hash = "srp"
seed = 0

[privacy]
# epsilon = 4        # protects single records; rows and bits are then planned for `expect` records
# expect = 1000      # records of a typical site
# explain = 0.5      # share of the budget for single columns: which of them differ

[missing]
null_values = {markers}     # further markers of missing values, besides ?, NA and the empty text
"""
FAR, NEARLY_ALL = 4.0, 0.95  # scales from the center beyond which most values cannot be
UNUSUAL = 1.5  # scales of a median from the center from which on another unit is looked for


class Estimate(NamedTuple):
    """What is estimated privately: `epsilon` is for all centers and scales together.

    The `bounds` of each column are public, and must not come from the data.
    """

    epsilon: float
    bounds: dict[str, tuple[float, float]]

    def claim(self) -> str:
        """Say in one line what was spent, for what, and what is public."""
        off = quartile_error(len(self.bounds), self.epsilon)
        return (
            f"epsilon={self.epsilon:g} for adding or removing one record was spent on the centers "
            f"and scales of {', '.join(self.bounds)}; public: their bounds. A quartile is off by "
            f"at most {off:,} records (95%)."
        )


def read_bounds(text: str | None) -> dict[str, tuple[float, float]]:
    """Read public bounds of columns, such as ``age=0:120,chol=50:600``."""
    bounds = {}
    for name, span in parse_options(text or "").items():
        low, _, high = str(span).partition(":")
        try:
            bounds[name] = float(low), float(high)
        except ValueError:
            raise ConfigError(f"--bounds {name}={span}: write NAME=LOW:HIGH") from None
        if not -math.inf < bounds[name][0] < bounds[name][1] < math.inf:
            raise ConfigError(f"--bounds {name}={span}: low must be below high")
    if not bounds:
        raise ConfigError("--epsilon needs --bounds, such as age=0:120,chol=50:600")
    return bounds


@contextmanager
def estimated_constants(
    path: Path, estimate: Estimate, want: Want, ledger: BudgetLedger | None = None
) -> Iterator[dict[str, Constants]]:
    """Yield private centers and scales by column, paid for from the ledger if there is one.

    Until the block has ended without an error, the same request returns them without paying again.
    """
    counts, spans = _cell_counts(path, estimate, want), list(estimate.bounds.values())

    def make() -> bytes:
        return json.dumps(private_constants(counts, spans, estimate.epsilon)).encode()

    asked = json.dumps(["constants", *estimate, want.null_values]).encode()
    request = hashlib.blake2b(asked + counts.tobytes(), digest_size=16).hexdigest()
    if ledger is None:
        content = make()
    else:
        price = constants_release(len(spans), estimate.epsilon)
        content = ledger.charge_and_store([price], make, request=request)
    stored = zip(estimate.bounds, json.loads(content), strict=True)
    yield {name: Constants(*constants) for name, constants in stored}
    if ledger is not None:
        ledger.delivered(request)


def _cell_counts(path: Path, estimate: Estimate, want: Want) -> NDArray[np.int64]:
    """Count the values of each column in the cells between its bounds, (columns, cells)."""
    columns = tuple(
        Column(name, center=low, scale=(high - low) / CELLS, missing="indicator")
        for name, (low, high) in estimate.bounds.items()
    )
    counts = np.zeros((len(columns), CELLS), np.int64)
    for block in open_source(path, replace(want, columns=columns)).blocks():
        for i, part in enumerate(block.parts):
            cells = np.clip(np.floor(part.order[~part.missing]), 0, CELLS - 1)
            counts[i] += np.bincount(cells.astype(np.int64), minlength=CELLS)
    return counts


def propose_spec(
    path: Path,
    label: str | None,
    want: Want,
    estimate: Estimate | None = None,
    constants: Mapping[str, Constants] | None = None,
) -> tuple[str, list[str]]:
    """Return a spec as TOML text, and the sections where a public constant is still TODO.

    With an `estimate`, no column but those of `constants` is looked at: what it seems to hold may
    depend on a single record.
    """
    table, constants = _first_table(path, want), constants or {}
    if label in constants:
        raise ConfigError(f"--bounds {label}: this is the label, which has no center and scale")
    if estimate is None and label and table.kind(label) not in ("whole", "number", "empty"):
        raise ConfigError(f"--label {label}: labels are whole numbers from 0, not texts")
    source = "Nothing in here is a value of anybody's data"
    source += "." if estimate is None else f", except for this:\n# {estimate.claim()}"
    markers = [value for value in want.null_values if value not in NULL_VALUES]
    sections = {"": HEAD.format(source=source, markers=json.dumps(markers, ensure_ascii=False))}
    if label is not None:
        column = f"[label]\ncolumn = {json.dumps(label)}\n"
        sections["label"] = f"{column}classes = 2  # TODO: how many at all sites\n"
    for name in (name for name in table.schema.names if name != label):
        head = f"[columns.{json.dumps(name, ensure_ascii=False)}]"
        if name in constants:
            center, scale = constants[name]
            stated = f"scale = {scale!r}"
            if scale is None:
                stated = "# scale =    # TODO: half of the values lie too close to estimate it"
            sections[name] = f'{head}\nkind = "number"\ncenter = {center!r}\n{stated}\n'
        elif estimate is not None:
            sections[name] = f"# {head}   # TODO: its kind\n"
        else:
            sections[name] = _section(table, name, head)
    return "\n".join(sections.values()), [n for n, text in sections.items() if n and "TODO" in text]


def _first_table(path: Path, want: Want) -> Table:
    file = find_files(path)[0]
    if kind_of(file) not in FORMATS:
        raise ConfigError(f"{file}: a spec is for tables, not for {kind_of(file)} files")
    return open_table(file, path, want)


def _section(table: Table, name: str, head: str) -> str:
    """Describe a column, by its type and by how many different values it has."""
    role, formats = _role(table, name)
    if role in LEFT_OUT:
        return f"# {head[9:-1]} {LEFT_OUT[role]}, so it is left out\n"
    unsure = f"   # TODO: or {' or '.join(formats[1:])}" if formats[1:] else ""
    stated = f'format = "{formats[0]}"{unsure}\n' if formats else ""
    return f"{head}\n{SECTIONS[role]}{stated}"


def _role(table: Table, name: str) -> tuple[str, list[str]]:
    """Return what a column seems to hold, and the formats in which all of it are dates."""
    kind = table.kind(name)
    if name == "" or IDENTIFIER.search(name):
        return "identifier", []
    if kind in ("date", "other", "empty"):
        return kind, []
    if pa.types.is_boolean(table.schema.field(name).type):
        return "boolean", []
    first = next(table.batches((name,), 1 << 14), None)
    values = pa.array([], pa.string()) if first is None else first[name]
    different = values.unique().drop_null()
    few = len(different) <= FEW
    if kind == "text":
        plain = pc.utf8_trim_whitespace(different)
        read = {f: pc.strptime(plain, format=f, unit="s", error_is_null=True) for f in DATE_FORMATS}
        formats = [f for f, dates in read.items() if len(dates) and not dates.null_count]
        return "date" if formats else "category" if few else "text", formats
    if kind == "number":  # categories with missing values are often written 0.0, 1.0
        few = few and all(v != v or float(v).is_integer() for v in different.to_pylist())
    elif not few and len(different) == len(values):
        return "identifier", []
    return "category" if few else "number", []


SECTIONS = {
    "number": 'kind = "number"\n# center =   # TODO: a typical value, a public constant\n'
    "# scale =    # TODO: a typical spread, a public constant\n",
    "boolean": 'kind = "boolean"\n',
    "category": 'kind = "category"\nslots = 16   # hashed; better: levels = ["a", "b"]\n',
    "date": 'kind = "date"\nparts = ["yearday", "weekday"]   # or: since = "2020-01-01"\n',
    "text": 'kind = "text"\nslots = 64\n',
}
LEFT_OUT = {
    "identifier": "looks like an identifier",
    "empty": "holds no values",
    "other": "holds what cannot be compared",
}


@dataclass
class Fit:
    """What of a table does not fit a spec, and what was read."""

    problems: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    read: dict[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, str]:
        """Return the findings in words."""
        facts = {"fits": "no" if self.problems else "yes", "problems": "\n".join(self.problems)}
        facts |= {"columns not used": ", ".join(self.unused), "warnings": "\n".join(self.warnings)}
        return {key: value for key, value in facts.items() if value} | self.read


def check_data(path: Path, want: Want, spec: SketchSpec) -> Fit:
    """Read a table as a spec wants it, and collect what does not fit.

    It is read column by column, so that one problem does not hide the next, then row by row.
    """
    fit, table = Fit(), _first_table(path, want)
    columns = [c for c in want.columns if isinstance(c, Column)]
    roles = [name for name in (want.label, want.person) if name is not None]
    used = {want.name_at_site(name) for name in (*(c.name for c in columns), *roles)}
    fit.unused = [name for name in table.schema.names if name not in used]
    for column in columns:
        with _collecting(path, fit):
            one = replace(want, columns=(column,), label=None, person=None)
            _check_column(open_source(path, one), column, spec.limits.get(column.name), fit)
    for role in roles:
        with _collecting(path, fit):
            table.kind(want.name_at_site(role))
    if not fit.problems:
        with _collecting(path, fit):
            _check_rows(open_source(path, want), spec.label.classes, fit)
    return fit


@contextmanager
def _collecting(path: Path, fit: Fit) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        fit.problems.append(str(error).removeprefix(f"{path}: "))


def _check_rows(source: Source, classes: int | None, fit: Fit) -> None:
    """Read all columns together: labels, people, and rows that are there several times."""
    draw = np.random.default_rng(0).integers
    multipliers = draw(1 << 63, size=source.dim, dtype=np.uint64) * 2 + 1
    digests, last = [np.empty(0, np.uint64)], -1
    for block in source.blocks():
        digests.append(((block.x + 0.0).view(np.uint64) * multipliers).sum(axis=1))
        last = max(last, -1 if block.y is None else int(block.y.max(initial=-1)))
    reading = source.reading
    if not reading.rows:
        fit.problems.append("the table has no rows")
    if classes is not None and last >= classes:
        fit.problems.append(f"label {last}: with {classes} classes the last is {classes - 1}")
    fit.warnings += reading.warnings()
    fit.read = reading.facts()
    rows = np.concatenate(digests)
    if repeated := len(rows) - len(np.unique(rows)):
        equal = "equal an earlier one in all columns of the spec"
        fit.read["repeated rows"] = f"{repeated:,} of {len(rows):,} {equal}"


def _check_column(source: Source, column: Column, limits: Limits | None, fit: Fit) -> None:
    """Read one column; remember what is wrong with its values."""
    orders = [part.order[~part.missing] for b in source.blocks() for part in b.parts]
    values, others = np.concatenate([np.empty(0), *orders]), source.reading.others[column.name]
    if source.reading.rows and not len(values):
        fit.problems.append(f"column {column.name!r} holds no values")
    elif others and others == len(values):
        fit.problems.append(f"no value of {column.name!r} is one of its levels")
    elif others > len(values) / 2:
        fit.warnings.append(f"most values of {column.name!r} are none of its levels")
    if column.kind == "number" and len(values):
        _check_numbers(column, values, limits or Limits(), fit)


def _check_numbers(column: Column, values: NDArray[np.float64], limits: Limits, fit: Fit) -> None:
    """Compare normalized values with the limits, and with the center and scale."""
    original = values * column.scale + column.center
    unit = f" {limits.unit}" if limits.unit else ""
    for limit, sign, side in ((limits.min, -1, "below min"), (limits.max, 1, "above max")):
        if limit is None:
            continue
        wrong = sign * (original - limit) > 1e-12 * abs(limit)
        if wrong.any():
            worst = original[wrong][np.abs(original[wrong] - limit).argmax()]
            fit.problems.append(
                f"{wrong.sum():,} of {len(values):,} values of {column.name!r} are {side} = "
                f"{limit:g}{unit}, such as {worst:.4g}"
            )
    median, far = float(np.median(original)), float(np.median(np.abs(values)))
    hint = unit_hint(median, column) if far > UNUSUAL else ""
    where = f"(median {median:.4g}, center {column.center:g}{unit}): another unit?{hint}"
    if (np.abs(values) > FAR).mean() > NEARLY_ALL:
        fit.problems.append(
            f"{column.name!r}: {NEARLY_ALL:.0%} of the values lie beyond {FAR:g} scales {where}"
        )
    elif hint:
        fit.warnings.append(f"{column.name!r}: the values lie {far:.2g} scales off {where}")


def unit_hint(median: float, column: Column) -> str:
    """Name the usual factor that would bring a median to the center of a column.

    >>> unit_hint(66.5, Column("height", center=169, scale=10))
    ' Times 2.54 (inches and cm) it would fit: state factor in --site'
    """
    factor = min(FACTORS, key=lambda factor: abs(median * factor - column.center))
    if abs(median * factor - column.center) > column.scale:
        return ""
    return f" Times {factor:.4g} ({FACTORS[factor]}) it would fit: state factor in --site"
