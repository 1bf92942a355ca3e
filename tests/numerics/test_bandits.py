"""Duels against the double loop, the pool against the exact law."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from math import lgamma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta, chisquare

from fedcohort.numerics import bandits

WINS = np.array([3.0, 0.0, 1.0, 6.0])
LOSSES = np.array([1.0, 0.0, 4.0, 5.0])


def laws(i: int):
    return beta(WINS[i] + 1, LOSSES[i] + 1)


def exact_first(clients: tuple[int, ...], i: int) -> float:
    """Probability that client i has the largest of fresh draws of `clients`."""
    others = [laws(j) for j in clients if j != i]
    return quad(lambda x: laws(i).pdf(x) * np.prod([o.cdf(x) for o in others]), 0, 1)[0]


def exact_law(size: int) -> dict[tuple[int, ...], float]:
    """Probability of every ordered pool: a new race, with fresh draws, for each pick."""
    law = {}
    for order in permutations(range(4), size):
        left = [tuple(j for j in range(4) if j not in order[:at]) for at in range(size)]
        law[order] = float(np.prod([exact_first(c, i) for c, i in zip(left, order, strict=True)]))
    return law


@pytest.mark.parametrize("size", [1, 2])
def test_pool_has_the_law_of_algorithm_1(size: int) -> None:
    """Chi-square of 10,000 draws at the 1e-3 level, seed fixed.

    It rejects one draw and top-P beyond doubt, so that it can tell the two apart.
    """
    law, chances = exact_law(size), {}
    assert sum(law.values()) == pytest.approx(1, abs=1e-8)
    for pool in (bandits.thompson_pool, bandits.thompson_pool_one_draw):
        rng = np.random.default_rng(42)
        seen = Counter(tuple(pool(WINS, LOSSES, size, rng).tolist()) for _ in range(10_000))
        expected = np.array(list(law.values())) * 10_000
        chances[pool] = chisquare([seen[order] for order in law], expected, sum_check=False).pvalue
    assert chances[bandits.thompson_pool] > 1e-3
    assert chances[bandits.thompson_pool_one_draw] < 1e-6 or size == 1


def test_pool_of_many_groups_agrees_with_brute_force() -> None:
    """How often each of 60 clients enters a pool of 20, against drawing every Beta every time.

    1,000 repetitions each: the standard error of a difference is at most 0.022, so 5 of them
    never occur by chance among 60 clients, while a wrong bound shifts many clients.
    """
    rng = np.random.default_rng(7)
    wins, losses = rng.integers(0, 40, 60) * 1.5, rng.integers(0, 40, 60) * 1.0
    wins[:10], losses[:10] = 0, 0
    fast, slow = np.zeros(60), np.zeros(60)
    for _ in range(1000):
        fast[bandits.thompson_pool(wins, losses, 20, rng)] += 1
        left = np.ones(60, bool)
        for _ in range(20):
            draws = np.where(left, rng.beta(wins + 1, losses + 1), -1.0)
            left[draws.argmax()] = False
        slow += ~left
    assert np.abs(fast - slow).max() / 1000 < 5 * 0.022


@given(
    seed=st.integers(0, 2**32),
    counts=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=30),
    share=st.floats(0, 1),
)
def test_pools_are_different_clients(seed: int, counts, share: float) -> None:
    wins, losses = np.array(counts).T
    size = int(share * len(counts))
    for pool in (bandits.thompson_pool, bandits.thompson_pool_one_draw):
        taken = pool(wins, losses, size, np.random.default_rng(seed))
        assert len(taken) == len(set(taken.tolist())) == size
        assert set(taken.tolist()) <= set(range(len(counts)))


def test_reversed_hazard_and_its_bound() -> None:
    rng = np.random.default_rng(0)
    out = np.empty(1)
    for _ in range(2000):
        a, b = 1 + 500 * rng.random() ** 3, 1 + 500 * rng.random() ** 3
        x = float(np.clip(beta.ppf(rng.random(), a, b), 1e-12, 1 - 1e-9))
        norm = lgamma(a + b) - lgamma(a) - lgamma(b)
        exact = bandits.reversed_hazard(a, b, norm, x)
        assert exact == pytest.approx(beta.pdf(x, a, b) / beta.cdf(x, a, b), rel=1e-8)
        low = x * rng.random() if rng.random() < 0.5 else x
        one = np.array([1])
        bandits.fill_bounds(np.array([a]), np.array([b]), np.array([norm]), one, low, out)
        assert out[0] * (1 + 1e-9) >= exact  # a bound at `low` holds above it


@given(
    rewards=st.lists(st.integers(-3, 3).map(float), max_size=12), rate=st.sampled_from([1.0, 0.5])
)
def test_duel_is_algorithm_2(rewards: list[float], rate: float) -> None:
    rng = np.random.default_rng(len(rewards))
    wins, losses = rng.random(len(rewards)), rng.random(len(rewards))
    expected_wins, expected_losses = wins.copy(), losses.copy()
    for i, reward_i in enumerate(rewards):
        for j, reward_j in enumerate(rewards):
            if reward_i > reward_j:
                expected_wins[i] += rate
                expected_losses[j] += rate
    new_wins, new_losses = bandits.duel(wins, losses, np.array(rewards), rate)
    np.testing.assert_allclose(new_wins, expected_wins)
    np.testing.assert_allclose(new_losses, expected_losses)


def test_mean_rank_is_the_sum_of_pairwise_probabilities() -> None:
    """10,000 draws: the standard error of a mean is at most .011."""
    ranks = bandits.rank_posterior(WINS, LOSSES, np.random.default_rng(0), draws=10_000)
    for i in range(4):
        others = [exact_first((i, j), j) for j in range(4) if j != i]
        assert ranks.mean[i] == pytest.approx(1 + sum(others), abs=0.05)
    assert ranks.mean.sum() == pytest.approx(10)
    assert (ranks.lower <= ranks.mean).all()
    assert (ranks.mean <= ranks.upper).all()
