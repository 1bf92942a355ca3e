"""What the cohorts of a policy are worth: as many random clients as have the same discrepancy.

The discrepancy of a cohort is the squared maximum mean discrepancy between its merged data and the
federation's, less the expected part of sample size and noise. For k of N clients drawn at random
and averaged equally, its expectation is (V / k) (N - k) / (N - 1), with V the variance between
clients. A policy's cohorts are chosen on one half of the sketches' rows and judged on the other
half, both ways, because a chosen cohort fits the noise by which it was chosen. They are worth as
many random clients as have the same discrepancy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.policies import Policy
from fedcohort.rounds import ClientId, Outcome, Round, stream
from fedcohort.signals.forms import sketch_dtype
from fedcohort.signals.table import Signals
from fedcohort.sketch.distances import error_variance, noise_variance_total
from fedcohort.sketch.federation import blocks

Array = NDArray[np.float64]
Average = Literal["equal", "size"]

MOST_CLIENTS = 1000  # policies are tried on a random part of more clients
MOST_ROUNDS = 400


@dataclass(frozen=True)
class Worth:
    """What the cohorts of one policy and size are worth.

    Attributes
    ----------
    policy, cohort_size
        The case.
    discrepancy, error : float
        Mean squared MMD of the judged cohorts to the federation, and its standard error.
    uniform : float
        The same for random cohorts of this size.
    random_clients : float
        How many random clients represent the federation as well.
    rounds : int
        Simulated rounds.
    rounds_until_all : int or None
        The round by which every client had taken part; None if not all did.
    fewest, most : float
        Smallest and largest number of picks per client, as a multiple of the equal share.
    waiting : tuple of str
        Clients that were not picked, at most ten.
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
    """Center, energies and the variance between clients, over all rows of all sketches."""

    def __init__(self, readings: NDArray[Any], average: Average) -> None:
        n, (rows, buckets) = readings["n"], readings["counts"].shape[1:]
        self.rows, self.clients, self.cells = rows, len(n), rows * buckets
        self.shares = n / n.sum() if average == "size" else np.full(len(n), 1 / len(n))
        self.center = np.zeros(self.cells)
        self.energy = np.empty(len(n))
        for part in blocks(readings):
            q = _flat(readings[part])
            self.center += self.shares[part] @ q
            squares = np.einsum("ij,ij->i", q, q)
            noise = readings["noise"][part]
            self.energy[part] = error_variance(squares, n[part], noise, rows, buckets)
        self.whole = float(self.shares**2 @ self.energy)
        far = np.empty(len(n))
        for part in blocks(readings):
            gap = _flat(readings[part]) - self.center
            far[part] = np.einsum("ij,ij->i", gap, gap)
        own = (far - self.whole - (1 - 2 * self.shares) * self.energy) / rows
        self.variance = float(own.mean())
        self.error = float(own.std() / math.sqrt(len(n)))
        sampling = self.energy - noise_variance_total(n, readings["noise"], self.cells)
        self.floor = float(sampling.mean()) / rows

    def uniform(self, k: int) -> float:
        """Expected discrepancy of k random clients, averaged equally."""
        return self.variance / k * (self.clients - k) / max(self.clients - 1, 1)


