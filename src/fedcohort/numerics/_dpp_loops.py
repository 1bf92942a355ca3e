"""The two loops of a k-DPP draw, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcohort.numerics._jit import jit

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@jit
def draw_eigenvectors(chances: Array, k: int, rng: np.random.Generator) -> Indices:
    """Walk down the eigenvalues; `chances[i, j]` takes number i when j are still wanted."""
    chosen = np.empty(k, np.int64)
    wanted = k
    index = chances.shape[0] - 1
    while wanted > 0:
        if rng.random() < chances[index, wanted]:
            wanted -= 1
            chosen[wanted] = index
        index -= 1
    return chosen


@jit
def draw_projection(eigenvectors: Array, chosen: Indices, rng: np.random.Generator) -> Indices:
    """Draw the items of the projection DPP that the chosen eigenvectors (rows) span.

    The chain rule picks an item in proportion to its squared distance from the span of those
    picked. Proposing by the unconditional squared norms and accepting by the ratio needs about
    k log k distances instead of N k. Inner loops run along memory, so that they vectorize
    without changing the order of any sum.
    """
    k, size = chosen.size, eigenvectors.shape[1]
    norms = np.zeros(size)
    for j in chosen:
        for i in range(size):
            norms[i] += eigenvectors[j, i] * eigenvectors[j, i]
    cumulative = np.cumsum(norms)
    basis, transposed = np.zeros((k, k)), np.zeros((k, k))
    vector = np.empty(k)
    items = np.empty(k, np.int64)
    found = 0
    while found < k:
        mark = rng.random() * cumulative[-1]
        item = min(np.searchsorted(cumulative, mark, "right"), size - 1)
        limit = rng.random() * norms[item]
        for j in range(k):
            vector[j] = eigenvectors[chosen[j], item]
        along = _along(transposed, vector, found)
        if norms[item] - (along * along).sum() <= limit or (items[:found] == item).any():
            continue
        _subtract(vector, basis, along)
        _subtract(vector, basis, _along(transposed, vector, found))  # restores what rounding lost
        basis[found] = vector / np.sqrt((vector * vector).sum())
        transposed[:, found] = basis[found]
        items[found] = item
        found += 1
    return items


@jit
def _along(transposed: Array, vector: Array, found: int) -> Array:
    along = np.zeros(found)
    for j in range(vector.size):
        for b in range(found):
            along[b] += transposed[j, b] * vector[j]
    return along


@jit
def _subtract(vector: Array, basis: Array, along: Array) -> None:
    for b in range(along.size):
        for j in range(vector.size):
            vector[j] -= along[b] * basis[b, j]
