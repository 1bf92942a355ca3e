"""Strategies whose clients reply with several records, only with metrics, or with boosted trees."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from fedcohort.exceptions import ConfigError
from fedcohort.flower import attach
from fedcohort.gates import SketchToSkip
from fedcohort.policies import POLICIES


class Scaffold(flower.FedAvg):
    """Like SCAFFOLD: two records are sent to clients and come back, and both are averaged."""

    def configure_train(self, server_round, arrays, config, grid):
        self.current = arrays
        controls = getattr(self, "controls", arrays)
        for message in super().configure_train(server_round, arrays, config, grid):
            message.content["controls"] = controls
            yield message

    def aggregate_train(self, server_round, replies):
        contents = [reply.content for reply in replies]
        mean = {
            name: ArrayRecord(
                {
                    k: Array(np.mean([c[name][k].numpy() for c in contents], axis=0))
                    for k in self.current
                }
            )
            for name in ("arrays", "controls")
        }
        self.controls = mean["controls"]
        return mean["arrays"], MetricRecord()


class MetricsOnly(flower.FedAvg):
    """Collects statistics and leaves the model as it is."""

    def aggregate_train(self, server_round, replies):
        return None, self.train_metrics_aggr_fn([r.content for r in replies], "num-examples")


def two_records(digits, message):
    """A model moved by 1, and a second record."""
    content = digits.update(message, lambda a: a + 1)
    content["controls"] = message.content["arrays"]
    return content


def only_metrics(digits, message):
    return RecordDict({"metrics": MetricRecord({"num-examples": 1, "mean": 2.0})})


REPLIES = {"several records": (Scaffold, two_records), "metrics only": (MetricsOnly, only_metrics)}


def grid_replying(digits, content):
    return digits.grid_of(
        lambda client: digits.replying_app(client, lambda message: content(digits, message))
    )


@pytest.mark.parametrize("case", REPLIES)
def test_replies_of_another_kind_go_with_policies_that_need_no_update(digits, cohort, inner, case):
    strategy_class, content = REPLIES[case]
    grid = grid_replying(digits, content)
    strategy = cohort(inner=inner(strategy_class), cohort_size=3)
    result = strategy.start(grid, digits.arrays(), 2)
    assert [len(r.finished) for r in strategy.history] == [3, 3] and not strategy.refused
    if case == "several records":
        for before, after in zip(digits.arrays().values(), result.arrays.values(), strict=True):
            np.testing.assert_allclose(after.numpy(), before.numpy() + 2, rtol=1e-6)
    else:
        assert result.train_metrics_clientapp[2]["mean"] == pytest.approx(2.0)


@pytest.mark.parametrize("case", REPLIES)
def test_policies_that_compare_updates_say_that_they_cannot(digits, cohort, inner, case):
    strategy_class, content = REPLIES[case]
    grid = grid_replying(digits, content)
    strategy = cohort(POLICIES["fedacs"](), inner(strategy_class), cohort_size=3)
    with pytest.raises(ConfigError, match="ArrayRecords, not one"):
        strategy.start(grid, digits.arrays(), 1)


def test_one_odd_reply_does_not_become_the_rule(digits, cohort, inner):
    """A custom strategy's replies are compared with each other: the odd one is left out."""
    grid, odd = grid_replying(digits, two_records), digits.clients[2]
    grid.apps[digits.node(odd)] = digits.changing_app(odd, lambda a: a)
    strategy = cohort(inner=inner(Scaffold), cohort_size=8)
    strategy.start(grid, digits.arrays(), 1)
    (report,) = strategy.history
    assert set(report.selected) - set(report.finished) == {odd}


# --- boosted trees -------------------------------------------------------------------------------


