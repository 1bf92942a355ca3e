"""What `attach` registers, refuses and keeps to itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.exceptions import BudgetExceeded, ConfigError, DataError
from fedcohort.flower import Privacy, attach
from fedcohort.flower.data import Examples
from fedcohort.flower.messages import RECORD, Request, from_record, to_record
from fedcohort.flower.privacy import sketch
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
    attach(app, lambda c: (X[: len(c.node_config["client-id"])], Y[:3]))
    assert from_record(ask(app, context, "query.num_examples")[RECORD], "num_examples", 8) == 3


def test_an_app_keeps_its_own_handlers(digits, context):
    """The app of a user has @app.train() and @app.evaluate() already: both stay."""
    app, seen = ClientApp(), []

    @app.train()
    def train(message, context):
        seen.append("train")
        return echo(message, context)

    @app.evaluate()
    def evaluate(message, context):
        seen.append("evaluate")
        return echo(message, context)

    attach(app, (X, Y), digits.model)
    app(train_message("train", ARRAYS), context)
    app(train_message("evaluate", ARRAYS), context)
    app(train_message("train.probe", ARRAYS, gate="cmfl"), context)
    assert seen == ["train", "evaluate", "train"]
    with pytest.raises(ConfigError, match="leave out train="):
        attach(app, (X, Y), train=train)


def test_an_app_of_the_old_kind_is_refused_with_words():
    app = ClientApp(client_fn=lambda context: None)
    with pytest.raises(ConfigError, match=r"client_fn.*@app\.train"):
        attach(app, (X, Y))


# --- privacy ----------------------------------------------------------------------------------


def test_the_client_decides_its_epsilon_whatever_the_server_asks(context, tmp_path):
    app = with_data(privacy=Privacy(2.0, folder=tmp_path), signals=["race_sketch"])
    options = {"race_sketch": {"rows": 20, "bits": 3, "epsilon": 1e9}}
    exact = asked_sketch(with_data(), context)
    private = asked_sketch(app, context, options)
    assert not np.array_equal(private["counts"], exact["counts"])
    # Laplace noise for 20 cells at epsilon 2: variance 2 (20 / 2)^2, a little less if discrete.
    assert private["noise"] == pytest.approx(200, rel=0.01)


def test_a_release_lost_on_its_way_to_the_disk_is_not_paid_again(context, tmp_path, monkeypatch):
    """A client that dies between the payment and the file finds its release beside the ledger."""
    app = with_data(privacy=Privacy(1.0, folder=tmp_path), signals=["race_sketch"])
    real = os.replace

    def fails(source, target):
        if str(target).endswith(".sketch"):
            raise OSError("killed here")
        real(source, target)

    with monkeypatch.context() as during:
        during.setattr(os, "replace", fails)
        with pytest.raises(Exception, match="killed here"):
            asked_sketch(app, context)
    assert BudgetLedger(tmp_path / "budget.json", 1.0).spent("ann") == 1.0
    asked_sketch(app, context)
    assert BudgetLedger(tmp_path / "budget.json", 1.0).spent("ann") == 1.0


def test_the_same_question_gets_the_same_answer_and_costs_once(context, tmp_path):
    first = asked_sketch(
        with_data(privacy=Privacy(1.0, folder=tmp_path), signals=["race_sketch"]), context
    )
    restarted = with_data(privacy=Privacy(1.0, folder=tmp_path), signals=["race_sketch"])
    for _ in range(3):
        assert asked_sketch(restarted, context) == first
    assert BudgetLedger(tmp_path / "budget.json", 1.0).spent("ann") == 1.0


def test_a_server_cannot_ask_the_budget_empty(context, tmp_path):
    """Other seeds would average the noise away: each is a release, and the budget ends."""
    app = with_data(privacy=Privacy(1.0, folder=tmp_path, total=2.0), signals=["race_sketch"])
    seeded = [{"race_sketch": {"rows": 20, "bits": 3, "seed": seed}} for seed in range(5)]
    for options in seeded[:2]:
        asked_sketch(app, context, options)
    for options in seeded[2:]:
        with pytest.raises(BudgetExceeded):
            asked_sketch(app, context, options)
    again = with_data(privacy=Privacy(1.0, folder=tmp_path, total=2.0), signals=["race_sketch"])
    with pytest.raises(BudgetExceeded):  # nor by waiting for a restart
        asked_sketch(again, context, seeded[4])
    asked_sketch(again, context, seeded[0])
    spent = json.loads((tmp_path / "budget.json").read_text())["clients"]["ann"]
    assert spent["releases"] == 2 and spent["epsilon"] == 2.0


def test_new_data_are_a_new_release(context, tmp_path):
    privacy = Privacy(1.0, folder=tmp_path, total=2.0)
    asked_sketch(with_data(privacy=privacy, signals=["race_sketch"]), context)
    app = ClientApp()
    attach(app, (X[:40], Y[:40]), privacy=privacy, signals=["race_sketch"])
    asked_sketch(app, context)
    assert BudgetLedger(tmp_path / "budget.json", 2.0).remaining("ann") == 0


@pytest.mark.parametrize("name", ["label_histogram", "insight"])
def test_no_data_signal_goes_past_the_budget(context, tmp_path, name):
    """Exact label counts beside a private sketch would make its noise pointless."""
    given = {"classes": 3, "insight": lambda x, y: np.bincount(y)}
    with pytest.raises(ConfigError, match=f"does not cover '{name}'"):
        with_data(privacy=Privacy(1.0, folder=tmp_path), signals=["race_sketch", name], **given)
    app = with_data(**given)  # the operator of the node sets the budget, whatever the app says
    ask(app, context, f"query.{name}")
    context.node_config |= {"fedcohort-epsilon": 1.0, "fedcohort-folder": str(tmp_path)}
    with pytest.raises(ConfigError, match=f"does not cover '{name}'"):
        ask(app, context, f"query.{name}")


def test_a_private_number_of_examples_is_not_told(tmp_path):
    with pytest.raises(ConfigError, match="n='hidden'"):
        Privacy(1.0, folder=tmp_path, n="hidden")
    both = ["race_sketch", "num_examples"]
    with_data(privacy=Privacy(1.0, folder=tmp_path), signals=both)
    with pytest.raises(ConfigError, match="does not cover 'num_examples'"):
        with_data(privacy=Privacy(1.0, folder=tmp_path, n="private"), signals=both)


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
        sketch(Examples((X, Y)), options)


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


# --- privacy settings of the node, state of other runs, mods, losses ----------------------------


def test_privacy_needs_a_list_of_signals_and_an_absolute_folder(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="signals="):
        with_data(privacy=Privacy(1.0, folder=tmp_path))
    with pytest.raises(ConfigError, match="must be absolute"):
        Privacy(1.0, folder="budget")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    app = with_data(privacy=Privacy(1.0), signals=["race_sketch"])
    asked_sketch(app, Context(0, 1, {"client-id": "ann"}, RecordDict(), {}))
    assert (tmp_path / ".fedcohort" / "privacy" / "budget.json").exists()


def test_a_budget_survives_another_directory_and_another_run(context, tmp_path, monkeypatch):
    settings = {"privacy": Privacy(1.0, folder=tmp_path), "signals": ["race_sketch"]}
    first = asked_sketch(with_data(**settings), context)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    other_run = Context(99, 7, {"client-id": "ann"}, RecordDict(), {})
    assert asked_sketch(with_data(**settings), other_run) == first
    with pytest.raises(BudgetExceeded):
        asked_sketch(with_data(**settings), other_run, {"race_sketch": {"rows": 9, "bits": 3}})


def test_the_operator_of_a_node_decides(tmp_path, caplog):
    """Signals, epsilon and budget in the node config win over the app."""
    config = {"client-id": "ann", "fedcohort-signals": "race_sketch", "fedcohort-epsilon": 0.5}
    config |= {"fedcohort-folder": str(tmp_path), "fedcohort-total": 0.5}
    node = Context(0, 1, config, RecordDict(), {})
    app = with_data()
    with caplog.at_level("INFO", logger="flwr.fedcohort"):
        assert asked_sketch(app, node)["noise"] > 0
    assert "released a sketch of ann: epsilon 0.5; 0 of 0.5 left" in caplog.text
    with pytest.raises(ConfigError, match="operator of this node does not release 'num_examples'"):
        ask(app, node, "query.num_examples")
    with pytest.raises(BudgetExceeded):
        asked_sketch(app, node, {"race_sketch": {"rows": 9, "bits": 3}})


def own_handlers(**options):
    """An app with training and evaluation of its own, which report 50 examples."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        reply = echo(message, context)
        reply.content["metrics"] = MetricRecord({"num-examples": len(X), "train_loss": 0.5})
        return reply

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": len(X), "eval_loss": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    attach(app, (X, Y), **options)
    return app


