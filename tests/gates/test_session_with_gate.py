"""The session's side of gates: who goes on, what is charged, what a policy learns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedcohort import storage
from fedcohort.datasets import federate, load
from fedcohort.gates import SketchToSkip
from fedcohort.policies import Uniform
from fedcohort.session import Session
from fedcohort.signals.projection import Vectors
from fedcohort.simulate import LocalTraining, Simulation, build
from fedcohort.simulate.clock import Bernoulli

START = np.linspace(1, 2, 40)
NOTHING = lambda name, clients: {}  # noqa: E731


class Watchful(Uniform):
    def __init__(self):
        self.seen = []

    def observe(self, round, outcome, signals):
        self.seen.append((round.number, outcome))


def session(**options):
    gate = SketchToSkip(0.1, k=4, **options)
    return Session(Watchful(), cohort_size=2, seed=0, gate=gate, model_bytes=1000)


def play(run, moved, available="abcdef"):
    """One round; `moved` says how far each selected client's model goes."""
    chosen = run.begin(available, NOTHING).clients
    announced = run.announce(Vectors(START))
    models = np.stack([START * (1 + m) for m in moved[: len(chosen)]])
    flags = run.gate.probe(announced, Vectors(START), Vectors(models))
    asked = run.admit(dict(zip(chosen, flags, strict=True)))
    outcome = run.finish({}, asked)
    return chosen, outcome


def test_a_skipped_round_moves_no_model_and_keeps_the_cohort():
    run = session()
    first, outcome = play(run, [0.01, 0.01])
    assert run.skipped
    assert outcome.finished == ()
    assert outcome.withheld == first
    assert outcome.dropped == ()
    second, outcome = play(run, [0.5, 0.01])
    assert second == first
    assert not run.skipped
    assert outcome.finished == first
    # Two models down in round 0, none in round 1; two up in round 1.
    assert run.ledger.by_kind("down", 0)["model"] == 2000
    assert "model" not in run.ledger.by_kind("down", 1)
    assert "model" not in run.ledger.by_kind("up", 0)
    assert run.ledger.by_kind("up", 1)["model"] == 2000
    # The gate: five floats down and a flag up for each client; a byte asks for each upload.
    assert run.ledger.by_kind("down", 0)["gate"] == 2 * 20
    assert run.ledger.by_kind("down", 1)["gate"] == 2 * (20 + 1)
    assert run.ledger.by_kind("up", 0)["gate"] == 2
    assert [number for number, _ in run.policy.seen] == [1]


def test_clients_that_leave_during_skips_are_replaced():
    """A cohort of six shrank to 2.8 on average, down to a single model that was "averaged"."""
    run = session()
    first, _ = play(run, [0.01, 0.01])
    second, _ = play(run, [0.01, 0.01], available=[first[0], "z"])
    assert second == (first[0], "z")
    assert run.ledger.by_kind("down", 1)["model"] == 1000  # to the newcomer alone
    third, _ = play(run, [0.01, 0.01], available=["x", "y"])
    assert set(third) == {"x", "y"}
    assert run.ledger.by_kind("down", 2)["model"] == 2000


def test_weights_keep_their_sum_when_a_client_leaves_during_skips():
    class Weighted(Uniform):
        def select(self, round, signals, rng):
            return dataclasses.replace(super().select(round, signals, rng), weights=(0.6, 0.2))

    run = Session(Weighted(), cohort_size=2, seed=0, gate=SketchToSkip(0.1, k=4))
    (stays, _), _ = play(run, [0.01, 0.01])
    play(run, [0.01, 0.01], available=[stays, "z"])
    assert sum(run.selection.weights) == pytest.approx(0.8)  # it was .6 + .6


@pytest.mark.parametrize("mode", ["round", "client"])
def test_what_a_client_kept_ends_with_its_model_unless_clients_upload_alone(mode):
    """At 60 % presence clients leave while rounds are skipped; they came back with old drift."""
    simulation = Simulation(
        federate(load("digits"), "shards", clients=12, per_client=2, seed=0),
        build("mlp-64-30", (1, 8, 8), classes=10, seed=0),
        "uniform",
        cohort_size=4,
        local=LocalTraining(steps=1, batch_size=16, lr=0.05),
        availability=Bernoulli(0.6),
        gate=SketchToSkip(0.02, k=50, mode=mode),
    )
    kept = {
        bool(simulation.seeds[0].differences)
        for record in (simulation.step()[0] for _ in range(25))
        if record.finished
    }
    assert kept == ({False} if mode == "round" else {True})


def test_only_those_that_moved():
    run = session(mode="client")
    chosen, outcome = play(run, [0.01, 0.5])
    assert outcome.finished == (chosen[1],)
    assert outcome.withheld == (chosen[0],)
    assert run.ledger.by_kind("up")["model"] == 1000


def test_an_update_that_was_not_asked_for_is_refused():
    run = session(mode="client")
    chosen = run.begin("abc", NOTHING).clients
    run.admit({chosen[0]: np.array([0], np.uint8), chosen[1]: np.array([1], np.uint8)})
    with pytest.raises(ValueError, match="was not selected"):
        run.finish({}, chosen)


def test_a_skip_survives_a_checkpoint(tmp_path):
    run, other = session(), session()
    first, _ = play(run, [0.01, 0.01])
    storage.save(tmp_path / "x", run.state_dict())
    other.load_state_dict(storage.load(tmp_path / "x"))
    assert other.skipped
    assert play(other, [0.01, 0.01])[0] == first
    assert other.gate.state.skips == 2
