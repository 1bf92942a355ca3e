from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from fedcohort.privacy.noise import (
    bernoulli_exp,
    discrete_gaussian,
    discrete_laplace,
    laplace_moments,
    uniform_below,
    words,
)


def seeded(seed=0):
    return words(np.random.default_rng(seed))


def check_shape(drawn, weight):
    """Chi-square against exact probabilities; right code fails once in 10,000 seeds."""
    reach = np.arange(-400, 401)
    exact = weight(reach)
    exact /= exact.sum()
    common = exact * len(drawn) >= 20
    observed = np.array([(drawn == x).sum() for x in reach[common]])
    rest = [len(drawn) - observed.sum()], [len(drawn) * exact[~common].sum()]
    result = chisquare(np.r_[observed, rest[0]], np.r_[exact[common] * len(drawn), rest[1]])
    assert result.pvalue > 1e-4


@pytest.mark.parametrize(("t", "s"), [(1, 1), (3, 1), (7, 2), (1, 3), (40, 16)])
def test_laplace_probabilities_are_exact(t, s):
    drawn = discrete_laplace(seeded(), 200_000, t, s)
    check_shape(drawn, lambda x: np.exp(-np.abs(x) * s / t))


@pytest.mark.parametrize(("u", "s"), [(2, 1), (40, 16), (33, 16), (300, 16)])
def test_gaussian_probabilities_are_exact(u, s):
    drawn = discrete_gaussian(seeded(), 200_000, u, s)
    check_shape(drawn, lambda x: np.exp(-(x.astype(float) ** 2) / 2 / (u / s) ** 2))


def test_a_slightly_wrong_shape_is_noticed():
    drawn = discrete_gaussian(seeded(), 200_000, 42, 16)
    with pytest.raises(AssertionError):
        check_shape(drawn, lambda x: np.exp(-(x.astype(float) ** 2) / 2 / (40 / 16) ** 2))


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0, 200.0])
def test_laplace_moments_are_those_of_the_probabilities(scale):
    x = np.arange(-20_000, 20_001)
    p = np.exp(-np.abs(x) / scale)
    p /= p.sum()
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
