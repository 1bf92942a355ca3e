"""Sets of clients whose merged reading is nearest a target.

Readings that merge by weighted means (histograms, sketches, feature means) describe a set of
clients as well as one client. The objective of a set S is

    || sum_S w_i q_i / sum_S w_i  -  target ||^2  +  sum_S w_i^2 v_i / (sum_S w_i)^2,

where v_i is the variance of reading i. Choosing greedily by it is kernel herding (Chen, Welling,
Smola. Super-Samples from Kernel Herding. UAI 2010) when the q_i are feature means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


def match(
    readings: ArrayLike,
    weights: ArrayLike,
    target: ArrayLike,
    size: int,
    *,
    pool: Sequence[int] | NDArray[np.int64] | None = None,
    variance: ArrayLike | None = None,
    fixed: int = 0,
    sweeps: int = 2,
    gram: NDArray[Any] | None = None,
) -> tuple[list[int], float]:
    """Choose the set that minimizes the objective above, greedily and then by exchanges.

    Readings are (N, D); `variance` (N,) is the expected squared error of each, 0 by default. The
    first `fixed` positions of the `pool`, which is all by default, are in the set. Each of the
    `sweeps` exchanges every member for the best alternative. A pick costs O(N D), or O(N) with
    `gram`, the inner products of all readings. Returns positions in the order of choice (ties go to
    the earlier in the pool), and the objective.

    >>> readings = [[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    >>> sorted(match(readings, [1, 1, 1, 1], [1 / 3, 1 / 3, 1 / 3], size=3)[0])
    [0, 2, 3]
    """
    points, goal = np.asarray(readings), np.asarray(target, np.float64)
    pool = np.arange(len(points)) if pool is None else np.asarray(pool, np.int64)
    mine = _of_pool(points, weights, variance, pool)

    def products(i: int) -> NDArray[Any]:
        return np.asarray(mine[0] @ mine[0][i] if gram is None else gram[pool[i], pool])

    cohort = _Cohort(*mine, goal, products)
    for i in range(min(fixed, size)):
        cohort.add(i)
    for _ in range(size - len(cohort.members)):
        cohort.add(cohort.best())
    for _ in range(sweeps):
        if not cohort.exchange(fixed):
            break
    return pool[cohort.members].tolist(), cohort.value() + float(goal @ goal)


def cut(
    readings: ArrayLike,
    weights: ArrayLike,
    target: ArrayLike,
    size: int,
    *,
    order: Sequence[int] | NDArray[np.int64],
    variance: ArrayLike | None = None,
    fixed: int = 0,
    sweeps: int = 10,
) -> list[list[int]]:
    """Divide clients into sets of `size` so that the sum of the objective over sets is small.

    The sets start as runs of `order`, and the remainder is left over; the first `fixed` stay in the
    first set. A sweep, in O(N^2), exchanges each client for the best of another set, or of those
    left over, where that helps.
    """
    pool = np.asarray(order, np.int64)
    points, share, error = _of_pool(np.asarray(readings), weights, variance, pool)
    groups = _Groups(points - np.asarray(target, np.float64), share, error, size, fixed)
    for _ in range(sweeps):
        if not groups.sweep():
            break
    members = [np.flatnonzero(groups.of == g) for g in range(groups.count)]
    return [pool[part].tolist() for part in members]


def _of_pool(
    points: NDArray[Any], weights: ArrayLike, variance: ArrayLike | None, pool: Indices
) -> tuple[NDArray[Any], Array, Array]:
    """Return readings, weights and variances of the pool; readings are not copied if it is all."""
    whole = np.array_equal(pool, np.arange(len(points)))
    error = np.zeros(len(points)) if variance is None else np.asarray(variance)
    return points if whole else points[pool], np.asarray(weights, np.float64)[pool], error[pool]


class _Groups:
    """All clients in sets; the last group holds those left over, and its objective is 0."""

    def __init__(self, gaps: Array, weights: Array, variance: Array, size: int, fixed: int) -> None:
        self.weights, self.fixed = weights, fixed
        self.count = len(weights) // size
        self.of = np.minimum(np.arange(len(weights)) // size, self.count)
        gaps = weights[:, None] * gaps
        self.products = gaps @ gaps.T
        self.products[np.diag_indices_from(self.products)] += weights**2 * variance
        self.alone = np.diag(self.products).copy()
        member = (self.of[:, None] == np.arange(self.count + 1)).astype(np.float64)
        self.overlap = self.products @ member  # of each client with each group
        self.energy = np.einsum("ig,ig->g", member, self.overlap)
        self.weight = self.weights @ member

    def sweep(self) -> bool:
        """Exchange each client for the best other one; say whether any was exchanged."""
        before = self.of.copy()
        for i in range(self.fixed, len(self.of)):
            gain = self._gains(i)
            j = int(np.argmax(gain))
            if gain[j] > 1e-12:
                self._exchange(i, j)
        return not np.array_equal(self.of, before)

    def _gains(self, i: int) -> Array:
        """How much the sum of objectives falls if i changes places with each client."""
        a, b, every = self.of[i], self.of, np.arange(len(self.of))
        shared, alone, w = self.products[i], self.alone, self.weights
        there = self.overlap[every, b]
        energy_a = self.energy[a] - 2 * self.overlap[i, a] + alone[i]
        energy_a = energy_a + 2 * (self.overlap[:, a] - shared) + alone
        energy_b = self.energy[b] - 2 * there + alone + 2 * (self.overlap[i, b] - shared) + alone[i]
        before = self._values(self.energy[a], self.weight[a], a)
        before = before + self._values(self.energy[b], self.weight[b], b)
        after = self._values(energy_a, self.weight[a] - w[i] + w, a)
        after = after + self._values(energy_b, self.weight[b] - w + w[i], b)
        gain = before - after
        gain[b == a] = -np.inf
        gain[: self.fixed] = -np.inf
        return np.asarray(gain)

    def _values(self, energy: Array, weight: Array, group: Indices) -> Array:
        return np.where(group < self.count, energy / weight**2, 0.0)

    def _exchange(self, i: int, j: int) -> None:
        a, b = int(self.of[i]), int(self.of[j])
        change = self.products[:, j] - self.products[:, i]
        self.overlap[:, a] += change
        self.overlap[:, b] -= change
        self.of[i], self.of[j] = b, a
        for group in (a, b):
            inside = self.of == group
            self.energy[group] = self.overlap[inside, group].sum()
            self.weight[group] = self.weights[inside].sum()


class _Cohort:
    """A set under construction: sums that make the objective of every neighbor O(1).

    Members are positions in the pool; readings are scaled by their weights.
    """

    def __init__(
        self,
        readings: NDArray[Any],
        weights: Array,
        variance: Array,
        goal: Array,
        products: Callable[[int], NDArray[Any]],
    ) -> None:
        self.weights, self.products = weights, products  # products of one with all of the pool
        squares = np.einsum("ij,ij->i", readings, readings).astype(np.float64)
        self.own_energy = weights**2 * (squares + variance)
        self.own_toward = weights * (readings @ goal.astype(readings.dtype)).astype(np.float64)
        self.members: list[int] = []
        self.columns: list[Array] = []
        self.inside = np.zeros(len(weights), bool)
        self.overlap = np.zeros(len(weights))  # weighted products with the merged members
        self.energy = self.toward = self.weight = 0.0

    def column(self, i: int) -> Array:
        """Weighted inner products of member i with the pool."""
        return np.asarray(self.weights * self.weights[i] * self.products(i), np.float64)

    def best(self) -> int:
        """Return who helps the set most if added."""
        weight = self.weight + self.weights
        energy = self.energy + 2 * self.overlap + self.own_energy
        value = energy / weight**2 - 2 * (self.toward + self.own_toward) / weight
        value[self.inside] = np.inf
        return int(np.argmin(value))

    def value(self) -> float:
        """Objective of the set, but for a constant."""
        return self.energy / self.weight**2 - 2 * self.toward / self.weight

    def add(self, i: int, at: int | None = None, column: Array | None = None) -> None:
        """Add i, at the end or in the place `at`."""
        column = self.column(i) if column is None else column
        at = len(self.members) if at is None else at
        self.members.insert(at, i)
        self.columns.insert(at, column)
        self.energy += 2 * self.overlap[i] + self.own_energy[i]
        self.toward += self.own_toward[i]
        self.weight += self.weights[i]
        self.overlap = self.overlap + column
        self.inside[i] = True

    def remove(self, at: int) -> tuple[int, Array]:
        """Take out the member in place `at`; return it and its column."""
        i, column = self.members.pop(at), self.columns.pop(at)
        self.inside[i] = False
        self.overlap = self.overlap - column
        self.energy -= 2 * self.overlap[i] + self.own_energy[i]
        self.toward -= self.own_toward[i]
        self.weight -= self.weights[i]
        return i, column

    def exchange(self, fixed: int) -> bool:
        """Replace each member that is not fixed by the best other; say whether any changed."""
        if len(self.members) in (0, self.inside.size):
            return False
        changed = False
        for at in range(fixed, len(self.members)):
            before = self.value()
            old, column = self.remove(at)
            new = self.best()
            self.add(new, at, column if new == old else None)
            if new != old and self.value() >= before - 1e-12 * abs(before):
                self.remove(at)  # a tie does not justify an exchange
                self.add(old, at, column)
            changed |= self.members[at] != old
        return changed
