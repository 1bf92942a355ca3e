"""Policies by label histograms: exact small cases, laws and targets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedcohort.policies import FLIPS, DCFedAvg, FedCBS, LabelMatch
from fedcohort.policies.fed_cbs import imbalance
from fedcohort.policies.readings import label_counts
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.signals.table import Signals
from fedcohort.testing import recorded

IDS = tuple(f"{i:02d}" for i in range(20))


def labeled(rows) -> Signals:
    return recorded(label_histogram=dict(zip(IDS, np.asarray(rows, float), strict=False)))


def one_label(classes: int = 5) -> Signals:
    """Client i holds label i mod 5 only."""
    return labeled(10 * np.eye(classes)[np.arange(20) % classes])


def test_label_counts_drop_the_empty_and_clip_the_forged() -> None:
    rows = np.full((20, 2), 5.0)
    rows[3], rows[4], rows[5] = (0, 0), (-3, 6), (2.0**39, 2.0**39)
    positions, counts = label_counts(labeled(rows), IDS)
    assert 3 not in positions
    assert counts[3].tolist() == [0, 6]  # client 4: noise below zero is cut
    assert counts[4].tolist() == [50, 50]  # client 5: 10 times the median of 10


def test_imbalance_is_the_quadratic_form_of_the_paper() -> None:
    """QCID = sum_kl q_k q_l <a_k, a_l> / (sum q)^2 - 1 / B, by brute force."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (4, 6)).astype(float)
    q, shares = counts.sum(axis=1), counts / counts.sum(axis=1, keepdims=True)
    quadratic = (q @ (shares @ shares.T) @ q) / q.sum() ** 2 - 1 / 6
    assert imbalance(counts.sum(axis=0)[None])[0] == pytest.approx(quadratic)


class TestFedCBS:
    def test_the_law_by_enumeration(self) -> None:
        """P(first) by QCID^-1 plus the bonus, P(second | first) by QCID^-2; 4000 draws.

        Four standard errors are at most .032.
        """
        rows = np.array([[6.0, 2, 1], [1, 5, 2], [2, 2, 5]])
        signals, ids, number = labeled(rows), IDS[:3], 4
        policy = FedCBS(exploration=0.5)
        policy.state.selected = {"00": 3, "02": 1}
        times = np.array([3.0, 0.0, 1.0]) + 1
        first = 1 / imbalance(rows) + 0.5 * np.sqrt(3 * np.log(5) / (2 * times))
        first /= first.sum()
        expected = Counter()
        for i in range(3):
            others = [j for j in range(3) if j != i]
            second = np.array([imbalance((rows[i] + rows[j])[None])[0] ** -2 for j in others])
            for j, p in zip(others, second / second.sum(), strict=True):
                expected[ids[i], ids[j]] += first[i] * p
        draws = 4000
        found = Counter(
            policy.select(Round(number, ids, 2), signals, stream(0, n)).clients
            for n in range(draws)
        )
        for pair, p in expected.items():
            assert abs(found[pair] / draws - p) < 4 * np.sqrt(0.25 / draws)


