"""Flower's strategies, and subclasses of them, work inside `CohortStrategy` as they do alone."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower

from fedcohort.exceptions import ConfigError
from fedcohort.flower import CohortStrategy
from fedcohort.flower.wire import dtypes_of, in_dtypes
from fedcohort.policies import Uniform

ROUNDS = 4


def start_arrays(counter=False):
    """A model with parameters, and perhaps a counter as batch norm has one."""
    rng = np.random.default_rng(0)
    values = {"weight": rng.normal(size=(8, 5)), "bias": rng.normal(size=5)}
    arrays = {name: Array(np.float32(value)) for name, value in values.items()}
    return ArrayRecord({**arrays, "count": Array(np.array(0))} if counter else arrays)


def make_grid(digits, mods=(), attached=True):
    """Clients that go towards a point of their own, in the dtypes of the app's model."""

    def content(client, message):
        own, lr = np.float32(digits.clients.index(client)), message.content["config"]["lr"]
        arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
        for name in ("weight", "bias"):
            values = np.float32(arrays[name])
            arrays[name] = values + np.float32(lr) * np.sin(own - values)
        if "count" in arrays:
            arrays["count"] = np.array(int(arrays["count"]) + 2 + int(own))
        metrics = MetricRecord({"train_loss": 1 / (1 + float(own)), "num-examples": 10})
        record = ArrayRecord({name: Array(values) for name, values in arrays.items()})
        return RecordDict({"arrays": record, "metrics": metrics})

    return digits.grid_of(
        lambda client: digits.replying_app(client, partial(content, client), attached, mods)
    )


OFF = {"fraction_evaluate": 0.0, "min_evaluate_nodes": 0}


SERVER_OPTIMIZERS = {"eta": 0.01, "beta_1": 0.9, "beta_2": 0.99, **OFF}


INNERS = {
    "FedAvg": lambda: flower.FedAvg(**OFF),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1, **OFF),
    "FedAdam": lambda: flower.FedAdam(**SERVER_OPTIMIZERS),
    "FedYogi": lambda: flower.FedYogi(**SERVER_OPTIMIZERS),
    "FedAdagrad": lambda: flower.FedAdagrad(eta=0.01, **OFF),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.9, **OFF),
    "FedMedian": lambda: flower.FedMedian(**OFF),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(**OFF),
    "Krum": lambda: flower.Krum(num_malicious_nodes=1, **OFF),
    "MultiKrum": lambda: flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=4, **OFF),
    "Bulyan": lambda: flower.Bulyan(num_malicious_nodes=1, **OFF),
    "QFedAvg": lambda: flower.QFedAvg(0.1, **OFF),
    "server fixed": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(**OFF), 0.01, 1.0, 8
    ),
    "server adaptive": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        flower.FedAvg(**OFF), 0.01, 8
    ),
    "client fixed": lambda: flower.DifferentialPrivacyClientSideFixedClipping(
        flower.FedAvg(**OFF), 0.01, 1.0, 8
    ),
    "client adaptive": lambda: flower.DifferentialPrivacyClientSideAdaptiveClipping(
        flower.FedAvg(**OFF), 0.01, 8
    ),
}


MODS = {"client fixed": [fixedclipping_mod], "client adaptive": [adaptiveclipping_mod]}


@pytest.fixture
def in_order(monkeypatch):
    """Both federations add updates in the same order, so that sums of floats agree."""
    monkeypatch.setattr(random, "sample", lambda nodes, size: sorted(nodes, reverse=True)[:size])
    monkeypatch.setattr(
        "fedcohort.policies.uniform.pick", lambda clients, size, rng: tuple(clients[:size])
    )


def run(strategy, grid, counter=False, rounds=ROUNDS):
    np.random.seed(0)  # noqa: NPY002 - Flower's noise
    return strategy.start(
        grid, start_arrays(counter), rounds, train_config=ConfigRecord({"lr": 0.1})
    )


def values(result):
    return {name: array.numpy() for name, array in result.arrays.items()}


@pytest.mark.parametrize("counter", [False, True], ids=["plain", "batch norm"])
@pytest.mark.parametrize("name", INNERS)
def test_everybody_in_a_uniform_cohort_is_the_inner_strategy(digits, in_order, name, counter):
    """Before a fix, FedAdam's float64 arrays and averaged counters had all updates refused."""
    mods, inner = MODS.get(name, ()), INNERS[name]()
    strategy = CohortStrategy(INNERS[name](), Uniform(), cohort_size=8, timeout=5)
    grids = [make_grid(digits, mods, attached) for attached in (False, True)]
    if (name, counter) == ("QFedAvg", True):  # Flower itself fails: it scales counters in place
        for one, grid in zip((inner, strategy), grids, strict=True):
            with pytest.raises(TypeError, match="Cannot cast ufunc"):
                run(one, grid, counter)
        return
    if counter and mods:
        # Flower's mod clips counters too. Alone, it would clip them against averages such as 3.6.
        send_dtypes_of(start_arrays(counter), inner)
    alone = run(inner, grids[0], counter)
    inside = run(strategy, grids[1], counter)
    assert [len(r.finished) for r in strategy.history] == [8] * ROUNDS
    assert not strategy.refused
    start = start_arrays(counter)
    for key, array in values(inside).items():
        np.testing.assert_array_equal(array, values(alone)[key])
        assert not np.array_equal(array, start[key].numpy())
    assert list(inside.train_metrics_clientapp) == [1, 2, 3, 4]
    assert inside.train_metrics_clientapp == alone.train_metrics_clientapp