def booster(trees: int) -> bytes:
    """A booster in XGBoost's JSON, with only the fields that Flower's bagging reads."""
    model = {
        "gbtree_model_param": {"num_trees": str(trees), "num_parallel_tree": "1"},
        "trees": [{"id": i} for i in range(trees)],
        "tree_info": [0] * trees,
        "iteration_indptr": list(range(trees + 1)),
    }
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def trees_grid(digits, hostile=None, loss=None, evaluated=None):
    """Clients that train one tree each; a hostile one replies with bytes that are not JSON."""

    def content(client, message):
        data = b"{not json" if client == hostile else booster(1)
        metrics = MetricRecord({"num-examples": 10} | ({"train_loss": loss} if loss else {}))
        arrays = ArrayRecord([np.frombuffer(data, np.uint8)])
        return RecordDict({"arrays": arrays, "metrics": metrics})

    def evaluate(message, context):
        evaluated.append(message.content["arrays"]["0"].numpy().size)
        metrics = MetricRecord({"eval_loss": 0.5, "num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def make_app(client):
        app = digits.replying_app(client, partial(content, client), attached=False)
        if evaluated is not None:
            app.evaluate()(evaluate)
        attach(app, digits.examples(client), classes=10)
        return app

    return digits.grid_of(make_app)


def trained(way, message):
    return way == "up" and message.has_content() and "arrays" in message.content


EMPTY = ArrayRecord([np.frombuffer(b"", np.uint8)])


@pytest.mark.parametrize("policy", ["uniform", "race-softmax", "kdpp:race_sketch"])
def test_trees_are_bagged_from_cohorts(digits, cohort, inner, policy):
    name, _, signal = policy.partition(":")
    made = POLICIES[name](**({"signal": signal} if signal else {}))
    strategy = cohort(made, inner(flower.FedXgbBagging), cohort_size=3)
    grid = trees_grid(digits)
    result = strategy.start(grid, EMPTY, 3)
    model = json.loads(result.arrays["0"].numpy().tobytes())["learner"]["gradient_booster"]["model"]
    assert model["gbtree_model_param"]["num_trees"] == "9" and len(model["trees"]) == 9
    assert [len(r.finished) for r in strategy.history] == [3, 3, 3]
    sizes = [m.content["arrays"]["0"].numpy().nbytes for w, _, m in grid.crossed if trained(w, m)]
    assert strategy.session.ledger.by_kind("up")["model"] == sum(sizes)


@pytest.mark.parametrize(
    ("policy", "gate"), [("fedacs", None), ("uniform", SketchToSkip(0.1, k=5))], ids=str
)
def test_trees_and_what_compares_updates_are_refused_at_once(digits, cohort, inner, policy, gate):
    strategy = cohort(POLICIES[policy](), inner(flower.FedXgbBagging), cohort_size=3, gate=gate)
    with pytest.raises(ConfigError, match="not vectors"):
        strategy.start(trees_grid(digits), EMPTY, 1)


def test_a_policy_that_asks_for_vectors_of_trees_is_told_why_there_are_none(digits, cohort, inner):
    strategy = cohort("divfl", inner(flower.FedXgbBagging), cohort_size=3)
    with pytest.raises(ConfigError, match=r"round 2.*no floating-point arrays"):
        strategy.start(trees_grid(digits, loss=0.5), EMPTY, 2)


def test_trees_that_are_none_do_not_end_a_run(digits, cohort, inner):
    strategy = cohort(inner=inner(flower.FedXgbBagging), cohort_size=8)
    strategy.start(trees_grid(digits, hostile=digits.clients[4]), EMPTY, 2)
    assert [len(r.finished) for r in strategy.history] == [7, 7]
    assert strategy.refused == {"invalid": 2}


@pytest.mark.parametrize("policy", ["power-of-choice:d=4", "active-fl"])
def test_nobody_is_asked_about_an_empty_model(digits, cohort, inner, policy):
    """Flower's XGBoost app evaluates it by aborting the process."""
    evaluated = []
    grid = trees_grid(digits, evaluated=evaluated)
    strategy = cohort(policy, inner(flower.FedXgbBagging), cohort_size=2)
    strategy.start(grid, EMPTY, 2)
    assert [len(r.finished) for r in strategy.history] == [2, 2]
    assert len(grid.asked("loss")) == (0 if policy == "active-fl" else 4)
    assert evaluated and all(evaluated)  # in the second round
