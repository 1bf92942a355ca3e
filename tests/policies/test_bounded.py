from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedcohort import Session
from fedcohort.policies import POLICIES, Bounded, ClusteredSampling, Policy, Uniform
from fedcohort.rounds import Selection
from fedcohort.testing import check_policy, drive

CLIENTS = [f"c{i:02d}" for i in range(40)]


class Favorites(Policy):
    """Always the same clients, and never the last one."""

    def select(self, round, signals, rng):
        return Selection(tuple(c for c in round.available if c != "c39")[: round.size])


def places(policy, rounds, cohort_size=4, away=lambda number: ()):
    session = Session(policy, cohort_size=cohort_size, seed=0)
    counts = Counter()
    for number in range(rounds):
        there = [c for c in CLIENTS if c not in away(number)]
        counts.update(drive(session, there).clients)
    return counts


@pytest.mark.parametrize("cap", [1.25, 1.5, 3.0])
def test_no_client_exceeds_its_cap(cap):
    """200 rounds of 4 of 40: a fair share of 20 places each."""
    counts = places(Bounded(Favorites(), floor=0.0, cap=cap), 200)
    assert max(counts.values()) <= cap * 20 + 1
    assert max(places(Favorites(), 200).values()) == 200  # without bounds
    assert sum(counts.values()) == 800


@pytest.mark.parametrize("floor", [0.1, 0.5, 1.0])
def test_every_client_reaches_its_floor(floor):
    counts = places(Bounded(Favorites(), floor=floor, cap=3.0), 200)
    assert min(counts[c] for c in CLIENTS) >= floor * 20 - 1
    assert places(Bounded(Favorites(), floor=0.0), 200)["c39"] < 20 * 0.1


def test_shares_count_only_rounds_in_which_a_client_was_there():
    """A client that comes for the last 20 of 200 rounds is due 2 places, not 20."""
    away = lambda number: ("c39",) if number < 180 else ()  # noqa: E731
    counts = places(Bounded(Favorites(), floor=1.0, cap=1.0), 200, away=away)
    assert 1 <= counts["c39"] <= 3


@pytest.mark.parametrize("first", [0, 20])
def test_newcomers_share_one_cap_whatever_they_are_called(first):
    """An attacker comes back under a new name each round, and the policy likes it best.

    Fair is 4 / 41 of a place per round; together they may take twice that. Alone, each had its
    first place free: a place in every round.
    """

    class Newest(Policy):
        def select(self, round, signals, rng):
            return Selection(round.available[::-1][: round.size])  # "x..." comes last

    session, places_taken = Session(Bounded(Newest()), cohort_size=4, seed=0), 0
    for number in range(200):
        name = f"x{number:03d}"
        there = [*CLIENTS, name] if number >= first else CLIENTS
        places_taken += name in drive(session, there).clients
    assert places_taken <= 2 * (200 - first) * 4 / 41 + 1
    assert places_taken >= 20  # honest newcomers are heard too


@pytest.mark.parametrize("name", ["fedcor", "oort", "race-softmax", "sketch-match"])
def test_a_bounded_policy_keeps_the_contract(name):
    check_policy(lambda: Bounded(POLICIES[name]()))


@pytest.mark.parametrize(
    "options", [{"floor": -0.1}, {"floor": 1.1}, {"cap": 0.9}, {"cap": float("nan")}]
)
def test_bounds_that_cannot_be(options):
    with pytest.raises(ValueError, match=r"Bounded: .*(floor|cap)="):
        Bounded(Uniform(), **options)
    with pytest.raises(ValueError, match="policy="):
        Bounded("uniform")


def test_the_inner_weights_are_kept_where_nobody_is_behind():
    session = Session(Bounded(ClusteredSampling(), floor=0.0), cohort_size=4, seed=0)
    weights = drive(session, CLIENTS).weights
    assert weights is not None
    assert np.isclose(sum(weights), 1)
