from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.exceptions import ConfigError, DataError, NoClients
from fedcohort.personalize import ColdStart, Record, Registry, nearest, newcomers
from fedcohort.personalize.models import average
from fedcohort.personalize.newcomers import RIDGE, best_mixture
from fedcohort.sketch.distances import distance
from fedcohort.sketch.uncertainty import distance_with_error, possible_luck

PLACES = {"a": 0.0, "b": 0.1, "c": 2.0, "d": 3.2}
ANGLES = [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0]


def fill(registry, make, count):
    """Clients at different angles, of different sizes, half of them private."""
    rng, sketches = np.random.default_rng(0), {}
    for i in range(count):
        made = make(rng.uniform(0, 2 * np.pi), i, int(rng.integers(20, 300)))
        sketches[f"c{i}"] = made.privatize(3.0, rng=rng) if i % 2 else made
    registry.add_many(Record(c, s, reference=c) for c, s in sketches.items())
    return sketches


def ranked_by_hand(query, sketches, plain):
    """Every client by definition, one by one."""
    counts = np.array([s.counts for s in sketches.values()])
    a, b = possible_luck(counts, len(sketches))

    def score(client):
        other = sketches[client]
        if plain:
            return float(((query.normalized() - other.normalized()) ** 2).sum())
        luck = a / other.n + b * other.noise / other.n**2
        return distance(query, other, "mmd") * query.rows + luck

    return sorted(sketches, key=score)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("cells", [1 << 22, 1])
def test_a_search_is_the_definition(registry, make, plain, cells, monkeypatch):
    """All clients in one block, and block by block; `possible_luck` then sees the first alone."""
    monkeypatch.setattr(newcomers, "CELLS", cells)
    sketches = fill(registry, make, 60)
    for seed in range(3):
        query = make(seed, 1000 + seed)
        near = nearest(registry, query, k=60, plain=plain)
        if cells > 1 or plain:
            assert [f.client for f in near] == ranked_by_hand(query, sketches, plain)
        assert nearest(registry, query, k=7, plain=plain) == near[:7]
        for one in near[:3]:
            square, error = distance_with_error(query, sketches[one.client], "mmd")
            assert one.squared == pytest.approx(square * query.rows, abs=1e-12)
            assert one.error == pytest.approx(error * query.rows)
            assert one.distance == pytest.approx(max(one.squared, 0) ** 0.5)


def test_luck_bounds_what_twins_show_and_not_by_much():
    """1,000 times 50 sketches of one law, compared with the law itself.

    The luckiest is below the bound in at most 5 % of the cases: in fewer, because squares have a
    short lower tail. The 95 % quantile is at least .7 of the bound; without the quantile of N, or
    with another power of n, rows or the trace, it is not between .7 and 1.
    """
    rng, rows, n, clients = np.random.default_rng(0), 8, 200, 50
    p = rng.dirichlet(np.ones(16), rows)
    luckiest = []
    for _ in range(1000):
        q = rng.multinomial(n, p, (clients, rows)) / n
        squares = ((q - p) ** 2).sum((1, 2)) - (rows - (q**2).sum((1, 2))) / (n - 1)
        luckiest.append(-squares.min())
    a, _ = possible_luck(rng.multinomial(10**6, p)[None], clients)
    assert 0.7 < np.quantile(luckiest, 0.95) / (a / n) < 1


def test_questions_that_cannot_be_answered(registry, make):
    with pytest.raises(NoClients):
        nearest(registry, make(0.0))
    fill(registry, make, 3)
    with pytest.raises(ConfigError, match="k=0"):
        nearest(registry, make(0.0), k=0)
    for few in (make(0.0, n=1), make(0.0, n=3), make(0.0).privatize(0.05)):
        with pytest.raises(DataError, match=r"cannot tell.*n="):
            nearest(registry, few)


def test_counts_of_every_width(registry, make):
    """Counts of 1, 2, 4 and 8 bytes side by side."""
    sketches = [make(0.3 * i, i, n=20) for i in range(4)]
    for sketch, factor in zip(sketches, (1, 100, 10**6, 10**12), strict=True):
        sketch.counts, sketch.n = sketch.counts * factor, sketch.n * factor
    registry.add_many(Record(f"c{i}", sketch) for i, sketch in enumerate(sketches))
    near = [nearest(registry, sketch, k=4) for sketch in sketches]
    assert [(one[0].client, len(one)) for one in near] == [(f"c{i}", 4) for i in range(4)]


def test_a_damaged_sketch_is_skipped_and_named(registry, make):
    sketches = fill(registry, make, 10)
    query = make(1.0, 99)
    best, second = (near.client for near in nearest(registry, query, k=2))
    with registry.db.writing() as db:
        db.execute("UPDATE clients SET sketch = ? WHERE id = ?", (b"nothing", best))
    with pytest.warns(RuntimeWarning, match=f"client '{best}' is skipped"):
        assert nearest(registry, query)[0].client == second
    with pytest.warns(RuntimeWarning, match="is skipped"):
        assert {f.client for f in nearest(registry, query, k=9)} == sketches.keys() - {best}
    registry.add(best, sketches[best], reference="x", replace=True)
    assert nearest(registry, query)[0].client == best


def test_readers_never_fail_while_others_write(registry, make):
    """Searches from a second connection beside additions, replacements and removals."""
    fill(registry, make, 30)
    query, stop = make(1.0, 99), threading.Event()

    def read():
        answers = set()
        with Registry(registry.path) as reader:
            while not stop.is_set():
                answers.add(len(nearest(reader, query, k=5)))
        return answers

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for i in range(60):
                registry.add(f"new {i % 7}", make(i, i), reference="x", replace=True)
                if i % 5 == 0:
                    registry.remove(f"new {i % 7}")
        finally:
            stop.set()
        assert reading.result() == {5}


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


def test_the_limit_can_be_set_or_lifted(warm, make):
    for limit in (None, 1e3):
        assert ColdStart(warm, max_distance=limit).advise(make(5.2, 100)).near
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
    for kind in (("c0", "c1", "c2"), ("c3", "c4", "c5")):
        assert sum(advice.weights.get(c, 0) for c in kind) == pytest.approx(0.5, abs=0.05)
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


def test_the_limit_is_a_quantile_of_distances_to_the_nearest_other(registry, make, monkeypatch):
    assert ColdStart(registry).limit == inf
    sketches = {c: make(angle, i, 2000) for i, (c, angle) in enumerate(PLACES.items())}
    registry.add_many(Record(c, sketch, reference=c) for c, sketch in sketches.items())
    near = {c: nearest(registry, s, without=c)[0] for c, s in sketches.items()}
    assert {c: one.client for c, one in near.items()} == {"a": "b", "b": "a", "c": "d", "d": "c"}
    squares = [one.squared for one in near.values()]
    assert ColdStart(registry).limit == pytest.approx(np.quantile(squares, 0.95))
    monkeypatch.setattr(newcomers, "MAX_CALIBRATED", 2)
    assert ColdStart(registry).limit in [
        pytest.approx(np.quantile(p, 0.95)) for p in combinations(squares, 2)
    ]
