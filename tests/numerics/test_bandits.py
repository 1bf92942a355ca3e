"""Duels against the double loop, the pool against the exact law, ranks against integrals."""

from __future__ import annotations

from itertools import combinations, permutations, product
from math import lgamma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import beta, chi2

from fedcohort.numerics import _thompson, bandits

WINS = np.array([3.0, 0.0, 1.0, 6.0])
LOSSES = np.array([1.0, 0.0, 4.0, 5.0])


def _exact_first(clients: tuple[int, ...], i: int) -> float:
    """Probability that client i has the largest of fresh draws of `clients`."""

    def integrand(x: float) -> float:
        value = beta.pdf(x, WINS[i] + 1, LOSSES[i] + 1)
        for j in clients:
            if j != i:
                value *= beta.cdf(x, WINS[j] + 1, LOSSES[j] + 1)
        return float(value)

    return float(quad(integrand, 0, 1, epsabs=1e-10)[0])


def _exact_law(size: int) -> dict[tuple[int, ...], float]:
    """Probability of every ordered pool: a new race, with fresh draws, for each pick."""
    law = {}
    for order in permutations(range(4), size):
        probability, left = 1.0, (0, 1, 2, 3)
        for i in order:
            probability *= _exact_first(left, i)
            left = tuple(j for j in left if j != i)
        law[order] = probability
    return law


def _chi_square(draw, law: dict[tuple[int, ...], float], draws: int) -> tuple[float, int]:
    counts = dict.fromkeys(law, 0)
    for _ in range(draws):
        counts[tuple(draw())] += 1
    seen = np.array(list(counts.values()))
    expected = np.array(list(law.values())) * draws
    assert expected.min() > 5
    return float(((seen - expected) ** 2 / expected).sum()), len(law) - 1


@pytest.mark.parametrize("size", [1, 2])
def test_pool_has_the_law_of_algorithm_1(size: int) -> None:
    """Chi-square of 10,000 draws at the 1e-3 level, seed fixed."""
    law = _exact_law(size)
    assert sum(law.values()) == pytest.approx(1, abs=1e-8)
    rng = np.random.default_rng(42)
    statistic, freedom = _chi_square(
        lambda: bandits.thompson_pool(WINS, LOSSES, size, rng), law, 10_000
    )
    assert statistic < chi2.isf(1e-3, freedom)


def test_one_draw_is_another_law() -> None:
    """The same test rejects one draw and top-P beyond doubt, so it can tell the two apart."""
    rng = np.random.default_rng(42)
    statistic, freedom = _chi_square(
        lambda: bandits.thompson_pool_one_draw(WINS, LOSSES, 2, rng), _exact_law(2), 10_000
    )
    assert statistic > 2 * chi2.isf(1e-6, freedom)


def test_one_draw_first_pick_is_exact() -> None:
    rng = np.random.default_rng(1)
    statistic, freedom = _chi_square(
        lambda: bandits.thompson_pool_one_draw(WINS, LOSSES, 1, rng), _exact_law(1), 10_000
    )
    assert statistic < chi2.isf(1e-3, freedom)


def test_pool_of_many_groups_agrees_with_brute_force() -> None:
    """How often each of 60 clients enters a pool of 20, against drawing every Beta every time.

    4,000 repetitions each: the standard error of a difference is at most 0.011, so 5 of them
    never occur by chance among 60 clients, while a wrong bound shifts many clients.
    """
    rng = np.random.default_rng(7)
    wins, losses = rng.integers(0, 40, 60) * 1.5, rng.integers(0, 40, 60) * 1.0
    wins[:10], losses[:10] = 0, 0
    fast, slow = np.zeros(60), np.zeros(60)
    for _ in range(4000):
        fast[bandits.thompson_pool(wins, losses, 20, rng)] += 1
        left = np.ones(60, bool)
        for _ in range(20):
            draws = np.where(left, rng.beta(wins + 1, losses + 1), -1.0)
            left[draws.argmax()] = False
        slow += ~left
    assert np.abs(fast - slow).max() / 4000 < 5 * 0.011


def test_no_counts_mean_a_uniform_pool() -> None:
    rng = np.random.default_rng(3)
    counts = np.zeros(10)
    for _ in range(5000):
        counts[bandits.thompson_pool(np.zeros(10), np.zeros(10), 4, rng)] += 1
    # 2,000 expected, standard deviation 35; five of them
    assert np.abs(counts - 2000).max() < 175


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
        assert len(taken) == len(set(taken)) == size
        assert set(taken) <= set(range(len(counts)))


