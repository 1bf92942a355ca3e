"""Uniform, power-of-choice, active FL, FedSAE and Oort against cases worked out by hand."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.policies import ActiveFL, FedSAE, Oort, PowerOfChoice, Uniform, oort
from fedcohort.policies.base import pick
from fedcohort.policies.delta import inverse_inclusion
from fedcohort.policies.oort import OortState
from fedcohort.policies.readings import sizes
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.session import Session
from fedcohort.signals.table import Signals
from fedcohort.testing import recorded

IDS = tuple(f"{i:02d}" for i in range(20))


def test_pick_has_the_law_of_successive_draws():
    p, draws, rng = np.array([0.5, 0.3, 0.15, 0.05]), 40_000, np.random.default_rng(0)
    law = {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in permutations(range(4), 2)}
    counts = Counter(pick("abcd", 2, rng, np.log(p)) for _ in range(draws))
    # Chi-square with 11 degrees of freedom: 31.3 is the 0.1 % point. Sampling with the
    # probabilities as they are and dropping repeats unordered would be off by hundreds.
    expected = {("abcd"[i], "abcd"[j]): draws * q for (i, j), q in law.items()}
    assert sum((counts[o] - e) ** 2 / e for o, e in expected.items()) < 31.3
    assert set(pick("abc", 3, rng, np.array([0, -np.inf, 700.0]))) == set("ac")
    assert pick("ab", 2, rng, np.full(2, -np.inf)) == ()


def test_a_forged_size_is_clipped_and_so_is_the_weight_of_an_unlikely_pick():
    signals = recorded(num_examples=dict.fromkeys(IDS, 40) | {"05": 2**40})
    assert sizes(signals, IDS).max() == 400
    weights = inverse_inclusion(np.full(5, 0.01), np.array([0.5, 0.5, 0.5, 0.5, 1e-9]))
    assert weights == pytest.approx((0.02, 0.02, 0.02, 0.02, 2.0))  # it was 10^7


class TestUniform:
    def test_is_uniform(self):
        round, counts = Round(0, tuple("abcdef"), 2), Counter()
        for i in range(6000):
            counts.update(Uniform().select(round, Signals(), stream(0, i)).clients)
        # Each count is about Binomial(6000, 1/3): standard deviation 36.5; five of them is 183.
        assert all(abs(counts[c] - 2000) < 183 for c in "abcdef")

    def test_a_cohort_can_be_kept(self):
        policy, ids = Uniform(interval=3), tuple("abcdefgh")
        cohorts = [policy.select(Round(n, ids, 3), Signals(), stream(n)).clients for n in range(9)]
        assert [set(c) for c in cohorts[:3]] == [set(cohorts[0])] * 3
        assert len({frozenset(c) for c in cohorts}) == 3
        drawn = policy.select(Round(9, ids, 3), Signals(), stream(20)).clients
        others = tuple(c for c in ids if c != drawn[0])
        kept = policy.select(Round(10, others, 3), Signals(), stream(21)).clients
        assert set(drawn[1:]) < set(kept)
        assert len(set(kept)) == 3


class TestPowerOfChoice:
    def test_ties_go_to_the_candidate_drawn_first(self):
        first = []
        for seed in range(200):
            session = Session(PowerOfChoice(d=6), cohort_size=1, seed=seed)
            chosen = session.begin(IDS, lambda name, clients: dict.fromkeys(clients, 1))
            first.append(chosen.clients[0])
        # uniform over 20; by lowest id, "00" alone would have 60 of 200 (6 candidates of 20)
        assert np.bincount(np.array(first, int), minlength=20).max() < 25

    def test_candidates_are_drawn_by_size(self):
        signals, counts = recorded(num_examples={"a": 1, "b": 3, "c": 0}), Counter()
        for i in range(4000):
            round = Round(0, ("a", "b", "c", "silent"), 1)
            counts[PowerOfChoice(d=2).candidates(round, signals, stream(0, i))[0]] += 1
        # A silent client counts with the mean of the known sizes, 4/3, an empty one never comes.
        # b has probability 9/16 and the silent one 1/4: standard deviations 31 and 27.
        assert abs(counts["b"] - 2250) < 140
        assert abs(counts["silent"] - 1000) < 140
        assert not counts["c"]

    def test_the_highest_fresh_losses_win_with_equal_weights(self):
        signals = recorded(loss={"a": 9.0})
        signals.record("loss", {"b": 1.0, "c": 3.0, "d": 2.0}, stamp=1)
        round = Round(1, ("a", "b", "c", "d"), 2, "size")
        selection = PowerOfChoice(d=3).select(round, signals, stream(0))
        assert selection.clients == ("c", "d")  # a's loss is of an older model
        assert selection.scores == {"c": 3.0, "d": 2.0}
        assert selection.weights == (0.5, 0.5)  # by size they would count twice

    def test_d_is_twice_the_cohort_and_must_be_above_it(self):
        drawn = PowerOfChoice().candidates(Round(0, IDS, 4), Signals(), stream(0))
        assert len(set(drawn)) == 8
        with pytest.raises(ConfigError, match=r"d=4 .*cohort_size=4"):
            PowerOfChoice(d=4).candidates(Round(0, IDS, 4), Signals(), stream(0))


class TestActiveFL:
    def signals(self):
        sizes = {"a": 4, "b": 9, "c": 16, "d": 1}  # values sqrt(n) * loss: 2, 3, 4, 1
        return recorded(num_examples=sizes, loss=dict.fromkeys("abcd", 1.0))

    def test_the_law_by_hand(self):
        """alpha1 = 1/2 leaves b and c, with odds exp(3 alpha2) : exp(4 alpha2)."""
        policy = ActiveFL(alpha1=0.5, alpha2=1.0, alpha3=0.0)
        round = Round(1, tuple("abcd"), 1)
        picks = [policy.select(round, self.signals(), stream(0, i)).clients for i in range(4000)]
        share = picks.count(("c",)) / len(picks)
        assert {p[0] for p in picks} == {"b", "c"}
        assert abs(share - np.e / (1 + np.e)) < 5 * np.sqrt(0.2 / 4000)

    def test_the_untried_come_first_and_a_report_that_is_missing_halves_the_value(self):
        policy, signals = ActiveFL(alpha1=0.75, alpha3=0.0), self.signals()
        round = Round(1, (*"abcd", "new"), 1)
        assert policy.select(round, signals, stream(0)).clients == ("new",)
        policy.observe(round, Outcome(("b", "c"), ("c",)), signals)
        round = Round(1, tuple("abcd"), 1)
        scores = {}
        for i in range(30):
            scores |= ActiveFL.select(policy, round, signals, stream(i)).scores
        assert scores == {"b": 3.0}  # c, which finished, fell from 4 to 2; b, which dropped, not

    @pytest.mark.parametrize(("size", "alpha3"), [(5, 0.2), (10, 0.1)])
    def test_all_losses_at_the_start_and_one_place_by_chance(self, size, alpha3):
        """As the released code of FedCor: 4 + 1 and 9 + 1 clients from the first round on."""
        session = Session(ActiveFL(alpha3=alpha3, everybody=True), cohort_size=size, seed=0)
        losses, asked, low = {f"{i:02d}": 1.0 + i for i in range(60)}, [], 0

        def collect(name, clients):
            asked.extend(clients if name == "loss" else ())
            return {c: losses[c] if name == "loss" else 9 for c in clients}

        for _ in range(20):
            cohort = session.begin(list(losses), collect).clients
            assert min(losses[c] for c in cohort[: size - 1]) > 45  # above three quarters
            low += losses[cohort[-1]] <= 45
            session.finish({"loss": {c: losses[c] for c in cohort}}, cohort)
        assert low > 10
        assert asked == list(losses)


class TestFedSAE:
    def test_the_law_and_the_value(self) -> None:
        policy, ids, sizes = FedSAE(beta=0.5), IDS[:3], {"00": 4, "01": 9, "02": 16}
        signals = recorded(num_examples=sizes, loss={"00": 1.0, "01": 0.5})
        policy.observe(Round(0, ids, 3), Outcome(ids, ids), signals)
        # 2 x 1, 3 x .5, and half of the median for the one who reported nothing
        selection = policy.select(Round(1, ids, 3), signals, stream(0))
        assert selection.scores == {"00": 2.0, "01": 1.5, "02": 0.875}
        logits = 0.5 * np.array([2.0, 1.5, 0.875])
        assert selection.clients == pick(ids, 3, stream(0), logits)  # its law is tested above


class TestOort:
    def finish(self, policy, number, losses, durations=()):
        signals = recorded(num_examples=dict.fromkeys(losses, 10))
        signals.record("loss_rms", losses, number)
        signals.record("duration", dict(durations), number)
        policy.state.exploited = list(losses)
        round = Round(number, tuple(sorted(losses)), 2)
        policy.observe(round, Outcome(tuple(losses), tuple(losses)), signals)

    def test_scores_by_hand(self, monkeypatch):
        """Round 9 (the tenth). The unexplored count with their sizes when utilities are scaled.

        Of 5, 10, 20, 40, 90 the clip at .5 is sorted[2] = 20, the floor .999 x 5 and the range up
        to 90. Durations 1, 2, 4, 8: the quantile .5 is sorted[2] = 4.
        """
        monkeypatch.setattr(oort, "_CLIP", 0.5)
        policy = Oort(alpha=2.0)
        policy.state = OortState(
            utility={"a": 10.0, "b": 20.0, "c": 90.0, "d": 40.0},
            last={"a": 0, "b": 4, "c": 9, "d": 9},
            duration={"a": 1.0, "b": 8.0, "c": 2.0, "d": 4.0},
            preferred=0.5,
        )
        size = np.array([0.0, 0, 0, 0, 5])
        explored = np.array([True, True, True, True, False])
        bonus = [np.sqrt(0.1 * np.log(10) / since) for since in (1, 5, 10)]
        low, width = 4.995, 90 - 4.995
        expected = [
            (10 - low) / width + bonus[0],
            ((20 - low) / width + bonus[1]) * (4 / 8) ** 2,
            (20 - low) / width + bonus[2],
            (20 - low) / width + bonus[2],
            -np.inf,
        ]
        found = policy.scores(Round(9, tuple("abcde"), 2), size, explored)
        assert found == pytest.approx(expected)

    def test_exploitation_keeps_to_the_pool(self):
        """Utilities 100, 98, 95, 1; one place. The cut is .95 of the second score: a, b and c."""
        policy = Oort(exploration=0)
        utility = {"a": 100.0, "b": 98.0, "c": 95.0, "d": 1.0}
        policy.state = OortState(utility, dict.fromkeys("abcd", 0), exploration=0.0)
        round = Round(0, tuple("abcd"), 1)  # round 0: log 1 = 0, no bonus
        picks = Counter(
            policy.select(round, Signals(), stream(0, i)).clients[0] for i in range(4000)
        )
        scores = np.array([100, 98, 95]) - 0.999
        for client, share in zip("abc", scores / scores.sum(), strict=True):
            assert abs(picks[client] / 4000 - share) < 5 * 0.5 / np.sqrt(4000)
        assert not picks["d"]

    def test_the_unexplored_are_drawn_by_size_from_the_largest(self):
        """Two places, one for the explored; the other by size among the five largest."""
        policy, signals, counts = Oort(exploration=0.5), Signals(), Counter()
        sizes = dict(zip("efghijk", (1, 2, 3, 4, 5, 6, 7), strict=True)) | {"a": 5}
        signals.record("num_examples", sizes, 0)
        for i in range(3000):
            policy.state = OortState({"a": 1.0}, {"a": 0}, exploration=0.5)
            chosen = policy.select(Round(0, tuple("aefghijk"), 2), signals, stream(i)).clients
            assert chosen[0] == "a"
            counts[chosen[1]] += 1
        assert set(counts) == set("ghijk")
        assert abs(counts["k"] / 3000 - 7 / 25) < 5 * np.sqrt(0.2 / 3000)

    def test_utility_is_size_times_root_mean_square_loss_and_falls_without_a_report(self):
        policy = Oort()
        self.finish(policy, 0, {"a": 0.5, "b": 2.0}, {"a": 1.0, "b": 3.0})
        assert policy.state.utility == {"a": 5.0, "b": 20.0}
        assert policy.state.duration == {"a": 1.0, "b": 3.0}
        assert policy.state.history == [pytest.approx(12.5, rel=1e-4)]
        round = Round(3, ("a", "b", "c", "d"), 3)
        policy.observe(round, Outcome(("a", "c", "d"), ("a", "c"), ("d",)), Signals())
        assert policy.state.utility == {"a": 2.5, "b": 20.0, "c": 6.25}  # the median is 12.5
        assert policy.state.last == {"a": 3, "b": 0, "c": 3}  # d was withheld by a gate

    @pytest.mark.parametrize(
        ("losses", "preferred"), [([4, 4, 4, 4.2], 0.15), ([4, 4, 1, 1], 0.1), ([1, 1, 9, 9], 0.05)]
    )
    def test_the_pacer_moves_where_utility_is_flat_or_jumps(self, losses, preferred, monkeypatch):
        """Sums of two windows: within a tenth, between, and more than fivefold apart."""
        monkeypatch.setattr(oort, "_PACER_ROUNDS", 2)
        policy = Oort()
        for number, loss in enumerate(losses):
            self.finish(policy, number, {"a": loss})
        assert policy.state.preferred == pytest.approx(preferred)