@pytest.mark.parametrize("where", ["app", "node config"])
def test_a_private_number_of_examples_leaves_nowhere(tmp_path, where, digits):
    """Not in a sketch, a query, a training reply, a gate's upload or an evaluation."""
    config, options = {"client-id": "ann"}, {}
    if where == "app":
        privacy = Privacy(2.0, folder=tmp_path, n="private")
        options = {"privacy": privacy, "signals": ["race_sketch"]}
    else:
        config |= {"fedcohort-epsilon": 2.0, "fedcohort-folder": str(tmp_path)}
        config |= {"fedcohort-n": "private"}
    node = Context(0, 1, config, RecordDict(), {})
    app = own_handlers(**options)
    released = asked_sketch(app, node)
    assert released["n"] == pytest.approx(released["counts"].sum() / 20)  # the noisy counts' own
    with pytest.raises(ValueError, match=r"does not cover|No query function"):
        ask(app, node, "query.num_examples")
    trained = app(train_message("train", ARRAYS), node).content
    assert trained["metrics"] == {"num-examples": 1, "train_loss": 0.5}
    app(train_message("train.probe", ARRAYS, gate="cmfl"), node)
    assert app(train_message("train.upload"), node).content["metrics"]["num-examples"] == 1
    evaluated = app(train_message("evaluate", ARRAYS), node).content["metrics"]
    assert evaluated == {"num-examples": 1, "eval_loss": 0.5}
    ours = digits.app("client-0", **options)
    reply = ours(train_message("train", digits.arrays()), node)
    assert reply.content["metrics"] == {"num-examples": 1}


