"""What `attach` registers with an app, how the app answers queries, and how it trains."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod

from fedcohort.exceptions import ConfigError
from fedcohort.flower import attach
from fedcohort.flower.client.data import Examples
from fedcohort.flower.client.privacy import sketch
from fedcohort.flower.wire import RECORD, from_bytes
from fedcohort.signals.projection import Projection
from fedcohort.sketch.race import RaceSketch


def test_data_signals_need_no_model_and_no_torch(client, context):
    app = client.app(insight=lambda x, y: np.bincount(y))
    found = client.sketch(app, context)
    direct = RaceSketch.srp(6, 20, 3, seed=0)
    direct.add(client.x / np.linalg.norm(client.x, axis=1, keepdims=True))
    assert found["n"] == 50 and found["noise"] == 0
    np.testing.assert_array_equal(found["counts"], direct.counts)
    assert client.ask(app, context, "insight").tolist() == [17, 17, 16]
    with pytest.raises(ValueError, match="no model in the message"):
        client.ask(app, context, "loss")


def test_a_client_says_which_signals_it_answers(client, context):
    app = client.app(signals=["num_examples"])
    assert client.ask(app, context, "num_examples") == 50
    with pytest.raises(ValueError, match="does not release 'race_sketch'"):
        client.sketch(app, context)
    with pytest.raises(ConfigError, match="signal 'lost'"):
        client.app(signals=["lost"])


def test_an_app_keeps_its_own_handlers(client, digits, context):
    """A user's app already has @app.train() and @app.evaluate(): both stay."""
    app, seen = ClientApp(), []

    @app.train()
    def train(message, context):
        seen.append("train")
        return client.echo(message, context)

    @app.evaluate()
    def evaluate(message, context):
        seen.append("evaluate")
        return client.echo(message, context)

    attach(app, (client.x, client.y), digits.model)
    client.send(app, client.message("train", client.arrays), context)
    client.send(app, client.message("evaluate", client.arrays), context)
    client.send(app, client.message("train.fedcohort_probe", client.arrays, gate="cmfl"), context)
    assert seen == ["train", "evaluate", "train"]


