"""Noise: drawn with exact probabilities, and as much as the budget asks for."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import chisquare, norm

from fedcohort.privacy.noise import (
    analytic_delta,
    bernoulli_exp,
    discrete_delta,
    discrete_gaussian,
    discrete_laplace,
    gaussian_scale,
    laplace_moments,
    laplace_scale,
    sensitivity,
    uniform_below,
    words,
)


def seeded(seed=0):
    return words(np.random.default_rng(seed))


def laplace(x, scale):
    return np.exp(-np.abs(x) / scale)


def gaussian(x, scale):
    return np.exp(-(x.astype(float) ** 2) / 2 / scale**2)


@pytest.mark.parametrize(
    ("draw", "weight", "t", "s"),
    [
        *((discrete_laplace, laplace, *t) for t in [(1, 1), (3, 1), (7, 2), (1, 3), (40, 16)]),
        *((discrete_gaussian, gaussian, *t) for t in [(2, 1), (40, 16), (33, 16), (300, 16)]),
    ],
)
def test_probabilities_are_exact(draw, weight, t, s):
    """Chi-square against exact probabilities; right code fails once in 10,000 seeds."""
    drawn, reach = draw(seeded(), 200_000, t, s), np.arange(-400, 401)
    exact = weight(reach, t / s)
    exact *= len(drawn) / exact.sum()
    common = exact >= 20
    seen = [(drawn == x).sum() for x in reach[common]]
    seen, exact = ([*part, len(drawn) - sum(part)] for part in (seen, exact[common]))
    assert chisquare(seen, exact).pvalue > 1e-4


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0, 200.0])
def test_laplace_moments_are_those_of_the_probabilities(scale):
    x = np.arange(-20_000, 20_001)
    p = laplace(x, scale) / laplace(x, scale).sum()
    variance = (p * x**2).sum()
    fourth = (p * x.astype(float) ** 4).sum() - 3 * variance**2
    assert laplace_moments(scale) == pytest.approx((variance, fourth), rel=1e-9)


def test_uniform_below_is_uniform_even_where_words_do_not_divide():
    # 3/4 of the words are in range for this bound: taking the rest modulo would double a third.
    bound = np.full(60_000, 3 * 2**61, np.int64)
    thirds = uniform_below(seeded(), bound) // 2**61
    assert chisquare(np.bincount(thirds, minlength=3)).pvalue > 1e-4


@pytest.mark.parametrize(("top", "bottom"), [(0, 5), (1, 3), (1, 1), (5, 2), (7, 1)])
def test_bernoulli_exp_has_the_right_probability(top, bottom):
    n = 200_000
    share = bernoulli_exp(seeded(), np.full(n, top), np.full(n, bottom)).mean()
    p = np.exp(-top / bottom)
    assert abs(share - p) <= 4 * np.sqrt(p * (1 - p) / n)


@given(st.integers(1, 10**6), st.floats(1e-4, 100))
def test_laplace_scale_is_never_too_small(cells, epsilon):
    t, s = laplace_scale(cells, epsilon)
    assert Fraction(cells) / Fraction(t, s) <= Fraction(epsilon)
    assert t / s <= cells / epsilon * 1.01 + 0.01


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("sigma", [0.7, 3.7306])
def test_analytic_delta_is_the_integral(epsilon, sigma):
    def gain(x):
        return max(norm.pdf(x, 0, sigma) - np.exp(epsilon) * norm.pdf(x, 1, sigma), 0.0)

    edge = 0.5 - epsilon * sigma**2  # where the densities' ratio is exp(epsilon)
    exact, _ = quad(gain, edge - 12 * sigma, edge, epsabs=1e-14)
    assert analytic_delta(sigma, 1, epsilon) == pytest.approx(exact, rel=1e-5)
    assert analytic_delta(2 * sigma, 4, epsilon) == pytest.approx(exact, rel=1e-5)


def exact_delta(sigma, cells, epsilon):
    """Hockey-stick divergence of the sum of `cells` discrete Gaussians, by convolution."""
    k = np.arange(-200, 201)
    one = np.exp(-(k**2) / (2 * sigma**2))
    one /= one.sum()
    pmf = np.ones(1)
    for _ in range(cells):
        pmf = np.convolve(pmf, one)
    s = np.arange(len(pmf)) - len(pmf) // 2
    pmf, s = pmf[pmf > 1e-200], s[pmf > 1e-200]
    loss = (2 * s + cells) / (2 * sigma**2)  # log ratio where c counts moved by one each
    shifted = pmf * np.exp(-loss)
    return float(np.maximum(pmf - np.exp(epsilon) * shifted, 0).sum())


@pytest.mark.parametrize("cells", [1, 2, 5, 20])
@pytest.mark.parametrize("sigma", [2.0, 3.5, 7.25])
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_discrete_delta_is_exact(cells, sigma, epsilon):
    exact = exact_delta(sigma, cells, epsilon)
    assert discrete_delta(sigma, cells, epsilon) == pytest.approx(exact, rel=1e-9, abs=1e-15)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2000), st.floats(0.05, 5), st.floats(1e-10, 1e-2))
def test_gaussian_scale_meets_delta_and_wastes_little(cells, epsilon, delta):
    u, s = gaussian_scale(1, 1.0, 1e-5)
    assert u / s == pytest.approx(3.7306, abs=0.07)  # Balle and Wang; classically 4.84
    u, s = gaussian_scale(cells, epsilon, delta)
    assert discrete_delta(u / s, cells, epsilon) <= delta
    if u > 2 * s:
        assert analytic_delta((u - 2) / s * 0.99, cells, epsilon) > delta


def test_sensitivity_and_wrong_budgets():
    assert sensitivity(7, "replace") == 14
    with pytest.raises(ValueError, match="neighbors"):
        sensitivity(7, "swap")
    with pytest.raises(ValueError, match="too small"):
        laplace_scale(10**6, 1e-12)
    with pytest.raises(ValueError, match="too small"):
        gaussian_scale(10**6, 1e-9, 1e-9)
