"""What `attach` registers, refuses and keeps to itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.exceptions import BudgetExceeded, ConfigError, DataError
from fedcohort.flower import Privacy, attach
from fedcohort.flower.answers import sketch
from fedcohort.flower.messages import RECORD, Request, from_record, to_record
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.signals.projection import Projection
from fedcohort.sketch.race import RaceSketch

X = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
Y = np.arange(50) % 3
SKETCH = {"race_sketch": {"rows": 20, "bits": 3}}


@pytest.fixture
def context():
    return Context(0, 1, {"client-id": "ann"}, RecordDict(), {})


def ask(app, context, kind, **entries):
    request = Request(0, 0, **entries)
    content = RecordDict({"config": ConfigRecord({RECORD: request.to_json()})})
    return app(Message(content, 1, kind), context).content


def asked_sketch(app, context, options=SKETCH):
    content = ask(app, context, "query.race_sketch", options=options)
    return from_record(content.config_records[RECORD], "race_sketch", 10**6)


def with_data(**options):
    app = ClientApp()
    attach(app, (X, Y), **options)
    return app


def test_data_signals_need_no_model_and_no_torch(context):
    app = with_data(insight=lambda x, y: np.bincount(y))
    sketch = asked_sketch(app, context)
    direct = RaceSketch.srp(6, 20, 3, seed=0)
    direct.add(X / np.linalg.norm(X, axis=1, keepdims=True))
    assert sketch["n"] == 50 and sketch["noise"] == 0
    np.testing.assert_array_equal(sketch["counts"], direct.counts)
    content = ask(app, context, "query.insight")
    assert from_record(content[RECORD], "insight", 100).tolist() == [17, 17, 16]
    with pytest.raises(ValueError, match="No query function"):
        ask(app, context, "query.loss")


def test_a_client_says_which_signals_it_answers(context):
    app = with_data(signals=["num_examples"])
    assert from_record(ask(app, context, "query.num_examples")[RECORD], "num_examples", 8) == 50
    with pytest.raises(ValueError, match="No query function"):
        asked_sketch(app, context)
    with pytest.raises(ConfigError, match=r"'loss'.*num_examples, race_sketch"):
        with_data(signals=["loss"])


def test_a_function_is_given_the_context(context):
    app = ClientApp()
    attach(app, lambda c: (X[: len(c.node_config["client-id"])], Y))
    assert from_record(ask(app, context, "query.num_examples")[RECORD], "num_examples", 8) == 3


def test_a_train_function_of_the_users_own_must_be_passed(digits):
    app = ClientApp()

    @app.train()
    def train(message, context):
        raise AssertionError

    attach(app, (X, Y))  # signals of the data alone leave training alone
    other = ClientApp()
    other.train()(train)
    with pytest.raises(ConfigError, match="attach\\(train="):
        attach(other, (X, Y), digits.model)


# --- privacy ----------------------------------------------------------------------------------


def test_the_client_decides_its_epsilon_whatever_the_server_asks(context, tmp_path):
    app = with_data(privacy=Privacy(2.0, folder=tmp_path))
    options = {"race_sketch": {"rows": 20, "bits": 3, "epsilon": 1e9}}
    exact = asked_sketch(with_data(), context)
    private = asked_sketch(app, context, options)
    assert not np.array_equal(private["counts"], exact["counts"])
    # Laplace noise for 20 cells at epsilon 2: variance 2 (20 / 2)^2, a little less if discrete.
    assert private["noise"] == pytest.approx(200, rel=0.01)


def test_the_same_question_gets_the_same_answer_and_costs_once(context, tmp_path):
    first = asked_sketch(with_data(privacy=Privacy(1.0, folder=tmp_path)), context)
    restarted = with_data(privacy=Privacy(1.0, folder=tmp_path))
    for _ in range(3):
        assert asked_sketch(restarted, context) == first
    assert BudgetLedger(tmp_path / "budget.json", 1.0).spent("ann") == 1.0


def test_a_server_cannot_ask_the_budget_empty(context, tmp_path):
    """Other seeds would average the noise away: each is a release, and the budget ends."""
    app = with_data(privacy=Privacy(1.0, folder=tmp_path, total=2.0))
    seeded = [{"race_sketch": {"rows": 20, "bits": 3, "seed": seed}} for seed in range(5)]
    for options in seeded[:2]:
        asked_sketch(app, context, options)
    for options in seeded[2:]:
        with pytest.raises(BudgetExceeded):
            asked_sketch(app, context, options)
    again = with_data(privacy=Privacy(1.0, folder=tmp_path, total=2.0))
    with pytest.raises(BudgetExceeded):  # nor by waiting for a restart
        asked_sketch(again, context, seeded[4])
    asked_sketch(again, context, seeded[0])
    spent = json.loads((tmp_path / "budget.json").read_text())["clients"]["ann"]
    assert spent["releases"] == 2 and spent["epsilon"] == 2.0


def test_new_data_are_a_new_release(context, tmp_path):
    privacy = Privacy(1.0, folder=tmp_path, total=2.0)
    asked_sketch(with_data(privacy=privacy), context)
    app = ClientApp()
    attach(app, (X[:40], Y[:40]), privacy=privacy)
    asked_sketch(app, context)
    assert BudgetLedger(tmp_path / "budget.json", 2.0).remaining("ann") == 0


def test_a_server_may_ask_for_noise(context):
    options = {"race_sketch": {"rows": 20, "bits": 3, "epsilon": 1.0}}
    assert asked_sketch(with_data(), context, options)["noise"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 10**9, "bits": 10},
        {"rows": 10, "bits": 60},
        {"rows": 0, "bits": 3},
        {"rows": 10, "bits": 3, "label_weight": 1.0},
        {"rows": 10, "bits": 3, "center": True},
    ],
)
def test_sketches_that_a_client_cannot_or_will_not_make(options):
    with pytest.raises(ConfigError):
        sketch(X, Y, options)


# --- training ---------------------------------------------------------------------------------


def echo(message, context):
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)


def train_message(kind, arrays=None, **entries):
    request = Request(entries.pop("round", 0), 0, **entries)
    config = ConfigRecord({RECORD: request.to_json()})
    if request.gate == "cmfl":  # before the first step, it announces nothing
        config.update(to_record({"announce": np.empty(0, np.uint8)}))
    content = RecordDict({"config": config})
    if arrays is not None:
        content["arrays"] = arrays
    return Message(content, 1, kind)


ARRAYS = ArrayRecord([np.zeros(4, np.float32)])


def test_an_upload_without_a_probe_is_an_error(context):
    app = ClientApp()
    attach(app, (X, Y), train=echo)
    with pytest.raises(DataError, match="no update of round 0"):
        app(train_message("train.upload"), context)
    app(train_message("train.probe", ARRAYS, version="v", gate="cmfl"), context)
    with pytest.raises(DataError, match="no update of round 3"):
        app(train_message("train.upload", round=3), context)
    reply = app(train_message("train.upload"), context)
    assert reply.content["arrays"] == ARRAYS
    with pytest.raises(DataError, match="no update"):  # sent once, then forgotten
        app(train_message("train.upload"), context)


@pytest.mark.parametrize("step", [False, True])
def test_the_users_own_training_is_sketched_whole_or_as_a_step(context, step):
    def train(message, context):
        (given,) = message.content["arrays"].to_numpy_ndarrays()
        content = RecordDict({"arrays": ArrayRecord([given + np.arange(4, dtype=np.float32)])})
        return Message(content, reply_to=message)

    app = ClientApp()
    attach(app, (X, Y), lambda: None, train=train, signals=["model_sketch"])
    given = np.full(4, 10, np.float32)
    options = {"model_sketch": {"k": 2, "kind": "uniform", "seed": 3, "fresh": True, "step": step}}
    arrays = ArrayRecord([given])
    message = train_message("query.model_sketch", arrays, version="v", options=options)
    answer = from_record(app(message, context).content[RECORD], "model_sketch", 100)
    expected = np.arange(4) + (0 if step else given)
    np.testing.assert_allclose(answer, Projection(4, 2, seed=3).apply(expected), rtol=1e-6)


@pytest.mark.parametrize(("k", "refused"), [(100, False), (10**9, True)])
def test_small_models_may_be_sketched_but_not_by_a_flood_of_numbers(context, k, refused):
    app = ClientApp()
    attach(app, (X, Y), lambda: None, train=echo, signals=["model_sketch"])
    options = {"model_sketch": {"k": k}}
    message = train_message("query.model_sketch", ARRAYS, version="v", options=options)
    if refused:
        with pytest.raises(ConfigError, match="numbers to sketch a model of 4"):
            app(message, context)
    else:
        answer = from_record(app(message, context).content[RECORD], "model_sketch", 1000)
        assert answer.shape == (k,)


def test_a_client_that_lost_the_model_says_so(context):
    app = ClientApp()
    attach(app, (X, Y), train=echo)
    app(train_message("train", ARRAYS, version="v1"), context)
    assert app(train_message("train", version="v1"), context).content["arrays"] == ARRAYS
    with pytest.raises(DataError, match="holds 'v1', not 'v2'"):
        app(train_message("train", version="v2"), context)


def test_an_unknown_gate_is_named(context):
    app = ClientApp()
    attach(app, (X, Y), train=echo)
    with pytest.raises(ConfigError, match="'secret'"):
        app(train_message("train.probe", ARRAYS, gate="secret"), context)


def test_mods_go_around_the_training(context):
    seen = []

    def mod(message, context, call_next):
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    app = ClientApp()
    attach(app, (X, Y), train=echo, mods=[mod])
    app(train_message("train", ARRAYS), context)
    app(train_message("train.probe", ARRAYS, gate="cmfl"), context)
    ask(app, context, "query.num_examples")
    assert seen == ["train", "train.probe"]


def test_a_plain_strategy_can_train_with_our_clients(digits):
    """Without a CohortStrategy at the server, the clients are ordinary Flower clients."""
    from flwr.serverapp.strategy import FedAvg

    result = FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0).start(
        digits.grid(), digits.arrays(), 2
    )
    assert digits.accuracy(result.arrays) != digits.accuracy(digits.arrays())


def test_a_sketch_larger_than_the_model_is_refused(digits, context):
    app = digits.app("client-0")
    request = Request(0, 0, options={"gradient_sketch": {"k": 10**9}})
    content = RecordDict({"config": ConfigRecord({RECORD: request.to_json()})})
    content["arrays"] = digits.arrays()
    with pytest.raises(ConfigError, match="k=1000000000"):
        app(Message(content, 1, "query.gradient_sketch"), context)
