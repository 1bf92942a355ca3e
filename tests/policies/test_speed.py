"""HACCS, REFL and TiFL, which know about speed and presence, on small cases by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from sklearn.cluster import OPTICS

from fedcohort import testing
from fedcohort.policies import HACCS, REFL, TiFL
from fedcohort.policies.haccs import linked
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.signals.table import Signals

IDS = tuple(f"{i:02d}" for i in range(20))


def recorded(**rows) -> Signals:
    """Readings of the first clients, in their order."""
    named = {name: dict(zip(IDS, values, strict=False)) for name, values in rows.items()}
    return testing.recorded(**named)


class TestHACCS:
    @pytest.mark.parametrize("seed", range(5))
    def test_clusters_are_those_of_optics(self, seed: int) -> None:
        """As the authors' code clusters: min_samples=2, cut at .25, noise points alone."""
        shares = np.random.default_rng(seed).dirichlet(np.full(3, 0.6), 40)
        _, found = linked(shares, stream(0))
        labels = OPTICS(min_samples=2, cluster_method="dbscan", eps=0.25).fit_predict(shares)
        alone = labels == -1
        labels[alone] = labels.max() + 1 + np.arange(alone.sum())
        together = labels[:, None] == labels
        np.testing.assert_array_equal(found[:, None] == found, together)

    def test_places_by_weight_and_the_fastest_first(self) -> None:
        """Kinds of 3, 2 and 1 clients with latencies 2, 4 and 8 and losses 1, 2 and 3.

        Weights with rho .5: (.75 + 1/14) / 2, (.5 + 4/14) / 2, (0 + 9/14) / 2, which is .365, .349
        and .286 of the whole. Of four places one goes to each kind, the last is drawn.
        """
        rows = [[9, 0, 0]] * 3 + [[0, 9, 0]] * 2 + [[0, 0, 9]]
        seconds, losses = [3.0, 1.0, 2.0, 5.0, 3.0, 8.0], [1.0] * 3 + [2.0] * 2 + [3.0]
        signals = recorded(label_histogram=rows, duration=seconds, loss=losses)
        fourth, draws = Counter(), 1000
        for n in range(draws):
            policy = HACCS(epsilon=0.0)
            chosen = policy.select(Round(1, IDS[:6], 4), signals, stream(n)).clients
            assert set(chosen[:3]) == {"01", "04", "05"}  # the fastest of each kind
            fourth[chosen[3]] += 1
        assert set(fourth) == {"02", "03"}  # the third kind has nobody left
        share = 0.75 + 1 / 14, 0.5 + 4 / 14
        assert abs(fourth["02"] / draws - share[0] / sum(share)) < 4 * np.sqrt(0.25 / draws)


class TestREFL:
    def test_the_chance_to_leave_by_hand(self) -> None:
        """a left twice in five rounds seen: 3 / 7; b never in seven: 1 / 9."""
        policy = REFL()
        for number, here in enumerate(["ab", "ab", "b", "ab", "ab", "b", "ab", "ab"]):
            round = Round(number, tuple(here), 2)
            scores = policy.select(round, Signals(), stream(number)).scores
        assert scores == pytest.approx({"a": 3 / 7, "b": 1 / 9})

    def test_nobody_is_picked_twice_within_five_rounds(self) -> None:
        policy, last = REFL(), {}
        for number in range(40):
            round = Round(number, IDS, 4)
            chosen = policy.select(round, Signals(), stream(number)).clients
            policy.observe(round, Outcome(chosen, chosen), Signals())
            assert all(number - last.get(c, -9) >= 5 for c in chosen)
            last.update(dict.fromkeys(chosen, number))
        assert len(policy.select(Round(40, IDS[:4], 4), Signals(), stream(0)).clients) == 4


class TestTiFL:
    def test_everybody_is_timed_first(self) -> None:
        policy, signals, seen = TiFL(), Signals(), []
        for number in range(4):
            chosen = policy.select(Round(number, IDS, 5), signals, stream(number)).clients
            signals.record("duration", dict.fromkeys(chosen, 1.0), number)
            seen += chosen
        assert sorted(seen) == list(IDS)

    def test_cohorts_are_of_one_tier_and_credits_end(self) -> None:
        """Four tiers of five by speed; of 40 rounds each has ten, and then all have ten again."""
        signals, policy = (
            recorded(duration=[(7 * i) % 20 + 1.0 for i in range(20)]),
            TiFL(rounds=40),
        )
        tier = {c: ((7 * int(c)) % 20) // 5 for c in IDS}
        drawn = []
        for number in range(1, 81):
            chosen = policy.select(Round(number, IDS, 5), signals, stream(number)).clients
            assert len({tier[c] for c in chosen}) == 1
            drawn.append(tier[chosen[0]])
        assert Counter(drawn[:40]) == Counter(drawn[40:]) == dict.fromkeys(range(4), 10)

    def test_the_worst_tier_is_drawn_most_often_once_training_stalls(self) -> None:
        """Losses 4, 3, 2, 1 of four tiers that do not fall: chances .4, .3, .2 and .1."""
        seconds = np.arange(20) + 1.0
        signals = recorded(duration=seconds, loss=4 - np.arange(20) // 5)
        policy, drawn = TiFL(interval=10, rounds=10**6), Counter()
        for number in range(1, 3001):
            chosen = policy.select(Round(number, IDS, 5), signals, stream(number)).clients
            drawn[int(chosen[0]) // 5] += number > 10
        for tier, share in enumerate((0.4, 0.3, 0.2, 0.1)):
            assert abs(drawn[tier] / 2990 - share) < 4 * np.sqrt(0.25 / 2990)

    def test_chances_stay_while_the_tier_becomes_better(self) -> None:
        policy = TiFL(interval=10)
        for number in range(1, 31):
            signals = recorded(duration=np.arange(20) + 1.0, loss=np.full(20, 9.0 / number))
            policy.select(Round(number, IDS, 5), signals, stream(number))
        assert policy.state.chances == [0.25] * 4
