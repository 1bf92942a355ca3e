"""How a client trains: at once or in the two phases of a gate, with mods around its training."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod

METRICS = MetricRecord({"num-examples": 1})


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
        content = RecordDict({"arrays": ArrayRecord([given + 1]), "metrics": METRICS})
        return Message(content, reply_to=message)

    app = client.app(train=train)
    kind, entries = "train.fedcohort_probe", {"gate": "cmfl", "version": "v"}
    client.send(app, client.message(kind, client.arrays, **entries), context)
    entries |= {"signals": ("gradient_sketch",), "options": {"gradient_sketch": {"k": 2}}}
    client.send(app, client.message(kind, client.arrays, round=1, **entries), context)
    assert starts == [0, 0, 1]  # the first round, the signal, the second round
