"""Low-rank covariance of loss changes: closed form, EM for missing losses, gradient steps.

Loss changes y of N clients follow N(0, X^T X + noise_std^2 I) with X of shape (rank, N), which is
probabilistic PCA (Tipping and Bishop 1999) with known noise and zero mean. Without the noise a
rank below N has no density, so the paper's eq. 15 needs it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def fit_low_rank(
    loss_changes: ArrayLike,
    weights: ArrayLike,
    rank: int,
    noise_std: float,
    *,
    em_steps: int = 30,
) -> Array:
    """Fit X of maximal weighted likelihood (FedCor, eq. 17), in closed form.

    The leading eigenvectors of the weighted second moment, scaled by sqrt(eigenvalue - noise).
    Only a samples x samples matrix is decomposed, so N may be a million.

    Parameters
    ----------
    loss_changes
        One row a sample, one column a client; NaN where a loss is missing.
    weights
        Weight of each sample, such as gamma^m.
    rank
        Rows of X; those beyond the rank of the data are zero.
    noise_std
        Standard deviation of the independent noise.
    em_steps
        Steps of expectation-maximization when losses are missing, from a start in which a missing
        change is the mean change of its sample. A client never seen gets a zero column.

    Examples
    --------
    >>> changes = [[3.0, 3.0, 0.0], [-1.0, -1.0, 0.0]]
    >>> x = fit_low_rank(changes, weights=[1, 1], rank=1, noise_std=0.1)
    >>> (x.T @ x).round(3).tolist()       # second moment 5, less half of 0.01 along (1, 1)
    [[4.995, 4.995, 0.0], [4.995, 4.995, 0.0], [0.0, 0.0, 0.0]]
    """
    changes, seen, shares = _checked(loss_changes, weights, rank, noise_std)
    if seen.all():
        return _closed_form(changes, shares, rank, noise_std)
    means = changes.sum(axis=1) / np.maximum(seen.sum(axis=1), 1)
    filled = np.where(seen, changes, means[:, None])
    factors = _closed_form(filled, shares, rank, noise_std)
    factors[:, ~seen.any(axis=0)] = 0.0
    for _ in range(em_steps):
        factors = _em_step(factors, changes, seen, shares, noise_std)
    return factors


def fit_gradient(
    loss_changes: ArrayLike,
    weights: ArrayLike,
    rank: int,
    noise_std: float,
    *,
    steps: int = 100,
    learning_rate: float = 0.01,
    initial: ArrayLike | None = None,
    rng: np.random.Generator | None = None,
) -> Array:
    """Fit X by Adam steps on the same likelihood, as the paper does; early stopping regularizes.

    Parameters
    ----------
    loss_changes, weights, rank, noise_std
        As in :func:`fit_low_rank`; missing losses are left out of the likelihood.
    steps, learning_rate
        Of Adam.
    initial
        X to start from, such as the last fit; otherwise small random numbers from `rng`.

    Examples
    --------
    >>> changes = [[3.0, 3.0], [-1.0, -1.0]]
    >>> rng = np.random.default_rng(0)
    >>> x = fit_gradient(changes, [1, 1], 1, 1.0, steps=500, learning_rate=0.1, rng=rng)
    >>> (x.T @ x).round(2).tolist()       # the closed form: 5 less half of 1
    [[4.5, 4.5], [4.5, 4.5]]
    """
    changes, seen, shares = _checked(loss_changes, weights, rank, noise_std)
    if initial is not None:
        factors = np.array(initial, dtype=np.float64)
    elif rng is not None:
        scale = np.sqrt(np.square(changes).mean() / rank)
        factors = rng.normal(scale=max(scale, noise_std), size=(rank, changes.shape[1]))
    else:
        raise ValueError("fit_gradient: give either `initial` or `rng`")
    first, second = np.zeros_like(factors), np.zeros_like(factors)
    for step in range(1, steps + 1):
        _, slope = _value_and_gradient(factors, changes, seen, shares, noise_std)
        first = 0.9 * first + 0.1 * slope
        second = 0.999 * second + 0.001 * slope**2
        size = np.sqrt(second / (1 - 0.999**step)) + 1e-8
        factors += learning_rate * first / (1 - 0.9**step) / size
    return factors


def log_likelihood(
    embedding: ArrayLike, loss_changes: ArrayLike, weights: ArrayLike, noise_std: float
) -> float:
    """Weighted log-likelihood of the samples; missing losses are left out.

    Examples
    --------
    >>> round(log_likelihood([[0.0]], [[0.0]], [1.0], 1.0), 4)     # -log(2 pi) / 2
    -0.9189
    """
    factors = np.asarray(embedding, dtype=np.float64)
    changes, seen, shares = _checked(loss_changes, weights, len(factors), noise_std)
    value, _ = _value_and_gradient(factors, changes, seen, shares, noise_std)
    return value * float(np.sum(np.asarray(weights, dtype=np.float64)))


def _closed_form(changes: Array, shares: Array, rank: int, noise_std: float) -> Array:
    roots = np.sqrt(shares)  # applied to small matrices, so that no copy of all changes is made
    values, vectors = np.linalg.eigh(np.outer(roots, roots) * (changes @ changes.T))
    top = np.argsort(values)[::-1][:rank]
    values, vectors = values[top], vectors[:, top]
    signal = np.maximum(values - noise_std**2, 0.0)
    gain = np.sqrt(np.divide(signal, values, out=np.zeros_like(values), where=signal > 0))
    factors = np.zeros((rank, changes.shape[1]))
    factors[: top.size] = (gain * vectors * roots[:, None]).T @ changes
    return factors


def _em_step(factors: Array, changes: Array, seen: Mask, shares: Array, noise_std: float) -> Array:
    """One step of EM; clients with equal patterns of missing samples share one linear system."""
    rank = len(factors)
    means = np.empty((len(changes), rank))
    moments = np.empty((len(changes), rank, rank))
    for t in range(len(changes)):
        inner, mean = _posterior(factors, changes[t], seen[t], noise_std)
        means[t] = mean
        moments[t] = np.outer(mean, mean) + noise_std**2 * inner
    patterns, kind = np.unique(seen, axis=1, return_inverse=True)
    systems = np.einsum("tp,t,tde->pde", patterns, shares, moments)
    systems += 1e-12 * np.trace(moments.sum(axis=0)) * np.eye(rank)
    inverses = np.linalg.inv(systems)
    right = (means * shares[:, None]).T @ changes
    result = np.empty_like(factors)
    for pattern in range(len(inverses)):
        members = kind == pattern
        result[:, members] = inverses[pattern] @ right[:, members]
    return result


def _posterior(factors: Array, changes: Array, seen: Mask, noise_std: float) -> tuple[Array, Array]:
    """M^-1 with M = X X^T + noise I over the seen clients, and the latent mean M^-1 X y."""
    part = factors * seen
    inner: Array = np.asarray(
        np.linalg.inv(part @ factors.T + noise_std**2 * np.eye(len(factors))), np.float64
    )
    return inner, inner @ (part @ changes)


def _value_and_gradient(
    factors: Array, changes: Array, seen: Mask, shares: Array, noise_std: float
) -> tuple[float, Array]:
    """Mean log-likelihood and its gradient in X, by the Woodbury identity."""
    noise, value, slope = noise_std**2, 0.0, np.zeros_like(factors)
    for t, share in enumerate(shares):
        inner, latent = _posterior(factors, changes[t], seen[t], noise_std)
        solved = (changes[t] - seen[t] * (latent @ factors)) / noise  # C^-1 y
        _, logdet = np.linalg.slogdet(inner)
        count = int(seen[t].sum())
        logdet_c = (count - len(factors)) * np.log(noise) - logdet
        value -= share * 0.5 * (changes[t] @ solved + logdet_c + count * np.log(2 * np.pi))
        slope += share * (np.outer(factors @ solved, solved) - inner @ (factors * seen[t]))
    return float(value), slope


def _checked(
    loss_changes: ArrayLike, weights: ArrayLike, rank: int, noise_std: float
) -> tuple[Array, Mask, Array]:
    """Changes with zeros for missing, what is seen, and weights that sum to one."""
    changes = np.asarray(loss_changes, dtype=np.float64)
    shares = np.asarray(weights, dtype=np.float64)
    if changes.ndim != 2 or shares.shape != changes.shape[:1]:
        raise ValueError(
            f"fit: loss_changes has shape {changes.shape} and weights {shares.shape}; "
            "they must be (samples, clients) and (samples,)"
        )
    seen = np.isfinite(changes)
    complete = bool(seen.all())
    if not complete and np.isinf(changes).any():
        raise ValueError("fit: loss_changes has an infinite value; use NaN for a missing loss")
    if rank < 1 or not noise_std > 0:
        raise ValueError(f"fit: rank={rank} must be at least 1 and noise_std={noise_std} above 0")
    if (shares < 0).any() or not 0 < shares.sum() < np.inf:
        raise ValueError("fit: weights must be non-negative, with a positive sum")
    return changes if complete else np.where(seen, changes, 0.0), seen, shares / shares.sum()
