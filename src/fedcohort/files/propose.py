"""Propose a spec from one site's table, and check a table against a spec.

A proposal holds names, types and roles of columns, and no value of the table. Levels are left open
for people to fill in with public constants. So are centers and scales, unless they are estimated
privately (`privacy.quantiles`) between public bounds. A check is local, so it costs no privacy.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.columns import Column
from fedcohort.files.source import (
    IDENTIFIER,
    NULL_VALUES,
    TABLES,
    Reading,
    Want,
    find_files,
    kind_of,
    open_source,
)
from fedcohort.files.spec import Limits, Site, SketchSpec
from fedcohort.files.tables import Table, open_table
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.quantiles import (
    CELLS,
    Constants,
    constants_release,
    private_constants,
    quartile_error,
)

DATE_FORMATS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d.%m.%Y %H:%M")
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
FAR, MOST = 4.0, 0.95  # scales from the center beyond which most values cannot be
FACTORS = {
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
NO_VALUES = "Nothing in here is a value of anybody's data."


@dataclass(frozen=True)
class Estimate:
    """What is estimated privately: `epsilon` is for all centers and scales together.

    The `bounds` of each column are public, and must not come from the data.
    """

    epsilon: float
    bounds: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        if not self.bounds:
            raise ConfigError("--epsilon needs --bounds, such as age=0:120,chol=50:600")
        for name, (low, high) in self.bounds.items():
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ConfigError(f"--bounds {name}={low:g}:{high:g}: low must be below high")

    def claim(self) -> str:
        """Say in one line what was spent, for what, and what is public."""
        off = quartile_error(len(self.bounds), self.epsilon, "add-remove")
        return (
            f"epsilon={self.epsilon:g} for adding or removing one record was spent on the centers "
            f"and scales of {', '.join(self.bounds)}; public: their bounds. A quartile is off by "
            f"at most {off:,} records (95%)."
        )


def read_bounds(text: str | None) -> dict[str, tuple[float, float]]:
    """Read public bounds of columns.

    Examples
    --------
    >>> read_bounds("age=0:120, chol=50:600")
    {'age': (0.0, 120.0), 'chol': (50.0, 600.0)}
    """
    bounds = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, span = part.rpartition("=")
        low, _, high = span.partition(":")
        try:
            bounds[name.strip()] = float(low), float(high)
        except ValueError:
            raise ConfigError(f"--bounds {part.strip()}: write NAME=LOW:HIGH") from None
    return bounds


@contextmanager
def estimated_constants(
    path: Path, estimate: Estimate, want: Want, ledger: BudgetLedger | None = None
) -> Iterator[dict[str, Constants]]:
    """Yield private centers and scales by column, paid for from the ledger if there is one.

    They count as delivered when the block ends without an error. Until then the same request
    returns the same constants without paying again.
    """
    price = constants_release(len(estimate.bounds), estimate.epsilon, "add-remove")
    counts = _cell_counts(path, estimate, want)

    def make() -> bytes:
        spans = list(estimate.bounds.values())
        constants = private_constants(counts, spans, estimate.epsilon)
        return json.dumps(dict(zip(estimate.bounds, constants, strict=True))).encode()

    if ledger is None:
        content = make()
    else:
        asked = [estimate.epsilon, dict(estimate.bounds), want.null_values]
        settings = json.dumps(["constants", *asked, _fingerprint(path).hex()])
        request = hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()
        content = ledger.charge_and_store([price], make, request=request)
    yield {name: Constants(*stored) for name, stored in json.loads(content).items()}
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


def _fingerprint(path: Path) -> bytes:
    """Return a digest of the bytes of a data file, or of all files of a folder."""
    digest = hashlib.blake2b(digest_size=16)
    for file in find_files(path):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, hashlib.blake2b).digest())
    return b"file" + digest.digest()


def propose_spec(
    path: Path,
    label: str | None,
    want: Want,
    estimate: Estimate | None = None,
    constants: Mapping[str, Constants] | None = None,
) -> str:
    """Return a spec as TOML text, with TODO where a public constant is needed.

    With an `estimate`, no column but those of `constants` is looked at: what it seems to hold may
    depend on a single record.
    """
    table, constants = first_table(path, want), constants or {}
    if label in constants:
        raise ConfigError(f"--bounds {label}: this is the label, which has no center and scale")
    source = NO_VALUES
    if estimate is not None:
        claim = fill(estimate.claim(), 96, initial_indent="# ", subsequent_indent="# ")
        source = f"{NO_VALUES[:-1]}, except for this:\n{claim}"
    markers = [value for value in want.null_values if value not in NULL_VALUES]
    parts = [HEAD.format(source=source, markers=json.dumps(markers, ensure_ascii=False))]
    if label is not None:
        table.kind(label)
        name = json.dumps(label)
        parts.append(f"[label]\ncolumn = {name}\nclasses = 2  # TODO: how many at all sites\n")
    for name in table.names:
        if name == label:
            continue
        if name in constants:
            parts.append(_estimated(name, constants[name]))
        elif estimate is not None:
            parts.append(f"# [columns.{json.dumps(name, ensure_ascii=False)}]   # TODO: its kind\n")
        else:
            parts.append(_section(name, _role(table, name)))
    return "\n".join(parts)


def left_open(proposal: str) -> list[str]:
    r"""Return the sections of a proposal in which something is marked TODO.

    Examples
    --------
    >>> left_open('[columns."age"]\n# center =  # TODO\n[columns."sex"]\nkind = "boolean"')
    ['age']
    """
    sections = re.split(r"^#? ?\[(?=[a-z])", proposal, flags=re.M)[1:]
    names = [re.match(r'(?:columns\."?)?(.*?)"?\]', part) for part in sections if "TODO" in part]
    return [name[1] for name in names if name is not None]


def _estimated(name: str, constants: Constants) -> str:
    scale = f"scale = {constants.scale!r}\n"
    if constants.scale is None:
        scale = "# scale =    # TODO: half of the values lie too close together to estimate it\n"
    quoted = json.dumps(name, ensure_ascii=False)
    return f'[columns.{quoted}]\nkind = "number"\ncenter = {constants.center!r}\n{scale}'


def first_table(path: Path, want: Want) -> Table:
    """Open the first file of a table or of a folder of tables."""
    file = find_files(path)[0]
    if kind_of(file) not in TABLES:
        raise ConfigError(f"{file}: a spec is for tables, not for {kind_of(file)} files")
    table = open_table(file, path, want)
    table.names  # noqa: B018 - says what is wrong with the file
    return table


def _role(table: Table, name: str) -> str:
    """Say what a column seems to hold, by its type and by how many different values it has."""
    kind = table.kind(name)
    if name == "" or IDENTIFIER.search(name):
        return "identifier"
    if kind in ("date", "vector", "other", "empty"):
        return {"vector": "number"}.get(kind, kind)
    if kind == "whole" and "bool" in table.type_name(name):
        return "boolean"
    values, rows = _first_values(table, name)
    few, distinct = len(values) <= FEW, len(values)
    if kind == "number":  # categories with missing values are often written 0.0, 1.0
        return "category" if few and all(v != v or float(v).is_integer() for v in values) else kind
    if kind == "whole":
        return "category" if few else "identifier" if distinct == rows > FEW else "number"
    if formats := _date_formats(values):
        return f"date as {' or '.join(formats)}"
    return "category" if few else "text"


def _first_values(table: Table, name: str) -> tuple[list[Any], int]:
    for batch in table.batches((name,), 1 << 14):
        return batch[name].unique().drop_null().to_pylist(), len(batch[name])
    return [], 0


def _date_formats(values: Sequence[str]) -> list[str]:
    """Return the formats in which all values are dates."""

    def fits(text: str, form: str) -> bool:
        try:
            datetime.strptime(text.strip(), form)
        except ValueError:
            return False
        return True

    return [f for f in DATE_FORMATS if values and all(fits(v, f) for v in values)]


SECTIONS = {
    "number": 'kind = "number"\n# center =   # TODO: a typical value, a public constant\n'
    "# scale =    # TODO: a typical spread, a public constant\n",
    "boolean": 'kind = "boolean"\n',
    "category": 'kind = "category"\nslots = 16   # hashed; better: levels = ["a", "b"]\n',
    "date": 'kind = "date"\nparts = ["yearday", "weekday"]   # or: since = "2020-01-01"\n',
    "text": 'kind = "text"\nslots = 64\n',
}
LEFT_OUT = {
    "identifier": "looks like an identifier, so it is left out",
    "empty": "holds no values, so it is left out",
    "other": "holds what cannot be compared, so it is left out",
}


def _section(name: str, role: str) -> str:
    quoted = json.dumps(name, ensure_ascii=False)
    if role.startswith("date as "):
        form, _, other = role.removeprefix("date as ").partition(" or ")
        unsure = f"   # TODO: or {other}" if other else ""
        return f'[columns.{quoted}]\n{SECTIONS["date"]}format = "{form}"{unsure}\n'
    if role in LEFT_OUT:
        return f"# {quoted} {LEFT_OUT[role]}\n"
    return f"[columns.{quoted}]\n{SECTIONS[role]}"


@dataclass
class Fit:
    """What of a table fits a spec, and what does not."""

    problems: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)

    def facts(self) -> dict[str, str]:
        """Return the findings in words."""
        facts = {"fits": "no" if self.problems else "yes"}
        if self.problems:
            facts["problems"] = "\n".join(self.problems)
        if self.unused:
            facts["columns not used"] = ", ".join(self.unused)
        if self.warnings:
            facts["warnings"] = "\n".join(self.warnings)
        return {**facts, **self.reading.facts()}


def check_data(
    path: Path, spec: SketchSpec, read: Want | None = None, site: Site | None = None
) -> Fit:
    """Read a table column by column as the spec says, and collect what does not fit."""
    want, fit = spec.want(read, site), Fit()
    names = first_table(path, want).names
    columns = [c for c in spec.columns if isinstance(c, Column)]
    roles = {"label": spec.label.column, "person": spec.person}
    used = {
        want.name_at_site(name) for name in (*(c.name for c in columns), *roles.values()) if name
    }
    fit.unused = [name for name in names if name not in used]
    for column in columns:
        name = want.name_at_site(column.name)
        if name not in names:
            fit.problems.append(f"column {name!r} is missing")
            continue
        one = replace(want, columns=(column,), label=None, person=None)
        _check_column(path, one, column, spec.limits, fit)
    for role, wanted in roles.items():
        if wanted is not None and want.name_at_site(wanted) not in names:
            fit.problems.append(f"the {role} {want.name_at_site(wanted)!r} is missing")
    if columns and not fit.problems and not fit.reading.rows:
        fit.problems.append("the table has no rows")
    fit.warnings += fit.reading.warnings()
    return fit


def _check_column(
    path: Path, want: Want, column: Column, limits: Mapping[str, Limits], fit: Fit
) -> None:
    """Read one column; remember what is wrong with its values."""
    total = fit.reading
    try:
        source = open_source(path, want)
        orders = [part.order[~part.missing] for b in source.blocks() for part in b.parts]
    except DataError as error:
        fit.problems.append(str(error).removeprefix(f"{path}: "))
        return
    seen = source.reading
    total.rows = total.kept = seen.rows
    total.missing += seen.missing
    total.others += seen.others
    total.ranges |= seen.ranges
    total.identifiers += seen.identifiers
    total.assumed = seen.assumed
    values = np.concatenate(orders) if orders else np.empty(0)
    if not seen.rows:
        return
    if not len(values):
        fit.problems.append(f"column {column.name!r} holds no values")
    elif seen.others[column.name] == len(values):
        fit.problems.append(f"no value of {column.name!r} is one of its levels")
    elif seen.others[column.name] > len(values) / 2:
        fit.warnings.append(f"most values of {column.name!r} are none of its levels")
    if column.kind == "number" and len(values):
        _check_numbers(column, values, limits.get(column.name, Limits()), fit)


def _check_numbers(column: Column, values: NDArray[np.float64], limits: Limits, fit: Fit) -> None:
    """Compare normalized values with the limits, and with the center and scale."""
    original = values * column.scale + column.center
    unit = f" {limits.unit}" if limits.unit else ""
    for limit, wrong, side in (
        (limits.min, original < (limits.min or 0) * (1 - 1e-12), "below min"),
        (limits.max, original > (limits.max or 0) * (1 + 1e-12), "above max"),
    ):
        if limit is not None and wrong.any():
            worst = original[wrong][np.abs(original[wrong] - limit).argmax()]
            fit.problems.append(
                f"{wrong.sum():,} of {len(values):,} values of {column.name!r} are {side} = "
                f"{limit:g}{unit}, such as {worst:.4g}"
            )
    if (np.abs(values) > FAR).mean() > MOST:
        hint = unit_hint(float(np.median(original)), column)
        fit.problems.append(
            f"{column.name!r}: {MOST:.0%} of the values lie beyond {FAR:g} scales (median "
            f"{np.median(original):.4g}, center {column.center:g}{unit}): another unit?{hint}"
        )


def unit_hint(median: float, column: Column) -> str:
    """Name the usual factors that would bring a median to the center of a column.

    Examples
    --------
    >>> unit_hint(66.5, Column("height", center=169, scale=10))
    ' Times 2.54 (inches and cm) it would fit: state factor in --site'
    """
    usual = [*FACTORS.items()]
    usual += [(1 / factor, what) for factor, what in FACTORS.items()]
    fits = {
        abs(median * factor - column.center) / column.scale: (factor, what)
        for factor, what in usual
    }
    best = min(fits)
    if best > 1:
        return ""
    factor, what = fits[best]
    return f" Times {factor:.4g} ({what}) it would fit: state factor in --site"
