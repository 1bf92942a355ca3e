"""`CohortStrategy` with clients that answer: cohorts, weights, messages, bytes and settings."""

from __future__ import annotations

import copy
import socket

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.serverapp import strategy as flower
from tests.flower.conftest import OneClient

from fedcohort.exceptions import ConfigError
from fedcohort.flower import Pace, attach
from fedcohort.flower.wire import RECORD
from fedcohort.gates import CMFL, SketchToSkip
from fedcohort.policies import POLICIES
from fedcohort.policies.base import Policy
from fedcohort.rounds import Selection


def named(gate):
    return "no gate" if gate is None else gate.name


@pytest.mark.parametrize("gate", [None, SketchToSkip(0.45, k=20), CMFL(0.55)], ids=named)
@pytest.mark.parametrize("name", ["power-of-choice", "race-softmax", "kdpp", "active-fl", "fedcor"])
def test_the_ledger_counts_the_bytes_that_cross(digits, cohort, name, gate):
    grid = digits.grid()
    strategy = cohort(POLICIES[name](), cohort_size=3, gate=copy.deepcopy(gate))
    strategy.start(grid, digits.arrays(), 4)
    ledger = strategy.session.ledger
    assert ledger.total("down") == grid.bytes_crossed("down")
    assert ledger.total("up") == grid.bytes_crossed("up")
    assert sum(r.bytes_down for r in strategy.history) == ledger.total("down")


def test_the_ledger_counts_models_sent_again(digits, cohort):
    """Clients that do not say that they keep it receive it with the query and for training."""

    def forgetful(message, context, call_next):
        reply = call_next(message, context)
        reply.content.get(RECORD, {}).pop("held", None)
        return reply

    grid = digits.grid(mods=[forgetful])
    strategy = cohort(POLICIES["power-of-choice"](d=4), cohort_size=2)
    strategy.start(grid, digits.arrays(), 2)
    keeping = digits.grid()
    other = cohort(POLICIES["power-of-choice"](d=4), cohort_size=2)
    other.start(keeping, digits.arrays(), 2)
    assert strategy.session.ledger.total("down") == grid.bytes_crossed("down")
    assert other.session.ledger.total("down") == keeping.bytes_crossed("down")
    assert grid.bytes_crossed("down") > keeping.bytes_crossed("down")
    assert [r.selected for r in strategy.history] == [r.selected for r in other.history]


@pytest.mark.parametrize("learns", [True, False])
def test_a_late_profile_is_taken_under_the_first_model(digits, cohort, learns):
    """Where the model did not change, the newcomer is sent one copy, and one is charged."""
    grid = digits.grid(train=None if learns else OneClient.echo)
    strategy = cohort(POLICIES["kdpp"](), cohort_size=8)
    last = digits.node(digits.clients[-1])
    app = grid.apps.pop(last)

    def join(number, arrays):
        if number == 2:
            grid.apps[last] = app

    strategy.start(grid, digits.arrays(), 3, evaluate_fn=join)
    profiles = [m for n, m in grid.asked("feature_profile") if n == last]
    assert profiles[0].content["arrays"] == digits.arrays()
    assert digits.clients[-1] in strategy.history[2].finished
    assert strategy.session.ledger.total("down") == grid.bytes_crossed("down")


def test_nothing_but_flowers_grid_is_used(digits, cohort, monkeypatch):
    """fedcohort opens no port and makes no connection of its own."""

    def forbidden(*arguments):
        raise AssertionError("a socket was used")

    for name in ("bind", "listen", "connect"):
        monkeypatch.setattr(socket.socket, name, forbidden)
    strategy = cohort("race-softmax", cohort_size=3, gate=SketchToSkip(0.45, k=20))
    strategy.start(digits.grid(), digits.arrays(), 2)
    assert len(strategy.history) == 2


def test_a_strategy_that_trains_nobody_is_left_alone(digits, cohort, inner):
    strategy = cohort(inner=inner(fraction_train=0.0, min_train_nodes=0))
    result = strategy.start(digits.grid(), digits.arrays(), 2)
    assert strategy.history == [] and not result.arrays


