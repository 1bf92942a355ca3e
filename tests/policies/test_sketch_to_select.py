"""Sketch-to-Select: clusters, the rounds between, and the trap of the literal form."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.policies import SketchToSelect
from fedcohort.rounds import Round, stream
from fedcohort.signals.table import Signals
from fedcohort.testing import recorded, select

IDS = tuple(f"{i:02d}" for i in range(24))


def rows() -> dict[str, np.ndarray]:
    """Four groups of six clients."""
    rng = np.random.default_rng(0)
    centers = 10 * rng.normal(size=(4, 5))
    return {c: centers[int(c) % 4] + 0.1 * rng.normal(size=5) for c in IDS}


def clustered(number: int = 0) -> Signals:
    signals = Signals()
    signals.record("model_sketch", rows(), number)
    return signals


def test_clients_that_hardly_move_are_told_apart_by_where_they_move() -> None:
    """Ten labels, learned to different degrees: steps from 1 down to 0.001, noise of a fifth."""
    ids = tuple(f"{i:02d}" for i in range(50))
    found = {"steps": [], "models": []}
    for trial in range(20):
        rng = np.random.default_rng(trial)
        towards, size = rng.normal(size=(10, 10)), np.logspace(-3, 0, 10)
        labels = {c: int(c) % 10 for c in ids}
        steps = {c: size[y] * (towards[y] + 0.2 * rng.normal(size=10)) for c, y in labels.items()}
        signals = recorded(model_sketch=steps)
        for compare, covered in found.items():
            policy = SketchToSelect(compare=compare)
            chosen = policy.select(Round(0, ids, 10), signals, stream(trial)).clients
            covered.append(len({labels[c] for c in chosen}))
    assert np.mean(found["steps"]) > 9.9
    assert np.mean(found["models"]) < 6


@pytest.mark.parametrize("size", [1e15, 1e39, 1e-20, 1e-300])
def test_a_hostile_sketch_neither_stops_a_selection_nor_takes_it_over(size: float) -> None:
    sketches = rows() | {"00": np.full(5, size)}
    chosen = select(SketchToSelect(), IDS, 5, model_sketch=sketches).clients  # warnings are errors
    assert {int(c) % 4 for c in chosen if c != "00"} == {0, 1, 2, 3}


def test_members_of_a_cluster_are_equally_likely() -> None:
    counts = np.zeros(24)
    for i in range(120):
        chosen = SketchToSelect().select(Round(0, IDS, 4), clustered(), stream(0, i)).clients
        counts[[int(c) for c in chosen]] += 1
    # each with probability 1/6: mean 20, standard deviation 4.1
    assert np.abs(counts - 20).max() < 4 * 4.1


def test_cohort_stays_until_the_next_selection() -> None:
    policy = SketchToSelect(interval=3)
    signals = clustered()
    cohorts = []
    for number in range(7):
        asked = policy.candidates(Round(number, IDS, 4), signals, stream(number))
        assert bool(asked) == (number % 3 == 0)
        if asked:
            signals = clustered(number)
        cohorts.append(policy.select(Round(number, IDS, 4), signals, stream(number)).clients)
    assert cohorts[0] == cohorts[1] == cohorts[2] != cohorts[3] == cohorts[4] == cohorts[5]


def test_an_absent_member_is_replaced_from_its_cluster() -> None:
    policy, signals = SketchToSelect(), clustered()
    cohort = policy.select(Round(0, IDS, 4), signals, stream(0)).clients
    gone = cohort[2]
    here = tuple(c for c in IDS if c != gone)
    again = policy.select(Round(1, here, 4), signals, stream(1)).clients
    (stand_in,) = set(again) - set(cohort)
    assert int(stand_in) % 4 == int(gone) % 4
    assert policy.select(Round(2, IDS, 4), signals, stream(2)).clients == cohort


def test_literal_sketches_pick_the_old_cohort_again_fresh_ones_do_not() -> None:
    """Finding 7: all that did not train hold one model. 10 of 50 trained; 40 are alike."""
    ids = tuple(f"{i:02d}" for i in range(50))
    old = set(ids[:10])
    rng = np.random.default_rng(0)
    repeated = {True: [], False: []}
    for trial in range(20):
        for fresh, again in repeated.items():
            rows = {c: rng.normal(size=10) if fresh or c in old else np.zeros(10) for c in ids}
            signals = Signals()
            signals.record("model_sketch", rows, 100)
            policy = SketchToSelect(fresh=fresh)
            chosen = policy.select(Round(100, ids, 10), signals, stream(trial)).clients
            again.append(len(old & set(chosen)))
    assert np.mean(repeated[False]) > 8.5
    assert np.mean(repeated[True]) < 4
    assert SketchToSelect().signal_options["model_sketch"]["fresh"] is True
    assert SketchToSelect(fresh=False).signal_options["model_sketch"]["fresh"] is False


def test_stale_sketches_are_not_clustered() -> None:
    policy = SketchToSelect()
    assert policy.select(Round(100, IDS, 4), clustered(0), stream(0)).clients == ()