class TestLabelMatch:
    @pytest.mark.parametrize(("policy", "at_random"), [(LabelMatch(), 1), (DCFedAvg(added=2), 2)])
    def test_each_pick_is_the_best_of_all(self, policy, at_random) -> None:
        """By squared distance of shares, and DC-FedAvg by the cosine of counts, while it falls."""
        rows = np.random.default_rng(1).integers(1, 20, (20, 4)).astype(float)
        goal = rows.sum(axis=0)

        def distance(members):
            pooled = rows[list(members)].sum(axis=0)
            if at_random == 2:
                return 1 - pooled @ goal / np.linalg.norm(pooled) / np.linalg.norm(goal)
            return np.square(pooled / pooled.sum() - goal / goal.sum()).sum()

        for n in range(20):
            selection = policy.select(Round(0, IDS, 4), labeled(rows), stream(n))
            chosen = [IDS.index(c) for c in selection.clients]
            for k in range(at_random, len(chosen)):
                rest = [j for j in range(20) if j not in chosen[:k]]
                assert chosen[k] == min(rest, key=lambda j: distance([*chosen[:k], j]))
            assert selection.scores[selection.clients[-1]] == pytest.approx(distance(chosen))

    @pytest.mark.parametrize(("averaging", "partner"), [("equal", "01"), ("size", "02")])
    def test_equal_averaging_counts_clients_not_examples(self, averaging, partner) -> None:
        """By size, 100 against 1 is no balance."""
        signals = labeled([[100.0, 0.0], [0.0, 1.0], [0.0, 100.0]])
        round, partners = Round(0, IDS[:3], 2, averaging), set()
        for n in range(30):
            first, second = LabelMatch("balanced").select(round, signals, stream(n)).clients
            partners |= {second} if first == "00" else set()
        assert partners == {partner}

    def test_nobody_is_added_who_makes_it_worse(self) -> None:
        signals = labeled([[10.0, 10.0], [1.0, 0.0], [1.0, 0.0]])
        cohorts = [
            DCFedAvg("balanced").select(Round(0, IDS[:3], 2), signals, stream(n)).clients
            for n in range(20)
        ]
        assert {c for c in cohorts if c[0] == "00"} == {("00",)}
        assert all(c[1] == "00" for c in cohorts if c[0] != "00")


class TestFLIPS:
    def test_clusters_get_equal_places_and_clients_their_turn(self) -> None:
        rows = [[10.0, 0, 0]] * 12 + [[0, 10.0, 0]] * 6 + [[0, 0, 10.0]] * 2
        signals, policy, picks = labeled(rows), FLIPS(), Counter()
        for number in range(24):
            chosen = policy.select(Round(number, IDS, 3), signals, stream(number)).clients
            policy.observe(Round(number, IDS, 3), Outcome(chosen, chosen), signals)
            picks.update(chosen)
        assert len(policy.state.points) == 3  # by the Davies-Bouldin index
        kinds = [sum(picks[c] for c in IDS[a:b]) for a, b in ((0, 12), (12, 18), (18, 20))]
        assert kinds == [24, 24, 24]
        assert {picks[c] for c in IDS[:12]} == {2}
        assert {picks[c] for c in IDS[18:]} == {12}

    def test_every_cluster_has_its_places_whoever_is_absent(self) -> None:
        """Two clusters of 10 and cohorts of 4: two places each in every round, at 70 % presence.

        Counted by present members alone, a cluster got none in most rounds.
        """
        signals, policy = labeled([[10.0, 0]] * 10 + [[0, 10.0]] * 10), FLIPS(clusters=2)
        for number in range(40):
            here = tuple(c for c in IDS if stream(7, number, c).random() < 0.7)
            chosen = policy.select(Round(number, here, 4), signals, stream(number)).clients
            policy.observe(Round(number, here, 4), Outcome(chosen, chosen), signals)
            assert sum(int(c) < 10 for c in chosen) == 2

    def test_there_are_at_most_ten_clusters_as_in_the_code(self) -> None:
        """Fifteen kinds of clients, which the Davies-Bouldin index would tell apart."""
        policy = FLIPS()
        policy.select(Round(0, IDS, 5), labeled(np.eye(15)[np.arange(20) % 15].tolist()), stream(0))
        assert len(policy.state.points) <= 10

    def test_newcomers_join_the_nearest_center(self) -> None:
        policy = FLIPS(clusters=2)
        policy.select(Round(0, IDS[:6], 2), labeled([[9.0, 1], [1, 9.0]] * 3), stream(0))
        centers = policy.state.points.copy()
        policy.select(Round(1, IDS[:7], 2), labeled([[9.0, 1], [1, 9.0]] * 3 + [[8, 2]]), stream(1))
        np.testing.assert_array_equal(policy.state.points, centers)
