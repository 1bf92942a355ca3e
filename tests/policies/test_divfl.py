"""DivFL against brute force, and what it does with few, stale and missing sketches."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from fedcohort.policies import DivFL
from fedcohort.rounds import Round, stream
from fedcohort.signals.table import Signals

IDS = tuple("abcdefghi")


def recorded(rows: np.ndarray, number: int = 0, ids=IDS, signal="gradient_sketch") -> Signals:
    signals = Signals()
    signals.record(signal, dict(zip(ids, rows, strict=True)), number)
    return signals


def cost(rows: np.ndarray, chosen, weights: np.ndarray) -> float:
    far = np.linalg.norm(rows[:, None] - rows[list(chosen)], axis=2)
    return float(weights @ far.min(axis=1))


@pytest.mark.parametrize("seed", range(10))
def test_greedy_steps_and_guarantee_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, n = rng.normal(size=(9, 4)), rng.integers(1, 30, size=9)
    signals = recorded(rows)
    signals.record("num_examples", dict(zip(IDS, n, strict=True)), 0)
    weights = n / n.sum()
    chosen = DivFL().select(Round(0, IDS, 3), signals, stream(0)).clients
    at = [IDS.index(c) for c in chosen]
    for step in range(3):
        best = min(cost(rows, [*at[:step], j], weights) for j in range(9))
        assert cost(rows, at[: step + 1], weights) == pytest.approx(best)
    start = weights @ np.linalg.norm(rows[:, None] - rows, axis=2).max(axis=1)
    optimum = min(cost(rows, s, weights) for s in combinations(range(9), 3))
    assert start - cost(rows, at, weights) >= (1 - 1 / np.e) * (start - optimum)


def test_coverage_weights_are_the_shares_of_the_nearest() -> None:
    rows = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [9.0], [9.1], [9.2], [9.3]])
    policy = DivFL(weights="coverage")
    selection = policy.select(Round(0, IDS, 3), recorded(rows), stream(0))
    for client, weight in zip(selection.clients, selection.weights, strict=True):
        at = IDS.index(client)
        assert weight == pytest.approx((3 if at < 3 else 2 if at < 5 else 4) / 9)
    assert sum(selection.weights) == pytest.approx(1)


def test_only_this_rounds_gradients_count() -> None:
    signals = recorded(np.eye(9), number=0)
    assert DivFL().select(Round(1, IDS, 3), signals, stream(0)).clients == ()
    assert DivFL().candidates(Round(1, IDS, 3), signals, stream(0)) == IDS


def test_updates_of_earlier_rounds_are_used_and_strangers_get_places() -> None:
    policy = DivFL("update_sketch")
    signals = recorded(np.eye(6), number=0, ids=IDS[:6], signal="update_sketch")
    assert policy.candidates(Round(5, IDS, 3), signals, stream(0)) == ()
    chosen = policy.select(Round(5, IDS, 3), signals, stream(0)).clients
    assert len(set(chosen) & set(IDS[:6])) == 2
    assert len(set(chosen) & set(IDS[6:])) == 1


def test_many_clients_are_represented_by_some() -> None:
    policy = DivFL(candidates=4)
    asked = policy.candidates(Round(0, IDS, 3), Signals(), stream(0))
    assert len(asked) == 4
    signals = Signals()
    signals.record("gradient_sketch", {c: [float(ord(c))] for c in asked}, 0)
    assert set(policy.select(Round(0, IDS, 3), signals, stream(1)).clients) <= set(asked)


def test_stochastic_greedy_is_nearly_as_good() -> None:
    rng = np.random.default_rng(1)
    ids = tuple(f"{i:03d}" for i in range(120))
    rows = rng.normal(size=(120, 3))
    signals = recorded(rows, ids=ids)
    weights = np.full(120, 1 / 120)
    costs = {}
    for method in ("lazy", "stochastic"):
        chosen = DivFL(method=method).select(Round(0, ids, 8), signals, stream(0)).clients
        costs[method] = cost(rows, [ids.index(c) for c in chosen], weights)
    assert costs["stochastic"] < 1.15 * costs["lazy"]
