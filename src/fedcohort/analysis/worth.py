"""What the cohorts of a policy are worth: as many random clients as have the same discrepancy.

The discrepancy of a cohort is the squared maximum mean discrepancy between its merged data and the
federation's, less the expected part of sample size and noise. For k of N clients drawn at random
and averaged equally, its expectation is (V / k) (N - k) / (N - 1), with V the variance between
clients. A policy's cohorts are chosen on one half of the sketches' rows and judged on the other
half, both ways, because a chosen cohort fits the noise by which it was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.policies import Policy
from fedcohort.rounds import ClientId, Outcome, Round, stream
from fedcohort.signals.forms import sketch_dtype
from fedcohort.signals.table import Signals
from fedcohort.sketch.distances import error_variance
from fedcohort.sketch.federation import blocks

Floats = NDArray[np.float64]
Average = Literal["equal", "size"]

MAX_CLIENTS = 1000  # policies are tried on a random part of more clients
MAX_ROUNDS = 400
DRAWS = 400  # random cohorts


@dataclass(frozen=True)
class Worth:
    """What the cohorts of one policy and size are worth.

    `discrepancy` is their mean squared MMD to the federation, with its standard `error`, `uniform`
    that of random cohorts, and `random_clients` how many of these represent the federation as well.
    Every client had taken part by `rounds_until_all` (None: not all did); `fewest` and `most` are
    picks per client as a multiple of the equal share, and `waiting` are clients never picked, at
    most ten. A round took `seconds` on average, those of its slowest client.
    """

    policy: str
    cohort_size: int
    discrepancy: float
    error: float
    uniform: float
    random_clients: float
    rounds: int
    rounds_until_all: int | None
    fewest: float
    most: float
    waiting: tuple[ClientId, ...]
    seconds: float | None = None


def uniform_discrepancy(readings: NDArray[Any], cohort_size: int) -> float:
    """Return the expected discrepancy of random cohorts that are averaged equally."""
    return BetweenClients(readings, "equal").uniform(cohort_size)


def random_clients(discrepancy: float, uniform: float, cohort_size: int, clients: int) -> float:
    """How many random clients have this discrepancy, if `cohort_size` of them have `uniform`.

    Solves uniform * (k_0 / (N - k_0)) * (N - k) / k = discrepancy for k.

    Examples
    --------
    >>> random_clients(0.1, 0.1, 5, 100), random_clients(0.0, 0.1, 5, 100)
    (5.0, 100.0)
    """
    if not uniform > 0 or cohort_size >= clients:
        return float(cohort_size)
    if discrepancy <= 0:
        return float(clients)
    unit = uniform * cohort_size / (clients - cohort_size)
    return float(clients / (1 + discrepancy / unit))


class BetweenClients:
    """Center, error variances and the variance between clients, over all rows of all sketches."""

    def __init__(self, readings: NDArray[Any], average: Average) -> None:
        n, (rows, buckets) = readings["n"], readings["counts"].shape[1:]
        self.rows, self.clients, cells = rows, len(n), rows * buckets
        self.shares = n / n.sum() if average == "size" else np.full(len(n), 1 / len(n))
        self.center = np.zeros(cells)
        self.errors = np.empty(len(n))
        for part in blocks(readings):
            q = _normalized(readings[part])
            self.center += self.shares[part] @ q
            squares = np.einsum("ij,ij->i", q, q)
            noise = readings["noise"][part]
            self.errors[part] = error_variance(squares, n[part], noise, rows, buckets)
        self.center_error = float(self.shares**2 @ self.errors)
        squares = np.empty(len(n))
        for part in blocks(readings):
            gap = _normalized(readings[part]) - self.center
            squares[part] = np.einsum("ij,ij->i", gap, gap)
        debiased = (squares - self.center_error - (1 - 2 * self.shares) * self.errors) / rows
        self.variance = float(debiased.mean())
        self.variance_error = float(debiased.std() / math.sqrt(len(n)))
        sampling = self.errors - cells * readings["noise"] / n**2
        self.floor = float(sampling.mean()) / rows

    def uniform(self, k: int) -> float:
        """Expected discrepancy of k random clients, averaged equally."""
        return self.variance / k * (self.clients - k) / max(self.clients - 1, 1)


class Trial:
    """Cohorts of some clients, chosen on one half of the rows and judged on the other.

    `durations` are seconds by client; clients without one count as the median.
    """

    def __init__(
        self,
        readings: NDArray[Any],
        ids: tuple[ClientId, ...],
        average: Average,
        seed: int,
        durations: Mapping[ClientId, float] | None = None,
    ) -> None:
        self.average, self.seed = average, seed
        at = np.arange(len(ids))
        if len(ids) > MAX_CLIENTS:
            drawn = stream(seed, "plan", "clients").choice(len(ids), MAX_CLIENTS, replace=False)
            at = np.sort(drawn)
        self.ids = tuple(ids[i] for i in at.tolist())
        stated = durations or {}
        usual = float(np.median(list(stated.values()))) if stated else math.nan
        self.seconds = np.array([stated.get(client, usual) for client in self.ids])
        rows = np.arange(readings["counts"].shape[1])
        self.halves = [Half(readings, at, rows % 2 == side, average) for side in (0, 1)]

    def uniform(self, k: int) -> tuple[float, float, float]:
        """Mean discrepancy of drawn cohorts, its standard error, and mean seconds of a round."""
        rng, n = stream(self.seed, "plan", "uniform", k), len(self.ids)
        cohorts = [rng.choice(n, k, replace=False) for _ in range(DRAWS)]
        values = [float(np.mean([h.judge(c) for h in self.halves])) for c in cohorts]
        return *_mean(values), float(np.mean([self.seconds[c].max() for c in cohorts]))

    def worth(
        self, label: str, make: Callable[[], Policy], k: int, uniform: float, clients: int
    ) -> Worth:
        """Try one policy with cohorts of k."""
        values: list[float] = []
        picks = np.zeros(len(self.ids))
        lengths, until, waits = [], [], []
        for chooser, judge in (self.halves, self.halves[::-1]):
            cohorts = self.cohorts(make(), chooser, k)
            values += [judge.judge(cohort) for cohort in cohorts]
            waits += [float(self.seconds[cohort].max()) for cohort in cohorts]
            first = np.full(len(self.ids), math.inf)
            for number in range(len(cohorts), 0, -1):
                first[cohorts[number - 1]] = number
            until.append(first.max())
            picks += np.bincount(np.concatenate(cohorts), minlength=len(self.ids))
            lengths.append(len(cohorts))
        mean, error = _mean(values)
        share = picks / picks.mean()
        return Worth(
            policy=label,
            cohort_size=k,
            discrepancy=mean,
            error=error,
            uniform=uniform,
            random_clients=random_clients(mean, uniform, k, clients),
            rounds=max(lengths),
            rounds_until_all=int(max(until)) if math.isfinite(max(until)) else None,
            fewest=float(share.min()),
            most=float(share.max()),
            waiting=tuple(self.ids[i] for i in np.flatnonzero(picks == 0)[:10].tolist()),
            seconds=None if math.isnan(waits[0]) else float(np.mean(waits)),
        )

    def cohorts(self, policy: Policy, half: Half, k: int) -> list[NDArray[np.int64]]:
        """Run the policy until everybody took part, at most 20 times as long as that must take."""
        signals, at = Signals(), {c: i for i, c in enumerate(self.ids)}
        signals.record("race_sketch", dict(zip(self.ids, half.readings, strict=True)), 0)
        unused, cohorts = set(self.ids), []
        shortest = math.ceil(len(self.ids) / k)
        for number in range(min(MAX_ROUNDS, max(20, 20 * shortest))):
            round = Round(number, self.ids, k, self.average)
            chosen = policy.select(round, signals, stream(self.seed, "plan", k, number)).clients
            policy.observe(round, Outcome(chosen, chosen), signals)
            cohorts.append(np.array([at[c] for c in chosen]))
            unused.difference_update(chosen)
            if not unused and number + 1 >= shortest:
                break
        return cohorts


class Half:
    """Some rows of the sketches: a federation of its own."""

    def __init__(
        self, readings: NDArray[Any], at: NDArray[np.int64], rows: NDArray[Any], average: Average
    ) -> None:
        whole = BetweenClients(_some_rows(readings, rows), average)
        self.readings = _some_rows(readings[at], rows)
        self.center_error, self.rows = whole.center_error, whole.rows
        self.errors, self.shares = whole.errors[at], whole.shares[at]
        self.points = (_normalized(self.readings) - whole.center).astype(np.float32)
        self.weights = self.readings["n"] if average == "size" else np.ones(len(at))

    def judge(self, cohort: NDArray[np.int64]) -> float:
        """Debiased squared MMD between a cohort's merged data and the federation's."""
        weights = self.weights[cohort] / self.weights[cohort].sum()
        gap = weights @ self.points[cohort]
        counted_twice = weights**2 - 2 * weights * self.shares[cohort]
        error = self.center_error + counted_twice @ self.errors[cohort]
        return float((gap @ gap - error) / self.rows)


def _mean(values: list[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values) / math.sqrt(len(values)))


def _normalized(readings: NDArray[Any]) -> Floats:
    """Counts / n, one flat row per client."""
    return np.asarray(readings["counts"].reshape(len(readings), -1) * (1 / readings["n"])[:, None])


def _some_rows(readings: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    counts = readings["counts"][:, rows]
    form = sketch_dtype(counts.shape[1], counts.shape[2], counts.dtype.str)
    out = np.zeros(len(readings), form)
    out["n"], out["noise"], out["counts"] = readings["n"], readings["noise"], counts
    return out
