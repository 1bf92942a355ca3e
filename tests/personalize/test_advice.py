from __future__ import annotations

from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.exceptions import ConfigError, DataError, NoClients
from fedcohort.personalize import ColdStart, Record, nearest
from fedcohort.personalize.advice import RIDGE, best_mixture, distance_limit
from fedcohort.personalize.models import average

PLACES = {"a": 0.0, "b": 0.1, "c": 2.0, "d": 3.2}
ANGLES = [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0]


@pytest.fixture
def warm(registry, make):
    for i, angle in enumerate(ANGLES):
        registry.add(f"c{i}", make(angle, i), {"w": np.array([angle])})
    registry.set_global({"w": np.array([-1.0])})
    return registry


@pytest.mark.parametrize("strategy", ["match", "nearest", "plain"])
def test_a_newcomer_gets_the_model_of_its_kind_or_the_global_one(warm, make, strategy):
    start = ColdStart(warm)
    for angle in (0.0, 2.0, 4.0):
        advice = start.advise(make(angle, 100), strategy)
        assert advice.near
        assert sum(advice.weights.values()) == pytest.approx(1)
        assert advice.distance <= advice.max_distance
        assert start.model(advice)["w"][0] == pytest.approx(angle, abs=0.05)
    far = start.advise(make(5.2, 100), strategy)
    assert not far.near
    assert far.weights == {}
    assert far.distance > far.max_distance
    assert start.model(far)["w"][0] == -1.0


def test_newcomers_like_the_warm_are_rarely_sent_away(registry, make):
    """By construction 1 in 20; at most 8 of 60 is exceeded with probability 0.2% (binomial)."""
    rng = np.random.default_rng(5)
    for i in range(60):
        registry.add(f"c{i}", make(rng.uniform(0, 6), i), reference="x")
    start = ColdStart(registry)
    away = sum(not start.advise(make(rng.uniform(0, 6), 1000 + i)).near for i in range(60))
    assert away <= 8


def test_the_limit_can_be_set_or_lifted(warm, make):
    far = make(5.2, 100)
    assert ColdStart(warm, max_distance=None).advise(far).near
    assert ColdStart(warm, max_distance=1e3).advise(far).near
    for bad in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="max_distance"):
            ColdStart(warm, max_distance=bad)


def test_a_mixture_of_two_kinds_is_matched(warm, make):
    """Half of one kind, half of another: nobody is near, but a mixture is."""
    half = make(0.0, 50, n=1000)
    half += make(2.0, 51, n=1000)
    start = ColdStart(warm)
    assert not start.advise(half, "nearest").near
    advice = start.advise(half, "match")
    assert advice.near
    of_first = sum(w for c, w in advice.weights.items() if c in ("c0", "c1", "c2"))
    of_second = sum(w for c, w in advice.weights.items() if c in ("c3", "c4", "c5"))
    assert of_first == pytest.approx(0.5, abs=0.05)
    assert of_second == pytest.approx(0.5, abs=0.05)
    assert start.model(advice)["w"][0] == pytest.approx(1.0, abs=0.1)


def test_clients_without_models_are_found_but_not_advised(registry, make):
    with pytest.raises(NoClients):
        ColdStart(registry).advise(make(1.0))
    for i in range(5):
        registry.add(f"bare {i}", make(1.0, i))
    start = ColdStart(registry, max_distance=None)
    alone = start.advise(make(1.0, 20), "match", 3)  # no client has a model
    assert (alone.weights, alone.near, len(alone.neighbors)) == ({}, False, 3)
    registry.add("with", make(1.2, 9), {"w": np.ones(2)})
    assert len(nearest(registry, make(1.0, 20), k=6)) == 6
    for strategy in ("nearest", "plain", "match"):
        assert start.advise(make(1.0, 20), strategy).weights == {"with": 1.0}


def test_mistakes_are_named(registry, warm, make):
    start = ColdStart(warm)
    with pytest.raises(ConfigError, match="'best'"):
        start.advise(make(0.0), "best")
    registry.add("far", make(5.5, 60), reference="s3://far")
    advice = start.advise(make(5.5, 61))
    assert advice.weights == {"far": 1.0}
    with pytest.raises(ConfigError, match="s3://far"):
        start.model(advice)


def test_averages_keep_types_and_refuse_unlike_models():
    a = {"w": np.array([1.0, 3.0], np.float16), "steps": np.array(7)}
    b = {"w": np.array([3.0, 1.0], np.float16), "steps": np.array(9)}
    mean = average({"a": (0.25, a), "b": (0.75, b)})
    assert (mean["w"].dtype, mean["w"].tolist(), mean["steps"]) == (np.float16, [2.5, 1.5], 9)
    with pytest.raises(DataError, match="'w'"):
        average({"a": (0.5, a), "b": (0.5, {**b, "w": np.zeros(3)})})


def problem(seed, k=6, dim=4):
    rng = np.random.default_rng(seed)
    clients, newcomer = rng.normal(size=(k, dim)), rng.normal(size=dim) / 2
    return clients @ clients.T, ((clients - newcomer) ** 2).sum(axis=1), clients, newcomer


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_matching_is_the_minimum_over_the_simplex(seed):
    """No other weights do better: first-order conditions, and 200 random alternatives."""
    gram, squares, clients, newcomer = problem(seed)
    errors = np.random.default_rng(seed + 1).uniform(0, 0.5, 6)

    def cost(w):
        return ((w @ clients - newcomer) ** 2).sum() + RIDGE * (w**2 * errors).sum()

    weights, square = best_mixture(gram, squares, errors)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    assert square == pytest.approx(((weights @ clients - newcomer) ** 2).sum(), abs=1e-9)
    rng = np.random.default_rng(seed + 2)
    for other in [*np.eye(6), *rng.dirichlet(np.full(6, 0.5), 200)]:
        assert cost(weights) <= cost(other) + 1e-7
    slope = 2 * gram @ weights + 2 * RIDGE * errors * weights + squares - np.diag(gram)
    used = weights > 1e-6
    assert np.ptp(slope[used]) < 1e-4
    assert slope.min() > slope[used].mean() - 1e-4


def test_matching_survives_what_debiasing_does():
    """A diagonal made too small leaves negative curvature; the answer is still a mixture."""
    gram, squares, _, _ = problem(3)
    weights, _ = best_mixture(gram - 5 * np.eye(6), squares - 5, np.zeros(6))
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    assert best_mixture(np.zeros((1, 1)), [0.0], [0.0])[0].tolist() == [1.0]


def test_the_limit_is_a_quantile_of_distances_to_the_nearest_other(registry, make):
    assert distance_limit(registry) == inf
    sketches = {c: make(angle, i, 2000) for i, (c, angle) in enumerate(PLACES.items())}
    registry.add_many(Record(c, sketch, reference=c) for c, sketch in sketches.items())
    near = {c: nearest(registry, s, without=c)[0] for c, s in sketches.items()}
    assert {c: one.client for c, one in near.items()} == {"a": "b", "b": "a", "c": "d", "d": "c"}
    squares = [one.squared for one in near.values()]
    assert distance_limit(registry) == pytest.approx(np.quantile(squares, 0.95))
    assert distance_limit(registry, most=2) in [
        pytest.approx(np.quantile(p, 0.95)) for p in combinations(squares, 2)
    ]
