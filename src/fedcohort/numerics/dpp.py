"""Exact k-determinantal point processes.

A k-DPP draws a set of k items with probability proportional to the determinant of the kernel
restricted to it, so similar items rarely appear together. The eigendecomposition is the only
expensive part; :class:`FixedSizeDPP` computes it once and reuses it for all draws and sizes.

References
----------
Kulesza, Taskar. k-DPPs: Fixed-Size Determinantal Point Processes. ICML 2011.
Zhang et al. DPP-based Client Selection for Federated Learning with Non-IID Data. ICASSP 2023.
Barthelmé, Tremblay, Amblard. A Faster Sampler for Discrete Determinantal Point Processes.
AISTATS 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, log

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class FixedSizeDPP:
    """A determinantal point process over N items, asked for sets of a fixed size.

    A kernel of rank r gives every set of more than r items probability zero. For k above the
    rank the law is therefore extended: r items from the r-DPP, the other k - r uniformly from
    the rest. All methods follow this law exactly.

    Parameters
    ----------
    eigenvalues
        The r positive eigenvalues of the kernel.
    eigenvectors
        Their orthonormal eigenvectors as rows, shape (r, N).

    Examples
    --------
    >>> import numpy as np
    >>> process = FixedSizeDPP.from_kernel(np.diag([1.0, 2.0, 4.0]))
    >>> process.sample(2, np.random.default_rng(0))
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
        matrix = _checked_kernel(kernel)
        values, vectors = np.linalg.eigh(matrix)
        if values.size and values[0] < -1e-8 * max(1.0, values[-1]):
            raise ValueError(f"k-DPP: kernel has the negative eigenvalue {values[0]:.3g}")
        keep = values > _tolerance(values)
        return cls(values[keep], vectors[:, keep].T)

    @classmethod
    def from_features(cls, features: ArrayLike) -> FixedSizeDPP:
        """From features F of shape (N, d), for the kernel F F^T, which is never formed.

        The dual form: only F^T F, of shape (d, d), is decomposed.
        """
        matrix = np.asarray(features, dtype=np.float64)
        if matrix.ndim != 2 or not np.isfinite(matrix).all():
            raise ValueError(f"k-DPP: features must be finite, (N, d); shape is {matrix.shape}")
        values, vectors = np.linalg.eigh(matrix.T @ matrix)
        keep = values > _tolerance(values)
        values, vectors = values[keep], vectors[:, keep]
        return cls(values, (vectors / np.sqrt(values)).T @ matrix.T)

    def sample(self, k: int, rng: np.random.Generator) -> list[int]:
        """Draw one set of k items, sorted.

        Eigenvectors are drawn first (Kulesza and Taskar, Algorithm 2), then the items of the
        projection that they span. The cost is O(N k + k^3 log k).
        """
        from fedcohort.numerics._loops import draw_eigenvectors, draw_projection

        _check_size(k, self.size)
        core = min(k, self.rank)
        chosen = np.empty(0, np.int64)
        if core:
            vectors = draw_eigenvectors(self._chance_table(core), core, rng)
            chosen = draw_projection(self.eigenvectors, vectors, rng)
        if core < k:
            rest = np.setdiff1d(np.arange(self.size), chosen)
            chosen = np.append(chosen, rng.choice(rest, k - core, replace=False))
        return [int(item) for item in np.sort(chosen)]

    def log_probability(self, subset: Sequence[int]) -> float:
        """Log-probability that `sample(len(subset))` gives this set."""
        items = np.asarray(subset, dtype=np.int64)
        k = items.size
        _check_size(k, self.size)
        if np.unique(items).size < k:
            raise ValueError(f"k-DPP: the subset {items.tolist()} repeats an item")
        core = min(k, self.rank)
        factor = self.eigenvectors[:, items] * np.sqrt(self.eigenvalues)[:, None]
        scales: Array = np.asarray(np.linalg.svd(factor, compute_uv=False), np.float64)
        scales = scales[scales > _tolerance(scales)]
        if scales.size < core:
            return float("-inf")
        inside = _log_polynomials(2 * np.log(scales), core)[-1, core]
        whole = _log_polynomials(np.log(self.eigenvalues), core)[-1, core]
        return float(inside - whole - log(comb(self.size - core, k - core)))

    def inclusion(self, k: int) -> Array:
        """Return the probability that each item is in a draw of size k; they sum to k."""
        _check_size(k, self.size)
        if k not in self._inclusion:
            self._inclusion = {k: self._included(k)}
        return self._inclusion[k].copy()

    def _included(self, k: int) -> Array:
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
        if core == k:
            return np.asarray(inside)
        return np.asarray(inside + (1 - inside) * (k - core) / (self.size - core))

    def _chance_table(self, k: int) -> Array:
        """Probability to take eigenvector i when j of the first i + 1 are still wanted."""
        if k not in self._chance:
            logs = np.log(self.eigenvalues)
            table = _log_polynomials(logs, k)
            chances = np.zeros((self.rank, k + 1))
            with np.errstate(invalid="ignore"):  # impossible states: -inf minus -inf
                chances[:, 1:] = np.exp(logs[:, None] + table[:-1, :-1] - table[1:, 1:])
            self._chance = {k: np.nan_to_num(chances)}  # keep the latest size only
        return self._chance[k]


