"""The compiled loop of uniform projections; imported when first needed.

It accumulates column after column in float64, so that the result does not depend on how many
threads or what vector width a machine has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.compiled import compiled

Array = NDArray[np.float64]
Values = NDArray[Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


@compiled(inline="always")
def _hash(key: np.uint64, counter: np.uint64) -> np.uint64:
    word = key + counter * _GOLDEN
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


@compiled()
def _uniform_column(key: np.uint64, column: int, out: Array) -> None:
    half = out.size // 2
    start = np.uint64(column) * np.uint64(half)
    for pair in range(half):
        word = _hash(key, start + np.uint64(pair))
        low = np.int64((word >> np.uint64(8)) & np.uint64(0xFFFFFF))
        high = np.int64(word >> np.uint64(40))
        out[pair] = (low + 0.5) * 2.0**-23 - 1.0
        out[half + pair] = (high + 0.5) * 2.0**-23 - 1.0


@compiled(nogil=True)
def uniform(values: Values, k: int, key: np.uint64) -> Array:
    """Project (m, dim) values; four columns of the matrix exist at a time."""
    rows, dim = values.shape
    padded = k + k % 2
    total = np.zeros((rows, padded))
    columns = np.empty((4, padded))
    for first in range(0, dim, 4):
        count = min(4, dim - first)
        for j in range(count):
            _uniform_column(key, first + j, columns[j])
        for i in range(rows):
            row = total[i]
            if count < 4:
                for j in range(count):
                    x = np.float64(values[i, first + j])
                    for r in range(padded):
                        row[r] += x * columns[j, r]
                continue
            a, b = np.float64(values[i, first]), np.float64(values[i, first + 1])
            c, d = np.float64(values[i, first + 2]), np.float64(values[i, first + 3])
            for r in range(padded):
                partial = (row[r] + a * columns[0, r]) + b * columns[1, r]
                row[r] = (partial + c * columns[2, r]) + d * columns[3, r]
    return total[:, :k]
