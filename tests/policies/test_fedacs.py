"""FedACS: duels from replies, the pool's law through the policy, the view without training."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.policies import FedACS
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.signals.table import Signals
from fedcohort.testing import recorded

IDS = ("a", "b", "c", "d")


def observed(policy: FedACS, distances: dict[str, float], number: int) -> None:
    signals = Signals()
    signals.record("update_distance", distances, number)
    clients = tuple(distances)
    policy.observe(Round(number, IDS, 3), Outcome(clients, clients), signals)


def test_only_fresh_distances_of_those_who_finished_count() -> None:
    policy, signals = FedACS(rate=0.5), Signals()
    signals.record("update_distance", {"a": 0.1}, 3)  # of an earlier round
    signals.record("update_distance", {"b": 1.0, "c": 2.0}, 4)
    outcome = Outcome(("a", "b", "c", "d"), ("a", "b", "c"))
    policy.observe(Round(4, IDS, 4), outcome, signals)
    assert policy.state.wins == {"b": 0.5, "c": 0.0}
    # a finished without a distance of this round and loses to both who sent one; d dropped out
    assert policy.state.losses == {"a": 1.0, "b": 0.0, "c": 0.5}


def test_a_users_insight_needs_no_training() -> None:
    signals = recorded(insight={"a": [0.0], "b": [0.4], "c": [9.0], "d": [-9.0]})
    policy = FedACS(reward="insight", pool_share=0.5)
    assert policy.needs.profile == {"insight"}
    assert not policy.needs.reply
    chosen = [policy.select(Round(0, IDS, 2), signals, stream(0, i)).clients for i in range(200)]
    near = sum(len({"a", "b"} & set(c)) for c in chosen)
    assert near > 300  # of 400 places
    # by hand: distances from the mean .1 are .1, .3, 8.9 and 9.1, so the standings are 3, 2, 1, 0
    assert policy.state.wins == {"a": 3.0, "b": 2.0, "c": 1.0, "d": 0.0}
    ranks = policy.ranks(IDS, np.random.default_rng(0))
    assert (np.diff(ranks.mean) > 0.3).all()  # it was the prior, 2.5 for everybody
    assert (ranks.lower <= ranks.mean).all() and (ranks.mean <= ranks.upper).all()


def test_memory_discounts_old_duels() -> None:
    """Skews flip after 200 rounds: with memory .95 the winners change, without they do not."""
    for memory, changes in ((1.0, False), (0.95, True)):
        policy = FedACS(memory=memory)
        for number in range(260):
            far = {"a": 1.0, "b": 2.0} if number < 200 else {"a": 2.0, "b": 1.0}
            observed(policy, far, number)
        assert (policy.state.wins["b"] > policy.state.wins["a"]) is changes
        if memory < 1:  # a geometric sum: 60 duels lost since
            assert policy.state.losses["a"] == pytest.approx((1 - 0.95**60) / 0.05)
