"""Tables: one list of columns for the terminal, for Markdown and for pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedcohort.options import as_text

if TYPE_CHECKING:
    from fedcohort.analysis.comparison import ComparisonRow, Interval
    from fedcohort.analysis.plan import Plan
    from fedcohort.experiments.results import Results, Spread, Summary

BARS = "▁▂▃▄▅▆▇█"
WRAPPED = 24  # columns at least of a text that may be broken
UNLIMITED = 100_000  # columns of a console that never wraps


class Cell(NamedTuple):
    """A text, and how it stands out."""

    text: str
    value: float | str = ""  # by which it is sorted; empty if unknown
    mark: str = ""  # "best", "odd" or nothing
    color: str = ""  # of a dot before the text


@dataclass(frozen=True)
class Column:
    """A column of a table: the cell of each row, and how it is shown."""

    header: str
    cell: Callable[[Any], Cell]
    number: bool = True
    best: str = ""  # "high" or "low": that value stands out
    detail: int = 0  # a narrow terminal leaves out columns of 1, then of 2, then of 3
    wraps: bool = False  # whether its text may be broken


class Cells(NamedTuple):
    """A table: its columns, and a row of cells for each."""

    columns: list[Column]
    rows: list[list[Cell]]

    def without_details(self, level: int) -> Cells:
        """Return the table without the columns of a detail up to a level."""
        kept = [i for i, column in enumerate(self.columns) if not 0 < column.detail <= level]
        return Cells([self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows])


def cells(rows: Sequence[Any], columns: Sequence[Column]) -> Cells:
    """Lay rows out; columns without any value are left out, and the best values stand out."""
    table = {column: [column.cell(row) for row in rows] for column in columns}
    table = {column: shown for column, shown in table.items() if any(c.text for c in shown)}
    for column, shown in table.items():
        values = [cell.value for cell in shown if isinstance(cell.value, float)]
        if column.best and values:
            top = max(values) if column.best == "high" else min(values)
            table[column] = [c._replace(mark="best") if c.value == top else c for c in shown]
    return Cells(list(table), [list(line) for line in zip(*table.values(), strict=True)])


def number(value: float | None, digits: int = 1, sign: Literal["-", "+"] = "-") -> Cell:
    """Return the cell of a number, with "+" if that is the `sign`; None and NaN are unknown."""
    known = value is not None and math.isfinite(value)
    return Cell(f"{value:{sign},.{digits}f}", float(value or 0)) if known else Cell("")


def plus_minus(spread: Spread, unit: float = 1.0) -> Cell:
    """Return the cell of a mean with its deviation, or alone if there is only one value."""
    mean, std = spread.mean * unit, spread.std * unit
    if math.isnan(mean):
        return Cell("")
    return Cell(f"{mean:.1f}" + ("" if math.isnan(std) else f" ± {std:.1f}"), mean)


def comparison_cells(
    results: Results, runs: Sequence[ComparisonRow], *, sparklines: bool = False
) -> Cells:
    """Lay out the comparison of runs; the first columns are the settings in which they differ.

    The columns of a gate appear only if a gate withheld something, in percent of plain FedAvg, and
    seconds to the target only if rounds take different time.
    """
    from fedcohort.analysis.comparison import curve, durations_differ

    settings, target = setting_columns(results), results.target
    lines = [sparkline(curve(r).mean) if r.histories else "" for r in results]
    units = ["rounds"] + ["seconds"] * durations_differ(results) if target is not None else []
    gated = any(run.means["skipped"].mean > 0 or run.means["overhead_up"].mean < 99 for run in runs)
    columns = [
        *(_text(name, i) for i, name in enumerate(settings, start=2)),
        Column("accuracy %", lambda r: plus_minus(r[0].accuracy, 100), best="high"),
        Column("against uniform", lambda r: _gain(r[0].gain)),
        *(_to_target(unit, target) for unit in units),
    ]
    gate = [
        Column("change %", lambda r: number(getattr(r[0].accuracy_change, "mean", None), sign="+")),
        _mean("rounds skipped %", "skipped"),
        _mean("uplink %", "overhead_up"),
        _mean("downlink %", "overhead_down"),
    ]
    columns += gate if gated else []
    columns += [
        _mean("GEMD", "gemd", 2, detail=int(gated)),
        _mean("evenness", "participation_entropy", 2, detail=1),
        _mean("MB up", "bytes_up", unit=1e-6, detail=1 if gated else 3),
        _mean("MB down", "bytes_down", unit=1e-6, detail=1 if gated else 3),
    ]
    if sparklines:
        columns.append(Column("accuracy by round", lambda r: Cell(r[1]), number=False, detail=2))
    return cells(list(zip(runs, lines, *settings.values(), strict=True)), columns)


def _mean(header: str, name: str, digits: int = 1, *, unit: float = 1.0, detail: int = 0) -> Column:
    """Return the column of a mean over seeds."""
    return Column(header, lambda r: number(r[0].means[name].mean * unit, digits), detail=detail)


def seed_cells(summaries: Sequence[Summary]) -> Cells:
    """Lay out one run, one row per seed."""
    columns = [
        Column("seed", lambda s: Cell(str(s.seed), float(s.seed)), number=False),
        Column("rounds", lambda s: number(s.rounds, 0)),
        Column("accuracy %", lambda s: number(100 * s.accuracy)),
        Column("rounds to target", lambda s: number(s.rounds_to_target, 0)),
        Column("GEMD", lambda s: number(s.gemd, 2)),
        Column("MB up", lambda s: number(s.bytes_up / 1e6)),
        Column("MB down", lambda s: number(s.bytes_down / 1e6)),
    ]
    return cells(summaries, columns)


class Rank(NamedTuple):
    """A client's posterior mean rank, 1 the least skewed, its 95% interval, and its duels."""

    client: str
    rank: float
    low: float
    high: float
    duels: float


