"""The same data, model and seed: what the simulator does, a Flower federation does as well."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg
from tests.flower.app.trial.task import accuracy
from tests.flower.conftest import SlowGrid

from fedcohort.flower import CohortStrategy, Pace
from fedcohort.flower.client.model import Measured
from fedcohort.flower.server import asking
from fedcohort.gates import CMFL, OptimalSampling, SketchToSkip
from fedcohort.policies import POLICIES, Policy
from fedcohort.rounds import Selection
from fedcohort.signals.catalog import SIGNALS, Needs, register_signal
from fedcohort.signals.forms import Numbers
from fedcohort.simulate import Simulation
from fedcohort.simulate.clock import Durations, Trace

ROUNDS = 4


def run_flower(digits, policy, gate=None, grid=None, **options):
    test = digits.federation.dataset.x_test
    strategy = CohortStrategy(
        FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0),
        policy,
        cohort_size=3,
        gate=gate,
        seed=7,
        center=test.reshape(len(test), -1).mean(axis=0),
        **{"timeout": 5, **options},
    )
    accuracies = []

    def evaluate(number, arrays):
        accuracies.append(accuracy(arrays))
        return MetricRecord({"accuracy": accuracies[-1]})

    grid = grid or digits.grid(classes=10)
    strategy.start(grid, digits.arrays(), ROUNDS, evaluate_fn=evaluate)
    return strategy, accuracies[1:]


def run_simulation(digits, policy, gate=None, **options):
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
        **options,
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


# They need durations, which are real seconds in Flower and modeled ones in the simulator.
UNLIKE = {"oort", "tifl", "haccs"}


PICKING = [
    *(POLICIES[name]() for name in sorted(set(POLICIES) - UNLIKE)),
    POLICIES["sketch-to-select"](interval=1, fresh=False),
    POLICIES["sketch-to-select"](interval=1, compare="models"),
    POLICIES["fedacs"](reward="gradient-sketch"),
    POLICIES["race-softmax"](rows=10),
]


@pytest.mark.parametrize("policy", PICKING, ids=repr)
def test_a_policy_picks_the_same_cohorts(digits, policy):
    # Flower's clients must be sent the public center; simulated ones share the server's memory.
    centered = policy.signal_options.get("race_sketch", {}).get("center")
    extra = len(digits.clients) * 64 * 8 if centered else 0
    other = copy.deepcopy(policy)
    check_same(*run_flower(digits, policy), *run_simulation(digits, other), extra_down=extra)


TIMED = [
    POLICIES["uniform"](),
    POLICIES["oort"](),
    POLICIES["sketch-match"](time=True),
    POLICIES["sketch-match"](time=True, turns=1, label_weight=0.0),
    POLICIES["sketch-match"](time="ask"),
]
#: With the positions of the clients that are there in the first rounds, and everybody later.
PACES = [
    (Pace(), []),
    (Pace(over_select=1.5), []),
    (Pace(over_select=1.5, late="next"), [[0, 1, 2, 3, 4], [3, 4]]),  # in round 2 the late ones
    (Pace(deadline=7.0), []),
    (Pace(deadline="50%", late="next", deviation=0.35), []),
]


@pytest.mark.parametrize(("pace", "there"), PACES, ids=["all", "more", "next", "deadline", "share"])
@pytest.mark.parametrize("policy", TIMED, ids=repr)
def test_the_same_durations_give_the_same_rounds(digits, clock, monkeypatch, policy, pace, there):
    """Cohorts, arrivals, updates and clock; the server looks for replies every half second."""
    seconds = {c: 2.0 + 3 * i % 17 for i, c in enumerate(digits.clients)}
    monkeypatch.setattr(asking, "FIRST_PAUSE", 0.5)
    monkeypatch.setattr(asking, "MAX_PAUSE", 0.5)
    monkeypatch.setattr(
        Measured, "expected_durations", lambda client: np.array([seconds[client.ids[0]]])
    )
    rounds = [[digits.clients[i] for i in some] for some in there] + [digits.clients]
    trace = dict(enumerate(rounds, 1))
    grid = SlowGrid(digits.grid(classes=10), clock, {digits.node(c): seconds[c] for c in seconds})

    def show(number):
        away = set(digits.clients).difference(trace[min(number, len(trace))])
        grid.away = {digits.node(client) for client in away}

    show(1)
    flower, accuracies = run_flower(
        digits,
        copy.deepcopy(policy),
        grid=grid,
        pace=pace,
        timeout=100,
        on_round=lambda report: show(report.round + 1),
    )
    options = {"durations": Durations({}, {}, seconds), "availability": Trace(trace)}
    session, records = run_simulation(digits, policy, pace=pace, **options)
    for name in ("selected", "finished", "cut", "late", "bytes_up"):
        assert [getattr(r, name) for r in flower.history] == [getattr(r, name) for r in records]
    for name in ("seconds", "elapsed"):
        clock = [getattr(r, name) for r in records]
        assert [getattr(r, name) for r in flower.history] == pytest.approx(clock, abs=0.002)
    assert accuracies == pytest.approx([r.accuracy for r in records], abs=1e-4)
    assert not flower.refused
    for report, record in zip(flower.history, records, strict=True):
        assert report.slowest == (None if record.slowest in record.cut else record.slowest)
    clients = session.signals.known("duration", digits.clients)
    known = [s.signals.values("duration", clients) for s in (flower.session, session)]
    assert known[0] == pytest.approx(known[1])


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
