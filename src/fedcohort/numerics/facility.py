"""Facility location: a small set of candidates such that every client has one nearby.

DivFL picks the cohort S that minimizes sum_i w_i min_{j in S} d_ij, the distance of each client's
gradient from the nearest picked one. The decrease of that cost is submodular, so greedy picks
reach at least 63 percent of the best possible decrease.

References
----------
Balakrishnan et al. Diverse Client Selection for Federated Learning via Submodular Maximization.
ICLR 2022.
Minoux. Accelerated Greedy Algorithms for Maximizing Submodular Set Functions. 1978.
Mirzasoleiman et al. Lazier Than Lazy Greedy. AAAI 2015.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def cost(distances: ArrayLike, chosen: Sequence[int], weights: ArrayLike | None = None) -> float:
    """Weighted sum over clients of the distance to the nearest chosen candidate.

    Examples
    --------
    >>> cost([[0, 5, 1], [5, 0, 4]], chosen=[0, 2])
    4.0
    """
    table, shares = _checked(distances, len(chosen), weights)
    if len(chosen) == 0:
        raise ValueError("facility cost: nothing is chosen")
    return float(shares @ table[np.asarray(chosen, np.int64)].min(axis=0))


def lazy_greedy(distances: ArrayLike, size: int, weights: ArrayLike | None = None) -> list[int]:
    """Pick candidates one by one, each with the largest decrease of the cost.

    A gain computed earlier is an upper bound of the gain now, so most candidates are evaluated
    once. The picks are those of plain greedy.

    Parameters
    ----------
    distances
        Shape (clients, candidates); usually square.
    size
        How many to pick.
    weights
        Of the clients; equal by default.

    Examples
    --------
    >>> lazy_greedy([[0, 1, 9, 9], [1, 0, 9, 9], [9, 9, 0, 2], [9, 9, 2, 0]], size=2)
    [0, 2]
    """
    from fedcohort.numerics._loops import lazy_loop

    table, shares = _checked(distances, size, weights)
    return [int(j) for j in lazy_loop(table, shares, size)]


def stochastic_greedy(
    distances: ArrayLike,
    size: int,
    rng: np.random.Generator,
    *,
    epsilon: float = 0.1,
    weights: ArrayLike | None = None,
) -> list[int]:
    """Pick by greedy steps that evaluate only a random part of the candidates.

    Each step evaluates candidates / size * log(1 / epsilon) of the remaining ones. The total cost
    is clients * candidates * log(1 / epsilon) for any size, and the guarantee loses at most
    epsilon in expectation.

    Examples
    --------
    >>> table = np.abs(np.arange(6.0)[:, None] - np.arange(6.0))
    >>> len(set(stochastic_greedy(table, 3, np.random.default_rng(0))))
    3
    """
    table, shares = _checked(distances, size, weights)
    if not 0 < epsilon < 1:
        raise ValueError(f"stochastic_greedy: epsilon={epsilon} must lie in (0, 1)")
    look = int(np.ceil(len(table) / max(size, 1) * np.log(1 / epsilon)))
    nearest = table.max(axis=0, initial=0.0)
    left = np.arange(len(table))
    chosen: list[int] = []
    for _ in range(size):
        sampled = np.sort(rng.choice(left, min(look, left.size), replace=False))
        pick = int(sampled[np.argmax(_gains(table[sampled], shares, nearest))])
        chosen.append(pick)
        left = left[left != pick]
        nearest = np.minimum(nearest, table[pick])
    return chosen


def _gains(rows: Array, shares: Array, nearest: Array) -> Array:
    """Decrease of the cost by each candidate (row)."""
    return np.asarray(np.maximum(nearest - rows, 0.0) @ shares)


def _checked(distances: ArrayLike, size: int, weights: ArrayLike | None) -> tuple[Array, Array]:
    """Return the distances, one row per candidate, and the weights of the clients."""
    table = np.ascontiguousarray(np.asarray(distances, dtype=np.float64).T)
    if table.ndim != 2 or not np.isfinite(table).all():
        raise ValueError("facility: distances must be finite, of shape (clients, candidates)")
    if not 0 <= size <= len(table):
        raise ValueError(f"facility: cannot pick {size} of {len(table)} candidates")
    shares = np.ones(table.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    if shares.shape != table.shape[1:]:
        raise ValueError(f"facility: {shares.size} weights for {table.shape[1]} clients")
    return table, shares
