"""The compiled loops behind `dpp`, `gp` and DivFL.

Import this module inside the function that needs it, because importing Numba takes a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedcohort.compiled import compiled

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile `function`."""
    return cast(F, compiled(nogil=True)(function))


Array = NDArray[np.float64]
Indices = NDArray[np.int64]


@jit
def draw_eigenvectors(chances: Array, k: int, rng: np.random.Generator) -> Indices:
    """Draw k eigenvectors; `chances[i, j]` is the probability to take i if j are still wanted."""
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

    The chain rule picks an item in proportion to its squared distance from the span of the items
    picked before. Rejection sampling with the unconditional squared norms as proposal needs about
    k log k distances instead of N k. Inner loops follow the memory layout, so they vectorize
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
    count = 0
    while count < k:
        mark = rng.random() * cumulative[-1]
        item = min(np.searchsorted(cumulative, mark, "right"), size - 1)
        limit = rng.random() * norms[item]
        for j in range(k):
            vector[j] = eigenvectors[chosen[j], item]
        along = _along(transposed, vector, count)
        if norms[item] - (along * along).sum() <= limit or (items[:count] == item).any():
            continue
        _subtract(vector, basis, along)
        _subtract(
            vector, basis, _along(transposed, vector, count)
        )  # again, to remove the rounding error
        basis[count] = vector / np.sqrt((vector * vector).sum())
        transposed[:, count] = basis[count]
        items[count] = item
        count += 1
    return items


@jit
def _along(transposed: Array, vector: Array, count: int) -> Array:
    along = np.zeros(count)
    for j in range(vector.size):
        for b in range(count):
            along[b] += transposed[j, b] * vector[j]
    return along


@jit
def _subtract(vector: Array, basis: Array, along: Array) -> None:
    for b in range(along.size):
        for j in range(vector.size):
            vector[j] -= along[b] * basis[b, j]


_BLOCK = 32  # bounds are searched in blocks of about sqrt(1000)


@jit
def lazy_loop(table: Array, shares: Array, size: int) -> NDArray[np.int64]:
    """Pick `size` candidates (rows) from a table of their distances to clients (columns)."""
    nearest = np.zeros(shares.size)
    for row in table:
        for i in range(row.size):
            nearest[i] = max(nearest[i], row[i])
    bounds = np.full(-(-len(table) // _BLOCK) * _BLOCK, -np.inf)
    for j in range(len(table)):
        bounds[j] = _gain(table[j], shares, nearest)
    computed = np.zeros(len(table), np.int64)  # how many were picked when a bound was computed
    leaders = np.empty(bounds.size // _BLOCK)  # the largest bound of each block
    for block in range(leaders.size):
        leaders[block] = bounds[block * _BLOCK : (block + 1) * _BLOCK].max()
    chosen = np.empty(size, np.int64)
    count = 0
    while count < size:
        first = np.argmax(leaders) * _BLOCK
        best = first + np.argmax(bounds[first : first + _BLOCK])
        if computed[best] < count:
            bounds[best] = _gain(table[best], shares, nearest)
            computed[best] = count
        else:
            chosen[count] = best
            bounds[best] = -np.inf
            nearest = np.minimum(nearest, table[best])
            count += 1
        leaders[first // _BLOCK] = bounds[first : first + _BLOCK].max()
    return chosen


@jit
def _gain(row: Array, shares: Array, nearest: Array) -> float:
    """Weighted decrease of the distances to the nearest if the row's candidate is added."""
    total = 0.0
    for i in range(row.size):
        nearer = nearest[i] - row[i]
        if nearer > 0:
            total += shares[i] * nearer
    return total


@jit
def score_clients(
    variances: Array,
    gain: Array,
    negligible: Array,
    scale: Array,
    negative_scale: Array,
    penalty: Array,
    out: Array,
) -> None:
    """Write each client's score into `out`: Sigma p over the standard deviation, annealed.

    `gain` is Sigma p. A variance of at most `negligible` counts as zero and scores 0. Positive
    scores are multiplied by `scale`, negative ones by `negative_scale`. `penalty` is minus
    infinity for clients that cannot be picked and 0 otherwise.
    """
    for i in range(variances.size):
        value = gain[i] / math.sqrt(max(variances[i], negligible[i]))
        value *= scale[i] if value >= 0 else negative_scale[i]
        out[i] = (value if variances[i] > negligible[i] else 0.0) + penalty[i]


@jit
def condition_on_pick(variances: Array, gain: Array, column: Array, decrease: float) -> None:
    """Condition variances and Sigma p on a pick.

    `column` is the pick's column of Sigma over its standard deviation; `decrease` is column @ p.
    """
    for i in range(column.size):
        variances[i] -= column[i] * column[i]
        gain[i] -= decrease * column[i]
