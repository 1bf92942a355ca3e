"""What policies read of clients, as arrays: sizes, label counts, vectors; and what is believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike, NDArray

from fedcohort.numerics.sampling import sample_positions
from fedcohort.options import unknown
from fedcohort.policies.base import Array, Indices, Policy, count_up, take, values_for
from fedcohort.rounds import ClientId, Outcome, Round
from fedcohort.signals.catalog import SIGNALS, Needs, Option, When
from fedcohort.signals.table import Signals
from fedcohort.sketch.federation import largest_believed

PROJECTION: Mapping[str, Option] = {"k": 50, "kind": "sparse", "seed": 0}
Clustering = Callable[[Array, Generator], tuple[Array, Indices]]  # points and their clusters
SKETCH: Mapping[str, Option] = {"rows": 10, "bits": 6, "seed": 0}


def believed(values: Array) -> Array:
    """Clip sizes at the largest believed one."""
    return np.minimum(values, largest_believed(values))


def filled(
    count: int, positions: Indices, values: Array, typical: Callable[[Array], Any] = np.median
) -> Array:
    """Return the values at their positions; elsewhere what is typical of them, or 1 if none are."""
    result = np.full(count, float(typical(values)) if len(values) else 1.0)
    result[positions] = values
    return result


def sizes(signals: Signals, clients: Sequence[ClientId]) -> Array:
    """Return each client's believed number of examples; the mean of the others if unknown."""
    positions, claims = signals.read("num_examples", clients)
    return filled(len(clients), positions, believed(claims), np.mean)


def shares(signals: Signals, clients: Sequence[ClientId]) -> Array:
    """Return each client's share of the data of `clients`; equal shares if nobody has any."""
    size = sizes(signals, clients)
    return size / size.sum() if size.any() else np.full(size.size, 1 / max(size.size, 1))


def label_counts(signals: Signals, clients: Sequence[ClientId]) -> tuple[Indices, Array]:
    """Return the positions of clients with labels, and their label counts, one row per client.

    Counts below zero are set to zero, rows that claim more examples than are believed scaled down.
    """
    positions, rows = signals.read("label_histogram", clients)
    rows = rows.reshape(len(positions), -1) if len(positions) else np.empty((0, 0))
    counts = np.maximum(rows, 0.0, dtype=np.float64)
    total = counts.sum(axis=1)
    filled = total > 1e-9  # a smaller sum could not be divided by
    positions, counts, total = positions[filled], counts[filled], total[filled]
    return positions, counts * (believed(total) / total)[:, None]


def label_shares(signals: Signals, clients: Sequence[ClientId]) -> tuple[Indices, Array]:
    """Return the positions of clients with labels, and their label shares, one row per client."""
    positions, counts = label_counts(signals, clients)
    return positions, counts / counts.sum(axis=1, keepdims=True)


@dataclass
class LabelClusters:
    """Label shares that were clustered; a client belongs to the nearest one's cluster."""

    points: Array = field(default_factory=lambda: np.empty((0, 0)))
    labels: Indices = field(default_factory=lambda: np.empty(0, np.int64))  # of the points
    fitted: int = 0  # for how many clients

    def fit(self, shares: Array, limit: int, rng: Generator, cluster: Clustering) -> bool:
        """Cluster at most `limit` clients, at first and when there are twice as many."""
        due = len(shares) >= 2 * self.fitted or self.points.shape[1:] != shares.shape[1:]
        if due:
            part = shares[sample_positions(len(shares), limit, rng)]
            (self.points, self.labels), self.fitted = cluster(part, rng), len(shares)
        return due

    def assign(self, shares: Array) -> Indices:
        """Return the cluster of each row."""
        from scipy.spatial import KDTree

        return np.asarray(self.labels[KDTree(self.points).query(shares)[1]])


def label_distances(counts: Array, pooled: Array | float, goal: Array | float) -> Array:
    """Return the squared distance from `goal` of the label shares of each row plus `pooled`."""
    sums = counts + pooled
    sums /= sums.sum(axis=1, keepdims=True)
    sums -= goal
    return np.asarray(np.square(sums, out=sums).sum(axis=1))


def vector_needs(
    policy: str, signal: str, *profile: str, when: Sequence[When] = ("profile", "query", "reply")
) -> Needs:
    """Return the needs of a policy that compares clients by a signal's vectors or sketches.

    `profile` names further profile signals; `when` limits the signals that the policy can use.
    """
    timely = [(name, s.form({})) for name, s in SIGNALS.items() if s.when in when]
    possible = [name for name, form in timely if getattr(form, "shape", None) != ()]
    if signal not in possible:
        raise unknown("signal", signal, possible, f"of {policy}")
    needs = {"profile": frozenset(profile), "query": frozenset[str](), "reply": frozenset[str]()}
    needs[SIGNALS[signal].when] |= {signal}
    return Needs(**needs)


def vector_options(signal: str) -> Mapping[str, Mapping[str, Option]]:
    """Return how the vectors of a signal are made: small sketches, or projections."""
    if signal == "race_sketch":
        return {signal: SKETCH}
    return {signal: PROJECTION} if SIGNALS[signal].when != "profile" else {}


def vectors(
    signals: Signals,
    name: str,
    clients: Sequence[ClientId],
    since: int | None = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Indices, NDArray[Any]]:
    """Return the positions of clients with a usable reading, and the readings as rows of numbers.

    A sketch becomes its counts divided by n; an empty sketch is not usable. With `since`, readings
    of earlier rounds are left out.
    """
    positions, readings = signals.read(name, clients)
    if since is not None and len(positions):
        fresh = signals.rounds(name, clients)[positions] >= since
        positions, readings = positions[fresh], readings[fresh]
    if not len(positions):
        return positions, np.empty((0, 0))
    if readings.dtype.names is None:
        return positions, readings.reshape(len(positions), -1).astype(dtype)
    filled = readings["n"] > 0
    counts = readings["counts"][filled].reshape(int(filled.sum()), -1)
    return positions[filled], np.asarray(counts / readings["n"][filled][:, None])


def by_report(
    round: Round, outcome: Outcome, signals: Signals, name: str
) -> tuple[tuple[ClientId, ...], tuple[ClientId, ...]]:
    """Divide those that finished into those with and without a valid reading of a reply signal."""
    fresh = signals.rounds(name, outcome.finished) == round.number
    finished = outcome.finished
    return take(finished, np.flatnonzero(fresh)), take(finished, np.flatnonzero(~fresh))


@dataclass
class LastLossState:
    """How often in a row each client finished without reporting a loss."""

    failures: dict[ClientId, int] = field(default_factory=dict)


class LastLossPolicy(Policy):
    """Selects by values: sqrt(n) times the loss with which a client last trained, infinite before.

    A client that finishes without reporting a loss has its value halved each time, or the median of
    all others if it never reported.
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"loss"}))

    def values(self, round: Round, signals: Signals) -> Array:
        """Return the value of each available client."""
        values = np.full(len(round.available), np.inf)
        positions, losses = signals.read("loss", round.available)
        values[positions] = np.sqrt(sizes(signals, round.available)[positions]) * losses
        failures = values_for(self.state.failures, round.available)
        if (late := failures > 0).any():
            median = float(np.median(values[positions])) if len(positions) else 0.0
            known = np.where(np.isfinite(values[late]), values[late], median)
            values[late] = known - np.abs(known) * (1 - 0.5 ** failures[late])
        return values

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        reported, missing = by_report(round, outcome, signals, "loss")
        for client in reported:
            self.state.failures.pop(client, None)
        count_up(self.state.failures, missing)
