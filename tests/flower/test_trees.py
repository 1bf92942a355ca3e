"""Boosted trees: bagged from cohorts, and refused where updates must be vectors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedXgbBagging
from tests.flower.conftest import booster

from fedcohort.exceptions import ConfigError
from fedcohort.gates import SketchToSkip
from fedcohort.policies import POLICIES


def trees_grid(digits, hostile=None):
    """Clients that train one tree each; a hostile one replies with bytes that are not JSON."""

    def content_of(client):
        data = b"{not json" if client == hostile else booster(1)
        arrays = ArrayRecord([np.frombuffer(data, np.uint8)])
        return RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 10})})

    return digits.grid_of(
        lambda client: digits.replying_app(client, lambda message: content_of(client))
    )


def trained(way, message):
    return way == "up" and message.has_content() and "arrays" in message.content


EMPTY = ArrayRecord([np.frombuffer(b"", np.uint8)])


@pytest.mark.parametrize("policy", ["uniform", "race-softmax", "kdpp:race_sketch"])
def test_trees_are_bagged_from_cohorts(digits, cohort, inner, policy):
    name, _, signal = policy.partition(":")
    made = POLICIES[name](**({"signal": signal} if signal else {}))
    strategy = cohort(made, inner(FedXgbBagging), cohort_size=3)
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
    strategy = cohort(POLICIES[policy](), inner(FedXgbBagging), cohort_size=3, gate=gate)
    with pytest.raises(ConfigError, match="not vectors"):
        strategy.start(trees_grid(digits), EMPTY, 1)


def test_a_policy_that_asks_for_vectors_of_trees_is_told_why_there_are_none(digits, cohort, inner):
    strategy = cohort("divfl", inner(FedXgbBagging), cohort_size=3)
    with pytest.raises(ConfigError, match=r"round 2.*no floating-point arrays"):
        strategy.start(digits.grid_of(digits.trees_app), EMPTY, 2)


def test_trees_that_are_none_do_not_end_a_run(digits, cohort, inner):
    strategy = cohort(inner=inner(FedXgbBagging), cohort_size=8)
    strategy.start(trees_grid(digits, hostile=digits.clients[4]), EMPTY, 2)
    assert [len(r.finished) for r in strategy.history] == [7, 7]
    assert strategy.refused == {"invalid": 2}
