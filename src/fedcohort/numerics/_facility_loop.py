"""The loop of lazy greedy facility location, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcohort.numerics._jit import jit

Array = NDArray[np.float64]


@jit
def lazy_loop(table: Array, shares: Array, size: int) -> NDArray[np.int64]:
    """Pick `size` rows (candidates) of a table of distances to clients (columns)."""
    nearest = np.zeros(shares.size)
    for row in table:
        nearest = np.maximum(nearest, row)
    bounds = np.empty(len(table))
    for j in range(len(table)):
        bounds[j] = _gain(table[j], shares, nearest)
    computed = np.zeros(len(table), np.int64)  # how many were picked when a bound was computed
    chosen = np.empty(size, np.int64)
    found = 0
    while found < size:
        best = np.argmax(bounds)
        if computed[best] < found:
            bounds[best] = _gain(table[best], shares, nearest)
            computed[best] = found
            continue
        chosen[found] = best
        bounds[best] = -np.inf
        nearest = np.minimum(nearest, table[best])
        found += 1
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