def test_plain_clients_can_be_selected_too(digits, cohort):
    """Clients without `attach` train for policies that need no signals."""
    grid = digits.grid_of(lambda client: digits.changing_app(client, lambda a: a + 1, False))
    strategy = cohort(cohort_size=2)
    strategy.start(grid, digits.arrays(), 2)
    assert [len(r.finished) for r in strategy.history] == [2, 2]


class Weighted(Policy):
    """Picks the first clients with given weights."""

    def __init__(self, *weights):
        self.weights = weights

    def select(self, round, signals, rng):
        return Selection(round.available[: len(self.weights)], self.weights)


@pytest.mark.parametrize("weights", [(0.25, 0.75), (0.5, 1.0), (3.0, 1.0)])
def test_weights_of_the_policy_are_used_as_they_are(digits, cohort, weights):
    """The next model is c + sum w (x - c), for weights of any sum."""
    grid = digits.grid()
    moves = {"client-0": 2.0, "client-1": -1.0}
    for client, by in moves.items():
        app = digits.changing_app(client, lambda a, by=by: a + np.float32(by))
        grid.apps[digits.node(client)] = app
    strategy = cohort(Weighted(*weights), cohort_size=2)
    result = strategy.start(grid, digits.arrays(), 1)
    step = weights[0] * 2.0 - weights[1]
    for before, after in zip(digits.arrays().values(), result.arrays.values(), strict=True):
        np.testing.assert_allclose(after.numpy(), before.numpy() + step, atol=1e-5)


def test_clients_state_how_long_a_round_should_take(digits, cohort):
    """Each times a training step of its own, without being sent a model."""
    strategy = cohort("sketch-match:time=ask", cohort_size=2)
    strategy.start(digits.grid(classes=10), digits.arrays(), 1)
    session = strategy.session
    assert (session.signals.values("expected_duration", digits.clients) > 0).all()
    assert session.ledger.by_kind("up")["expected_duration"] == 8 * len(digits.clients)
    assert session.ledger.by_kind("down")["model"] == 2 * session.model_bytes


def accountable():
    wrapper = flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 1.0, 1.0, 4)
    wrapper.accountant = object()
    return wrapper


CLIENT_SIDE = flower.DifferentialPrivacyClientSideFixedClipping(flower.FedAvg(), 1.0, 1.0, 4)
IMPOSSIBLE = {
    "server-side": {"inner": CLIENT_SIDE, "gate": SketchToSkip()},
    "insight_step": {"policy": POLICIES["fedacs"](reward="gradients")},
    "timeout=0": {"timeout": 0},
    "a gate decides when all": {"gate": "cmfl", "pace": Pace(deadline=1.0)},
    r"FedAvg.*flwr\.serverapp\.strategy": {"inner": OldFedAvg()},
    r"cohort_size=4.*FedXgbCyclic": {"inner": flower.FedXgbCyclic(), "cohort_size": 4},
    "accountant": {"inner": accountable(), "checkpoint": "run.ckpt"},
}


@pytest.mark.parametrize("why", IMPOSSIBLE)
def test_settings_that_cannot_work_are_refused(cohort, why):
    with pytest.raises(ConfigError, match=why):
        cohort(**IMPOSSIBLE[why])


@pytest.mark.parametrize("outputs", [10, 1])
def test_labels_are_hashed_by_the_models_outputs(digits, cohort, outputs):
    """A client with few labels does not know how many exist; one output stands for two labels."""

    def app(client):
        x, y = digits.examples(client)
        app = digits.changing_app(client, lambda a: a, attached=False)
        attach(app, (x, y if outputs == 10 else y % 2))
        return app

    arrays = ArrayRecord([np.zeros((64, outputs), np.float32), np.zeros(outputs, np.float32)])
    strategy = cohort("sketch-match:label_weight=1.0", cohort_size=3, center=np.zeros(64))
    strategy.start(digits.grid_of(app), arrays, 1)
    assert strategy.session.signals.known("race_sketch", digits.clients) == digits.clients
