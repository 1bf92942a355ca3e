"""The set whose merged reading is nearest a target.

Readings that merge by weighted means (histograms, sketches, feature means) describe a *set* of
clients as well as one client. Choosing the set S with the least

    || sum_S w_i q_i / sum_S w_i  -  target ||^2

is kernel herding when the q_i are feature means. Greedy picks, then each member is exchanged for
whoever serves the set best, until nothing improves.

References
----------
Chen, Welling, Smola. Super-Samples from Kernel Herding. UAI 2010.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


def objective(
    readings: ArrayLike,
    weights: ArrayLike,
    target: ArrayLike,
    chosen: Sequence[int],
    *,
    noise: ArrayLike | None = None,
    share: ArrayLike | None = None,
) -> float:
    """Squared distance of the merged reading from the target, less the noise's expected part.

    Parameters
    ----------
    readings
        Shape (N, D).
    weights
        What each reading weighs in a merge, such as its number of examples.
    target
        Shape (D,).
    chosen
        Positions of the set.
    noise
        Expected squared norm of the noise in each reading, for private readings.
    share
        Weight with which each reading, noise included, entered the target; 0 by default.

    Examples
    --------
    >>> objective([[1.0, 0.0], [0.0, 1.0]], [1, 3], [0.25, 0.75], chosen=[0, 1])
    0.0
    """
    problem = _Problem(readings, weights, target, None, noise, share, None)
    part = np.asarray(chosen, np.int64)
    merged = problem.weights[part] @ problem.readings[part] / problem.weights[part].sum()
    gap = merged - np.asarray(target, dtype=np.float64)
    mix = problem.weights[part] / problem.weights[part].sum()
    free = mix**2 @ problem.noise[part] - 2 * mix @ (problem.share * problem.noise)[part]
    return float(gap @ gap - free)


def match(
    readings: ArrayLike,
    weights: ArrayLike,
    target: ArrayLike,
    size: int,
    *,
    pool: Sequence[int] | NDArray[np.int64] | None = None,
    noise: ArrayLike | None = None,
    share: ArrayLike | None = None,
    fixed: int = 0,
    sweeps: int = 2,
    gram: ArrayLike | None = None,
) -> list[int]:
    """Choose the set that minimizes :func:`objective`, greedily and then by exchanges.

    A pick costs O(N D), or O(N) when the Gram matrix is given.

    Parameters
    ----------
    readings, weights, target, noise, share
        As in :func:`objective`.
    size
        How many to choose.
    pool
        Positions to choose from; all by default.
    fixed
        So many of the pool, from its start, are in the set whatever they do for it.
    sweeps
        How often to go through the set and exchange each member for the best alternative; a
        sweep without any exchange is the last. 0 leaves the greedy set.
    gram
        Inner products of all readings, shape (N, N), if they are at hand.

    Returns
    -------
    list of int
        Positions in the order of choice; ties go to the earlier in the pool.

    Examples
    --------
    >>> readings = [[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    >>> sorted(match(readings, [1, 1, 1, 1], [1 / 3, 1 / 3, 1 / 3], size=3))
    [0, 2, 3]
    """
    problem = _Problem(readings, weights, target, pool, noise, share, gram)
    if not 0 <= size <= problem.pool.size:
        raise ValueError(f"match: cannot choose {size} of {problem.pool.size} clients")
    cohort = _Cohort(problem)
    for i in range(min(fixed, size)):
        cohort.add(i)
    for _ in range(size - len(cohort.members)):
        cohort.add(cohort.best())
    for _ in range(sweeps):
        if not cohort.exchange(fixed):
            break
    return [int(problem.pool[i]) for i in cohort.members]


class _Problem:
    """The data of one choice, restricted to the pool and scaled by the weights."""

    def __init__(
        self,
        readings: ArrayLike,
        weights: ArrayLike,
        target: ArrayLike,
        pool: Sequence[int] | Indices | None,
        noise: ArrayLike | None,
        share: ArrayLike | None,
        gram: ArrayLike | None,
    ) -> None:
        points = np.asarray(readings)
        if points.dtype not in (np.float32, np.float64):
            points = points.astype(np.float64)
        goal = np.asarray(target, dtype=points.dtype)
        if points.ndim != 2 or goal.shape != points.shape[1:]:
            raise ValueError(f"match: readings {points.shape} do not fit the target {goal.shape}")
        count = len(points)
        self.pool = np.arange(count) if pool is None else np.asarray(pool, np.int64)
        if np.unique(self.pool).size < self.pool.size:
            raise ValueError("match: the pool names a client twice")
        whole = self.pool.size == count and bool((self.pool == np.arange(count)).all())
        self.readings = points if whole else points[self.pool]
        self.weights = _vector(weights, "weights", count)[self.pool]
        self.noise = _vector(0.0 if noise is None else noise, "noise", count)[self.pool]
        self.share = _vector(0.0 if share is None else share, "share", count)[self.pool]
        if (self.weights <= 0).any():
            raise ValueError("match: weights must be positive")
        self.gram = None if gram is None else np.asarray(gram)
        squares = np.einsum("ij,ij->i", self.readings, self.readings).astype(np.float64)
        self.energy = self.weights**2 * (squares - self.noise)
        toward = (self.readings @ goal).astype(np.float64) - self.share * self.noise
        self.toward = self.weights * toward

    def column(self, i: int) -> Array:
        """Weighted inner products of member i with the pool."""
        if self.gram is None:
            products = self.readings @ self.readings[i]
        else:
            products = self.gram[self.pool[i], self.pool]
        return np.asarray(self.weights * self.weights[i] * products, np.float64)


class _Cohort:
    """A set under construction: sums that make the objective of every neighbor O(1)."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        self.members: list[int] = []
        self.columns: list[Array] = []
        self.inside = np.zeros(problem.pool.size, bool)
        self.overlap = np.zeros(problem.pool.size)  # weighted products with the merged members
        self.energy = self.toward = self.weight = 0.0

    def best(self) -> int:
        """Who serves the set best if added."""
        problem = self.problem
        weight = self.weight + problem.weights
        energy = self.energy + 2 * self.overlap + problem.energy
        value = energy / weight**2 - 2 * (self.toward + problem.toward) / weight
        value[self.inside] = np.inf
        return int(np.argmin(value))

    def value(self) -> float:
        """Objective of the set, but for a constant."""
        return self.energy / self.weight**2 - 2 * self.toward / self.weight

    def add(self, i: int, at: int | None = None, column: Array | None = None) -> None:
        """Add i, at the end or in the place `at`."""
        problem = self.problem
        column = problem.column(i) if column is None else column
        at = len(self.members) if at is None else at
        self.members.insert(at, i)
        self.columns.insert(at, column)
        self.energy += 2 * self.overlap[i] + problem.energy[i]
        self.toward += problem.toward[i]
        self.weight += problem.weights[i]
        self.overlap = self.overlap + column
        self.inside[i] = True

    def remove(self, at: int) -> tuple[int, Array]:
        """Take out the member in place `at`; return it and its column."""
        problem = self.problem
        i, column = self.members.pop(at), self.columns.pop(at)
        self.inside[i] = False
        self.overlap = self.overlap - column
        self.energy -= 2 * self.overlap[i] + problem.energy[i]
        self.toward -= problem.toward[i]
        self.weight -= problem.weights[i]
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
                self.remove(at)  # a tie is no reason to move
                self.add(old, at, column)
            changed |= self.members[at] != old
        return changed


def _vector(value: ArrayLike, name: str, count: int) -> Array:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0:
        array = np.full(count, float(array))
    if array.shape != (count,) or not np.isfinite(array).all():
        raise ValueError(
            f"match: {name} must be {count} finite numbers, its shape is {array.shape}"
        )
    return array
