from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedcohort.privacy.calibration import (
    analytic_delta,
    discrete_delta,
    gaussian_scale,
    laplace_scale,
    sensitivity,
)


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


def test_analytic_calibration_beats_the_classical():
    # Balle and Wang: sigma = 3.73 for (1, 1e-5); sqrt(2 ln(1.25 / delta)) / epsilon says 4.84.
    u, s = gaussian_scale(1, 1.0, 1e-5)
    assert u / s == pytest.approx(3.7306, abs=0.07)


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
