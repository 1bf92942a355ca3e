from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError, DataError, NoClients
from fedcohort.personalize import ColdStart, Limit, Record
from fedcohort.personalize.cold_start import clusters
from fedcohort.personalize.limits import store_limit
from fedcohort.personalize.models import average
from fedcohort.sketch.race import RaceSketch

ANGLES = [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0]


@pytest.fixture
def warm(registry, make):
    for i, angle in enumerate(ANGLES):
        registry.add(f"c{i}", make(angle, i), {"w": np.array([angle])})
    registry.set_global({"w": np.array([-1.0])})
    return registry


@pytest.mark.parametrize("strategy", ["nearest", "k-nearest", "match", "cluster"])
def test_a_newcomer_gets_the_model_of_its_kind(warm, make, strategy):
    start = ColdStart(warm)
    for angle in (0.0, 2.0, 4.0):
        advice = start.advise(make(angle, 100), strategy, 3 if strategy == "k-nearest" else None)
        assert advice.near
        assert sum(advice.weights.values()) == pytest.approx(1)
        assert advice.distance <= advice.max_distance
        assert start.model(advice)["w"][0] == pytest.approx(angle, abs=0.05)


@pytest.mark.parametrize("strategy", ["nearest", "k-nearest", "match", "cluster"])
def test_a_newcomer_of_another_kind_gets_the_global_model(warm, make, strategy):
    start = ColdStart(warm)
    advice = start.advise(make(5.2, 100), strategy)
    assert not advice.near
    assert advice.weights == {}
    assert advice.distance > advice.max_distance
    assert start.model(advice)["w"][0] == -1.0


def test_private_sketches_work_throughout(warm, make):
    """The epsilon leaves twins ten times nearer than strangers; seeds are fixed."""
    start = ColdStart(warm)
    rng = np.random.default_rng(0)
    for angle in (0.0, 2.0, 4.0):
        query = make(angle, 100, n=2000).privatize(4.0, rng=rng)
        advice = start.advise(query, "k-nearest", 3)
        assert start.model(advice)["w"][0] == pytest.approx(angle, abs=0.1)


def test_newcomers_like_the_warm_are_rarely_sent_away(registry, make):
    """By construction 1 in 20; at most 8 of 60 is exceeded with probability 0.2% (binomial)."""
    rng = np.random.default_rng(5)
    for i in range(60):
        registry.add(f"c{i}", make(rng.uniform(0, 6), i), reference="x")
    start = ColdStart(registry)
    away = sum(not start.advise(make(rng.uniform(0, 6), 1000 + i)).near for i in range(60))
    assert away <= 8


def test_little_data_is_no_reason_to_abstain(warm, make):
    """Five samples scatter far; the limit grows with their standard error."""
    start = ColdStart(warm)
    away = [not start.advise(make(2.0, 200 + i, n=5)).near for i in range(20)]
    assert sum(away) <= 2


def test_the_limit_can_be_set_or_lifted_or_stored(warm, make):
    far = make(5.2, 100)
    assert ColdStart(warm, max_distance=None).advise(far).near
    assert ColdStart(warm, max_distance=1e3).advise(far).near
    assert not ColdStart(warm, max_distance=0.01).advise(make(1.0, 9)).near
    store_limit(warm, Limit(1e6))
    assert ColdStart(warm).advise(far).near
    assert ColdStart(warm).limit == Limit(1e6)
    with pytest.raises(ConfigError, match="max_distance"):
        ColdStart(warm, max_distance=-1)


def test_neighbors_found_before_are_used(warm, make):
    start = ColdStart(warm)
    query = make(2.0, 100)
    found = start.nearest(query, 20)
    for strategy in ("nearest", "k-nearest", "match"):
        assert start.advise(query, strategy, neighbors=found) == start.advise(query, strategy)


