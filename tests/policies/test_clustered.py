"""Clustered sampling: expected weights equal the shares of the data, whatever the clusters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.policies import ClusteredSampling
from fedcohort.policies.clustered import _always_selected, _draw_one_per_unit, _similarity_groups
from fedcohort.rounds import Round, stream
from fedcohort.signals.table import Signals

IDS = tuple(f"{i:02d}" for i in range(12))
SIZES = np.array([40, 3, 17, 8, 9, 25, 60, 5, 12, 30, 7, 14])


def recorded(n=SIZES, ids=IDS) -> Signals:
    signals = Signals()
    signals.record("num_examples", dict(zip(ids, n, strict=True)), 0)
    return signals


def similar(signals: Signals, kinds: int = 4, signal: str = "update_sketch") -> Signals:
    rng = np.random.default_rng(0)
    rows = {c: 20.0 * np.eye(kinds)[int(c) % kinds] + 0.1 * rng.normal(size=kinds) for c in IDS}
    signals.record(signal, rows, 0)
    return signals


@pytest.mark.parametrize("by", ["size", "similarity"])
@pytest.mark.parametrize("size", [1, 3, 5, 11])
def test_expected_weights_are_the_shares(by: str, size: int) -> None:
    """Mean weight over 3,000 draws; a weight lies in [0, max(1/size, p)], so 5 standard errors."""
    signals = similar(recorded())
    policy = ClusteredSampling(by)
    total = np.zeros(12)
    draws = 3000
    for i in range(draws):
        selection = policy.select(Round(0, IDS, size), signals, stream(size, i))
        assert len(selection.clients) == size
        assert sum(selection.weights) == pytest.approx(1)
        for client, weight in zip(selection.clients, selection.weights, strict=True):
            total[int(client)] += weight
    share = SIZES / SIZES.sum()
    largest = np.maximum(1 / size, share)
    error = 5 * np.sqrt(share * largest / draws) + 1e-12
    assert (np.abs(total / draws - share) < error).all()


@settings(max_examples=80, deadline=None)
@given(
    n=st.lists(st.integers(0, 1000), min_size=1, max_size=25).filter(any),
    size=st.integers(1, 12),
    seed=st.integers(0, 2**32),
)
def test_cohorts_are_complete_and_different(n: list[int], size: int, seed: int) -> None:
    share = np.array(n) / sum(n)
    size = min(size, int(np.count_nonzero(share)))
    sure, mass = _always_selected(share, size)
    assert mass.sum() == pytest.approx(size - sure.size)
    assert (mass <= 1).all()
    left = np.flatnonzero(mass > 0)
    places = size - sure.size
    drawn = (
        left[_draw_one_per_unit(mass[left], places, np.random.default_rng(seed))]
        if places
        else left[:0]
    )
    assert len({*sure.tolist(), *drawn.tolist()}) == size


@pytest.mark.parametrize("seed", range(12))
def test_draws_have_the_right_marginals_and_one_a_unit(seed: int) -> None:
    """Exact by construction; here by 2,000 draws, 5 standard deviations for each client."""
    rng = np.random.default_rng(seed)
    mass = rng.dirichlet(np.ones(9)) * 3
    if mass.max() > 1:
        return
    counts = np.zeros(9)
    ends = np.cumsum(mass)
    for _ in range(2000):
        drawn = _draw_one_per_unit(mass, 3, rng)
        assert len(set(drawn.tolist())) == 3
        for unit, i in enumerate(drawn):
            assert ends[i] > unit - 1e-9
            assert ends[i] - mass[i] < unit + 1 + 1e-9
        counts[drawn] += 1
    assert (np.abs(counts / 2000 - mass) < 5 * np.sqrt(mass * (1 - mass) / 2000) + 1e-9).all()


def test_like_clients_seldom_come_together() -> None:
    signals = similar(recorded(np.full(12, 10)))
    together = {}
    for by in ("size", "similarity"):
        policy = ClusteredSampling(by)
        chosen = [policy.select(Round(0, IDS, 4), signals, stream(i)).clients for i in range(200)]
        together[by] = np.mean([len({int(c) % 4 for c in cohort}) for cohort in chosen])
    assert together["similarity"] == 4.0  # four kinds of three, each fills one distribution
    assert together["size"] < 3.5


def test_groups_fit_into_a_place_and_follow_likeness() -> None:
    rng = np.random.default_rng(0)
    rows = np.repeat(10 * np.eye(3), 8, axis=0) + 0.1 * rng.normal(size=(24, 3))
    labels = _similarity_groups(rows, np.full(24, 6 / 24), places=6)
    assert len(set(labels.tolist())) >= 6
    for label in set(labels.tolist()):
        members = np.flatnonzero(labels == label)
        assert members.size * 6 / 24 <= 1
        assert len(set((members // 8).tolist())) == 1  # no group mixes kinds


def test_a_giant_is_always_there_with_its_share() -> None:
    signals = recorded(np.array([900, *np.full(11, 10)]))
    for i in range(20):
        selection = ClusteredSampling().select(Round(0, IDS, 3), signals, stream(i))
        weights = dict(zip(selection.clients, selection.weights, strict=True))
        # Sizes are clipped at ten times the median, here 100: still more than one place of three.
        assert weights["00"] == pytest.approx(100 / 210)
        assert sum(weights.values()) == pytest.approx(1)


def test_clients_without_data_and_unknown_sizes() -> None:
    signals = recorded(np.array([10, 10, 0, *np.full(9, 0)]))
    selection = ClusteredSampling().select(Round(0, IDS, 4), signals, stream(0))
    assert set(selection.clients) == {"00", "01"}  # the session fills the rest
    unknown = ClusteredSampling().select(Round(0, IDS, 4), Signals(), stream(0))
    assert unknown.weights == pytest.approx((0.25,) * 4)


def test_groups_are_kept_for_the_interval() -> None:
    policy = ClusteredSampling("similarity", interval=3)
    signals = similar(recorded())
    made = []
    for number in range(7):
        policy.select(Round(number, IDS, 4), signals, stream(number))
        made.append(policy.state.made)
    assert made == [0, 0, 0, 3, 3, 3, 6]


def test_sketches_and_profiles_group_without_training() -> None:
    signals = similar(recorded(np.full(12, 10)), signal="feature_profile")
    policy = ClusteredSampling("similarity", "feature_profile")
    chosen = policy.select(Round(0, IDS, 4), signals, stream(0)).clients
    assert sorted(int(c) % 4 for c in chosen) == [0, 1, 2, 3]
    assert policy.needs.profile == {"num_examples", "feature_profile"}
