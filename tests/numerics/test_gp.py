"""Greedy selection against literal conditioning, and fits against the likelihood itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from fedcohort.numerics import gp


def _algorithm_1(cov, p, alpha, size, available):
    """Lines 1 to 10 as printed: full posterior mean and covariance for every candidate."""
    mu, sigma = np.zeros(len(p)), np.array(cov, dtype=np.float64)
    left, chosen = list(available), []
    for _ in range(size):
        best = None
        for k in left:
            predicted = mu[k] - alpha[k] * np.sqrt(sigma[k, k])
            mean = mu + sigma[:, k] / sigma[k, k] * (predicted - mu[k])
            if best is None or p @ mean < best[0]:
                best = (p @ mean, k, mean)
        _, k, mu = best
        sigma = sigma - np.outer(sigma[:, k], sigma[:, k]) / sigma[k, k]
        chosen.append(k)
        left.remove(k)
    return chosen


def log_likelihood(embedding, loss_changes, weights, noise_std) -> float:
    """Weighted log-likelihood of the samples, of the marginal law of what is there."""
    x, total = np.asarray(embedding), 0.0
    for weight, row in zip(weights, np.asarray(loss_changes), strict=True):
        seen = np.isfinite(row)
        cov = x[:, seen].T @ x[:, seen] + noise_std**2 * np.eye(seen.sum())
        total += weight * multivariate_normal(np.zeros(seen.sum()), cov).logpdf(row[seen])
    return total


def root(cov):
    """An embedding X with X^T X = cov."""
    return np.linalg.cholesky(cov).T


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.7])
def test_greedy_is_algorithm_1(seed: int, noise: float) -> None:
    """With noise no variance is ever negligible, so that the picks go on beyond the rank."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4 if noise else 12, 12))
    p, alpha = rng.dirichlet(np.ones(12)), 0.9 ** rng.integers(0, 4, size=12)
    some = rng.choice(12, 10, replace=False).tolist()
    expected = _algorithm_1(x.T @ x + noise**2 * np.eye(12), p, alpha, 9, some)
    assert gp.greedy(x, p, alpha, 9, some, noise_std=noise) == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rank=st.integers(0, 4),
    n=st.integers(1, 12),
    duplicates=st.booleans(),
)
def test_picks_beyond_the_rank_are_different_and_complete(
    seed: int, rank: int, n: int, duplicates: bool
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rank, n))
    if duplicates:
        x[:, n // 2 :] = x[:, :1]
    assert sorted(gp.greedy(x, np.ones(n), np.ones(n), n)) == list(range(n))


def test_all_negative_scores_over_a_subset() -> None:
    """Clients 1 and 2 both raise the overall loss; annealing client 2 must not favor it."""
    cov = np.array([[9.0, -2.0, -2.0], [-2.0, 1.0, 0.0], [-2.0, 0.0, 1.0]])
    alpha = np.array([1.0, 1.0, 0.5])
    assert gp.greedy(root(cov), np.ones(3), alpha, 1, [1, 2]) == [2]  # the paper's rule
    assert gp.greedy(root(cov), np.ones(3), alpha, 1, [1, 2], demote=True) == [1]


def _samples(seed: int, t: int = 8, n: int = 10, rank: int = 3):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(t, rank)) @ rng.normal(size=(rank, n)) + 0.1 * rng.normal(size=(t, n))
    return y, 0.9 ** np.arange(t)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rank", [1, 3, 9])
def test_closed_form_is_a_maximum(seed: int, rank: int) -> None:
    """No gradient step and no random step improves the weighted likelihood."""
    y, w = _samples(seed)
    noise = 0.15
    x = gp.fit_low_rank(y, w, rank, noise)
    best = log_likelihood(x, y, w, noise)
    for rate in (1e-2, 1e-4, 1e-6):
        rng = np.random.default_rng(seed)
        stepped = gp.fit_gradient(y, w, rank, noise, rng, steps=1, learning_rate=rate, initial=x)
        assert log_likelihood(stepped, y, w, noise) <= best + 1e-9 * abs(best)
    rng = np.random.default_rng(seed)
    for scale in (1e-1, 1e-2, 1e-3):
        for _ in range(20):
            other = x + scale * rng.normal(size=x.shape)
            assert log_likelihood(other, y, w, noise) <= best + 1e-9 * abs(best)


def test_gradient_matches_finite_differences() -> None:
    y, w = _samples(3, t=4, n=5)
    y[1, 2] = np.nan
    x = np.random.default_rng(0).normal(size=(2, 5))
    changes, seen, shares = gp._prepare(y, w)
    slope = gp.gradient(x, changes, seen, shares, 0.3)
    for i, j in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i, j] += 1e-6
        down[i, j] -= 1e-6
        scale = log_likelihood(up, y, w, 0.3) - log_likelihood(down, y, w, 0.3)
        assert slope[i, j] * w.sum() == pytest.approx(scale / 2e-6, rel=1e-4, abs=1e-6)


def test_weights_of_zero_and_repeats_mean_what_they_say() -> None:
    y, _ = _samples(4)
    doubled = gp.fit_low_rank(np.vstack([y, y[:1]]), np.ones(9), 3, 0.1)
    weighted = gp.fit_low_rank(y, np.r_[2.0, np.ones(7)], 3, 0.1)
    np.testing.assert_allclose(doubled.T @ doubled, weighted.T @ weighted, atol=1e-9)
    ignored = gp.fit_low_rank(y, np.r_[0.0, np.ones(7)], 3, 0.1)
    without = gp.fit_low_rank(y[1:], np.ones(7), 3, 0.1)
    np.testing.assert_allclose(ignored.T @ ignored, without.T @ without, atol=1e-9)


def test_a_missing_change_is_the_mean_of_its_sample_and_clients_never_seen_count_nothing() -> None:
    y, w = _samples(8)
    y[2, [1, 4]] = np.nan
    filled = np.where(np.isnan(y), np.nanmean(y, axis=1)[:, None], y)
    never = np.full((len(y), 1), np.nan)
    fits = [gp.fit_low_rank(c, w, 3, 0.15) for c in (np.hstack([y, never]), filled)]
    np.testing.assert_array_equal(fits[0][:, -1], 0.0)
    np.testing.assert_allclose(fits[0][:, :-1].T @ fits[0][:, :-1], fits[1].T @ fits[1])
