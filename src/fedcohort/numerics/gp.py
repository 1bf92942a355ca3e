"""Greedy selection under a Gaussian model of loss changes (FedCor, Algorithm 1), and its fit.

The model says that one round changes the clients' losses by a draw from N(mu, Sigma). Choosing
client k predicts its own change as mu_k - alpha_k sigma_k, which moves the expected overall loss
by -alpha_k (p^T Sigma_k) / sigma_k; Algorithm 1 takes the client with the largest decrease,
conditions the model on the prediction and goes on. The mean cancels, only the covariance counts.

References
----------
Tang et al. FedCor: Correlation-Based Active Client Selection Strategy for Heterogeneous
Federated Learning. CVPR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.numerics._gp_fit import fit_gradient, fit_low_rank, log_likelihood

__all__ = ["fit_gradient", "fit_low_rank", "greedy", "greedy_low_rank", "log_likelihood"]

Array = NDArray[np.float64]

_TINY = 1e-300
_TIE = 1e-9  # scores this close are equal but for rounding; the first client is taken
_SPENT = 1e-10  # share of a variance below which conditioning has explained a client away


def greedy(
    cov: ArrayLike,
    p: ArrayLike,
    alpha: ArrayLike,
    size: int,
    available: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    demote: bool = False,
) -> list[int]:
    """Select clients one after the other by Algorithm 1, with a given covariance.

    Parameters
    ----------
    cov
        Covariance Sigma of the loss changes, shape (N, N).
    p
        Weight of each client in the overall loss.
    alpha
        Scale factors, 1 for a client not yet annealed.
    size
        How many to select.
    available
        Positions to choose from; all by default. The others still count in the overall loss.
    demote
        Over a subset every score can be negative; multiplying by a smaller alpha then raises a
        client. The default keeps the paper's rule; True divides negative scores by alpha
        instead, so that annealing never favors anyone.

    Returns
    -------
    list of int
        Positions in the order of selection, all different. A client whose remaining variance is
        zero scores 0. When that holds for all that are left (more picks than the rank of the
        covariance), the selection starts again from the given covariance for the rest.

    Examples
    --------
    >>> cov = [[2.0, 1.9, 0.0], [1.9, 2.0, 0.0], [0.0, 0.0, 1.0]]
    >>> greedy(cov, p=[1, 1, 1], alpha=[1, 1, 1], size=2)   # not the two that say the same
    [0, 2]
    """
    matrix = _finite(cov, "cov")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"greedy: cov must be square, its shape is {matrix.shape}")
    return _select(_Dense(matrix), p, alpha, size, available, demote)


def greedy_low_rank(
    embedding: ArrayLike,
    p: ArrayLike,
    alpha: ArrayLike,
    size: int,
    available: Sequence[int] | NDArray[np.int64] | None = None,
    *,
    noise_std: float = 0.0,
    demote: bool = False,
) -> list[int]:
    """As :func:`greedy` with cov = X^T X + noise_std^2 I for an embedding X of shape (rank, N).

    The covariance is never formed: a pick costs O(N rank). Give the noise of the fit: without it
    what little conditioning leaves of a client's variance counts as much as a full one, and the
    picks after the first few repeat what is already there.

    Examples
    --------
    >>> greedy_low_rank([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [1, 1, 1], [1, 1, 1], size=2)
    [0, 2]
    """
    factors = _finite(embedding, "embedding")
    if factors.ndim != 2:
        raise ValueError(f"greedy: embedding must be (rank, N), its shape is {factors.shape}")
    if not 0 <= noise_std < np.inf:
        raise ValueError(f"greedy: noise_std={noise_std} must not be negative")
    return _select(_LowRank(factors, noise_std**2), p, alpha, size, available, demote)


class _Dense:
    """A covariance matrix, conditioned in place."""

    def __init__(self, cov: Array) -> None:
        self.cov, self.left = cov, cov.copy()
        self.variance = np.diag(cov).copy()

    def times(self, p: Array) -> Array:
        return np.asarray(self.cov @ p)

    def condition(self, k: int) -> Array:
        column: Array = self.left[k] / np.sqrt(self.left[k, k])
        self.left -= np.outer(column, column)
        return column

    def restart(self) -> None:
        self.left = self.cov.copy()


class _LowRank:
    """The covariance X^T P X + noise I: conditioning changes only P, the latent covariance."""

    def __init__(self, factors: Array, noise: float) -> None:
        self.factors, self.noise = factors, noise
        self.variance = np.einsum("ij,ij->j", factors, factors) + noise
        self.latent = np.eye(len(factors))
        self.known: list[int] = []

    def times(self, p: Array) -> Array:
        return np.asarray((self.factors @ p) @ self.factors + self.noise * p)

    def condition(self, k: int) -> Array:
        gain = self.latent @ self.factors[:, k]
        variance = gain @ self.factors[:, k] + self.noise
        self.latent = self.latent - np.outer(gain, gain) / variance
        column = np.asarray(gain @ self.factors)
        column[k] += self.noise
        column[self.known] = 0.0  # their changes, noise included, are given: nothing moves them
        self.known.append(k)
        column /= np.sqrt(variance)
        return column

    def restart(self) -> None:
        self.latent = np.eye(len(self.factors))
        self.known = []


def _select(
    model: _Dense | _LowRank,
    p: ArrayLike,
    alpha: ArrayLike,
    size: int,
    available: Sequence[int] | NDArray[np.int64] | None,
    demote: bool,
) -> list[int]:
    """Run Algorithm 1 on the variances and on pull = Sigma p, all that it looks at.

    Conditioning on k takes from Sigma the outer product of k's column over its deviation, so the
    variances lose that column's square and the pull a multiple of it.
    """
    from fedcohort.numerics._gp_loops import absorb, score

    clients = model.variance.size
    weights, rise = _vector(p, "p", clients), _vector(alpha, "alpha", clients)
    fall = 1 / np.maximum(rise, _TINY) if demote else rise
    barrier = np.where(_closed(clients, size, available), -np.inf, 0.0)
    pull, spent = model.times(weights), np.maximum(_SPENT * model.variance, _TINY)
    left, drawn, scores = model.variance.copy(), pull.copy(), np.empty(clients)
    chosen: list[int] = []
    for _ in range(size):
        score(left, drawn, spent, rise, fall, barrier, scores)
        if scores.max() <= 0 and not ((left > spent) & (barrier == 0)).any():
            model.restart()
            left, drawn = model.variance.copy(), pull.copy()
            score(left, drawn, spent, rise, fall, barrier, scores)
        top = scores.max()
        pick = int(np.argmax(scores >= top - _TIE * abs(top)))
        chosen.append(pick)
        barrier[pick] = -np.inf
        if left[pick] > spent[pick]:
            column = model.condition(pick)
            absorb(left, drawn, column, float(column @ weights))
    return chosen


def _closed(
    clients: int, size: int, available: Sequence[int] | NDArray[np.int64] | None
) -> NDArray[np.bool_]:
    """Mark the clients that cannot be selected."""
    closed = np.zeros(clients, bool)
    if available is not None:
        closed[:] = True
        closed[np.asarray(available, np.int64)] = False
    pool = clients - int(closed.sum())
    if not 0 <= size <= pool:
        raise ValueError(f"greedy: cannot select {size} of {pool} clients")
    return closed


def _vector(value: ArrayLike, name: str, clients: int) -> Array:
    array = _finite(value, name)
    if array.shape != (clients,):
        raise ValueError(f"greedy: {name} has shape {array.shape}, not ({clients},)")
    return array


def _finite(value: ArrayLike, name: str) -> Array:
    array = np.asarray(value, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"greedy: {name} has a value that is not finite")
    return array
