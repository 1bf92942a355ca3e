"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedcohort.experiments.summary import Spread, Summary
from fedcohort.report.costs import CostRow
from fedcohort.report.tables import ComparisonRow, Curve

BARS = "▁▂▃▄▅▆▇█"


def comparison_table(
    rows: Sequence[ComparisonRow],
    curves: Sequence[Curve],
    target: float | None,
    title: str,
    width: int = 120,
) -> Table:
    """Lay out a comparison; the best accuracy and the fewest rounds stand out.

    Curves are left out where the terminal is too narrow for them, and the gate's columns where
    no gate held anything back. Those are in percent of plain FedAvg, for the downlink both with
    the cohort and with all clients receiving the model.
    """
    gated = any(row.skipped.mean or row.overhead_up.mean < 99 for row in rows)
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("policy", no_wrap=True)
    table.add_column("accuracy %", justify="right", no_wrap=True)
    if target is not None:
        table.add_column(f"rounds to {target:.0%}", justify="right", no_wrap=True)
    names = ["GEMD", "MB up", "MB down", "s"]
    if gated:
        names = ["change %", "skipped %", "up %", "down %", "(all) %"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    drawn = width >= (125 if gated else 105)
    if drawn:
        table.add_column("accuracy by round", no_wrap=True)
    top = max(row.accuracy.mean for row in rows)
    reached = [r.rounds_to_target.mean for r in rows if not r.rounds_to_target.missing]
    for row, curve in zip(rows, curves, strict=True):
        cells = [row.policy, _bold(_percent(row.accuracy), row.accuracy.mean == top)]
        if target is not None:
            best = bool(reached) and row.rounds_to_target.mean == min(reached)
            cells.append(_bold(_rounds(row.rounds_to_target, row.seeds), best))
        if gated:
            change = row.accuracy_change
            cells.append("" if change is None else f"{change.mean:+.1f}")
            downs = (row.overhead_down, row.overhead_down_to_all)
            cells += [f"{share.mean:.1f}" for share in (row.skipped, row.overhead_up, *downs)]
        else:
            cells += [f"{row.gemd.mean:.2f}", f"{row.megabytes_up.mean:.1f}"]
            cells += [f"{row.megabytes_down.mean:.1f}", f"{row.seconds:.1f}"]
        if drawn:
            cells.append(sparkline(curve.mean))
        table.add_row(*cells)
    return table


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values between 0 and 1 as a row of bars.

    Examples
    --------
    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    step = max(1, -(-len(values) // width))
    shown = [values[min(i + step, len(values)) - 1] for i in range(0, len(values), step)]
    return "".join(BARS[min(int(max(v, 0.0) * len(BARS)), len(BARS) - 1)] for v in shown)


def _percent(value: Spread) -> str:
    return f"{100 * value.mean:.1f} ± {100 * value.std:.1f}"


def _rounds(value: Spread, seeds: int) -> str:
    """Show rounds to target; seeds that never reached it are said, not averaged away."""
    if value.missing == seeds:
        return "not reached"
    text = f"{value.mean:.1f} ± {value.std:.1f}"
    return text if not value.missing else f"{text} ({seeds - value.missing}/{seeds})"


def _bold(text: str, yes: bool) -> str:
    return f"[bold green]{text}[/]" if yes else text


def cost_table(rows: Sequence[CostRow], clients: int, cohort_size: int, parameters: int) -> Table:
    """Lay out what policies ask for."""
    title = f"{clients} clients, cohorts of {cohort_size}, a model of {parameters:,} numbers"
    table = Table(title=title, title_justify="left", header_style="bold", show_lines=True)
    for name in ("policy", "asks for", "kB once", "kB a round", "models a round", "use it when"):
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


def summary_table(summaries: Sequence[Summary], title: str) -> Table:
    """Lay out the seeds of one run."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("seed", "rounds", "accuracy %", "to target", "GEMD", "MB up", "MB down"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in summaries:
        reached = "" if s.rounds_to_target is None else str(s.rounds_to_target)
        cells = [str(s.seed), str(s.rounds), f"{100 * s.terminal_accuracy:.1f}", reached]
        cells += [f"{s.gemd:.2f}", f"{s.bytes_up / 1e6:.1f}", f"{s.bytes_down / 1e6:.1f}"]
        table.add_row(*cells)
    return table
