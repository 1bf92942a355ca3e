"""The loop of lazy greedy facility location, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcohort.numerics._jit import jit

Array = NDArray[np.float64]

_BLOCK = 32  # bounds are searched by blocks: about the root of a thousand


@jit
def lazy_loop(table: Array, shares: Array, size: int) -> NDArray[np.int64]:
    """Pick `size` rows (candidates) of a table of distances to clients (columns)."""
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
    found = 0
    while found < size:
        first = np.argmax(leaders) * _BLOCK
        best = first + np.argmax(bounds[first : first + _BLOCK])
        if computed[best] < found:
            bounds[best] = _gain(table[best], shares, nearest)
            computed[best] = found
        else:
            chosen[found] = best
            bounds[best] = -np.inf
            nearest = np.minimum(nearest, table[best])
            found += 1
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
