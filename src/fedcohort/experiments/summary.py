"""The few numbers that a run comes down to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedcohort import metrics
from fedcohort.datasets import Federation
from fedcohort.ledger import Ledger
from fedcohort.simulate.history import History


class Overhead(NamedTuple):
    """Bytes in percent of plain FedAvg's over the same rounds (paper 2, section 4.1).

    Everything that crosses is counted: models, sketches, flags. The paper does not say who
    receives FedAvg's broadcast, so there are two downlinks: to the cohort, as the ledger counts,
    and to all clients, in both methods.
    """

    skipped: float
    up: float
    down: float
    down_to_all: float


class Summary(NamedTuple):
    """One seed of one run.

    Attributes
    ----------
    accuracy : float
        Of the last evaluated round.
    terminal_accuracy, terminal_spread : float
        Mean and standard deviation of the accuracy over the last 50 rounds, or over the last
        fifth of a run of fewer than 250.
    best_accuracy : float
        The highest of all rounds.
    rounds_to_target : int or None
        Rounds until the target was reached, None if it never was or there is none.
    seconds_to_target : float or None
        The same in simulated seconds.
    gemd : float
        Mean group earth mover's distance of the cohorts (paper 4, eq. 15).
    participation_entropy : float
        1 when all clients took part equally often, 0 when one did all.
    bytes_up, bytes_down : int
        All rounds, all messages.
    bytes_by_kind : dict
        The same by kind of message, both directions.
    overhead : Overhead
        Bytes as a share of FedAvg's.
    """

    seed: int
    rounds: int
    accuracy: float
    terminal_accuracy: float
    terminal_spread: float
    best_accuracy: float
    rounds_to_target: int | None
    seconds_to_target: float | None
    gemd: float
    participation_entropy: float
    bytes_up: int
    bytes_down: int
    bytes_by_kind: dict[str, int]
    overhead: Overhead


def summarize(
    history: History,
    federation: Federation,
    ledger: Ledger,
    target: float | None,
    model_bytes: int,
) -> Summary:
    """Condense one seed's history."""
    accuracy = history.accuracy
    measured = accuracy[np.isfinite(accuracy)]
    last = measured[-min(50, max(1, len(measured) // 5)) :]
    last = last if len(last) else np.array([np.nan])
    seconds = [r.seconds for r in history.rounds]
    kinds = {
        f"{kind} {way}": size
        for way in ("up", "down")
        for kind, size in sorted(ledger.by_kind(way).items())
    }
    counts = metrics.participation(history.selections, sorted(federation.parts))
    return Summary(
        seed=history.seed,
        rounds=len(history.rounds),
        accuracy=float(last[-1]),
        terminal_accuracy=float(last.mean()),
        terminal_spread=float(last.std()),
        best_accuracy=float(measured.max()) if len(measured) else float("nan"),
        rounds_to_target=None if target is None else metrics.rounds_to_target(accuracy, target),
        seconds_to_target=(
            None if target is None else metrics.time_to_target(accuracy, seconds, target)
        ),
        gemd=_mean_gemd(history, federation),
        participation_entropy=metrics.participation_entropy(counts),
        bytes_up=ledger.total("up"),
        bytes_down=ledger.total("down"),
        bytes_by_kind=kinds,
        overhead=overhead(history, ledger, len(federation.parts), model_bytes),
    )


def overhead(history: History, ledger: Ledger, clients: int, model_bytes: int) -> Overhead:
    """Compare a run's bytes with those of FedAvg with as many clients a round."""
    rounds = len(history.rounds)
    skipped = sum(r.skipped for r in history.rounds)
    fedavg = sum(len(r.selected) for r in history.rounds) * model_bytes
    small = ledger.total("down") - ledger.by_kind("down").get("model", 0)
    broadcast = (rounds - skipped) * clients * model_bytes
    return Overhead(
        skipped=100 * skipped / rounds,
        up=100 * ledger.total("up") / fedavg,
        down=100 * ledger.total("down") / fedavg,
        down_to_all=100 * (broadcast + small) / (rounds * clients * model_bytes),
    )


def _mean_gemd(history: History, federation: Federation) -> float:
    counts = federation.label_counts()
    position = {client: i for i, client in enumerate(sorted(federation.parts))}
    cohorts = [[position[c] for c in r.finished] for r in history.rounds if r.finished]
    if not cohorts:
        return float("nan")
    return float(np.mean([metrics.gemd(counts, cohort) for cohort in cohorts]))


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds; `missing` seeds had no value."""

    mean: float
    std: float
    missing: int


def spread(values: Sequence[float | None]) -> Spread:
    """Mean and sample standard deviation of the values that are there.

    Examples
    --------
    >>> spread([1.0, 3.0, None])
    Spread(mean=2.0, std=1.4142135623730951, missing=1)
    """
    known = [v for v in values if v is not None and np.isfinite(v)]
    missing = len(values) - len(known)
    if not known:
        return Spread(float("nan"), float("nan"), missing)
    std = float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
    return Spread(float(np.mean(known)), std, missing)
