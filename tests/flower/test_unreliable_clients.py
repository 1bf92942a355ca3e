"""Clients that leave, stay silent, fail, lie or cannot answer: the run goes on or says why not."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from tests.flower.conftest import OneClient, claim

from fedcohort.exceptions import ConfigError
from fedcohort.flower import attach
from fedcohort.flower.wire import RECORD, to_bytes
from fedcohort.gates import CMFL, SketchToSkip
from fedcohort.policies import POLICIES

# --- replies that cannot be used ----------------------------------------------------------------

METRICS = MetricRecord({"num-examples": 10, "loss": 0.5})


def records(**changed):
    """Make a reply with the model as it was sent and good metrics, except for what is changed."""

    def content(digits, message):
        found = {"arrays": message.content["arrays"], "metrics": METRICS, **changed}
        return RecordDict({name: record for name, record in found.items() if record is not None})

    return content


def metrics(**values):
    return records(metrics=MetricRecord({k.replace("_", "-"): v for k, v in values.items()}))


#: By name, a function of `digits` and the message that returns an unusable reply.
LIES = {
    "nan": lambda digits, message: digits.update(message, lambda a: a * np.nan),
    "shape": lambda digits, message: digits.update(message, lambda a: a[:1]),
    "names": records(arrays=ArrayRecord([np.zeros(3)])),
    "two models": lambda digits, message: RecordDict(
        {"a": message.content["arrays"], "b": message.content["arrays"], "metrics": METRICS}
    ),
    "no model": records(arrays=None),
    "no metrics": records(metrics=None),
    "no weight": metrics(loss=1.0),
    "nan weight": metrics(num_examples=float("nan")),
    "negative weight": metrics(num_examples=-5, loss=1.0),
    "list weight": metrics(num_examples=[1, 2]),
    "other metrics": metrics(num_examples=10),
}


def lying_app(digits, client, name):
    return digits.replying_app(client, lambda message: LIES[name](digits, message))


@pytest.mark.parametrize("name", LIES)
def test_an_update_that_is_none_is_dropped_and_counted(digits, cohort, name):
    """The next model is the mean of the others, which all add 1."""
    grid = digits.grid_of(lambda client: digits.changing_app(client, lambda a: a + 1))
    liar = digits.clients[2]
    grid.apps[digits.node(liar)] = lying_app(digits, liar, name)
    strategy = cohort(cohort_size=8)
    result = strategy.start(grid, digits.arrays(), 1)
    (report,) = strategy.history
    assert set(report.selected) - set(report.finished) == {liar}
    assert strategy.refused["invalid"] == 1
    for before, after in zip(digits.arrays().values(), result.arrays.values(), strict=True):
        np.testing.assert_allclose(after.numpy(), before.numpy() + 1, rtol=1e-5)


READINGS = {
    "impossible": claim("<f8", (0, *3 * [2**40 - 1]), b""),  # np.empty stopped the server
    "nan": to_bytes(np.float64("nan")),
    "shape": to_bytes(np.zeros((3, 3), np.int16)),
    "huge": to_bytes(np.zeros(10_000_000, np.uint8)),
}


@pytest.mark.parametrize("kind", ["query", "reply"])
@pytest.mark.parametrize("reading", READINGS)
def test_a_hostile_reading_is_dropped_counted_and_charged(digits, cohort, reading, kind):
    grid, liar = digits.grid(), digits.clients[0]
    name = "race_sketch" if kind == "query" else "loss_rms"
    app = grid.apps[digits.node(liar)]
    handler = "query.fedcohort" if kind == "query" else "train.default"
    honest = app._registered_funcs[handler]

    def answer(message, context):
        reply = honest(message, context)
        reply.content[RECORD].update(ConfigRecord({name: READINGS[reading]}))
        return reply

    app._registered_funcs[handler] = answer
    strategy = cohort("race-softmax" if kind == "query" else "oort", cohort_size=8)
    strategy.start(grid, digits.arrays(), 1)
    assert strategy.session.signals.dropped[name] == 1
    assert len(strategy.history[0].finished) == 8
    assert (strategy.session.ledger.by_kind("up")[name] > 10_000_000) == (reading == "huge")


def test_a_signal_that_raises_does_not_cost_the_update(digits, cohort):
    """Oort on a model whose loss cannot be computed once ended with an empty model."""

    def broken(client):
        app = ClientApp()
        app.train()(OneClient.echo)
        loss = {"loss": lambda outputs, y: {}["no logits"]}
        attach(app, digits.examples(client), digits.model, **loss)
        return app

    grid = digits.grid()
    grid.apps[digits.node("client-0")] = broken("client-0")
    strategy = cohort("oort", cohort_size=8)
    result = strategy.start(grid, digits.arrays(), 1)
    assert len(strategy.history[0].finished) == 8 and result.arrays
    assert +strategy.unanswered == {"loss_rms": 1}
    with pytest.raises(ConfigError, match=r"loss_rms.*KeyError: 'no logits'"):
        cohort("oort", cohort_size=8).start(digits.grid_of(broken), digits.arrays(), 1)


def test_training_that_raises_at_all_clients_stops_the_first_round_with_the_reason(digits, cohort):
    def fail(message):
        raise KeyError("no such column: age")

    grid = digits.grid_of(lambda client: digits.replying_app(client, fail))
    with pytest.raises(ConfigError, match="KeyError: 'no such column: age'"):
        cohort(cohort_size=4).start(grid, digits.arrays(), 3)


def test_evaluations_that_would_break_an_average_are_left_out(digits, cohort):
    grid = digits.grid()
    for i, client in enumerate(digits.clients):
        app = grid.apps[digits.node(client)]
        value = {0: float("nan"), 1: [1.0, 2.0]}.get(i, 0.5)

        @app.evaluate()
        def evaluate(message, context, value=value):
            metrics = MetricRecord({"num-examples": 10, "accuracy": value})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = cohort(inner=flower.FedAvg(), cohort_size=2)
    result = strategy.start(grid, digits.arrays(), 1)
    assert result.evaluate_metrics_clientapp[1] == {"accuracy": pytest.approx(0.5)}


# --- clients that leave, join late or stay silent -----------------------------------------------


@pytest.mark.parametrize("gate", [None, SketchToSkip(0.0001, k=5)], ids=["plain", "gate"])
def test_a_node_that_is_gone_is_told_by_the_message_it_did_not_answer(digits, cohort, gate):
    grid, strategy = digits.grid(), cohort(cohort_size=8, gate=gate)

    def leave(number, arrays):
        grid.gone = {digits.node("client-3")} if number == 1 else set()

    strategy.start(grid, digits.arrays(), 3, evaluate_fn=leave)
    assert [len(r.finished) for r in strategy.history] == [8, 7, 8]
    assert sum(strategy.refused.values()) == 1


def test_a_round_in_which_everybody_fails_changes_nothing(digits, cohort):
    grid, strategy = digits.grid(), cohort(cohort_size=3)
    strategy.directory.refresh(grid)
    grid.gone = set(grid.apps)
    result = strategy.start(grid, digits.arrays(), 2)
    assert [r.finished for r in strategy.history] == [(), ()]
    assert strategy.refused == {"error": 6} and not result.arrays


# --- a run in which the model would never change stops ------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_run_stops_if_all_updates_have_another_form(digits, cohort, size):
    grid = digits.grid_of(lambda client: digits.changing_app(client, lambda a: a.ravel()[:1]))
    with pytest.raises(ConfigError, match=r"never change.*of shape \(1,\)"):
        cohort(cohort_size=size).start(grid, digits.arrays(), 9)


def test_one_client_of_another_form_does_not_stop_a_run(digits, cohort):
    grid, liar = digits.grid(), digits.clients[2]
    grid.apps[digits.node(liar)] = digits.changing_app(liar, lambda a: a.ravel()[:1])
    strategy = cohort(cohort_size=1, seed=1)
    strategy.start(grid, digits.arrays(), 16)
    refused = [r for r in strategy.history if not r.finished]
    assert refused and all(r.selected == (liar,) for r in refused)


# --- signals that no client answers -------------------------------------------------------------


def grid_without_losses(digits, attached=True):
    """Clients with their own training and no model, so that no loss can be measured."""

    def content(message):
        metrics = MetricRecord({"num-examples": 10})
        return RecordDict({"arrays": message.content["arrays"], "metrics": metrics})

    return digits.grid_of(lambda client: digits.replying_app(client, content, attached))


MISSING = {
    "power-of-choice": "'loss'.*no @app.evaluate",
    "kdpp": "'feature_profile'.*model=",
    "oort": "'loss_rms'.*attach",
}


@pytest.mark.parametrize("policy", MISSING)
def test_a_policy_without_answers_stops(digits, cohort, policy):
    """Such a policy once selected uniformly, without a warning and with exit status 0."""
    strategy = cohort(policy, cohort_size=3, center=np.zeros(64))
    with pytest.raises(ConfigError, match=f"round 1: nobody answered the signal {MISSING[policy]}"):
        strategy.start(grid_without_losses(digits), digits.arrays(), 3)


def test_a_gate_around_clients_that_cannot_train_for_it_stops(digits, cohort):
    strategy = cohort(cohort_size=3, gate=CMFL())
    with pytest.raises(ConfigError, match=r"nobody answered the gate 'cmfl'"):
        strategy.start(grid_without_losses(digits, attached=False), digits.arrays(), 2)


def test_one_client_that_does_not_answer_is_reported_once_and_stops_nothing(digits, cohort, caplog):
    grid, strategy = digits.grid(), cohort(POLICIES["power-of-choice"](d=8), cohort_size=2)
    grid.apps[digits.node("client-3")] = digits.app("client-3", signals=["num_examples"])
    strategy.start(grid, digits.arrays(), 3)
    told = [r.getMessage() for r in caplog.records if "did not answer" in r.getMessage()]
    assert len(told) == 1 and "client-3: ConfigError" in told[0] and "'loss'" in told[0]
    assert strategy.unanswered == {"num_examples": 0, "loss": 3}
