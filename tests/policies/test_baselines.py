"""Uniform, power-of-choice, active FL and Oort against cases worked out by hand."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from fedcohort.policies import POLICIES, ActiveFL, ClusteredSampling, Oort, PowerOfChoice, Uniform
from fedcohort.policies.base import pick, sizes
from fedcohort.policies.oort import OortState
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.session import Session
from fedcohort.signals.table import Signals
from fedcohort.testing import drive


def successive(p, k):
    """The exact law of drawing k one after the other: ordered tuples -> probability."""
    law = {}
    for order in permutations(range(len(p)), k):
        left, chance = 1.0, 1.0
        for i in order:
            chance *= p[i] / left
            left -= p[i]
        law[order] = chance
    return law


def test_pick_has_the_law_of_successive_draws():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    law = successive(p, 2)
    draws, rng = 40_000, np.random.default_rng(0)
    counts = dict.fromkeys(law, 0)
    for _ in range(draws):
        counts[tuple("abcd".index(c) for c in pick("abcd", 2, rng, np.log(p)))] += 1
    # Chi-square with 11 degrees of freedom: 31.3 is the 0.1 % point. Sampling with the
    # probabilities as they are and dropping repeats unordered would be off by hundreds.
    chi = sum((counts[o] - draws * q) ** 2 / (draws * q) for o, q in law.items())
    assert chi < 31.3


def test_pick_never_takes_the_impossible():
    assert set(pick("abc", 3, np.random.default_rng(0), np.array([0, -np.inf, 700.0]))) == set("ac")
    assert pick("ab", 2, np.random.default_rng(0), np.full(2, -np.inf)) == ()


def test_uniform_is_uniform():
    round = Round(0, tuple("abcdef"), 2)
    counts = dict.fromkeys("abcdef", 0)
    for i in range(6000):
        for client in Uniform().select(round, Signals(), stream(0, i)).clients:
            counts[client] += 1
    # Each count is about Binomial(6000, 1/3): standard deviation 36.5; five of them is 183.
    assert all(abs(count - 2000) < 183 for count in counts.values())


def test_a_uniform_cohort_can_be_kept():
    policy = Uniform(interval=3)
    ids = tuple("abcdefgh")
    cohorts = [policy.select(Round(n, ids, 3), Signals(), stream(n)).clients for n in range(9)]
    assert [set(c) for c in cohorts[:3]] == [set(cohorts[0])] * 3
    assert len({frozenset(c) for c in cohorts}) == 3
    replaced = policy.select(Round(9, ids, 3), Signals(), stream(20))
    kept = policy.select(
        Round(10, tuple(c for c in ids if c != replaced.clients[0]), 3), Signals(), stream(21)
    )
    assert set(replaced.clients[1:]) < set(kept.clients)
    assert len(set(kept.clients)) == 3
    assert Uniform().state is None


@pytest.mark.parametrize("name", ["active-fl", "oort"])
def test_never_reporting_a_loss_does_not_pay(name):
    """A liar that finishes but reports no loss stays below the fair share of .05.

    Before, its value was infinite or it stayed unexplored: .94 and .91 of the rounds.
    """
    session = Session(POLICIES[name](), cohort_size=5, seed=2)
    ids = [f"client-{i:03d}" for i in range(100)]

    def spoil(client, value):
        return None if client == ids[7] else value

    picked = [ids[7] in drive(session, ids, spoil=spoil).clients for _ in range(100)]
    assert np.mean(picked) <= 0.05


def test_a_forged_size_is_clipped():
    signals = Signals()
    ids = tuple(f"{i:03d}" for i in range(100))
    signals.record("num_examples", dict.fromkeys(ids, 40) | {"050": 2**40}, 0)
    assert sizes(signals, ids).max() == 400
    policy = ClusteredSampling()
    drawn = [policy.select(Round(n, ids, 5), signals, stream(n)) for n in range(200)]
    share = 400 / (99 * 40 + 400)
    picked = [s for s in drawn if "050" in s.clients]
    # inclusion 5 x .0917 = .459, four standard errors of 200 draws are .141; it was 1
    assert abs(len(picked) / 200 - 5 * share) < 0.141
    assert all(max(s.weights) == pytest.approx(0.2) for s in picked)  # it was 1 of 1


class TestPowerOfChoice:
    def test_ties_go_to_the_candidate_drawn_first(self):
        ids = tuple(f"{i:02d}" for i in range(20))
        first = []
        for seed in range(200):
            session = Session(PowerOfChoice(d=6), cohort_size=1, seed=seed)
            chosen = session.begin(ids, lambda name, clients: dict.fromkeys(clients, 1))
            assert chosen.clients[0] == session.policy.state.drawn[0]
            first.append(chosen.clients[0])
        # uniform over 20; by lowest id, "00" alone would have 60 of 200 (6 candidates of 20)
        assert np.bincount(np.array(first, int), minlength=20).max() < 25

    def test_candidates_are_drawn_by_size(self):
        signals = Signals()
        signals.record("num_examples", {"a": 1, "b": 3, "c": 0}, stamp=0)
        round = Round(0, ("a", "b", "c", "silent"), 1)
        counts = {"a": 0, "b": 0, "silent": 0}
        for i in range(4000):
            (drawn,) = PowerOfChoice(d=1).candidates(round, signals, stream(0, i))
            counts[drawn] += 1
        # A silent client counts with the mean of the known sizes, 4/3, an empty one never comes.
        # b has probability 9/16 and the silent one 1/4: standard deviations 31 and 27.
        assert abs(counts["b"] - 2250) < 140
        assert abs(counts["silent"] - 1000) < 140

    def test_the_highest_fresh_losses_win(self):
        signals = Signals()
        signals.record("loss", {"a": 9.0}, stamp=0)
        signals.record("loss", {"b": 1.0, "c": 3.0, "d": 2.0}, stamp=1)
        selection = PowerOfChoice(d=3).select(Round(1, ("a", "b", "c", "d"), 2), signals, stream(0))
        assert selection.clients == ("c", "d")  # a's loss is of an older model
        assert selection.scores == {"c": 3.0, "d": 2.0}

    def test_d_must_be_positive(self):
        with pytest.raises(ValueError, match="d=0"):
            PowerOfChoice(d=0)


class TestActiveFL:
    def signals(self):
        signals = Signals()
        signals.record("num_examples", {"a": 4, "b": 9, "c": 16, "d": 1}, stamp=0)
        signals.record("loss", {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, stamp=0)
        return signals  # values sqrt(n) * loss: 2, 3, 4, 1

    def test_the_law_by_hand(self):
        """alpha1 = 1/2 leaves b and c, with odds exp(3 alpha2) : exp(4 alpha2)."""
        policy = ActiveFL(alpha1=0.5, alpha2=1.0, alpha3=0.0)
        round = Round(1, tuple("abcd"), 1)
        picks = [policy.select(round, self.signals(), stream(0, i)).clients for i in range(4000)]
        share = picks.count(("c",)) / len(picks)
        assert {p[0] for p in picks} == {"b", "c"}
        assert abs(share - np.e / (1 + np.e)) < 5 * np.sqrt(0.2 / 4000)

    def test_a_part_is_uniform(self):
        policy = ActiveFL(alpha1=0.5, alpha2=50.0, alpha3=0.5)
        round = Round(1, tuple("abcd"), 2)
        picks = [policy.select(round, self.signals(), stream(0, i)).clients for i in range(3000)]
        assert all(first == "c" for first, _ in picks)  # odds of e^50
        seconds = [second for _, second in picks]
        assert all(abs(seconds.count(c) - 1000) < 130 for c in "abd")  # 5 standard deviations

    def test_the_untried_come_first(self):
        signals = self.signals()
        round = Round(1, (*"abcd", "new"), 1)
        policy = ActiveFL(alpha3=0.0)
        assert policy.select(round, signals, stream(0)).clients == ("new",)

    def test_who_finishes_without_a_loss_is_worth_half_and_who_drops_out_as_much_as_before(self):
        policy, round = ActiveFL(), Round(1, tuple("abcd"), 2)
        policy.observe(round, Outcome(("b", "c"), ("b",)), self.signals())
        assert policy._values(round, self.signals()).tolist() == [2.0, 1.5, 4.0, 1.0]

    def test_enough_are_left_to_fill_the_cohort(self):
        round = Round(1, tuple("abcd"), 3)
        chosen = ActiveFL(alpha1=1.0, alpha3=0.0).select(round, self.signals(), stream(0)).clients
        assert set(chosen) == {"a", "b", "c"}

    @pytest.mark.parametrize("bad", [{"alpha1": 2}, {"alpha2": 0}, {"alpha3": -1}])
    def test_options_are_checked(self, bad):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ActiveFL(**bad)


class TestOort:
    def test_scores_by_hand(self):
        """Round 9 (the tenth): clip at the median, bonus, penalty of the slow, no scaling."""
        policy = Oort(clip=0.5, alpha=2.0, normalize=False)
        policy.state = OortState(
            utility={"a": 10.0, "b": 20.0, "c": 90.0},
            last={"a": 0, "b": 4, "c": 9},
            duration={"a": 1.0, "b": 4.0, "c": 2.0},
            preferred=2.0,
        )
        bonus = [np.sqrt(0.1 * np.log(10) / since) for since in (1, 5, 10)]
        expected = [10 + bonus[0], (20 + bonus[1]) * (2 / 4) ** 2, 20 + bonus[2]]
        assert policy.scores(["a", "b", "c"], 9) == pytest.approx(expected)
        scaled = Oort(clip=0.5, normalize=True)
        scaled.state = policy.state
        expected = [0 + bonus[0], (1 + bonus[1]) / 4, 1 + bonus[2]]
        assert scaled.scores(["a", "b", "c"], 9) == pytest.approx(expected)

    def test_exploitation_keeps_to_the_pool(self):
        """Scores 10, 9.6, 9, 1 and one place: c = 0.95 lets in the first two, in proportion."""
        policy = Oort(exploration=0, min_exploration=0, clip=1.0, normalize=False)
        utility = {"a": 10.0, "b": 9.6, "c": 9.0, "d": 1.0}
        policy.state = OortState(utility=utility, last=dict.fromkeys("abcd", 0))
        round = Round(0, tuple("abcd"), 1)  # round 0: log 1 = 0, no bonus
        picks = [policy.select(round, Signals(), stream(0, i)).clients[0] for i in range(4000)]
        assert set(picks) == {"a", "b"}
        assert abs(picks.count("a") / 4000 - 10 / 19.6) < 5 * 0.5 / np.sqrt(4000)

    def test_exploration_share(self):
        policy = Oort(exploration=0.5, exploration_decay=1.0)
        policy.state = OortState(utility=dict.fromkeys("abcd", 1.0), last=dict.fromkeys("abcd", 0))
        chosen = policy.select(Round(3, tuple("abcdwxyz"), 4), Signals(), stream(0)).clients
        assert len(set(chosen) & set("abcd")) == 2
        # When all are explored the whole cohort is exploited, and the other way round.
        assert len(policy.select(Round(3, tuple("abcd"), 4), Signals(), stream(0)).clients) == 4
        assert len(policy.select(Round(3, tuple("wxyz"), 4), Signals(), stream(0)).clients) == 4

    def finish(self, policy, number, losses, durations):
        signals = Signals()
        signals.record("num_examples", dict.fromkeys(losses, 10), 0)
        signals.record("loss_rms", losses, number)
        signals.record("duration", durations, number)
        round = Round(number, tuple(sorted(losses)), 2)
        policy.observe(round, Outcome(tuple(losses), tuple(losses)), signals)

    def test_utility_is_size_times_root_mean_square_loss(self):
        policy = Oort()
        self.finish(policy, 0, {"a": 0.5, "b": 2.0}, {"a": 1.0, "b": 3.0})
        assert policy.state.utility == {"a": 5.0, "b": 20.0}
        assert policy.state.preferred == 2.0  # the median of the first durations
        assert policy.state.step == 0.2

    def test_the_pacer_relaxes_when_utility_falls(self):
        policy = Oort(window=2, preferred=1.0, pacer_step=0.5)
        for number, loss in enumerate([4.0, 4.0, 1.0]):
            self.finish(policy, number, {"a": loss}, {"a": 1.0})
        assert policy.state.preferred == 1.0  # fewer than 2 windows yet
        self.finish(policy, 3, {"a": 1.0}, {"a": 1.0})
        assert policy.state.preferred == 1.5  # 40 + 40 > 10 + 10
        self.finish(policy, 4, {"a": 9.0}, {"a": 1.0})
        assert policy.state.preferred == 1.5  # 40 + 10 < 10 + 90

    def test_who_does_not_report_counts_as_explored_with_half_the_median(self):
        policy = Oort()
        policy.state.utility = {"c": 8.0, "d": 4.0, "e": 2.0}
        policy.observe(Round(3, ("a", "c", "d"), 2), Outcome(("a", "c"), ("a", "c")), Signals())
        assert policy.state.utility == {"a": 2.0, "c": 4.0, "d": 4.0, "e": 2.0}
        assert policy.state.last == {"a": 3, "c": 3}

    def test_who_drops_out_keeps_its_utility_and_its_last_round(self):
        policy = Oort()
        policy.state = OortState(utility={"c": 8.0}, last={"c": 1})
        policy.observe(Round(3, ("a", "c", "d"), 2), Outcome(("a", "c"), ()), Signals())
        assert policy.state.utility == {"c": 8.0}
        assert policy.state.last == {"c": 1}

    def test_whom_a_gate_withholds_does_not_fail(self):
        policy = Oort()
        policy.observe(Round(0, ("a", "b"), 2), Outcome(("a", "b"), (), ("a", "b")), Signals())
        assert policy.state.utility == {}

    @pytest.mark.parametrize(
        "bad", [{"cutoff": 2}, {"clip": -1}, {"alpha": -1}, {"window": 0}, {"preferred": -1}]
    )
    def test_options_are_checked(self, bad):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Oort(**bad)