def test_a_public_number_of_examples_is_the_true_one(context, tmp_path):
    app = own_handlers(privacy=Privacy(2.0, folder=tmp_path), signals=["race_sketch"])
    assert asked_sketch(app, context)["n"] == 50
    reply = app(train_message("train", ARRAYS), context)
    assert reply.content["metrics"]["num-examples"] == 50


def test_the_server_cannot_choose_the_account(tmp_path):
    """A request names the client; a server that sends other names gets no other budget."""
    settings = {"privacy": Privacy(1.0, folder=tmp_path), "signals": ["race_sketch"]}
    app, nameless = with_data(**settings), Context(0, 1, {}, RecordDict(), {})
    ask(app, nameless, "query.race_sketch", options=SKETCH, client="a")
    ask(app, nameless, "query.race_sketch", options=SKETCH, client="b")
    other = {"race_sketch": {"rows": 9, "bits": 3}}
    with pytest.raises(BudgetExceeded):
        ask(app, nameless, "query.race_sketch", options=other, client="c")


def test_the_same_question_asked_many_times_at_once_is_charged_once(tmp_path):
    """By eight threads in each of two processes: sixteen times."""
    script = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from fedcohort.flower import Privacy
from fedcohort.flower.data import Examples
from fedcohort.flower.privacy import sketch
made = sketch(Examples((np.eye(6), np.arange(6))), {"rows": 20, "bits": 3})
folder = Path(sys.argv[1])
(folder / f"ready-{sys.argv[2]}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
release = Privacy(1.0, folder=folder, total=100.0).release
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: release("ann", made).counts.tobytes(), range(8)))
assert len(set(found)) == 1
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    running = [subprocess.Popen([*command, str(number)]) for number in range(2)]
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert all(process.poll() is None for process in running)
        time.sleep(0.05)
    (tmp_path / "go").touch()
    assert [process.wait(timeout=280) for process in running] == [0, 0]
    assert BudgetLedger(tmp_path / "budget.json", 100.0).spent("ann") == 1.0


