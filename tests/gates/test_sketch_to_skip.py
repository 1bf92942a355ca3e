from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.gates import SketchToSkip, model_close
from fedcohort.gates.sketch_to_skip import drift
from fedcohort.signals.projection import Projection, Vectors


def answers(gate, start, models):
    origin = Vectors(start)
    return gate.probe(gate.announce(origin), origin, Vectors(models))


def named(rows):
    return {f"c{i}": row for i, row in enumerate(rows)}


def test_flags_equal_hand_computed_projections():
    rng = np.random.default_rng(0)
    start = rng.normal(size=50)
    models = start + rng.normal(size=(8, 50)) * np.linspace(0.001, 0.4, 8)[:, None]
    matrix = Projection(50, 10, seed=0).matrix()
    h, rows = matrix @ start, models @ matrix.T
    ratios = np.linalg.norm(rows - h, axis=1) / np.linalg.norm(h)
    threshold = float(np.sort(ratios)[3:5].mean())  # four below, four above
    flags = answers(SketchToSkip(threshold, k=10), start, models)
    assert flags.dtype == np.uint8
    assert flags[:, 0].tolist() == (ratios < threshold).tolist()
    assert flags.sum() == 4


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_round_is_skipped_if_and_only_if_all_are_close(close):
    gate = SketchToSkip(0.1)
    asked = gate.decide(named(np.array(close, np.uint8)[:, None]))
    assert (asked == ()) == all(close)
    assert asked in ((), tuple(f"c{i}" for i in range(len(close))))
    only = SketchToSkip(0.1, mode="client")
    moved = tuple(f"c{i}" for i, near in enumerate(close) if not near)
    assert only.decide(named(np.array(close, np.uint8)[:, None])) == moved


def test_it_cannot_skip_for_ever():
    gate = SketchToSkip(0.1, max_skips=3)
    close = named(np.ones((2, 1), np.uint8))
    decisions = [bool(gate.decide(close)) for _ in range(8)]
    assert decisions == [False, False, False, True, False, False, False, True]


def test_a_model_that_is_not_finite_counts_as_no_answer():
    start = np.ones(20)
    models = np.stack([start, np.full(20, np.nan), start * 1.001])
    gate = SketchToSkip(0.5, k=5)
    flags = answers(gate, start, models)
    assert flags[:, 0].tolist() == [1, 2, 1]
    assert gate.decide(named(flags)) == ()  # the two that answered are close: skipped
    gate = SketchToSkip(0.5, k=5)
    assert gate.decide(named(np.array([[0], [2]], np.uint8))) == ("c0",)
    assert gate.decide(named(np.array([[2]], np.uint8))) == ()


@pytest.mark.parametrize(
    "lie", [np.array([9], np.uint8), np.zeros(3, np.uint8), np.array([-1.0]), np.array([np.nan])]
)
def test_answers_out_of_form_are_ignored(lie):
    gate = SketchToSkip(0.1)
    honest = np.array([0], np.uint8)
    assert gate.decide({"liar": lie, "honest": honest}) == ("honest",)


def test_zero_models():
    assert drift(np.zeros((1, 3)), np.zeros(3)).tolist() == [0.0]
    assert drift(np.ones((1, 3)), np.zeros(3)).tolist() == [np.inf]
    gate = SketchToSkip(0.1, k=4)
    flags = answers(gate, np.zeros(10), np.stack([np.zeros(10), np.ones(10)]))
    assert flags[:, 0].tolist() == [1, 0]


def test_the_public_predicate():
    a, b = np.array([3.0, 4.0]), np.array([3.0, 4.4])
    assert model_close(b, a, 0.081)  # 0.4 / 5 = 0.08
    assert not model_close(b, a, 0.079)
    with pytest.raises(ValueError, match="threshold=0"):
        model_close(a, b, 0)
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        model_close(a, b[:1], 0.1)


def skip_rates(gate, growth, rounds):
    """Skipped or not, round by round; `growth(n)` is the drift n rounds after the last upload."""
    since, skipped = 0, []
    for _ in range(rounds):
        since += 1
        moved, limit = growth(since), gate.state.threshold
        flag = [moved] if limit is None else [moved < limit]
        kind = np.float32 if limit is None else np.uint8
        asked = gate.decide({"c0": np.array(flag, kind)})
        skipped.append(not asked)
        if asked:
            since = 0
    return np.array(skipped)


