"""The same data, model and seed: what the simulator does, a Flower federation does as well."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

from fedcohort.flower import CohortStrategy
from fedcohort.gates import CMFL, OptimalSampling, SketchToSkip
from fedcohort.policies import POLICIES, Policy
from fedcohort.rounds import Selection
from fedcohort.signals.catalog import SIGNALS, Needs, register_signal
from fedcohort.signals.forms import Numbers
from fedcohort.simulate import Simulation

ROUNDS = 4


def run_flower(digits, policy, gate=None, **options):
    grid = digits.grid(classes=10)
    test = digits.federation.dataset.x_test
    strategy = CohortStrategy(
        FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0),
        policy,
        cohort_size=3,
        gate=gate,
        seed=7,
        timeout=5,
        center=test.reshape(len(test), -1).mean(axis=0),
    )
    accuracies = []

    def evaluate(number, arrays):
        accuracies.append(digits.accuracy(arrays))
        return MetricRecord({"accuracy": accuracies[-1]})

    strategy.start(grid, digits.arrays(), ROUNDS, evaluate_fn=evaluate)
    return strategy, accuracies[1:]


def run_simulation(digits, policy, gate=None):
    simulation = Simulation(
        digits.federation,
        digits.model(),
        policy,
        cohort_size=3,
        gate=gate,
        local=digits.local,
        aggregation="size-weighted",
        seeds=(7,),
        device="cpu",
    )
    return simulation.seeds[0].session, [simulation.step()[0] for _ in range(ROUNDS)]


def check_same(flower, accuracies, session, records, extra_down=0):
    assert [r.selected for r in flower.history] == [r.selected for r in records]
    assert [r.finished for r in flower.history] == [r.finished for r in records]
    assert accuracies == pytest.approx([r.accuracy for r in records], abs=1e-4)
    assert [r.bytes_up for r in flower.history] == [r.bytes_up for r in records]
    assert flower.session.ledger.by_kind("up") == session.ledger.by_kind("up")
    down = flower.session.ledger.by_kind("down")
    assert sum(down.values()) == sum(session.ledger.by_kind("down").values()) + extra_down
    assert down["model"] == session.ledger.by_kind("down")["model"]


# Durations are real seconds in Flower and modeled ones in the simulator.
UNLIKE = {"oort", "tifl", "haccs"}


@pytest.mark.parametrize("name", sorted(set(POLICIES) - UNLIKE))
def test_a_policy_picks_the_same_cohorts(digits, name):
    policy = POLICIES[name]
    # Flower's clients must be sent the public center; simulated ones share the server's memory.
    centered = policy().signal_options.get("race_sketch", {}).get("center")
    extra = len(digits.clients) * 64 * 8 if centered else 0
    check_same(*run_flower(digits, policy()), *run_simulation(digits, policy()), extra_down=extra)


@pytest.mark.parametrize(
    "policy",
    [
        POLICIES["sketch-to-select"](interval=1, fresh=False),
        POLICIES["sketch-to-select"](interval=1, compare="models"),
        POLICIES["fedacs"](reward="gradient-sketch"),
        POLICIES["race-softmax"](rows=10),
    ],
    ids=repr,
)
def test_options_of_signals_travel_with_the_query(digits, policy):
    other = copy.deepcopy(policy)
    check_same(*run_flower(digits, policy), *run_simulation(digits, other))


@pytest.mark.parametrize(
    "gate",
    [
        SketchToSkip(threshold=0.45, k=20),
        SketchToSkip(threshold=0.45, k=20, on_skip="reset", max_skips=2),
        SketchToSkip(threshold=0.15, k=50, mode="client"),
        SketchToSkip(window=2, k=10, skip_rate=0.5),
        CMFL(threshold=0.55),
        OptimalSampling(uploads=2),
    ],
    ids=["skip", "reset", "client", "auto", "cmfl", "sampled"],
)
def test_a_gate_decides_the_same(digits, gate):
    flower, accuracies = run_flower(digits, POLICIES["uniform"](), copy.deepcopy(gate))
    session, records = run_simulation(digits, POLICIES["uniform"](), copy.deepcopy(gate))
    assert any(r.withheld for r in flower.history)  # else the gate did nothing here
    check_same(flower, accuracies, session, records)


def test_a_signal_of_ones_own_runs_in_the_simulator_and_in_flower(digits):
    """docs/write-a-policy.md shows this one: a policy may need what the library never heard of."""

    class ManyLabels(Policy):
        needs = Needs(profile=frozenset({"label_count"}), reply=frozenset({"step_norm"}))

        def select(self, round, signals, rng):
            counts = signals.values("label_count", round.available)
            order = np.lexsort((np.arange(len(counts)), -counts))
            return Selection(tuple(round.available[i] for i in order[: round.size]))

    flower, accuracies = run_flower(digits, ManyLabels())
    session, records = run_simulation(digits, ManyLabels())
    check_same(flower, accuracies, session, records)
    clients = tuple(sorted(digits.federation.parts))
    y, parts = digits.federation.dataset.y, digits.federation.parts
    labels = [len(np.unique(y[parts[c]])) for c in clients]
    for signals in (session.signals, flower.session.signals):
        assert signals.values("label_count", clients).tolist() == labels
        assert (signals.values("step_norm", records[0].selected) > 0).all()


@pytest.fixture(autouse=True)
def own_signals():
    @register_signal("label_count", when="profile", work="data", form=Numbers(low=0))
    def label_count(clients, options):
        """How many different labels the client has."""
        return [len(np.unique(y)) for _, y in clients.examples()]

    @register_signal("step_norm", when="reply", work="server", form=Numbers(low=0))
    def step_norm(clients, options):
        """Length of the update."""
        return np.linalg.norm(clients.updates().numpy(), axis=1)

    yield
    del SIGNALS["label_count"], SIGNALS["step_norm"]