def test_where_training_reports_no_loss_the_evaluation_of_the_same_model_does(client, context):
    """Oort and others had no answer from Flower's Hugging Face app and its autoencoder."""
    app, moved = ClientApp(), ArrayRecord([np.ones(4, np.float32)])

    @app.train()
    def train(message, context):
        reply = client.echo(message, context)
        reply.content["arrays"] = moved
        return reply

    @app.evaluate()
    def evaluate(message, context):
        given = message.content["arrays"].to_numpy_ndarrays()[0].sum()
        metrics = MetricRecord({"num-examples": 50, "eval_loss": 0.5 + float(given)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    attach(app, (client.x, client.y))
    message = client.message("train", client.arrays, signals=("loss",))
    reply = client.send(app, message, context)
    assert from_bytes(reply.content[RECORD]["loss"], 8) == 0.5  # of the model that was sent
    assert reply.content["arrays"] == moved


def test_a_query_of_the_apps_own_stays(client, context):
    """`attach` once replaced @app.query("loss")."""
    app = ClientApp()
    app.query("loss")(lambda message, context: "mine")
    attach(app, (client.x, client.y))
    assert app(client.message("query.loss"), context) == "mine"
    with pytest.raises(ConfigError, match="attach once"):
        attach(app, (client.x, client.y))


def test_an_app_of_the_old_kind_is_refused_with_words(client):
    app = ClientApp(client_fn=lambda context: None)
    with pytest.raises(ConfigError, match=r"client_fn.*@app\.train"):
        attach(app, (client.x, client.y))


@pytest.mark.parametrize(
    ("x", "hash", "told"),
    [
        (np.arange(40).reshape(4, 10), "auto", True),
        (np.arange(40).reshape(4, 10), "minhash", False),
        (np.arange(40, dtype=np.uint8).reshape(4, 10), "auto", False),  # pixels
        (np.eye(4), "auto", False),
    ],
)
def test_inputs_that_look_like_tokens_are_mentioned(x, hash, told, caplog):
    with caplog.at_level("WARNING", logger="fedcohort"):
        sketch(Examples((x, np.zeros(4, int))), {"rows": 4, "bits": 3, "hash": hash})
    assert ("hash='minhash'" in caplog.text) == told


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
def test_sketches_that_a_client_cannot_or_will_not_make(client, options):
    with pytest.raises(ConfigError):
        sketch(Examples((client.x, client.y)), options)


@pytest.mark.parametrize("step", [False, True])
def test_the_users_own_training_is_sketched_whole_or_as_a_step(client, context, step):
    def train(message, context):
        (given,) = message.content["arrays"].to_numpy_ndarrays()
        content = RecordDict({"arrays": ArrayRecord([given + np.arange(4, dtype=np.float32)])})
        return Message(content, reply_to=message)

    app = client.app(model=lambda: None, train=train, signals=["model_sketch"])
    given = np.full(4, 10, np.float32)
    options = {"model_sketch": {"k": 2, "kind": "uniform", "seed": 3, "fresh": True, "step": step}}
    arrays = ArrayRecord([given])
    answer = client.ask(app, context, "model_sketch", arrays, version="v", options=options)
    expected = np.arange(4) + (0 if step else given)
    np.testing.assert_allclose(answer, Projection(4, 2, seed=3).apply(expected), rtol=1e-6)


@pytest.mark.parametrize(("k", "refused"), [(100, False), (10**9, True)])
def test_small_models_may_be_sketched_but_not_by_a_flood_of_numbers(client, context, k, refused):
    app = client.app(model=lambda: None, train=client.echo, signals=["model_sketch"])
    entries = {"version": "v", "options": {"model_sketch": {"k": k}}}
    if refused:
        with pytest.raises(ValueError, match="numbers to sketch a model of 4"):
            client.ask(app, context, "model_sketch", client.arrays, **entries)
    else:
        answer = client.ask(app, context, "model_sketch", client.arrays, **entries)
        assert answer.shape == (k,)


@pytest.mark.parametrize("sigmoid", [True, False])
def test_a_classifier_with_one_output_reports_its_true_loss(client, context, sigmoid):
    """The softmax of one output is always 1: cross-entropy once reported a loss of 0."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 1), *([torch.nn.Sigmoid()] if sigmoid else [])]
    model, y = torch.nn.Sequential(*layers), client.y % 2
    app = ClientApp()
    attach(app, (client.x, y), lambda: torch.nn.Sequential(*layers))
    reading = client.ask(app, context, "loss", ArrayRecord(model.state_dict()), version="v")
    with torch.no_grad():
        logits = layers[0](torch.from_numpy(client.x))[:, 0].double().numpy()
    expected = np.mean(np.logaddexp(0, logits) - y * logits)
    assert reading == pytest.approx(expected, rel=1e-5)


def test_losses_of_a_model_with_batch_norm_use_its_statistics(client, context):
    torch.manual_seed(0)

    def build():
        return torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
        )

    model = build()
    model(torch.from_numpy(client.x))  # moves the statistics away from 0 and 1
    app = client.app(model=build)
    reading = client.ask(app, context, "loss", ArrayRecord(model.state_dict()), version="v")
    with torch.no_grad():
        outputs = model.eval()(torch.from_numpy(client.x))
        expected = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(client.y)).item()
    assert reading == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"running statistics.*@app\.train"):
        client.send(
            app, client.message("train", ArrayRecord(model.state_dict()), version="v"), context
        )


def test_a_client_loads_neither_torch_nor_ray_before_it_needs_them():
    """A SuperNode starts a process per message, and most messages need no PyTorch."""
    script = """
import sys, flwr.app, flwr.clientapp, flwr.serverapp
before = set(sys.modules)
from fedcohort.flower import attach
from fedcohort.simulate import LocalTraining
app = flwr.clientapp.ClientApp()
attach(app, ([[0.0]], [0]), lambda: None, local=LocalTraining(epochs=2))
assert not {"torch", "ray", "sklearn", "numba"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# --- training ------------------------------------------------------------------------------------


def test_an_upload_without_a_probe_is_an_error(client, context):
    app = client.app(train=client.echo)
    with pytest.raises(ValueError, match="no update of round 1"):
        client.send(app, client.message("train.fedcohort_upload"), context)
    probe = client.message("train.fedcohort_probe", client.arrays, version="v", gate="cmfl")
    client.send(app, probe, context)
    with pytest.raises(ValueError, match="no update of round 4"):
        client.send(app, client.message("train.fedcohort_upload", round=3), context)
    reply = client.send(app, client.message("train.fedcohort_upload"), context)
    assert reply.content["arrays"] == client.arrays
    with pytest.raises(ValueError, match="no update"):  # sent once, then forgotten
        client.send(app, client.message("train.fedcohort_upload"), context)


def test_a_client_that_lost_the_model_says_so(client, context):
    app = client.app(train=client.echo)
    client.send(app, client.message("train", client.arrays, version="v1"), context)
    again = client.send(app, client.message("train", version="v1"), context)
    assert again.content["arrays"] == client.arrays
    with pytest.raises(ValueError, match="holds 'v1', not 'v2'"):
        client.send(app, client.message("train", version="v2"), context)


def test_an_app_level_clipping_mod_leaves_queries_alone(client, context):
    """Flower's clipping mods answer a message without a model with an error that reaches no one."""
    seen = []

    def watching(message, context, call_next):
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    def train(message, context):
        reply = client.echo(message, context)
        reply.content["arrays"] = ArrayRecord([np.ones(4, np.float32)])
        return reply

    app = client.app(train, mods=[fixedclipping_mod, watching])
    assert client.ask(app, context, "num_examples") == 50
    message = client.message("train.fedcohort_probe", client.arrays, gate="cmfl", version="v")
    message.content["config"]["clipping_norm"] = 1.0
    assert app(message, context).has_content()
    assert client.send(app, client.message("train.fedcohort_upload"), context).has_content()
    assert seen == ["query.fedcohort", "train.fedcohort_probe", "train.fedcohort_upload"]


def test_our_training_reads_fedproxs_mu(digits, client):
    """A large mu keeps the model close to the global one."""
    app, arrays = digits.app("client-0"), digits.arrays()

    def step(mu):
        message = client.message("train", arrays)
        message.content["config"]["proximal-mu"] = mu
        own = Context(0, 1, {"client-id": "client-0"}, RecordDict(), {})
        trained = app(message, own).content["arrays"]
        return sum(float(np.abs(trained[k].numpy() - arrays[k].numpy()).sum()) for k in arrays)

    assert step(5.0) < 0.8 * step(0.0)


def test_a_signal_of_the_apps_own_training_does_not_change_where_a_gated_client_starts(
    client, context
):
    """It goes on from the update that the gate left with it; the signal is of the global model."""
    starts = []

    def train(message, context):
        (given,) = message.content["arrays"].to_numpy_ndarrays()
        starts.append(given[0])
        content = RecordDict(
            {"arrays": ArrayRecord([given + 1]), "metrics": MetricRecord({"num-examples": 1})}
        )
        return Message(content, reply_to=message)

    app = client.app(train=train)
    kind, entries = "train.fedcohort_probe", {"gate": "cmfl", "version": "v"}
    client.send(app, client.message(kind, client.arrays, **entries), context)
    entries |= {"signals": ("gradient_sketch",), "options": {"gradient_sketch": {"k": 2}}}
    client.send(app, client.message(kind, client.arrays, round=1, **entries), context)
    assert starts == [0, 0, 1]  # the first round, the signal, the second round