class Trial:
    """Cohorts of some clients, chosen on one half of the rows and judged on the other."""

    def __init__(
        self, readings: NDArray[Any], ids: tuple[ClientId, ...], average: Average, seed: int
    ) -> None:
        self.average, self.seed = average, seed
        at = np.arange(len(ids))
        if len(ids) > MOST_CLIENTS:
            drawn = stream(seed, "plan", "clients").choice(len(ids), MOST_CLIENTS, replace=False)
            at = np.sort(drawn)
        self.ids = tuple(ids[i] for i in at.tolist())
        rows = np.arange(readings["counts"].shape[1])
        self.halves = [Half(readings, at, rows % 2 == side, average) for side in (0, 1)]

    def draws(self, k: int, number: int = 400) -> tuple[float, float]:
        """Mean discrepancy of random cohorts and its standard error."""
        rng = stream(self.seed, "plan", "uniform", k)
        found = []
        for _ in range(number):
            cohort = rng.choice(len(self.ids), k, replace=False)
            found.append(np.mean([half.judge(cohort) for half in self.halves]))
        return float(np.mean(found)), float(np.std(found) / math.sqrt(number))

    def worth(
        self, label: str, make: Callable[[], Policy], k: int, uniform: float, clients: int
    ) -> Worth:
        """Try one policy with cohorts of k."""
        found: list[float] = []
        picks = np.zeros(len(self.ids))
        rounds, until = 0, []
        for chooser, judge in (self.halves, self.halves[::-1]):
            cohorts = self._cohorts(make(), chooser, k)
            found += [judge.judge(cohort) for cohort in cohorts]
            seen = np.zeros(len(self.ids), bool)
            until.append(next((r + 1 for r, c in enumerate(cohorts) if _all(seen, c)), None))
            picks += np.bincount(np.concatenate(cohorts), minlength=len(self.ids))
            rounds = max(rounds, len(cohorts))
        mean, error = float(np.mean(found)), float(np.std(found) / math.sqrt(len(found)))
        share = picks / picks.mean()
        never = [self.ids[i] for i in np.flatnonzero(picks == 0)[:10].tolist()]
        return Worth(
            label,
            k,
            mean,
            error,
            uniform,
            random_clients(mean, uniform, k, clients),
            rounds,
            None if None in until else max(u for u in until if u is not None),
            float(share.min()),
            float(share.max()),
            tuple(never),
        )

    def _cohorts(self, policy: Policy, half: Half, k: int) -> list[NDArray[np.int64]]:
        """Run the policy until everybody took part, at most 20 times as long as that must take."""
        signals, at = Signals(), {c: i for i, c in enumerate(self.ids)}
        signals.record("race_sketch", dict(zip(self.ids, half.readings, strict=True)), 0)
        unused, cohorts = set(self.ids), []
        limit = min(MOST_ROUNDS, max(20, 20 * math.ceil(len(self.ids) / k)))
        for number in range(limit):
            round = Round(number, self.ids, k, self.average)
            chosen = policy.select(round, signals, stream(self.seed, "plan", k, number)).clients
            policy.observe(round, Outcome(chosen, chosen), signals)
            cohorts.append(np.array([at[c] for c in chosen]))
            unused.difference_update(chosen)
            if not unused and number + 1 >= math.ceil(len(self.ids) / k):
                break
        return cohorts


class Half:
    """Some rows of the sketches: a federation of its own."""

    def __init__(
        self, readings: NDArray[Any], at: NDArray[np.int64], rows: NDArray[Any], average: Average
    ) -> None:
        whole = BetweenClients(_some_rows(readings, rows), average)
        self.readings = _some_rows(readings[at], rows)
        self.center, self.whole, self.rows = whole.center, whole.whole, whole.rows
        self.energy, self.shares = whole.energy[at], whole.shares[at]
        self.points = (_flat(self.readings) - self.center).astype(np.float32)
        n = self.readings["n"]
        self.weights = n if average == "size" else np.ones(len(n))

    def judge(self, cohort: NDArray[np.int64]) -> float:
        """Debiased squared MMD between a cohort's merged data and the federation's."""
        weights = self.weights[cohort] / self.weights[cohort].sum()
        gap = weights @ self.points[cohort]
        own = weights**2 - 2 * weights * self.shares[cohort]
        return float((gap @ gap - self.whole - own @ self.energy[cohort]) / self.rows)


def _flat(readings: NDArray[Any]) -> Array:
    """Counts / n, one flat row per client."""
    return np.asarray(readings["counts"].reshape(len(readings), -1) * (1 / readings["n"])[:, None])


def _some_rows(readings: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    counts = readings["counts"][:, rows]
    form = sketch_dtype(counts.shape[1], counts.shape[2], counts.dtype.str)
    out = np.zeros(len(readings), form)
    out["n"], out["noise"], out["counts"] = readings["n"], readings["noise"], counts
    return out


def _all(seen: NDArray[Any], cohort: NDArray[np.int64]) -> bool:
    seen[cohort] = True
    return bool(seen.all())