class TestAutomatic:
    def feed(self, gate, drifts):
        return gate.decide({f"c{i}": np.array([d], np.float32) for i, d in enumerate(drifts)})

    def test_clients_send_their_drift_until_a_threshold_is_found(self):
        gate = SketchToSkip("auto", k=4, window=3, skip_rate=0.5)
        start, models = np.ones(10), np.ones((2, 10)) * 1.01
        assert np.isnan(gate.announce(Vectors(start))[-1])
        assert answers(gate, start, models).dtype == np.float32
        for one, two in ((0.02, 0.03), (0.01, 0.05)):  # skipped, not skipped
            assert self.feed(gate, [0.001, one]) == ()
            assert self.feed(gate, [0.001, two]) == ("c0", "c1")
        # Medians of the largest drifts: 0.015 after one round, 0.04 after two; halfway between.
        assert gate.state.threshold == pytest.approx(0.0275)
        assert gate.announce(Vectors(start))[-1] == pytest.approx(0.0275)
        assert answers(gate, start, models).dtype == np.uint8

    @pytest.mark.parametrize("on_skip", ["keep", "reset"])
    def test_one_liar_cannot_raise_the_threshold(self, on_skip):
        """One drift of 10 in every cohort of five moved the threshold from .18 to 3.3 and more."""
        found = []
        for lie in (0.2, 10.0):
            rng = np.random.default_rng(0)
            gate = SketchToSkip("auto", on_skip=on_skip)
            for _ in range(20):
                self.feed(gate, [*rng.uniform(0.1, 0.2, 4), lie])
            found.append(gate.state.threshold)
        assert found[0] <= found[1] <= 2 * 0.2

    @pytest.mark.parametrize("rate", [0.5, 0.6, 0.75, 0.8, 0.9])
    @pytest.mark.parametrize("growth", [lambda n: 0.01 * n, np.sqrt, lambda n: 1 - 0.9**n])
    def test_the_wanted_rate_is_met_however_drift_adds_up(self, rate, growth):
        gate = SketchToSkip("auto", window=5, skip_rate=rate)
        skipped = skip_rates(gate, growth, 220)
        cycle = 1 / (1 - rate)  # whole cycles give the rates on both sides of 0.6
        low, high = 1 - 1 / np.floor(cycle + 1e-9), 1 - 1 / np.ceil(cycle - 1e-9)
        assert low - 0.03 <= skipped[20:].mean() <= high + 0.03

    def test_reset_takes_a_quantile(self):
        gate = SketchToSkip("auto", window=5, skip_rate=0.5, on_skip="reset")
        for d in (1.0, 2.0, 3.0, 4.0, 5.0):
            assert self.feed(gate, [d]) == ("c0",)
        assert gate.state.threshold == 3.0

    @pytest.mark.parametrize("rate", [0.3, 0.5, 0.8, 0.9])
    def test_the_rate_is_kept_while_training_slows_down(self, rate):
        slower = itertools.count(1)
        gate = SketchToSkip("auto", skip_rate=rate)
        skipped = skip_rates(gate, lambda n: n / (30 + next(slower)), 1000)[20:].mean()
        first, last = 1 / 30, 1 / 2000  # the threshold may follow the drift, by a factor of 60
        assert abs(skipped - rate) < np.log(first / last) / (0.1 * 980)

    def test_a_cycle_that_cannot_be_watched_begins_again(self):
        gate = SketchToSkip("auto", skip_rate=0.5, window=2)
        assert self.feed(gate, [0.1]) == ()
        assert self.feed(gate, [np.inf]) == ("c0",)  # the server's model is zero
        assert gate.decide({}) == ()
        assert self.feed(gate, [0.3]) == ()
        assert self.feed(gate, [0.5]) == ("c0",)
        assert gate.state.threshold == pytest.approx(0.4)


def test_a_model_below_k_parameters_is_compared_as_it_is():
    gate, start = SketchToSkip(0.1), np.ones(10)
    assert gate.announce(Vectors(start)).shape == (10 + 1,)
    assert answers(gate, start, np.stack([start * 1.01, start * 2]))[:, 0].tolist() == [1, 0]