def test_all_clients_can_be_taken() -> None:
    rng = np.random.default_rng(0)
    pool = bandits.thompson_pool(rng.random(300) * 1e4, np.ones(300), 300, rng)
    assert sorted(pool) == list(range(300))


def test_compiled_loop_equals_plain_python() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(1, 60, 25) * 1.0, rng.integers(1, 60, 25) * 1.0
    counts = rng.integers(1, 4, 25)
    plain = _plain_python()
    for seed in range(10):
        fast = _thompson.pool_loop(a, b, counts, 30, np.random.default_rng(seed))
        slow = plain["pool_loop"](a, b, counts, 30, np.random.default_rng(seed))
        assert fast.tolist() == slow.tolist()


def _plain_python() -> dict:
    """The module's functions without Numba: what runs where it is not installed."""
    names = vars(_thompson)
    space = dict(names)
    import types

    for name, value in names.items():
        if hasattr(value, "py_func"):
            function = value.py_func
            space[name] = types.FunctionType(function.__code__, space, name)
    return space


def test_reversed_hazard_and_its_bound() -> None:
    rng = np.random.default_rng(0)
    out = np.empty(1)
    for _ in range(2000):
        a, b = 1 + 500 * rng.random() ** 3, 1 + 500 * rng.random() ** 3
        x = float(np.clip(beta.ppf(rng.random(), a, b), 1e-12, 1 - 1e-9))
        norm = lgamma(a + b) - lgamma(a) - lgamma(b)
        exact = _thompson.reversed_hazard(a, b, norm, x)
        assert exact == pytest.approx(beta.pdf(x, a, b) / beta.cdf(x, a, b), rel=1e-8)
        low = x * rng.random() if rng.random() < 0.5 else x
        one = np.array([1])
        _thompson._fill_bounds(np.array([a]), np.array([b]), np.array([norm]), one, low, out)
        assert out[0] * (1 + 1e-9) >= exact  # a bound at `low` holds above it


@given(
    rewards=st.lists(st.integers(-3, 3).map(float), max_size=12),
    rate=st.sampled_from([1.0, 0.5]),
)
def test_duel_is_algorithm_2(rewards: list[float], rate: float) -> None:
    rng = np.random.default_rng(len(rewards))
    wins, losses = rng.random(15), rng.random(15)
    who = rng.choice(15, len(rewards), replace=False)
    expected_wins, expected_losses = wins.copy(), losses.copy()
    for i, reward_i in zip(who, rewards, strict=True):
        for j, reward_j in zip(who, rewards, strict=True):
            if reward_i > reward_j:
                expected_wins[i] += rate
                expected_losses[j] += rate
    before = wins.copy()
    new_wins, new_losses = bandits.duel(wins, losses, who, rewards, rate)
    np.testing.assert_allclose(new_wins, expected_wins)
    np.testing.assert_allclose(new_losses, expected_losses)
    np.testing.assert_array_equal(wins, before)


def test_mean_rank_is_the_sum_of_pairwise_probabilities() -> None:
    ranks = bandits.rank_posterior(WINS, LOSSES, np.random.default_rng(0), draws=10_000)
    for i in range(4):
        others = [
            quad(
                lambda x, i=i, j=j: (
                    beta.pdf(x, WINS[i] + 1, LOSSES[i] + 1) * beta.sf(x, WINS[j] + 1, LOSSES[j] + 1)
                ),
                0,
                1,
            )[0]
            for j in range(4)
            if j != i
        ]
        assert ranks.mean[i] == pytest.approx(1 + sum(others), abs=1e-9)
    assert ranks.mean.sum() == pytest.approx(10)
    assert (ranks.lower <= ranks.mean).all()
    assert (ranks.mean <= ranks.upper).all()


