"""Inclusion probabilities of successive sampling against enumeration of all orders."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from fedcohort.numerics.sampling import _exact, _limit, successive_inclusion


def _enumerate(p: np.ndarray, k: int) -> np.ndarray:
    result = np.zeros(len(p))
    for order in permutations(range(len(p)), k):
        left, chance = list(range(len(p))), 1.0
        for i in order:
            chance *= p[i] / p[left].sum()
            left.remove(i)
        result[list(order)] += chance
    return result


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
def test_inclusion_matches_enumeration(k: int, spread: float) -> None:
    logits = spread * np.random.default_rng(k).normal(size=7)
    expected = _enumerate(np.exp(logits), k)
    np.testing.assert_allclose(successive_inclusion(logits, k), expected, rtol=1e-6, atol=1e-9)


def test_inclusion_sums_to_k_in_a_large_federation() -> None:
    logits = np.random.default_rng(0).normal(size=1000)
    chances = successive_inclusion(logits, 50)
    assert chances.sum() == pytest.approx(50, abs=1e-6)
    assert np.corrcoef(chances, np.exp(logits))[0, 1] > 0.95


def test_limit_is_close_for_many_clients() -> None:
    rates = np.exp(np.random.default_rng(0).normal(size=800))
    exact, limit = _exact(rates, 40), _limit(rates, 40)
    np.testing.assert_allclose(limit, exact, rtol=0.02)
    assert limit.sum() == pytest.approx(40, abs=1e-6)


def test_huge_logits_neither_overflow_nor_vanish() -> None:
    chances = successive_inclusion(np.array([1e6, 1e6, 0.1, 0.0, -np.inf, -1e6]), 3)
    np.testing.assert_allclose(chances[:2], 1.0)
    assert chances[2] / chances[3] == pytest.approx(np.exp(0.1), rel=1e-6)
    assert chances[4] == 0
    assert chances.sum() == pytest.approx(3)


def test_fewer_possible_than_wanted() -> None:
    assert successive_inclusion([0.0, -np.inf, 1.0], 5).tolist() == [1.0, 0.0, 1.0]
    assert successive_inclusion([0.0, 1.0], 0).tolist() == [0.0, 0.0]