def similarity_kernel(
    profiles: ArrayLike, scale: float | None = None, distances: Array | None = None
) -> Array:
    """Kernel L = S^T S of FL-DP3S, with S the similarities of eq. 14.

    Parameters
    ----------
    profiles
        One profile per client, shape (N, D).
    scale
        The largest distance, if it must stay fixed while clients join and leave; similarities
        below 0 are then set to 0. By default it is taken from the given profiles, as in eq. 14.
        When all profiles are equal, every similarity is 1.
    distances
        What `scipy.spatial.distance.pdist` returned for the profiles, if it is known: for many
        clients it takes as long as all the rest.

    Examples
    --------
    >>> similarity_kernel([[0.0], [1.0], [4.0]]).round(3).tolist()
    [[1.562, 1.5, 0.188], [1.5, 1.625, 0.5], [0.188, 0.5, 1.062]]
    """
    from scipy.spatial.distance import pdist, squareform

    points = np.asarray(profiles, dtype=np.float64)
    if points.ndim != 2 or not np.isfinite(points).all():
        raise ValueError(f"similarity_kernel: profiles must be finite, (N, D), not {points.shape}")
    gaps = squareform(pdist(points) if distances is None else distances, checks=False)
    span = gaps.max(initial=0.0) if scale is None else scale
    if span <= 0:
        similarities = np.ones_like(gaps)
    else:
        similarities = np.divide(gaps, span, out=gaps)
        np.maximum(np.subtract(1, similarities, out=similarities), 0, out=similarities)
    return np.asarray(similarities.T @ similarities)


def sample(kernel: ArrayLike, k: int, rng: np.random.Generator) -> list[int]:
    """Draw one set of size k from the k-DPP of a kernel.

    Examples
    --------
    >>> sample([[1, 1], [1, 1]], 1, np.random.default_rng(0)) in ([0], [1])
    True
    """
    return FixedSizeDPP.from_kernel(kernel).sample(k, rng)


def log_probability(kernel: ArrayLike, subset: Sequence[int]) -> float:
    """Log-probability of a set under the k-DPP of its size (eq. 13).

    Examples
    --------
    >>> round(log_probability([[1, 0, 0], [0, 1, 0], [0, 0, 4]], [0, 2]), 4)    # log(4 / 9)
    -0.8109
    """
    return FixedSizeDPP.from_kernel(kernel).log_probability(subset)


def inclusion(kernel: ArrayLike, k: int) -> Array:
    """Return the probability that each item is in a draw of size k.

    Examples
    --------
    >>> inclusion([[2, 0], [0, 6]], 1).round(3).tolist()
    [0.25, 0.75]
    """
    return FixedSizeDPP.from_kernel(kernel).inclusion(k)


def _log_polynomials(logs: Array, k: int) -> Array:
    """Log of the elementary symmetric polynomials e_j of the first i values, [i, j].

    In log space, because e_50 of 1,000 eigenvalues overflows (Kulesza and Taskar, Algorithm 1).
    """
    table = np.full((logs.size + 1, k + 1), -np.inf)
    table[:, 0] = 0.0
    for i, value in enumerate(logs):
        np.logaddexp(table[i, 1:], value + table[i, :-1], out=table[i + 1, 1:])
    return table


def _tolerance(values: Array) -> float:
    return float(np.finfo(np.float64).eps * max(values.size, 1) * values.max(initial=0.0))


def _checked_kernel(kernel: ArrayLike) -> Array:
    matrix = np.asarray(kernel, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"k-DPP: the kernel must be square, its shape is {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ValueError("k-DPP: the kernel has a value that is not finite")
    if not (matrix == matrix.T).all():
        small = 1e-8 * np.abs(matrix).max(initial=0)
        if not np.allclose(matrix, matrix.T, rtol=1e-8, atol=small):
            raise ValueError("k-DPP: the kernel is not symmetric")
    return matrix


def _check_size(k: int, size: int) -> None:
    if not 0 <= k <= size:
        raise ValueError(f"k-DPP: cannot draw {k} of {size} items")
