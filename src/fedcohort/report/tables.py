"""Rows and curves computed from results, and the tables that a terminal shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedcohort.analysis.comparison import ComparisonRow, Curve
from fedcohort.analysis.costs import CostRow
from fedcohort.analysis.plan import Plan
from fedcohort.experiments.results import Summary
from fedcohort.report.columns import (
    Cell,
    Cells,
    Column,
    comparison_cells,
    number,
    seed_cells,
)

BARS = "▁▂▃▄▅▆▇█"
UNLIMITED = 100_000  # columns of a console that never wraps


def comparison_table(
    rows: Sequence[ComparisonRow],
    curves: Sequence[Curve],
    target: float | None,
    title: str,
    width: int = 120,
    settings: Sequence[Mapping[str, str]] | None = None,
) -> Table:
    """Lay out a comparison, with the best accuracy and the fewest rounds in bold.

    A terminal that is too narrow gets no sparklines, then only the most important columns, and if
    that does not suffice, one block of lines per run: no number is ever cut.
    """
    table = comparison_cells(rows, target, settings or [{"policy": r.policy} for r in rows])
    by_round = Column("accuracy by round", lambda _: Cell(""), number=False)
    lines = [Cell(sparkline(curve.mean)) for curve in curves]

    def with_lines(table: Cells) -> Cells:
        drawn = [[*row, line] for row, line in zip(table.rows, lines, strict=True)]
        return Cells([*table.columns, by_round], drawn)

    short = table.without_details()
    return fitting([with_lines(table), with_lines(short), short], table, title, width)


def summary_table(summaries: Sequence[Summary], title: str, width: int = 120) -> Table:
    """Lay out one run, one row per seed; no number is ever cut."""
    table = seed_cells(summaries)
    return fitting([table], table, title, width)


def fitting(attempts: Sequence[Cells], whole: Cells, title: str, width: int) -> Table:
    """Return the first table that fits the width, or else all of it as one block per row."""
    console = Console(width=UNLIMITED)
    for table in map(_columns, attempts, itertools.repeat(title)):
        if Measurement.get(console, console.options, table).maximum <= width:
            return table
    return _blocks(whole, title)


def _columns(cells: Cells, title: str) -> Table:
    """Lay cells out as one line per row."""
    table = Table(title=Text(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for column in cells.columns:
        justify: Literal["left", "right"] = "right" if column.number else "left"
        table.add_column(Text(column.header), justify=justify, no_wrap=True)
    for row in cells.rows:
        table.add_row(
            *(Text(cell.text, "bold green" if cell.mark == "best" else "") for cell in row)
        )
    return table


def _blocks(cells: Cells, title: str) -> Table:
    """Lay cells out as one block per row, with a line for each column."""
    table = Table(title=Text(title), title_justify="left", show_header=False, box=SIMPLE_HEAD)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for row in cells.rows:
        for column, cell in zip(cells.columns, row, strict=True):
            name = Text(column.header, "" if column.number else "bold")
            strong = cell.mark == "best" or not column.number
            table.add_row(name, Text(cell.text, "bold green" if strong else ""))
        table.add_section()
    return table


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values between 0 and 1 as a row of block characters.

    Examples
    --------
    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    step = max(1, -(-len(values) // width))
    shown = [values[min(i + step, len(values)) - 1] for i in range(0, len(values), step)]
    return "".join(BARS[min(int(max(v, 0.0) * len(BARS)), len(BARS) - 1)] for v in shown)


def cost_table(rows: Sequence[CostRow], clients: int, cohort_size: int, parameters: int) -> Table:
    """Lay out which signals the policies need and what these cost."""
    title = f"{clients} clients, cohorts of {cohort_size}, a model of {parameters:,} parameters"
    table = Table(title=title, title_justify="left", header_style="bold", show_lines=True)
    for name in (
        "policy",
        "asks for",
        "kB once",
        "kB per round",
        "models per round",
        "use it when",
    ):
        right = name.startswith(("kB", "models"))
        table.add_column(name, justify="right" if right else "left", no_wrap=name == "policy")
    for row in rows:
        asks = [("once", row.profile), ("before", row.query), ("after", row.reply)]
        signals = "\n".join(f"{when}: {what}" for when, what in asks if what) or "nothing"
        numbers = (row.once / 1e3, row.each_round / 1e3, row.models_each_round)
        table.add_row(row.policy, signals, *(f"{value:.1f}" for value in numbers), row.when)
    return table


def worth_table(plan: Plan, width: int) -> Table:
    """Lay out what the cohorts of each policy and size are worth."""
    columns = [
        Column("policy", lambda w: Cell(w.policy), number=False),
        Column("clients", lambda w: number(w.cohort_size, 0)),
        Column("discrepancy", lambda w: Cell(f"{w.discrepancy:.4f} ± {w.error:.4f}")),
        Column("worth, random clients", lambda w: number(w.random_clients, 0)),
        Column("all used by round", lambda w: number(w.rounds_until_all or math.nan, 0)),
        Column("picks, least to most", lambda w: Cell(f"{w.fewest:.1f}x to {w.most:.1f}x")),
    ]
    if plan.uniform_seconds:
        columns.append(Column("seconds per round", lambda w: number(w.seconds)))
    uniform = [
        [Cell("uniform"), number(k, 0), Cell(f"{value:.4f}"), number(k, 0), Cell(""), Cell("")]
        + [number(plan.uniform_seconds.get(k, math.nan))] * bool(plan.uniform_seconds)
        for k, value in plan.uniform.items()
    ]
    rows = [[column.cell(worth) for column in columns] for worth in plan.worths]
    table = Cells(columns, uniform + rows)
    return fitting([table], table, "Worth of a cohort", width)