def test_a_mixture_of_two_kinds_is_matched(warm, make):
    """Half of one kind, half of another: nobody is near, but a mixture is."""
    half = make(0.0, 50, n=1000)
    half.merge(make(2.0, 51, n=1000))
    start = ColdStart(warm)
    assert not start.advise(half, "nearest").near
    advice = start.advise(half, "match")
    assert advice.near
    of_first = sum(w for c, w in advice.weights.items() if c in ("c0", "c1", "c2"))
    of_second = sum(w for c, w in advice.weights.items() if c in ("c3", "c4", "c5"))
    assert of_first == pytest.approx(0.5, abs=0.05)
    assert of_second == pytest.approx(0.5, abs=0.05)
    assert start.model(advice)["w"][0] == pytest.approx(1.0, abs=0.1)


def test_mistakes_are_named(registry, warm, make, tmp_path):
    start = ColdStart(warm)
    with pytest.raises(ConfigError, match="unknown strategy 'best'"):
        start.advise(make(0.0), "best")
    registry.add("far", make(5.5, 60), reference="s3://far")
    advice = start.advise(make(5.5, 61))
    assert advice.weights == {"far": 1.0}
    with pytest.raises(ConfigError, match="s3://far"):
        start.model(advice)


def test_an_empty_registry_has_no_advice(registry, make):
    with pytest.raises(NoClients):
        ColdStart(registry).advise(make(0.0))


def cloud(empty, rng, shift, n):
    """Sketch of points in 20 dimensions, where rows see different things."""
    made = empty.empty_like()
    points = rng.normal(size=(n, 20))
    points[:, :2] += [1, shift]
    made.add(points)
    return made


def test_clusters_are_what_sketches_cannot_tell_apart(make):
    empty, rng = RaceSketch.srp(dim=20, rows=30, bits=5), np.random.default_rng(0)
    groups = clusters([cloud(empty, rng, shift, 200) for shift in (0, 0, 2, 2, 0, -2, -2)])
    assert groups.tolist() == [0, 0, 1, 1, 0, 2, 2]
    assert clusters([make(0.0)]).tolist() == [0]
    assert clusters([]).tolist() == []
    one = clusters([make(a, i) for i, a in enumerate(ANGLES)], cut=1e9)
    assert set(one.tolist()) == {0}


def test_much_noise_makes_one_cluster(make):
    rng = np.random.default_rng(0)
    noisy = [make(a, i).privatize(0.05, rng=rng) for i, a in enumerate(ANGLES)]
    assert len(set(clusters(noisy).tolist())) < 3


def test_clusters_of_too_many_are_refused(make, monkeypatch):
    monkeypatch.setattr("fedcohort.personalize.cold_start.MAX_CLUSTERED", 3)
    with pytest.raises(ConfigError, match="4 clients are more than 3"):
        clusters([make(0.0, i) for i in range(4)])


def test_averages_keep_types_and_refuse_unlike_models():
    a = {"w": np.array([1.0, 3.0], np.float16), "steps": np.array(7)}
    b = {"w": np.array([3.0, 1.0], np.float16), "steps": np.array(9)}
    mean = average({"a": (0.25, a), "b": (0.75, b)})
    assert mean["w"].dtype == np.float16
    assert mean["w"].tolist() == [2.5, 1.5]
    assert mean["steps"] == 9
    with pytest.raises(DataError, match="array 'x' is new"):
        average({"a": (0.5, a), "b": (0.5, {**b, "x": np.zeros(1)})})
    with pytest.raises(DataError, match=r"'w' has shape"):
        average({"a": (0.5, a), "b": (0.5, {**b, "w": np.zeros(3)})})
    with pytest.raises(ConfigError, match="at least one"):
        average({})


def test_small_clients_do_not_win_by_luck(registry):
    """Why the ranking is cautious: 300 small strangers beside one large twin.

    Ranked by the unbiased distance alone, some stranger is luckier than the twin every time.
    """
    empty, rng = RaceSketch.srp(dim=20, rows=16, bits=5), np.random.default_rng(0)
    registry.add("twin", cloud(empty, rng, 0.0, 5000), reference="x")
    strangers = [Record(f"c{i}", cloud(empty, rng, 1.0, 20), reference="x") for i in range(300)]
    registry.add_many(strangers)
    start = ColdStart(registry, max_distance=None)
    for _ in range(5):
        found = start.nearest(cloud(empty, rng, 0.0, 2000), 301)
        assert found[0].client == "twin"
        assert min(found, key=lambda near: near.squared).client != "twin"
