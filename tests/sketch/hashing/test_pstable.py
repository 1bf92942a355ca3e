from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedcohort.sketch.hashing import PStable, pstable
from fedcohort.sketch.hashing.pstable import collision

ROWS = 1 << 15


@pytest.mark.parametrize("distance", [0.01, 0.5, 2.0, 7.0])
@pytest.mark.parametrize("width", [0.5, 2.0])
def test_closed_form_equals_the_integral(distance, width):
    # Datar et al.: the integral over projected gaps t of their density times 1 - t / width.
    def integrand(t):
        return 2 / distance * norm.pdf(t / distance) * (1 - t / width)

    exact, _ = quad(integrand, 0, width, points=[min(5 * distance, width)], limit=200)
    assert collision(distance, width) == pytest.approx(exact, abs=1e-9)


# 4 seeds x 2^15 rows: four standard errors are at most 0.0055; 0.0025 more for the structure.
@pytest.mark.parametrize("dim", [1, 2, 13, 300, 1500])
@pytest.mark.parametrize("buckets", [4, 512])
def test_law(dim, buckets):
    rng = np.random.default_rng(dim)
    start = rng.normal(scale=5, size=dim)
    step = rng.standard_normal(dim)
    for distance in (0.2, 1.0, 3.0, 20.0):
        pair = np.stack([start, start + distance * step / np.linalg.norm(step)])
        alike = collision(distance, 2.0)
        assert abs(meeting_rate(pair, buckets) - alike - (1 - alike) / buckets) < 0.008


def test_law_for_one_hot_differences():
    pair = np.array([[0.0, 0.0, 0.0], [0.0, 1.5, 0.0]])
    assert abs(meeting_rate(pair, 512) - collision(1.5, 2.0) * 511 / 512 - 1 / 512) < 0.008


def meeting_rate(pair, buckets, seeds=4):
    rates = []
    for seed in range(seeds):
        codes = PStable(pair.shape[1], ROWS, 2.0, buckets, seed).codes(pair)
        rates.append(np.mean(codes[:, 0] == codes[:, 1]))
    return float(np.mean(rates))


@pytest.mark.parametrize("dim", [3, 784])
def test_compiled_and_plain_loops_agree_bit_for_bit(dim, monkeypatch):
    x = np.random.default_rng(dim).normal(scale=30, size=(37, dim))
    hashes = PStable(dim, rows=70, width=1.0, buckets=64, seed=9)
    compiled = hashes.codes(x)
    monkeypatch.setattr(pstable, "kernels", lambda: None)
    np.testing.assert_array_equal(compiled, hashes.codes(x))


def test_large_numbers_keep_their_digits():
    # Time stamps: float32 would merge everything within two minutes.
    x = np.array([[1.7e9], [1.7e9 + 40.0]])
    codes = PStable(1, rows=500, width=2.0, buckets=64, seed=0).codes(x)
    assert np.mean(codes[:, 0] == codes[:, 1]) < 0.15


def test_vectors_beyond_the_reach_of_integers_are_refused():
    with pytest.raises(ValueError, match="standardize"):
        PStable(2, rows=4, width=1.0).codes(np.array([[0.0, 1e17]]))


@pytest.mark.parametrize("width", [0.0, -1.0, np.inf, np.nan])
def test_width_must_be_positive(width):
    with pytest.raises(ValueError, match="width"):
        PStable(2, width=width)
