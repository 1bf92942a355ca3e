"""The passes over all clients in a pick of FedCor's Algorithm 1, compiled and free of branches."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedcohort.numerics._jit import jit

Array = NDArray[np.float64]


@jit
def score(
    left: Array, drawn: Array, spent: Array, rise: Array, fall: Array, barrier: Array, out: Array
) -> None:
    """Write each client's score: Sigma p over its deviation, annealed.

    `left` holds the variances, `drawn` Sigma p. A variance of at most `spent` counts as none and
    scores 0. Scores are multiplied by `rise`, negative ones by `fall`; `barrier` is minus infinity
    for those who cannot be picked and 0 otherwise.
    """
    for i in range(left.size):
        value = drawn[i] / math.sqrt(max(left[i], spent[i]))
        value *= rise[i] if value >= 0 else fall[i]
        out[i] = (value if left[i] > spent[i] else 0.0) + barrier[i]


@jit
def absorb(left: Array, drawn: Array, column: Array, pull: float) -> None:
    """Condition variances and Sigma p on a pick; `column` is its column over its deviation."""
    for i in range(column.size):
        left[i] -= column[i] * column[i]
        drawn[i] -= pull * column[i]
