"""Propose a spec from one site's table, and check a site's table against a spec.

A proposal holds names, types and roles of columns, and no value of the table: levels, centers and
scales are left open for people to fill in with public constants.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedcohort.exceptions import DataError
from fedcohort.files.finding import find_files
from fedcohort.files.source import IDENTIFIER, CsvOptions, Reading, Want
from fedcohort.files.spec import SketchSpec
from fedcohort.files.table_file import TableFile
from fedcohort.files.table_source import TableSource
from fedcohort.sketch.columns import Column

FEW = 12  # different values; a column of whole numbers or texts with no more is a category
HEAD = """# How all sites make their sketches. Nothing in here is a value of anybody's data.
# Fill in what is marked TODO with public constants, delete the columns that should not be
# compared, and give this file to all sites:
#   fedcohort spec check data.csv --spec THIS.toml
#   fedcohort sketch data.csv --spec THIS.toml --client NAME -o NAME.sketch

[sketch]
hash = "srp"
seed = 0

[privacy]
# epsilon = 4        # protects single records; rows and bits are then planned for `expect` records
# expect = 1000      # records of a typical site
# explain = 0.5      # share of the budget for single columns: which of them differ

[missing]
null_values = []     # further markers of missing values, besides ?, NA and the empty text
"""


def propose_spec(path: Path, label: str | None, csv: CsvOptions) -> str:
    """Return a spec as TOML text, with TODO where a public constant is needed."""
    table = _first_table(path, csv)
    parts = [HEAD]
    if label is not None:
        table.kind(label)
        name = json.dumps(label)
        parts.append(f"[label]\ncolumn = {name}\nclasses = 2  # TODO: how many at all sites\n")
    for name in table.names:
        if name == label:
            continue
        parts.append(_section(name, _role(table, name)))
    return "\n".join(parts)


def _first_table(path: Path, csv: CsvOptions) -> TableFile:
    files = find_files(path)
    table = TableFile(files[0], path, csv)
    table.names  # noqa: B018 - says what is wrong with the file
    return table


def _role(table: TableFile, name: str) -> str:
    """Say what a column seems to hold, by its type and by how many different values it has."""
    kind = table.kind(name)
    if name == "" or IDENTIFIER.search(name):
        return "identifier"
    if kind in ("date", "number", "vector", "list", "other", "empty"):
        return {"vector": "number", "list": "other"}.get(kind, kind)
    if kind == "whole" and "bool" in table.type_name(name):
        return "boolean"
    few, distinct, rows = _look(table, name)
    if kind == "whole":
        return "category" if few else "identifier" if distinct == rows > FEW else "number"
    return "category" if few else "text"


def _look(table: TableFile, name: str) -> tuple[bool, int, int]:
    """Return whether the first block has few different values, how many, and its rows."""
    for batch in table.batches((name,), 1 << 14):
        distinct = len(batch[name].unique().drop_null())
        return distinct <= FEW, distinct, len(batch[name])
    return True, 0, 0


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


def check_data(path: Path, spec: SketchSpec, csv: CsvOptions) -> Fit:
    """Read a table column by column as the spec says, and collect what does not fit."""
    table, found = _first_table(path, csv), Fit()
    columns = [c for c in spec.columns if isinstance(c, Column)]
    used = {c.name for c in columns} | {spec.label.column}
    found.unused = [name for name in table.names if name not in used]
    for column in columns:
        if column.name not in table.names:
            found.problems.append(f"column {column.name!r} is missing")
            continue
        _try(path, replace(spec.want(csv=csv), columns=(column,), label=None), found)
    if spec.label.column is not None and spec.label.column not in table.names:
        found.problems.append(f"the label {spec.label.column!r} is missing")
    found.warnings = found.reading.warnings()
    for name, count in found.reading.others.items():
        if found.reading.rows and count > found.reading.rows / 2:
            found.warnings.append(f"most values of {name!r} are none of its levels")
    return found


def _try(path: Path, want: Want, found: Fit) -> None:
    reading = found.reading
    try:
        source: Any = TableSource(find_files(path), path, want)
        for _ in source.blocks():
            pass
    except DataError as error:
        found.problems.append(str(error).removeprefix(f"{path}: "))
        return
    own = source.reading
    reading.rows = reading.kept = own.rows
    reading.missing += own.missing
    reading.others += own.others
    reading.ranges |= own.ranges
    reading.identifiers += own.identifiers
    reading.assumed = own.assumed
