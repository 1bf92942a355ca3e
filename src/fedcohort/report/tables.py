"""Rows and curves computed from results, and the tables that a terminal shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedcohort.analysis.costs import CostRow
from fedcohort.analysis.plan import Plan
from fedcohort.experiments.results import PolicyResult, Results
from fedcohort.experiments.summary import Spread, Summary, spread
from fedcohort.report.columns import (
    Cell,
    Cells,
    Column,
    comparison_cells,
    seed_cells,
)
from fedcohort.rounds import stream
from fedcohort.simulate.history import History


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


class ComparisonRow(NamedTuple):
    """One run of a comparison, over all seeds.

    The overheads are in percent of plain FedAvg. The baseline is the run with uniform cohorts, no
    gate and otherwise equal settings: `accuracy_change` is in percent of its accuracy, and `gain`
    is the difference to it, with a paired interval. Both are None without a baseline; `gain` is
    also None for the baseline itself and if fewer than two seeds can be paired.
    """

    policy: str
    seeds: int
    accuracy: Spread
    rounds_to_target: Spread
    gemd: Spread
    participation_entropy: Spread
    megabytes_up: Spread
    megabytes_down: Spread
    seconds: float
    overhead_up: Spread
    overhead_down: Spread
    overhead_down_to_all: Spread
    skipped: Spread
    accuracy_change: Spread | None
    gain: Interval | None


class Curve(NamedTuple):
    """Mean accuracy over seeds, and one sample standard deviation to either side.

    `rounds` counts from 1. `megabytes` is the total traffic so far, in both directions, and
    `seconds` the simulated time. `low` and `high` are NaN for one seed.
    """

    policy: str
    rounds: list[int]
    megabytes: list[float]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def comparison(results: Sequence[PolicyResult]) -> list[ComparisonRow]:
    """Return one row per run, in the order of the results."""
    every = Results(results)
    return [_comparison_row(r, every.baseline(r)) for r in results]


def _comparison_row(r: PolicyResult, baseline: PolicyResult | None) -> ComparisonRow:
    pairs = [] if baseline is None else _paired(r.summaries, baseline.summaries)
    return ComparisonRow(
        policy=r.policy,
        seeds=len(r.summaries),
        accuracy=spread([s.accuracy for s in r.summaries]),
        rounds_to_target=spread([s.rounds_to_target for s in r.summaries]),
        gemd=spread([s.gemd for s in r.summaries]),
        participation_entropy=spread([s.participation_entropy for s in r.summaries]),
        megabytes_up=spread([s.bytes_up / 1e6 for s in r.summaries]),
        megabytes_down=spread([s.bytes_down / 1e6 for s in r.summaries]),
        seconds=r.seconds,
        overhead_up=spread([s.overhead.up for s in r.summaries]),
        overhead_down=spread([s.overhead.down for s in r.summaries]),
        overhead_down_to_all=spread([s.overhead.down_to_all for s in r.summaries]),
        skipped=spread([s.overhead.skipped for s in r.summaries]),
        accuracy_change=spread([100 * (a / b - 1) if b else None for a, b in pairs])
        if pairs
        else None,
        gain=None if baseline is r else paired_interval([a - b for a, b in pairs]),
    )


def _paired(own: Sequence[Summary], other: Sequence[Summary]) -> list[tuple[float, float]]:
    """Return the accuracies of the seeds that both runs have."""
    known = {s.seed: s.accuracy for s in other}
    pairs = [(s.accuracy, known[s.seed]) for s in own if s.seed in known]
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def paired_interval(differences: Sequence[float], resamples: int = 10_000) -> Interval | None:
    """Return the bootstrap 95 % interval of a mean of paired differences.

    It is the percentile interval of Efron (1979). Up to six differences, all resamples are
    enumerated, so that the interval is exact; otherwise `resamples` are drawn with a fixed seed.
    With very few differences it is too narrow. None if there are fewer than two.

    Examples
    --------
    >>> paired_interval([1.0, 3.0])
    Interval(mean=2.0, low=1.0, high=3.0)
    """
    values, n = np.asarray(differences, float), len(differences)
    if n < 2:
        return None
    if n <= 6:
        chosen = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        chosen = stream(0, "bootstrap", n).integers(0, n, (resamples, n))
    means = values[chosen].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    return Interval(float(values.mean()), float(low), float(high))


def curves(results: Sequence[PolicyResult]) -> list[Curve]:
    """Return one curve per run, over the rounds in which every seed was evaluated."""
    return [_curve(result.policy, result.histories) for result in results]


def _curve(policy: str, histories: Sequence[History]) -> Curve:
    length = min(len(h.rounds) for h in histories)
    accuracy = np.array([h.accuracy[:length] for h in histories])
    rounds = [h.rounds[:length] for h in histories]
    sent = np.cumsum([[r.bytes_up + r.bytes_down for r in own] for own in rounds], axis=1)
    seconds = np.array([[r.elapsed for r in own] for own in rounds])
    known = np.flatnonzero(np.isfinite(accuracy).all(axis=0))
    mean = accuracy[:, known].mean(axis=0)
    several = len(histories) > 1
    std = accuracy[:, known].std(axis=0, ddof=1) if several else np.full(len(known), np.nan)
    return Curve(
        policy=policy,
        rounds=(known + 1).tolist(),
        megabytes=(sent[:, known].mean(axis=0) / 1e6).tolist(),
        seconds=seconds[:, known].mean(axis=0).tolist(),
        mean=mean.tolist(),
        low=np.maximum(mean - std, 0).tolist(),
        high=np.minimum(mean + std, 1).tolist(),
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

    Parameters
    ----------
    rows, curves : sequences
        From `comparison` and `curves`.
    target : float or None
        The accuracy that `rounds_to_target` counts to.
    title : str
        Shown above.
    width : int, default=120
        Columns of the terminal.
    settings : sequence of mappings, optional
        From `setting_columns`: the first columns. By default there is one, the policy.
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
        table.add_row(
            row.policy,
            "\n".join(f"{when}: {what}" for when, what in asks if what) or "nothing",
            f"{row.once / 1e3:.1f}",
            f"{row.each_round / 1e3:.1f}",
            f"{row.models_each_round:.1f}",
            row.when,
        )
    return table


def worth_table(plan: Plan) -> Table:
    """Lay out what the cohorts of each policy and size are worth."""
    table = Table(title="Worth of a cohort", title_justify="left", header_style="bold")
    for name in ("policy", "clients", "discrepancy", "worth (random clients)", "all used by round"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    table.add_column("picks, least to most", justify="right")
    for k, expected in plan.uniform.items():
        table.add_row("uniform", str(k), f"{expected:.4f}", str(k), "-", "-")
    for w in plan.worths:
        table.add_row(
            w.policy,
            str(w.cohort_size),
            f"{w.discrepancy:.4f} ± {w.error:.4f}",
            f"{w.random_clients:.0f}",
            "-" if w.rounds_until_all is None else str(w.rounds_until_all),
            f"{w.fewest:.1f}x to {w.most:.1f}x",
        )
    return table
