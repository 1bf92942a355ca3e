"""Rows and curves computed from results, and the tables that a terminal shows.

`comparison` and `curves` return plain values, which tables print, figures draw and tests read.
`policy_costs` measures what the signals of each policy cost in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedcohort.experiments.several import BASELINE, PolicyResult
from fedcohort.experiments.summary import Spread, Summary, spread
from fedcohort.policies import POLICIES
from fedcohort.session import Session
from fedcohort.testing import drive


class ComparisonRow(NamedTuple):
    """One policy of a comparison, over all seeds.

    The overheads are in percent of plain FedAvg, and so is `accuracy_change`, which is None if
    FedAvg is not among the results.
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


class Curve(NamedTuple):
    """Mean accuracy over seeds, and one standard deviation to either side.

    `rounds` counts from 1. `megabytes` is the total traffic so far, in both directions.
    """

    policy: str
    rounds: list[int]
    megabytes: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def comparison(results: Sequence[PolicyResult]) -> list[ComparisonRow]:
    """Return one row per policy, in the order of the results."""
    plain = [r.summaries for r in results if r.policy == BASELINE]
    return [
        ComparisonRow(
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
            accuracy_change=_change(r.summaries, plain[0]) if plain else None,
        )
        for r in results
    ]


def _change(own: Sequence[Summary], plain: Sequence[Summary]) -> Spread:
    """Return the relative change of accuracy in percent, paired by seed."""
    pairs = [(a.accuracy, b.accuracy) for a, b in zip(own, plain, strict=True)]
    return spread([100 * (a / b - 1) if b else None for a, b in pairs])


def curves(results: Sequence[PolicyResult]) -> list[Curve]:
    """Return one curve per policy, over the rounds in which every seed was evaluated."""
    drawn = []
    for result in results:
        accuracy = np.array([h.accuracy for h in result.histories])
        sent = np.array(
            [np.cumsum([r.bytes_up + r.bytes_down for r in h.rounds]) for h in result.histories]
        )
        measured = np.flatnonzero(np.isfinite(accuracy).all(axis=0))
        mean, std = accuracy[:, measured].mean(axis=0), accuracy[:, measured].std(axis=0)
        drawn.append(
            Curve(
                policy=result.policy,
                rounds=(measured + 1).tolist(),
                megabytes=(sent[:, measured].mean(axis=0) / 1e6).tolist(),
                mean=mean.tolist(),
                low=(mean - std).tolist(),
                high=(mean + std).tolist(),
            )
        )
    return drawn


class CostRow(NamedTuple):
    """Bytes of one policy, all messages, for all clients together."""

    policy: str
    profile: str
    query: str
    reply: str
    once: int
    each_round: float
    models_each_round: float
    when: str


def policy_costs(
    clients: int, cohort_size: int, model_bytes: int, rounds: int = 20
) -> list[CostRow]:
    """Run every policy for some rounds and read its ledger.

    `once` is what clients send about themselves in the first round; `each_round` the mean of the
    signals in later rounds; `models_each_round` counts model transfers, down and up, in units of
    one model. Readings have the sizes of `fedcohort.testing.reading`.
    """
    return [_costs(name, clients, cohort_size, model_bytes, rounds) for name in sorted(POLICIES)]


def _costs(name: str, clients: int, cohort_size: int, model_bytes: int, rounds: int) -> CostRow:
    policy = POLICIES[name]()
    size = min(cohort_size, clients)
    if hasattr(policy, "d"):
        policy.d = max(policy.d, size)
    session = Session(policy, cohort_size=size, seed=0, model_bytes=model_bytes)
    names = [f"{i:07d}" for i in range(clients)]
    for _ in range(rounds):
        drive(session, names)
    up = [session.ledger.by_kind("up", r) for r in range(rounds)]
    down = [session.ledger.by_kind("down", r) for r in range(rounds)]
    profiles = policy.needs.profile
    signals = [sum(n for kind, n in u.items() if kind not in ("model", *profiles)) for u in up]
    models = sum(u.get("model", 0) + d.get("model", 0) for u, d in zip(up, down, strict=True))
    return CostRow(
        policy=name,
        profile=", ".join(sorted(profiles)),
        query=", ".join(sorted(policy.needs.query)),
        reply=", ".join(sorted(policy.needs.reply)),
        once=sum(n for u in up for kind, n in u.items() if kind in profiles),
        each_round=sum(signals) / rounds,
        models_each_round=models / model_bytes / rounds,
        when=policy.when,
    )


BARS = "▁▂▃▄▅▆▇█"


def comparison_table(
    rows: Sequence[ComparisonRow],
    curves: Sequence[Curve],
    target: float | None,
    title: str,
    width: int = 120,
) -> Table:
    """Lay out a comparison, with the best accuracy and the fewest rounds in bold.

    A narrow terminal gets no sparklines. The columns of a gate appear only if a gate withheld
    something. They are in percent of plain FedAvg; the downlink is given twice, with models
    going to the cohort and to all clients.
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
    """Draw values between 0 and 1 as a row of block characters.

    Examples
    --------
    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    step = max(1, -(-len(values) // width))
    shown = [values[min(i + step, len(values)) - 1] for i in range(0, len(values), step)]
    return "".join(BARS[min(int(max(v, 0.0) * len(BARS)), len(BARS) - 1)] for v in shown)


def _percent(value: Spread) -> str:
    return _plus_minus(Spread(100 * value.mean, 100 * value.std, value.missing))


def _plus_minus(value: Spread) -> str:
    """Format a mean with its deviation, or alone if there is only one value."""
    return f"{value.mean:.1f}" + ("" if math.isnan(value.std) else f" ± {value.std:.1f}")


def _rounds(value: Spread, seeds: int) -> str:
    """Format the rounds to the target, with the share of seeds that reached it if not all did."""
    if value.missing == seeds:
        return "not reached"
    text = _plus_minus(value)
    return text if not value.missing else f"{text} ({seeds - value.missing}/{seeds})"


def _bold(text: str, yes: bool) -> str:
    return f"[bold green]{text}[/]" if yes else text


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


def summary_table(summaries: Sequence[Summary], title: str) -> Table:
    """Lay out one run, one row per seed."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("seed", "rounds", "accuracy %", "to target", "GEMD", "MB up", "MB down"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in summaries:
        reached = "" if s.rounds_to_target is None else str(s.rounds_to_target)
        cells = [str(s.seed), str(s.rounds), f"{100 * s.accuracy:.1f}", reached]
        cells += [f"{s.gemd:.2f}", f"{s.bytes_up / 1e6:.1f}", f"{s.bytes_down / 1e6:.1f}"]
        table.add_row(*cells)
    return table
