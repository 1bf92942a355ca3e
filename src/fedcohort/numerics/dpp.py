"""Exact k-determinantal point processes.

A k-DPP draws a set of k items with probability proportional to the determinant of the kernel
restricted to it, so similar items rarely appear together.

References
----------
Kulesza, Taskar. k-DPPs: Fixed-Size Determinantal Point Processes. ICML 2011.
Barthelmé, Tremblay, Amblard. A Faster Sampler for Discrete DPPs. AISTATS 2023.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class FixedSizeDPP:
    """A determinantal point process over N items, asked for sets of a fixed size.

    It is given by the r positive eigenvalues of its kernel and their orthonormal eigenvectors as
    rows, (r, N). Every set of more than r items has probability zero. For a larger k the law is
    therefore extended: r items from the r-DPP, the others uniformly from the rest.

    >>> process = FixedSizeDPP.from_kernel(np.diag([1.0, 2.0, 4.0]))
    >>> process.sample(2, np.random.default_rng(0)).tolist()
    [1, 2]
    >>> process.inclusion(2).round(3).tolist()     # pairs weigh 2, 4, 8
    [0.429, 0.714, 0.857]
    """

    def __init__(self, eigenvalues: Array, eigenvectors: Array) -> None:
        self.eigenvalues = eigenvalues
        self.eigenvectors = np.ascontiguousarray(eigenvectors)
        self.rank, self.size = self.eigenvectors.shape
        self._chance: dict[int, Array] = {}
        self._inclusion: dict[int, Array] = {}

    @classmethod
    def from_kernel(cls, kernel: ArrayLike) -> FixedSizeDPP:
        """From a symmetric positive semi-definite kernel of shape (N, N)."""
        values, vectors = _spectrum(np.asarray(kernel, dtype=np.float64))
        return cls(values, vectors.T)

    @classmethod
    def from_features(cls, features: ArrayLike) -> FixedSizeDPP:
        """From features F of shape (N, d), for the kernel F F^T: only F^T F is decomposed."""
        matrix = np.asarray(features, dtype=np.float64)
        values, vectors = _spectrum(matrix.T @ matrix)
        return cls(values, (vectors / np.sqrt(values)).T @ matrix.T)

    def sample(self, k: int, rng: np.random.Generator) -> Indices:
        """Draw one set of k items, sorted, in O(N k + k^3 log k).

        Eigenvectors are drawn first (Kulesza and Taskar, Algorithm 2), then the items of the
        projection that they span.
        """
        core = min(k, self.rank)
        chosen = np.empty(0, np.int64)
        if core:
            vectors = draw_eigenvectors(self._chance_table(core), core, rng)
            chosen = draw_projection(self.eigenvectors[vectors], rng)
        if core < k:
            rest = np.setdiff1d(np.arange(self.size), chosen)
            chosen = np.append(chosen, rng.choice(rest, k - core, replace=False))
        return np.sort(chosen)

    def inclusion(self, k: int) -> Array:
        """Return the probability that each item is in a draw of size k; they sum to k."""
        if k in self._inclusion:
            return self._inclusion[k]
        core = min(k, self.rank)
        chances = self._chance_table(core)
        states = np.zeros(core + 1)
        states[core] = 1.0  # distribution of how many eigenvectors are still to be drawn
        weights = np.empty(self.rank)
        for index in range(self.rank - 1, -1, -1):
            taken = states * chances[index]
            weights[index] = taken.sum()
            states -= taken
            states[:-1] += taken[1:]
        inside = weights @ self.eigenvectors**2
        if core < k:
            inside += (1 - inside) * (k - core) / (self.size - core)
        self._inclusion = {k: inside}  # keep the latest size only
        return self._inclusion[k]

    def _chance_table(self, k: int) -> Array:
        """Probability to take eigenvector i when j of the first i + 1 are still wanted."""
        if k not in self._chance:
            logs = np.log(self.eigenvalues)
            table = log_polynomials(logs, k)
            chances = np.zeros((self.rank, k + 1))
            with np.errstate(invalid="ignore"):  # impossible states: -inf minus -inf
                chances[:, 1:] = np.exp(logs[:, None] + table[:-1, :-1] - table[1:, 1:])
            self._chance = {k: np.nan_to_num(chances)}  # keep the latest size only
        return self._chance[k]


def draw_eigenvectors(chances: Array, k: int, rng: np.random.Generator) -> Indices:
    """Draw k eigenvectors; `chances[i, j]` is the probability to take i if j are still wanted."""
    chosen: list[int] = []
    index = len(chances) - 1
    while len(chosen) < k:
        if rng.random() < chances[index, k - len(chosen)]:
            chosen.append(index)
        index -= 1
    return np.array(chosen[::-1], np.int64)


def draw_projection(rows: Array, rng: np.random.Generator) -> Indices:
    """Draw the items of the projection DPP that orthonormal rows span.

    An item is picked in proportion to its squared distance from the span of those before.
    Rejection from the unconditional squared norms needs about k log k distances instead of N k.
    """
    norms = np.square(rows).sum(axis=0)
    cumulative = np.cumsum(norms)
    basis, items = np.empty((0, len(rows))), list[int]()
    while len(items) < len(rows):
        mark = rng.random() * cumulative[-1]
        item = min(int(np.searchsorted(cumulative, mark, "right")), norms.size - 1)
        limit = rng.random() * norms[item]
        vector = rows[:, item]
        along = basis @ vector
        if norms[item] - along @ along <= limit or item in items:
            continue
        vector = vector - along @ basis
        vector -= (basis @ vector) @ basis  # again, to remove the rounding error
        basis = np.vstack([basis, vector / np.linalg.norm(vector)])
        items.append(item)
    return np.array(items, np.int64)


def similarity_kernel(distances: Array, scale: float | None = None) -> Array:
    """Kernel L = S^T S of FL-DP3S, with S the similarities of eq. 14, from `pdist`'s distances.

    `scale` is the largest distance, if it must stay fixed while clients join and leave;
    similarities below 0 are then set to 0. When all profiles are equal, every similarity is 1.

    >>> similarity_kernel(np.array([1.0, 4.0, 3.0])).round(3).tolist()     # profiles 0, 1 and 4
    [[1.562, 1.5, 0.188], [1.5, 1.625, 0.5], [0.188, 0.5, 1.062]]
    """
    from scipy.spatial.distance import squareform

    similarities = squareform(distances, checks=False)
    span = similarities.max(initial=0.0) if scale is None else scale
    similarities /= -span if span > 0 else np.inf
    similarities += 1
    np.maximum(similarities, 0, out=similarities)
    return np.asarray(similarities.T @ similarities)


def log_polynomials(logs: Array, k: int) -> Array:
    """Log of the elementary symmetric polynomials e_j of the first i values, [i, j].

    In log space, because e_50 of 1,000 eigenvalues overflows (Kulesza and Taskar, Algorithm 1).
    """
    table = np.full((logs.size + 1, k + 1), -np.inf)
    table[:, 0] = 0.0
    for i, value in enumerate(logs):
        np.logaddexp(table[i, 1:], value + table[i, :-1], out=table[i + 1, 1:])
    return table


def _spectrum(matrix: Array) -> tuple[Array, Array]:
    """Return the eigenvalues that are not zero but for rounding, and their eigenvectors."""
    values, vectors = np.linalg.eigh(matrix)
    keep = values > np.finfo(np.float64).eps * max(values.size, 1) * values.max(initial=0.0)
    return values[keep], vectors[:, keep]
