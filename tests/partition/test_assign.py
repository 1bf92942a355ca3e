"""The tools that partitions share: Dirichlet draws, dealing classes, apportioning clients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.partition import apportion, deal, dirichlet, even_sizes


def test_dirichlet_draws_have_the_right_moments_even_where_gammas_underflow():
    # Mean 1/k; second moment (a+1)/(k(ka+1)). 20,000 rows: standard errors below 0.003.
    rng = np.random.default_rng(0)
    for a, k in [(0.001, 4), (0.2, 4), (5.0, 3)]:
        draw = dirichlet(np.full((20_000, k), a), rng)
        assert np.isfinite(draw).all()
        assert draw.sum(axis=1) == pytest.approx(1.0)
        assert draw.mean(axis=0) == pytest.approx(1 / k, abs=0.012)
        assert (draw**2).mean() == pytest.approx((a + 1) / (k * (k * a + 1)), abs=0.006)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 2**32))
def test_deal_meets_sizes_within_supply(data, seed):
    sizes = np.array(data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=12)))
    classes = data.draw(st.integers(1, 5))
    supply = even_sizes(int(sizes.sum()), classes)
    rng = np.random.default_rng(seed)
    mix = rng.random((sizes.size, classes)) * (rng.random((sizes.size, classes)) < 0.5)
    counts = deal(mix, sizes, supply, rng)
    assert (counts.sum(axis=1) == sizes).all()
    assert (counts.sum(axis=0) == supply).all()
    assert (counts >= 0).all()


def test_deal_favors_nobody_when_a_class_runs_short():
    mix = np.array([[1.0, 0.0], [1.0, 0.0]])
    size, supply = np.array([5, 5]), np.array([5, 5])
    first = [int(deal(mix, size, supply, np.random.default_rng(seed))[0, 0]) for seed in range(20)]
    assert set(first) == {0, 5}  # one order only with probability 2e-6


def test_apportion_makes_the_smallest_share_as_large_as_can_be():
    # Against all ways to give seven clients to three classes.
    counts = np.array([50, 31, 9])
    best = max(min(counts / (a, b, 7 - a - b)) for a in range(1, 6) for b in range(1, 7 - a))
    holders = apportion(counts, 7, 7)
    assert holders.sum() == 7
    assert (counts / holders).min() == best
    assert apportion(counts, 7, 3).max() == 3
    assert apportion(counts, 2, 2).tolist() == [1, 1, 0]