def rank_cells(ranks: Sequence[Rank]) -> Cells:
    """Lay out clients by skew."""
    columns = [
        Column("client", lambda r: Cell(r.client), number=False),
        Column("rank by skew", lambda r: number(r.rank)),
        Column("95% interval", lambda r: Cell(f"{r.low:.0f} to {r.high:.0f}")),
        Column("duels", lambda r: number(r.duels, 0)),
    ]
    return cells(ranks, columns)


def _text(name: str, i: int) -> Column:
    return Column(name, lambda r: Cell(r[i], r[i]), number=False)


def _gain(gain: Interval | None) -> Cell:
    """Format a difference of accuracies in percentage points, with its interval."""
    if gain is None:
        return Cell("")
    mean, low, high = (100 * value for value in gain)
    return Cell(f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]", gain.mean)


def _to_target(unit: str, target: float | None) -> Column:
    """Return the column of what it took to the target; some seeds may not have reached it."""

    def cell(row: Any) -> Cell:
        value, seeds = row[0].means[f"{unit}_to_target"], row[0].seeds
        if value.missing == seeds:
            return Cell("not reached" if seeds else "")
        shown, share = plus_minus(value), f" ({seeds - value.missing}/{seeds})"
        return Cell(shown.text + share) if value.missing else shown

    return Column(f"{unit} to {target:.0%}", cell, best="low")


def setting_columns(results: Results) -> dict[str, list[str]]:
    """Return what tells the runs apart, by column: swept settings, or the name of the policy."""
    varied = results.varied()
    if all(key.startswith(("policy.", "gate.")) for key in varied):
        return {"policy": [r.policy for r in results]}
    # The last word of the key heads the column, or the whole key if two end alike.
    lasts = {key: key.removesuffix(".name").rpartition(".")[2] for key in varied}
    words = list(lasts.values())
    return {
        lasts[key] if words.count(lasts[key]) == 1 else key: [
            "" if value is None else as_text(value) for value in values
        ]
        for key, values in varied.items()
    }


def fit_table(table: Cells, title: str, width: int) -> Table:
    """Lay a table out in a terminal: without details if it is too wide, else one block per row."""
    console = Console(width=UNLIMITED)
    for attempt in map(table.without_details, range(4)):
        candidate = _columns(attempt, title)
        spare = width - Measurement.get(console, console.options, candidate).maximum
        if spare >= 0:
            wrapped = [column for column in candidate.columns if column.max_width]
            for column in wrapped:
                column.max_width = WRAPPED + spare // len(wrapped)
            return candidate
    return _blocks(table, title)


def _columns(cells: Cells, title: str) -> Table:
    """Lay cells out as one line per row."""
    table = Table(title=Text(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for column in cells.columns:
        width: dict[str, Any] = {"max_width": WRAPPED} if column.wraps else {"no_wrap": True}
        justify: Literal["left", "right"] = "right" if column.number else "left"
        table.add_column(Text(column.header), justify=justify, **width)
    for row in cells.rows:
        texts = [Text(cell.text, "bold green" if cell.mark == "best" else "") for cell in row]
        table.add_row(*texts, end_section=any(column.wraps for column in cells.columns))
    return table


def _blocks(cells: Cells, title: str) -> Table:
    """Lay cells out as one block per row, with a line for each column."""
    table = Table(title=Text(title), title_justify="left", show_header=False, box=SIMPLE_HEAD)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for row in cells.rows:
        for column, cell in zip(cells.columns, row, strict=True):
            name = Text(column.header, "" if column.number else "bold")
            strong = cell.mark == "best" or not column.number
            side: Literal["left", "right"] = "right" if column.number else "left"
            table.add_row(name, Text(cell.text, "bold green" if strong else "", justify=side))
        table.add_section()
    return table


def sparkline(values: Sequence[float], width: int = 17) -> str:
    """Draw values between 0 and 1 as a row of block characters.

    Examples
    --------
    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    step = max(1, -(-len(values) // width))
    shown = [values[min(i + step, len(values)) - 1] for i in range(0, len(values), step)]
    return "".join(BARS[min(int(max(v, 0.0) * len(BARS)), len(BARS) - 1)] for v in shown)


def worth_cells(plan: Plan) -> Cells:
    """Lay out what the cohorts of each policy and size are worth, uniform ones first."""
    from fedcohort.analysis.plan import Worth

    def discrepancy(w: Worth) -> Cell:
        error = f" ± {w.error:.4f}" if math.isfinite(w.error) else ""
        return Cell(f"{w.discrepancy:.4f}{error}")

    def picks(w: Worth) -> Cell:
        return Cell(f"{w.fewest:.1f}x to {w.most:.1f}x" if math.isfinite(w.most) else "")

    columns = [
        Column("policy", lambda w: Cell(w.policy), number=False),
        Column("clients", lambda w: number(w.cohort_size, 0)),
        Column("discrepancy", discrepancy, detail=2),
        Column("worth, random clients", lambda w: number(w.random_clients, 0)),
        Column("all used by round", lambda w: number(w.rounds_until_all, 0)),
        Column("picks, least to most", picks, detail=1),
        Column("seconds per round", lambda w: number(w.seconds)),
    ]
    no = math.nan
    uniform = [
        Worth("uniform", k, value, no, value, k, 0, None, no, no, (), plan.uniform_seconds.get(k))
        for k, value in plan.uniform.items()
    ]
    return cells([*uniform, *plan.worths], columns)