def test_more_duels_narrow_the_rank_interval() -> None:
    share = np.linspace(0.2, 0.8, 12)
    few = bandits.rank_posterior(10 * share, 10 * (1 - share), np.random.default_rng(0))
    many = bandits.rank_posterior(5000 * share, 5000 * (1 - share), np.random.default_rng(0))
    assert (many.upper - many.lower).mean() < 0.5 * (few.upper - few.lower).mean()
    np.testing.assert_allclose(many.mean, np.arange(12, 0, -1), atol=0.05)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: bandits.duel([0], [0], [0], [np.nan]), "NaN"),
        (lambda: bandits.duel([0, 0], [0, 0], [1, 1], [1.0, 2.0]), "twice"),
        (lambda: bandits.duel([0], [0], [0], [1.0, 2.0]), "participants"),
        (lambda: bandits.thompson_pool([1], [1, 2], 1, None), "equal vectors"),
        (lambda: bandits.thompson_pool([-1.0], [0], 1, None), "not negative"),
        (lambda: bandits.thompson_pool([1], [1], 2, None), "cannot take 2 of 1"),
        (lambda: bandits.rank_posterior([1], [1], None, level=2), "level=2"),
    ],
)
def test_mistakes_are_named(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    ("wins", "losses"), [((3, 1), (1, 4)), ((0, 7), (2, 2)), ((12, 9), (3, 3))]
)
def test_win_probability_equals_the_integral(wins, losses) -> None:
    first, second = (beta(w + 1, l + 1) for w, l in zip(wins, losses, strict=True))
    expected = quad(lambda x: first.pdf(x) * second.cdf(x), 0, 1)[0]
    assert bandits.win_probability(wins, losses) == pytest.approx(expected, abs=1e-9)
    swapped = bandits.win_probability(wins[::-1], losses[::-1])
    assert bandits.win_probability(wins, losses) + swapped == pytest.approx(1)


def test_regret_by_hand() -> None:
    table = [[0.5, 0.7, 0.8], [0.3, 0.5, 0.6], [0.2, 0.4, 0.5]]
    assert bandits.regret(table, [[0, 1], [1, 2]]) == pytest.approx(0.2 + 0.2 + 0.3)
    with pytest.raises(ValueError, match="no client beats all"):
        bandits.regret([[0.5, 0.7, 0.3], [0.3, 0.5, 0.7], [0.7, 0.3, 0.5]], [])


def test_skew_bounds_hold_for_every_deviation_of_coin_tosses() -> None:
    """All 2^M samples of a coin: no tail exceeds the bound, and M = 1 nearly attains it."""
    for size, chance in ((1, 0.5), (4, 0.3), (8, 0.5)):
        means = np.array(list(product((0, 1), repeat=size)), float)
        weights = np.prod(np.where(means > 0, chance, 1 - chance), axis=1)
        means = means.mean(axis=1)
        for gap in np.arange(1, size + 1) / size:
            tail = weights[np.abs(means - chance) >= gap - 1e-12].sum()
            # two clients, `gap` above and below their mean: each is `gap` away from it
            bound = bandits.skew_bounds([[gap], [-gap]], [size, size], [0.0], [1.0])[:, 0]
            assert bound == pytest.approx(2 * np.exp(-2 * size * gap**2))
            assert tail <= bound[0] + 1e-12
    assert bandits.skew_bounds([[0.5], [-0.5]], [1, 1], [0.0], [1.0])[0, 0] < 1.3  # true tail: 1


def test_the_product_of_skew_bounds_orders_clients_as_the_reward_does() -> None:
    """Equations 12 and 14: with equal sizes and ranges, the log of the product is -c reward^2."""
    updates = np.random.default_rng(0).normal(size=(6, 5))
    logs = np.log(bandits.skew_bounds(updates, [7] * 6, np.zeros(5), np.ones(5)) / 2).sum(axis=1)
    rewards = -np.linalg.norm(updates - updates.mean(axis=0), axis=1)
    assert logs == pytest.approx(-14 * rewards**2)
    with pytest.raises(ValueError, match="high above low"):
        bandits.skew_bounds(updates, [7] * 6, np.zeros(5), np.zeros(5))


def test_win_probability_by_enumeration_of_an_urn() -> None:
    """Beta(a, b) with whole a, b is an order statistic of a + b - 1 uniform numbers: rank them."""
    (w1, w2), (l1, l2) = (1, 0), (1, 1)
    first, second = w1 + l1 + 1, w2 + l2 + 1  # uniform numbers of each client
    hits = total = 0
    for own in combinations(range(first + second), first):
        others = [r for r in range(first + second) if r not in own]
        total += 1
        hits += own[w1] > others[w2]  # the (wins + 1)-th smallest has Beta(wins + 1, losses + 1)
    assert bandits.win_probability((w1, w2), (l1, l2)) == pytest.approx(hits / total)