def send_dtypes_of(start, inner):
    configure = inner.configure_train
    inner.configure_train = lambda number, arrays, config, grid: configure(
        number, in_dtypes(arrays, dtypes_of(start)), config, grid
    )


@pytest.mark.parametrize("name", ["FedAdam", "FedAvg"])
def test_clients_are_sent_the_dtypes_that_the_app_started_with(digits, name):
    grid = make_grid(digits)
    strategy = CohortStrategy(INNERS[name](), Uniform(), cohort_size=3, timeout=5)
    run(strategy, grid, counter=True, rounds=2)
    start = start_arrays(counter=True)
    for _, message in grid.sent("train"):
        sent = message.content["arrays"]
        assert [a.dtype for a in sent.values()] == [a.dtype for a in start.values()]


@pytest.mark.parametrize(
    ("policy", "gate"), [("uniform", "sketch-to-skip:threshold=0.05,k=20"), ("fedacs", None)]
)
def test_counters_are_not_parameters_for_gates_and_policies(digits, policy, gate):
    """Averaged counters are float64; before a fix, they were compared with parameters."""
    strategy = CohortStrategy(INNERS["FedAvg"](), policy, cohort_size=4, timeout=5, gate=gate)
    run(strategy, make_grid(digits), counter=True)
    assert sum(len(r.finished) for r in strategy.history) >= 4 and not strategy.refused


class PerNode(flower.FedAvg):
    """Sends each node its own config and model, and halves the learning rate once."""

    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 2:
            config["lr"] = config["lr"] / 2
        for message in super().configure_train(server_round, arrays, config, grid):
            node = message.metadata.dst_node_id
            moved = {k: Array(a.numpy() + np.float32(node)) for k, a in arrays.items()}
            own = ConfigRecord({**config, "node": node})
            content = RecordDict({"arrays": ArrayRecord(moved), "config": own})
            yield Message(content, node, "train")


def test_each_node_gets_its_own_message(digits):
    """Before a fix, 13 of 15 messages carried another node's config."""
    grid = digits.grid_of(lambda client: digits.changing_app(client, lambda a: a * 0))
    inner = PerNode(fraction_train=0.3, min_available_nodes=8, **OFF)
    strategy = CohortStrategy(inner, Uniform(), cohort_size=3, timeout=5)
    run(strategy, grid, rounds=5)
    sent = [(node, message.content) for node, message in grid.sent("train")]
    assert [content["config"]["node"] for node, content in sent] == [node for node, _ in sent]
    assert [content["config"]["lr"] for _, content in sent] == [0.1] * 3 + [0.05] * 12
    assert all((c["arrays"]["bias"].numpy() == node).all() for node, c in sent[3:])
    assert (inner.fraction_train, inner.min_available_nodes) == (0.3, 8)
    # What updates are compared with is the global model, not that of one of the nodes.
    assert not any(a.numpy().any() for a in strategy.collector.current.arrays.values())


class SomeNodes(PerNode):
    """Has a message of its own for two nodes only."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        return messages[:2]


def test_a_strategy_without_a_message_for_a_node_is_refused_with_words(digits):
    strategy = CohortStrategy(SomeNodes(**OFF), Uniform(), cohort_size=5, timeout=5)
    with pytest.raises(ConfigError, match="a message of its own, but none to client-"):
        run(strategy, make_grid(digits), rounds=1)


class Custom(flower.FedAvg):
    """Like Flower's advanced example: its own methods, and a start that calls them."""

    def set_folder(self, folder):
        self.folder = folder

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600, train_config=None, **rest):
        self.best = 0
        arrays, result = initial_arrays, flower.Result()
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, arrays, train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            arrays, metrics = self.aggregate_train(number, replies)
            result.arrays = arrays
            self.note(metrics)
        return result

    def note(self, metrics):
        self.best = max(self.best, 1 / metrics["train_loss"])
        (self.folder / "best.txt").write_text(str(self.best))


def test_methods_attributes_and_a_start_of_its_own_are_the_inner_strategys(digits, tmp_path):
    inner = Custom(**OFF)
    strategy = CohortStrategy(inner, Uniform(), cohort_size=3, timeout=5)
    strategy.set_folder(tmp_path)
    strategy.mood = "good"
    assert inner.folder == tmp_path and inner.mood == strategy.mood == "good"
    with pytest.raises(AttributeError, match="nonsense"):
        _ = strategy.nonsense
    result = run(strategy, make_grid(digits), rounds=3)
    assert [len(r.selected) for r in strategy.history] == [3, 3, 3]
    assert float((tmp_path / "best.txt").read_text()) == inner.best > 0
    assert result.arrays and not set(vars(inner)) & {"configure_train", "summary"}
