"""Results -> rows: what tables show and plots draw, as values that a test can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedcohort.experiments.compare import BASELINE
from fedcohort.experiments.several import PolicyResult
from fedcohort.experiments.summary import Spread, Summary, spread


class ComparisonRow(NamedTuple):
    """One policy in a comparison, over all seeds.

    Overheads and the change of accuracy are in percent of plain FedAvg, the latter where it is
    among the results.
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
    """Mean accuracy over seeds and one standard deviation around it.

    `rounds` counts from 1; `megabytes` is what had been sent in both directions by then.
    """

    policy: str
    rounds: list[int]
    megabytes: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def comparison(results: Sequence[PolicyResult]) -> list[ComparisonRow]:
    """One row a policy, in the order of the results.

    The accuracy is the terminal one of `experiments.summary`.
    """
    plain = [r.summaries for r in results if r.policy == BASELINE]
    return [
        ComparisonRow(
            policy=r.policy,
            seeds=len(r.summaries),
            accuracy=spread([s.terminal_accuracy for s in r.summaries]),
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
    """Relative change of the accuracy in percent, seed by seed."""
    pairs = [(a.terminal_accuracy, b.terminal_accuracy) for a, b in zip(own, plain, strict=True)]
    return spread([100 * (a / b - 1) if b else None for a, b in pairs])


def curves(results: Sequence[PolicyResult]) -> list[Curve]:
    """One curve a policy, over the rounds in which every seed was evaluated."""
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
