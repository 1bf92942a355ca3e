"""Facility location against plain greedy and the best set by brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from fedcohort.numerics import facility


def _table(seed: int, n: int = 9) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(n, 3))
    return cdist(points, points)


def _cost(table: np.ndarray, chosen) -> float:
    return float(table[:, list(chosen)].min(axis=1).sum())


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
        expected = _cost(table, plain[:size])
        assert _cost(table, lazy[:size]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(15))
def test_greedy_keeps_its_guarantee(seed: int) -> None:
    """The decrease from the worst single choice reaches 1 - 1/e of the best decrease."""
    table = _table(seed)
    start = table.max(axis=1).sum()
    best = min(_cost(table, subset) for subset in combinations(range(9), 3))
    reached = _cost(table, facility.lazy_greedy(table, 3))
    assert best <= reached
    assert start - reached >= (1 - 1 / np.e) * (start - best)


def test_rectangular_tables_and_duplicates() -> None:
    table = _table(5)[:, [0, 0, 3, 3, 7]]
    chosen = facility.lazy_greedy(table, 5)
    assert sorted(chosen) == [0, 1, 2, 3, 4]
    assert {chosen[0], chosen[1], chosen[2]} & {0, 1}  # the copies come last
    assert _cost(table, chosen[:3]) == pytest.approx(_cost(table, range(5)))
