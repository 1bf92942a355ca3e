"""Check a site's table against a spec, before anything leaves: local, so it costs no privacy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.files.columns import Column
from fedcohort.files.propose import first_table
from fedcohort.files.source import CsvOptions, Reading, Want, open_source
from fedcohort.files.spec import Limits, Site, SketchSpec

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
    path: Path,
    spec: SketchSpec,
    csv: CsvOptions | None = None,
    table: str | None = None,
    site: Site | None = None,
) -> Fit:
    """Read a table column by column as the spec says, and collect what does not fit."""
    want, fit = spec.want(csv=csv, table=table, site=site), Fit()
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
    if column.kind == "value" or not seen.rows:
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
