"""RACE softmax: the sampling law by enumeration, distances against the sketch module's own."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chi2

from fedcohort.numerics.sampling import successive_inclusion
from fedcohort.policies import RaceSoftmax
from fedcohort.rounds import Round, stream
from fedcohort.signals.forms import sketch_dtype
from fedcohort.signals.table import Signals
from fedcohort.sketch.distances import distances_to_global

IDS = tuple("abcdef")


def sketches(seed: int = 0, clients: int = 6, noise: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = np.zeros(clients, sketch_dtype(5, 8, "i4"))
    for one in out:
        one["n"] = n = rng.integers(20, 200)
        one["counts"] = rng.multinomial(n, rng.dirichlet(np.full(8, 0.5)), size=5)
        one["noise"] = noise
        one["counts"] += np.round(np.sqrt(noise) * rng.normal(size=(5, 8))).astype(int)
    return out


def recorded(readings: np.ndarray, ids=IDS, stamp: int = 0) -> Signals:
    signals = Signals()
    signals.record("race_sketch", dict(zip(ids, readings, strict=True)), stamp)
    return signals


def law(p: np.ndarray, k: int) -> dict[tuple[int, ...], float]:
    result = {}
    for order in permutations(range(len(p)), k):
        left, chance = list(range(len(p))), 1.0
        for i in order:
            chance *= p[i] / p[left].sum()
            left.remove(i)
        result[order] = chance
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_cohorts_follow_algorithm_3(temperature: float) -> None:
    """Chi-square over the 30 ordered pairs, 10,000 draws, at the 1e-4 level."""
    readings = sketches()
    q = readings["counts"] / readings["n"][:, None, None]
    far = np.sqrt(((q - q.mean(axis=0)) ** 2).sum(axis=(1, 2)))
    expected = law(np.exp(1 / (temperature * far)), 2)
    policy, signals = RaceSoftmax(temperature=temperature), recorded(readings)
    counts = dict.fromkeys(expected, 0)
    draws = 10_000
    for i in range(draws):
        chosen = policy.select(Round(0, IDS, 2), signals, stream(0, i)).clients
        counts[tuple(IDS.index(c) for c in chosen)] += 1
    statistic = sum((counts[o] - draws * p) ** 2 / (draws * p) for o, p in expected.items())
    assert min(expected.values()) * draws > 5
    assert statistic < chi2.isf(1e-4, len(expected) - 1)


def test_scores_are_inclusion_probabilities_and_weights_their_inverse() -> None:
    readings = sketches()
    policy = RaceSoftmax(weights="inverse-inclusion")
    selection = policy.select(Round(0, IDS, 2), recorded(readings), stream(0))
    q = readings["counts"] / readings["n"][:, None, None]
    far = np.sqrt(((q - q.mean(axis=0)) ** 2).sum(axis=(1, 2)))
    chance = dict.fromkeys(range(6), 0.0)
    for order, probability in law(np.exp(1 / far), 2).items():
        for i in order:
            chance[i] += probability
    share = readings["n"] / readings["n"].sum()
    for client, weight in zip(selection.clients, selection.weights, strict=True):
        i = IDS.index(client)
        assert selection.scores[client] == pytest.approx(chance[i])
        assert weight == pytest.approx(share[i] / chance[i])
    # so that the expected weight of every client is its share of the data
    assert sum(chance.values()) == pytest.approx(2)


@pytest.mark.parametrize("center", ["mean", "pooled"])
@pytest.mark.parametrize("distance", ["frobenius", "row-l2"])
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("noise", [0.0, 4.0])
def test_distances_are_those_of_the_sketch_module(center, distance, debias, noise) -> None:
    readings = sketches(noise=noise)
    policy, signals = RaceSoftmax(), recorded(readings)
    policy.state.include(signals, IDS, 0)
    got = policy.state.distances(readings, center, distance, debias)
    expected = distances_to_global(readings, center, distance, debias)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


def test_private_sketches_are_debiased_by_default() -> None:
    readings = sketches(noise=9.0)
    default, asked = RaceSoftmax(), RaceSoftmax(debias=True)
    for policy in (default, asked):
        policy.select(Round(0, IDS, 2), recorded(readings), stream(0))
    np.testing.assert_array_equal(default._kept[2], asked._kept[2])


def test_global_sketch_remembers_those_who_left() -> None:
    readings = sketches()
    together, apart = RaceSoftmax(), RaceSoftmax()
    together.state.include(recorded(readings), IDS, 0)
    signals = recorded(readings[:3], IDS[:3], 0)
    apart.state.include(signals, IDS[:3], 0)
    signals.record("race_sketch", dict(zip(IDS[3:], readings[3:], strict=True)), 1)
    for _ in range(2):  # nothing is counted twice
        apart.state.include(signals, IDS[3:], 1)
    assert apart.state.clients == 6
    for kind in ("mean", "pooled"):
        np.testing.assert_allclose(apart.state.center(kind), together.state.center(kind))


def test_zero_distances_come_first_and_do_not_blow_up() -> None:
    readings = sketches(clients=3)
    readings["n"], readings["counts"] = 8, np.ones((5, 8))
    readings["counts"][2] *= 0
    readings["counts"][2][:, 0] = 8
    readings = np.concatenate([readings, readings])  # center: not at any client
    signals = recorded(readings[[0, 1]], ("a", "b"))
    chosen = RaceSoftmax(temperature=1e-9).select(Round(0, ("a", "b"), 1), signals, stream(0))
    assert chosen.clients[0] in "ab"  # both at distance zero
    assert chosen.scores[chosen.clients[0]] == pytest.approx(0.5)


def test_clients_without_data_are_not_drawn() -> None:
    readings = sketches()
    readings["n"][0], readings["counts"][0] = 0, 0
    signals = recorded(readings)
    for i in range(50):
        assert "a" not in RaceSoftmax().select(Round(0, IDS, 4), signals, stream(0, i)).clients
    assert len(RaceSoftmax().select(Round(0, IDS, 6), signals, stream(0)).clients) == 5


def test_distances_are_kept_until_something_changes() -> None:
    policy, signals = RaceSoftmax(), recorded(sketches())
    policy.select(Round(0, IDS, 2), signals, stream(0))
    kept = policy._kept
    policy.select(Round(1, tuple(IDS), 2), signals, stream(1))
    assert policy._kept is kept
    policy.select(Round(2, IDS[:4], 2), signals, stream(2))
    assert policy._kept is not kept


def test_a_sketch_sent_twice_counts_once() -> None:
    """After client a sends another sketch, the sums are those of the newest sketches alone."""
    first, newest = sketches(seed=1), sketches(seed=2)
    newest[1:] = first[1:]
    signals, policy = recorded(first), RaceSoftmax()
    policy.state.include(signals, IDS, 0)
    signals.record("race_sketch", {"a": newest[0]}, 1)
    assert policy.state.include(signals, IDS, 1) == ()  # nobody is new
    expected = RaceSoftmax()
    expected.state.include(recorded(newest), IDS, 0)
    assert (policy.state.clients, policy.state.n) == (6, expected.state.n)
    for kind in ("mean", "pooled"):
        np.testing.assert_allclose(policy.state.center(kind), expected.state.center(kind))
        for debias in (False, True):
            got = policy.state.distances(newest, kind, "frobenius", debias)
            np.testing.assert_allclose(
                got, distances_to_global(newest, kind, "frobenius", debias), rtol=1e-9, atol=1e-9
            )


def test_private_sketches_starve_nobody() -> None:
    """Exact participation in 100 rounds of 5 of 100 clients, from inclusion probabilities.

    Clients hold 40 records of two of ten kinds, noise as at epsilon 1 with 10 rows. Many debiased
    squares are then negative. As zeros they took all picks: only 13 clients took part.
    """
    rng = np.random.default_rng(0)
    ids = tuple(f"{i:03d}" for i in range(100))
    bucket = rng.integers(0, 16, size=(10, 10))
    readings = np.zeros(100, sketch_dtype(10, 16, "i4"))
    for one in readings:
        records = rng.choice(rng.choice(10, 2, replace=False), 40)
        for r in range(10):
            one["counts"][r] = np.bincount(bucket[r][records], minlength=16)
        one["counts"] += np.round(rng.laplace(scale=10.0, size=(10, 16))).astype(int)
    readings["n"], readings["noise"] = 40, 200.0
    policy = RaceSoftmax()
    policy.select(Round(0, ids, 5), recorded(readings, ids), stream(0))
    chance = successive_inclusion(policy._kept[2], 5)
    assert chance.sum() == pytest.approx(5)
    expected = float((1 - (1 - chance) ** 100).sum())
    assert expected > 90  # uniform: 100 (1 - 0.95^100) = 99.4


def test_sums_of_counts_are_whole_and_parts_change_nothing(monkeypatch) -> None:
    """Bit for bit, for any BLAS and any number of sketches that are read at a time."""
    ids = tuple(f"{i:02d}" for i in range(40))
    readings = sketches(clients=40, noise=3.0)
    round = Round(0, ids, 5)
    found = []
    for part in (3, 1_024):
        monkeypatch.setattr("fedcohort.policies.race_softmax._PART", part)
        policy = RaceSoftmax()
        chosen = policy.select(round, recorded(readings, ids), stream(0))
        found.append((chosen, policy._kept[2].tobytes()))
        np.testing.assert_array_equal(policy.state.counts, readings["counts"].sum(axis=0))
    assert found[0] == found[1]
