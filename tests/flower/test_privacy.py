"""What a private client releases: its own epsilon and budget hold, whatever the server asks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.exceptions import ConfigError
from fedcohort.flower import Privacy, attach
from fedcohort.signals.catalog import SIGNALS, register_signal
from fedcohort.signals.forms import Numbers


def test_a_budget_is_in_an_absolute_folder(client, context, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="must be absolute"):
        Privacy(1.0, folder="budget")
    with pytest.raises(ConfigError, match="n='hidden'"):
        Privacy(1.0, folder=tmp_path, n="hidden")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    app = client.app(privacy=Privacy(1.0), signals=["race_sketch"])
    client.sketch(app, context)
    assert any((tmp_path / ".fedcohort" / "privacy").glob("budget-*.json"))


def test_the_client_decides_its_epsilon_whatever_the_server_asks(client, context, tmp_path):
    app = client.app(privacy=Privacy(2.0, folder=tmp_path), signals=["race_sketch"])
    exact = client.sketch(client.app(), context)
    private = client.sketch(app, context, epsilon=1e9)
    assert not np.array_equal(private["counts"], exact["counts"])
    # Laplace noise for 20 cells at epsilon 2 has variance 2 (20 / 2)^2, discrete noise a bit less.
    assert private["noise"] == pytest.approx(200, rel=0.01)


def test_no_server_sees_that_an_example_is_odd(client, context, tmp_path, monkeypatch):
    """A private client answers with a sketch all the same; an exact one names the row."""
    odd = np.where(np.arange(50)[:, None] == 3, np.nan, client.x)
    monkeypatch.setattr(client, "x", odd)
    app = client.app(privacy=Privacy(1.0, folder=tmp_path), signals=["race_sketch"])
    assert client.sketch(app, context)["n"] == 50
    assert client.sketch(client.app(), context, epsilon=1.0)["n"] == 50
    with pytest.raises(ValueError, match="row 3"):
        client.sketch(client.app(), context)


def test_the_operator_of_a_node_decides(client, tmp_path, caplog):
    """Signals, epsilon and budget in the node config override the app's."""
    config = {"client-id": "ann", "fedcohort-signals": "race_sketch", "fedcohort-epsilon": 0.5}
    config |= {"fedcohort-folder": str(tmp_path), "fedcohort-total": 0.5}
    node = Context(0, 1, config, RecordDict(), {})
    app = client.app()
    with caplog.at_level("INFO", logger="flwr.fedcohort"):
        assert client.sketch(app, node)["noise"] > 0
    assert "0.5 of 0.5 spent" in caplog.text
    with pytest.raises(ValueError, match="operator of this node does not release 'num_examples'"):
        client.ask(app, node, "num_examples")
    with pytest.raises(ValueError, match="BudgetExceeded"):
        client.sketch(app, node, rows=9)


def test_a_server_cannot_ask_the_budget_empty(client, context, tmp_path):
    """Sketches of many seeds would average the noise out: each is charged until none is left."""
    app = client.app(privacy=Privacy(1.0, folder=tmp_path, total=2.0), signals=["race_sketch"])
    first, _ = (client.sketch(app, context, seed=seed) for seed in (0, 1))
    for seed in (2, 3, 4):
        with pytest.raises(ValueError, match="BudgetExceeded"):
            client.sketch(app, context, seed=seed)
    again = client.app(privacy=Privacy(1.0, folder=tmp_path, total=2.0), signals=["race_sketch"])
    with pytest.raises(ValueError, match="BudgetExceeded"):  # a restart does not renew the budget
        client.sketch(again, context, seed=4)
    assert client.sketch(again, context, seed=0) == first  # the same question costs nothing more
    spent = json.loads(next(tmp_path.glob("budget-*.json")).read_text())["spent"]
    assert spent["releases"] == 2 and spent["epsilon"] == 2.0