def test_what_another_run_left_behind_is_forgotten(context):
    app = ClientApp()
    attach(app, (X, Y), train=echo)
    app(train_message("train.probe", ARRAYS, gate="cmfl", version="v", run="one"), context)
    assert any("difference" in name for name in context.state)
    with pytest.raises(DataError, match="no update"):
        app(train_message("train.upload", run="two"), context)
    assert not any("difference" in name for name in context.state)


def test_mods_are_called_as_flower_calls_them(context):
    """By position: a mod may name its arguments as it likes."""

    def mod(msg, ctx, app):
        reply = app(msg, ctx)
        reply.content["metrics"]["num-examples"] = 7
        return reply

    app = ClientApp()
    attach(app, (X, Y), train=echo, mods=[mod])
    assert app(train_message("train", ARRAYS), context).content["metrics"]["num-examples"] == 7


def test_an_app_level_clipping_mod_leaves_queries_alone(context):
    """Flower's clipping mods answer a message without a model with an error to nobody."""
    from flwr.clientapp.mod import fixedclipping_mod

    seen = []

    def watching(message, context, call_next):
        seen.append(message.metadata.message_type)
        return call_next(message, context)

    def train(message, context):
        reply = echo(message, context)
        reply.content["arrays"] = ArrayRecord([np.ones(4, np.float32)])
        return reply

    app = ClientApp(mods=[fixedclipping_mod, watching])
    attach(app, (X, Y), train=train)
    reply = ask(app, context, "query.num_examples")
    assert from_record(reply[RECORD], "num_examples", 8) == 50
    message = train_message("train.probe", ARRAYS, gate="cmfl", version="v")
    message.content["config"]["clipping_norm"] = 1.0
    assert app(message, context).has_content()
    assert app(train_message("train.upload"), context).has_content()
    assert seen == ["query.num_examples", "train.probe", "train.upload"]


@pytest.mark.parametrize("sigmoid", [True, False])
def test_a_classifier_with_one_output_reports_its_true_loss(context, sigmoid):
    """The softmax of one output is 1, so that cross-entropy reported a loss of 0."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 1), *([torch.nn.Sigmoid()] if sigmoid else [])]
    model, y = torch.nn.Sequential(*layers), Y % 2
    app = ClientApp()
    attach(app, (X, y), lambda: torch.nn.Sequential(*layers))
    arrays = ArrayRecord(model.state_dict())
    reply = app(train_message("query.loss", arrays, version="v"), context)
    with torch.no_grad():
        logits = layers[0](torch.from_numpy(X))[:, 0].double().numpy()
    expected = np.mean(np.logaddexp(0, logits) - y * logits)
    assert from_record(reply.content[RECORD], "loss", 8) == pytest.approx(expected, rel=1e-5)


def test_losses_of_a_model_with_batch_norm_use_its_statistics(context):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    def build():
        return torch.nn.Sequential(
            torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)
        )

    model = build()
    model(torch.from_numpy(X))  # moves the statistics away from 0 and 1
    app = ClientApp()
    attach(app, (X, Y), build)
    message = train_message("query.loss", ArrayRecord(model.state_dict()), version="v")
    reading = from_record(app(message, context).content[RECORD], "loss", 8)
    with torch.no_grad():
        outputs = model.eval()(torch.from_numpy(X))
        expected = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(Y)).item()
    assert reading == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match=r"running statistics.*@app\.train"):
        app(train_message("train", ArrayRecord(model.state_dict()), version="v"), context)


def test_our_training_reads_fedproxs_mu(digits, context):
    """A very large mu holds the model at the global one."""
    app, arrays = digits.app("client-0"), digits.arrays()

    def step(mu):
        message = train_message("train", arrays)
        message.content["config"]["proximal-mu"] = mu
        own = Context(0, 1, {"client-id": "client-0"}, RecordDict(), {})
        trained = app(message, own).content["arrays"]
        return sum(float(np.abs(trained[k].numpy() - arrays[k].numpy()).sum()) for k in arrays)

    assert step(5.0) < 0.8 * step(0.0)
