"""The Gaussian model of FedCor (Tang et al., CVPR 2022): its fit, and how it selects clients.

Fit. The loss changes y of N clients in one round follow N(0, X^T X + noise_std^2 I) with X of
shape (rank, N). This is probabilistic PCA (Tipping and Bishop 1999) with known noise and zero
mean, so the likelihood has a closed-form maximum; gradient steps follow the paper.

Selection (Algorithm 1). Choosing client k predicts its own change as mu_k - alpha_k sigma_k, which
moves the expected overall loss by -alpha_k (p^T Sigma_k) / sigma_k. The algorithm takes the client
with the largest decrease, conditions the model on the prediction, and repeats.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

_TINY = 1e-300
_TIE = 1e-9  # scores this close are equal except for rounding; the first client is taken
_NEGLIGIBLE = 1e-10  # share of a variance below which the picks so far explain all of it


def fit_low_rank(loss_changes: ArrayLike, weights: ArrayLike, rank: int, noise_std: float) -> Array:
    """Fit X of maximal weighted likelihood (FedCor, eq. 17), in closed form.

    `loss_changes` (samples, clients) is NaN where a loss is missing, which then counts as the mean
    change of its sample. A client without any loss gets a zero column. Only a samples x samples
    matrix is decomposed.

    >>> changes = [[3.0, 3.0, 0.0], [-1.0, -1.0, 0.0]]
    >>> x = fit_low_rank(changes, weights=[1, 1], rank=1, noise_std=0.1)
    >>> (x.T @ x).round(3).tolist()       # second moment 5, less half of 0.01 along (1, 1)
    [[4.995, 4.995, 0.0], [4.995, 4.995, 0.0], [0.0, 0.0, 0.0]]
    """
    changes, seen, shares = _prepare(loss_changes, weights)
    if not seen.all():
        means = changes.sum(axis=1) / np.maximum(seen.sum(axis=1), 1)
        changes = np.where(seen, changes, means[:, None])
        changes[:, ~seen.any(axis=0)] = 0.0
    roots = np.sqrt(shares)  # applied to small matrices, so that no copy of all changes is made
    values, vectors = np.linalg.eigh(np.outer(roots, roots) * (changes @ changes.T))
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    signal = np.maximum(values - noise_std**2, 0.0)
    gain = np.sqrt(np.divide(signal, values, out=np.zeros_like(values), where=signal > 0))
    factors = np.zeros((rank, changes.shape[1]))
    factors[: values.size] = (gain * vectors * roots[:, None]).T @ changes
    return factors


def fit_gradient(
    loss_changes: ArrayLike,
    weights: ArrayLike,
    rank: int,
    noise_std: float,
    rng: np.random.Generator,
    *,
    steps: int,
    learning_rate: float,
    initial: ArrayLike | None = None,
) -> Array:
    """Fit X by Adam steps on the same likelihood, as the paper does; early stopping regularizes.

    It starts from `initial`, such as the last fit, or from small random numbers.
    """
    changes, seen, shares = _prepare(loss_changes, weights)
    if initial is None:
        scale = np.sqrt(np.square(changes).mean() / rank)
        factors = rng.normal(scale=max(scale, noise_std), size=(rank, changes.shape[1]))
    else:
        factors = np.array(initial, dtype=np.float64)
    first, second = np.zeros_like(factors), np.zeros_like(factors)
    for step in range(1, steps + 1):
        slope = gradient(factors, changes, seen, shares, noise_std)
        first = 0.9 * first + 0.1 * slope
        second = 0.999 * second + 0.001 * slope**2
        size = np.sqrt(second / (1 - 0.999**step)) + 1e-8
        factors += learning_rate * first / (1 - 0.9**step) / size
    return factors


def gradient(factors: Array, changes: Array, seen: Mask, shares: Array, noise_std: float) -> Array:
    """Gradient of the mean log-likelihood in X, by the Woodbury identity."""
    slope = np.zeros_like(factors)
    for t, share in enumerate(shares):
        part = factors * seen[t]
        matrix = part @ factors.T + noise_std**2 * np.eye(len(factors))  # over the seen clients
        try:
            inner: Array = np.linalg.inv(matrix)
        except np.linalg.LinAlgError:  # singular by rounding
            inner = np.linalg.pinv(matrix, hermitian=True)
        latent = inner @ (part @ changes[t])
        solved = (changes[t] - seen[t] * (latent @ factors)) / noise_std**2  # C^-1 y
        slope += share * (np.outer(factors @ solved, solved) - inner @ part)
    return slope


def _prepare(loss_changes: ArrayLike, weights: ArrayLike) -> tuple[Array, Mask, Array]:
    """Return the changes (0 where missing), the mask of reported ones, and normalized weights."""
    changes = np.asarray(loss_changes, dtype=np.float64)
    shares = np.asarray(weights, dtype=np.float64)
    seen = np.isfinite(changes)
    return np.where(seen, changes, 0.0), seen, shares / shares.sum()


def greedy(
    embedding: Array,
    p: Array,
    alpha: Array,
    size: int,
    available: Indices | None = None,
    *,
    noise_std: float = 0.0,
    demote: bool = False,
) -> list[int]:
    """Select clients one by one with Algorithm 1, for cov = X^T X + noise_std^2 I.

    A pick costs O(N rank). Without the noise of the fit, the tiny variance that conditioning leaves
    counts as much as a full one. Clients that are not `available` still count in the overall loss,
    with weights `p`. A smaller alpha would raise a negative score; `demote` divides those by alpha
    instead. When nothing is left to explain, the selection starts again.
    """
    model = _LowRank(embedding, noise_std**2)
    negative_alpha = 1 / np.maximum(alpha, _TINY) if demote else alpha
    open_places = np.zeros(embedding.shape[1], bool)
    open_places[slice(None) if available is None else available] = True
    negligible = np.maximum(_NEGLIGIBLE * model.variance, _TINY)
    prior_gain = (embedding @ p) @ embedding + noise_std**2 * p  # Sigma p
    variances, gain = model.variance.copy(), prior_gain
    chosen: list[int] = []

    for _ in range(size):
        if not (open_places & (variances > negligible)).any():
            model = _LowRank(embedding, noise_std**2)
            variances, gain = model.variance.copy(), prior_gain
        score = gain / np.sqrt(np.maximum(variances, negligible))
        score *= np.where(score >= 0, alpha, negative_alpha)
        score[variances <= negligible] = 0.0
        score[~open_places] = -np.inf
        top = score.max()
        pick = int(np.argmax(score >= top - _TIE * abs(top)))
        chosen.append(pick)
        open_places[pick] = False
        if variances[pick] > negligible[pick]:
            # With c, column k of Sigma over its standard deviation, conditioning subtracts c c^T
            column = model.condition(pick)
            variances -= column * column
            gain = gain - float(column @ p) * column
    return chosen


class _LowRank:
    """The covariance X^T P X + noise I: conditioning changes only P, the latent covariance."""

    def __init__(self, factors: Array, noise: float) -> None:
        self.factors, self.noise = factors, noise
        self.variance = np.einsum("ij,ij->j", factors, factors) + noise
        self.latent = np.eye(len(factors))
        self.picked: list[int] = []

    def condition(self, k: int) -> Array:
        gain = self.latent @ self.factors[:, k]
        variance = gain @ self.factors[:, k] + self.noise
        self.latent = self.latent - np.outer(gain, gain) / variance
        column = np.asarray(gain @ self.factors)
        column[k] += self.noise
        column[self.picked] = 0.0  # their changes are fixed by conditioning, noise included
        self.picked.append(k)
        column /= np.sqrt(variance)
        return column