def test_the_server_cannot_choose_the_account(client, tmp_path):
    """A request names the client; a server that sends other names gets no other budget."""
    settings = {"privacy": Privacy(1.0, folder=tmp_path), "signals": ["race_sketch"]}
    app, nameless = client.app(**settings), Context(0, 1, {}, RecordDict(), {})

    def ask_as(name, rows):
        options = {"race_sketch": {"rows": rows, "bits": 3}}
        client.ask(app, nameless, "race_sketch", options=options, client=name)

    ask_as("a", rows=20)
    ask_as("b", rows=20)
    with pytest.raises(ValueError, match="BudgetExceeded"):
        ask_as("c", rows=9)


@pytest.mark.parametrize("where", ["app", "node config"])
def test_one_rule_says_what_a_budget_covers(digits, client, tmp_path, where):
    """Node settings once released an exact mean as a profile, and counts under another name."""
    config, options = {"client-id": "ann"}, {}
    if where == "app":
        options["privacy"] = Privacy(2.0, folder=tmp_path)
    else:
        config |= {"fedcohort-epsilon": 2.0, "fedcohort-folder": str(tmp_path)}
    node = Context(0, 1, config, RecordDict(), {})

    @register_signal("counts", when="profile", work="data", form=Numbers((None,)))
    def counts(clients, options):
        return [np.bincount(y) for _, y in clients.examples()]

    try:
        app = digits.app("client-0", classes=10, insight=lambda x, y: x.mean(), **options)
        answered, refusals = [], []
        for name in SIGNALS:
            entries = {"version": "v", "options": {"race_sketch": {"rows": 20, "bits": 3}}}
            try:
                client.ask(app, node, name, digits.arrays(), **entries)
                answered.append(name)
            except ValueError as error:
                refusals.append(str(error))
    finally:
        del SIGNALS["counts"]
    assert answered == ["num_examples", "race_sketch", "expected_duration"]
    told = ("does not cover", "cannot give updates", "cannot give durations")
    assert all(any(why in text for why in told) for text in refusals), refusals


def app_with_handlers(client, **options):
    """An app with its own training and evaluation, which report 50 examples."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        reply = client.echo(message, context)
        reply.content["metrics"] = MetricRecord({"num-examples": 50, "train_loss": 0.5})
        return reply

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": 50, "eval_loss": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    attach(app, (client.x, client.y), **options)
    return app


@pytest.mark.parametrize("where", ["app", "node config"])
def test_a_private_number_of_examples_leaves_nowhere(digits, client, tmp_path, where):
    """Not in a sketch, a query, a training reply, a gate's upload or an evaluation."""
    config, options = {"client-id": "ann"}, {}
    if where == "app":
        privacy = Privacy(2.0, folder=tmp_path, n="private")
        options = {"privacy": privacy, "signals": ["race_sketch"]}
    else:
        config |= {"fedcohort-epsilon": 2.0, "fedcohort-folder": str(tmp_path)}
        config |= {"fedcohort-n": "private"}
    node = Context(0, 1, config, RecordDict(), {})
    app = app_with_handlers(client, **options)
    released = client.sketch(app, node)
    assert released["n"] == pytest.approx(released["counts"].sum() / 20)  # from the noisy counts
    with pytest.raises(ValueError, match=r"does not cover|does not release"):
        client.ask(app, node, "num_examples")
    if where == "app":
        with pytest.raises(ConfigError, match="does not cover 'num_examples'"):
            client.app(privacy=privacy, signals=["num_examples"])
    trained = client.send(app, client.message("train", client.arrays), node).content
    assert trained["metrics"] == {"num-examples": 1, "train_loss": 0.5}
    client.send(app, client.message("train.fedcohort_probe", client.arrays, gate="cmfl"), node)
    uploaded = client.send(app, client.message("train.fedcohort_upload"), node).content
    assert uploaded["metrics"]["num-examples"] == 1
    evaluated = client.send(app, client.message("evaluate", client.arrays), node).content["metrics"]
    assert evaluated == {"num-examples": 1, "eval_loss": 0.5}
    ours = digits.app("client-0", **options)
    reply = client.send(ours, client.message("train", digits.arrays()), node)
    assert reply.content["metrics"] == {"num-examples": 1}
