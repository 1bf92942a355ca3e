"""Facility location against plain greedy and the best set by brute force."""

from __future__ import annotations

import types
from itertools import combinations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from fedcohort.numerics import _loops, facility


def _table(seed: int, n: int = 9) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(n, 3))
    return cdist(points, points)


def _plain_greedy(table: np.ndarray, size: int, weights: np.ndarray) -> list[int]:
    chosen: list[int] = []
    for _ in range(size):
        rest = [j for j in range(table.shape[1]) if j not in chosen]
        values = [weights @ table[:, [*chosen, j]].min(axis=1) for j in rest]
        chosen.append(rest[int(np.argmin(values))])
    return chosen


@pytest.mark.parametrize("seed", range(15))
def test_lazy_equals_plain_greedy(seed: int) -> None:
    table = _table(seed)
    weights = np.random.default_rng(seed).random(9) + 0.1
    assert facility.lazy_greedy(table, 5, weights) == _plain_greedy(table, 5, weights)


@pytest.mark.parametrize("seed", range(15))
def test_every_prefix_costs_what_plain_greedy_costs(seed: int) -> None:
    """With equal weights two mutual neighbors tie exactly, so costs are compared, not names."""
    table = _table(seed)
    lazy, plain = facility.lazy_greedy(table, 9), _plain_greedy(table, 9, np.ones(9))
    for size in range(1, 10):
        expected = facility.cost(table, plain[:size])
        assert facility.cost(table, lazy[:size]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(15))
def test_greedy_keeps_its_guarantee(seed: int) -> None:
    """The decrease from the worst single choice reaches 1 - 1/e of the best decrease."""
    table = _table(seed)
    start = table.max(axis=1).sum()
    best = min(facility.cost(table, subset) for subset in combinations(range(9), 3))
    reached = facility.cost(table, facility.lazy_greedy(table, 3))
    assert best <= reached
    assert start - reached >= (1 - 1 / np.e) * (start - best)


def test_stochastic_greedy_keeps_its_guarantee_on_average() -> None:
    table = _table(3, n=12)
    start = table.max(axis=1).sum()
    best = min(facility.cost(table, subset) for subset in combinations(range(12), 3))
    rng = np.random.default_rng(0)
    reached = [facility.cost(table, facility.stochastic_greedy(table, 3, rng)) for _ in range(200)]
    assert start - np.mean(reached) >= (1 - 1 / np.e - 0.1) * (start - best)


def test_looking_at_everybody_is_greedy() -> None:
    table = _table(4)
    rng = np.random.default_rng(0)
    assert facility.stochastic_greedy(table, 4, rng, epsilon=1e-9) == facility.lazy_greedy(table, 4)


def test_compiled_loop_equals_plain_python() -> None:
    table = np.ascontiguousarray(_table(6, n=21))
    shares = np.random.default_rng(0).random(21)
    compiled = _loops.lazy_loop(table, shares, 7)
    gain = _loops._gain.py_func
    space = vars(_loops) | {"_gain": gain}
    plain = types.FunctionType(_loops.lazy_loop.py_func.__code__, space)
    assert compiled.tolist() == plain(table, shares, 7).tolist()


def test_rectangular_tables_and_duplicates() -> None:
    table = _table(5)[:, [0, 0, 3, 3, 7]]
    chosen = facility.lazy_greedy(table, 5)
    assert sorted(chosen) == [0, 1, 2, 3, 4]
    assert {chosen[0], chosen[1], chosen[2]} & {0, 1}  # the copies come last
    assert facility.cost(table, chosen[:3]) == pytest.approx(facility.cost(table, range(5)))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: facility.lazy_greedy([[1.0]], 2), "cannot pick 2 of 1"),
        (lambda: facility.lazy_greedy([[np.nan]], 1), "finite"),
        (lambda: facility.lazy_greedy([[1.0]], 1, [1, 2]), "2 weights for 1"),
        (lambda: facility.stochastic_greedy([[1.0]], 1, None, epsilon=1), "epsilon=1"),
        (lambda: facility.cost([[1.0]], []), "nothing is chosen"),
    ],
)
def test_mistakes_are_named(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()
