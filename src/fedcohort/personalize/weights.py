"""How much of each neighbor's model a newcomer gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
RIDGE = 0.3
TINY = 1e-9  # least curvature, of the largest
HEAVY = 1e4  # weight of the sum, of the largest curvature


def by_distance(squares: ArrayLike, errors: ArrayLike) -> Floats:
    """Weigh neighbors by 1 / (squared distance + its standard error)^2.

    A twin outweighs everybody else; neighbors that cannot be told apart weigh alike.

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


def matching(gram: ArrayLike, squares: ArrayLike, energy: ArrayLike) -> Floats:
    """Find the mixture of clients whose sketch is nearest to the newcomer's.

    Minimizes the squared distance between the newcomer's sketch and sum_i w_i q_i over weights
    w >= 0 that sum to one. A share RIDGE of the mixture's own energy, sum_i w_i^2 e_i, is left in,
    so that no single noisy sketch is trusted too much.

    Parameters
    ----------
    gram : array (k, k)
        Debiased inner products of the clients' sketches, summed over rows.
    squares : array (k,)
        Debiased squared distances of the newcomer to the clients.
    energy : array (k,)
        Of the clients' sketches.

    Examples
    --------
    >>> clients, newcomer = np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]), np.array([0.25, 0.75])
    >>> squares = ((clients - newcomer) ** 2).sum(axis=1)
    >>> matching(clients @ clients.T, squares, np.zeros(3)).round(3).tolist()
    [0.25, 0.75, 0.0]
    """
    from scipy.optimize import nnls

    own, far = np.array(gram, float), np.asarray(squares, float)
    slope = (far - np.diag(own)) / 2  # see mixture_square
    own += RIDGE * np.diag(np.asarray(energy, float))
    values, axes = np.linalg.eigh(own)
    # debiasing can leave directions without curvature, or with a negative one
    values = np.maximum(values, TINY * max(float(values[-1]), 1e-300))
    root = np.sqrt(values)[:, None] * axes.T  # root' root = own
    target = -(axes.T @ slope) / np.sqrt(values)
    heavy = HEAVY * float(np.sqrt(values[-1]))  # the weights sum to one
    table = np.vstack([root, np.full(len(far), heavy)])
    weights: Floats = nnls(table, np.append(target, heavy))[0]
    weights /= weights.sum()
    return weights


def mixture_square(gram: ArrayLike, squares: ArrayLike, weights: ArrayLike) -> float:
    """Squared distance, without bias, between a mixture of clients and the newcomer.

    With weights that sum to one, |sum_i w_i q_i - x|^2 = w'Gw + sum_i w_i (|q_i - x|^2 - G_ii).

    Examples
    --------
    >>> clients = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> mixture_square(clients @ clients.T, [1.0, 1.0], [0.5, 0.5])
    0.5
    """
    products, share = np.asarray(gram, float), np.asarray(weights, float)
    gaps = np.asarray(squares, float) - np.diag(products)
    return float(share @ products @ share + share @ gaps)
