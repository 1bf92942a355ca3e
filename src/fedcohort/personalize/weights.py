"""How much of each neighbour's model a newcomer gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.personalize.pile import CAUTION

Floats = NDArray[np.float64]


def by_distance(squares: ArrayLike, errors: ArrayLike) -> Floats:
    """Weigh neighbours by 1 / (squared distance + its standard error)^2.

    A twin outweighs everybody else; neighbours that cannot be told apart weigh alike.

    Parameters
    ----------
    squares : array (k,)
        Squared distances without bias; negative ones count as zero.
    errors : array (k,)
        Their standard errors.

    Examples
    --------
    >>> by_distance([0.0, 1.0, 1.0], [1.0, 1.0, 1.0]).round(3).tolist()
    [0.667, 0.167, 0.167]
    """
    scale = np.maximum(squares, 0) + np.asarray(errors, float)
    scale = np.maximum(scale, 1e-12 * max(float(scale.max()), 1e-300))
    raw = (scale.min() / scale) ** 2
    weights: Floats = raw / raw.sum()
    return weights


def matching(gram: ArrayLike, energy: ArrayLike, steps: int = 2000) -> Floats:
    """Find the mixture of clients whose sketch is nearest to the query's.

    Minimizes the squared distance between the query and sum_i w_i q_i over weights w >= 0 that sum
    to one. As in `pile`, a share CAUTION of the energy of the mixture's noise is left in, so that
    no single noisy sketch is trusted too much. Solved by accelerated projected gradient steps.

    Parameters
    ----------
    gram : array (k + 1, k + 1)
        Debiased inner products of the clients' sketches and, last, the query's
        (`signals.distances.gram`, times the rows).
    energy : array (k,)
        Of the clients' sketches.
    steps : int
        At most.

    Examples
    --------
    >>> points = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0], [0.25, 0.75]])
    >>> matching(points @ points.T, np.zeros(3)).round(3).tolist()
    [0.25, 0.75, 0.0]
    """
    products = np.asarray(gram, float)
    own = products[:-1, :-1] + CAUTION * np.diag(np.asarray(energy, float))
    cross = products[:-1, -1]
    length = max(float(np.linalg.norm(own, 2)), 1e-300)
    weights = np.full(len(cross), 1 / len(cross))
    ahead, pace = weights, 1.0
    for _ in range(steps):
        new = to_simplex(ahead - (own @ ahead - cross) / length)
        faster = (1 + np.sqrt(1 + 4 * pace**2)) / 2
        ahead = new + (pace - 1) / faster * (new - weights)
        moved = float(np.abs(new - weights).max())
        weights, pace = new, faster
        if moved < 1e-9:
            break
    return weights


def to_simplex(point: Floats) -> Floats:
    """Return the nearest weights that are not negative and sum to one.

    Examples
    --------
    >>> to_simplex(np.array([0.7, 0.5, -1.0])).round(6).tolist()
    [0.6, 0.4, 0.0]
    """
    falling = np.sort(point)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(point) + 1)
    last = np.flatnonzero(falling > excess)[-1]
    weights: Floats = np.maximum(point - excess[last], 0)
    return weights


def mixture_square(gram: ArrayLike, weights: ArrayLike) -> float:
    """Squared distance, without bias, between a mixture of clients and the query.

    Examples
    --------
    >>> points = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> mixture_square(points @ points.T, [0.5, 0.5])
    0.5
    """
    signed = np.append(np.asarray(weights, float), -1.0)
    return float(signed @ np.asarray(gram, float) @ signed)
