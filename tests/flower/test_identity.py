"""Which node is which client: lasting ids, newcomers, duplicates, and nodes without an answer."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.exceptions import ConfigError
from fedcohort.flower import Directory, attach, own_id
from fedcohort.flower.server.identity import MAX_ASKS, NodeInfo, fingerprint
from fedcohort.flower.wire import RECORD


def context(**config):
    return Context(0, 1, config, RecordDict(), {})


def saying(value):
    app = ClientApp()

    @app.query("fedcohort")
    def answer(message, context):
        return Message(RecordDict({RECORD: ConfigRecord({"id": value})}), reply_to=message)

    return app


def test_own_ids_sort_as_partitions_do():
    ids = [own_id(context(**{"partition-id": i, "num-partitions": 101})) for i in range(101)]
    assert ids == sorted(ids) and ids[3] == "client-003"
    assert own_id(context(**{"partition-id": 3, "client-id": "ward-7"})) == "ward-7"
    with pytest.raises(ConfigError, match="client-id"):
        own_id(context())


def test_clients_keep_their_ids_when_node_ids_change(local_grid):
    grid, directory = local_grid, Directory(timeout=0.2)
    grid.add(5, saying("ann"))
    grid.add(6, saying("bob"))
    assert directory.refresh(grid) == {"ann": 5, "bob": 6}
    grid.remove(5)
    grid.add(99, saying("ann"))
    assert directory.refresh(grid) == {"ann": 99, "bob": 6}
    assert len(grid.asked("")) == 3  # nobody is asked twice


def test_a_double_is_left_out_while_the_first_is_online(local_grid):
    grid, directory = local_grid, Directory(timeout=0.2)
    grid.add(5, saying("ann"))
    directory.refresh(grid)
    grid.add(4, saying("ann"))
    assert directory.refresh(grid) == directory.refresh(grid) == {"ann": 5}
    assert directory.refused == {"ann": 1}
    grid.remove(5)
    assert directory.refresh(grid) == {"ann": 4}


def test_silent_nodes_are_asked_a_few_times_only(local_grid):
    grid, directory = local_grid, Directory(timeout=0.01)
    grid.add(5, saying("ann"))
    grid.silent.add(5)
    for _ in range(MAX_ASKS + 2):
        assert directory.refresh(grid) == {}
    assert len(grid.asked("")) == MAX_ASKS


def test_the_question_carries_the_training_config(digits, cohort, caplog):
    """A mod that reads it once raised, and the clients went by keys at INFO."""

    def mod(message, context, call_next):
        assert message.content["config"]["server-round"] >= 1
        assert message.content["config"]["lr"] == 0.5
        return call_next(message, context)

    def app(client):
        app = ClientApp(mods=[mod])
        attach(app, digits.examples(client), digits.model)
        return app

    strategy = cohort(cohort_size=2)
    config = ConfigRecord({"lr": 0.5})
    strategy.start(digits.grid_of(app), digits.arrays(), 1, train_config=config)
    assert set(strategy.directory.nodes) == set(digits.clients)


def key_of(node):
    return fingerprint(NodeInfo(node, key=b"key-%d" % node))


#: Where ids come from; by node what it says and its registered name; ids that it is known by.
IDS = [
    ("auto", {5: ("liar", "aachen")}, {"aachen": 5}),
    ("name", {5: ("liar", "aachen")}, {"aachen": 5}),
    ("public-key", {5: ("liar", "aachen")}, {key_of(5): 5}),
    ("client", {5: ("liar", "aachen")}, {"liar": 5}),
    ("auto", {5: ("x", "bergen"), 6: ("como", "")}, {"bergen": 5, key_of(6): 6}),
    ("auto", {5: (None, "")}, {key_of(5): 5}),  # an app without fedcohort
    ("client", {5: (None, "")}, {}),
    ("auto", {5: ("key-0123456789abcdef", ""), 6: ("node-5", "")}, {}),  # cannot be claimed
]


@pytest.mark.parametrize(("identity", "nodes", "known"), IDS, ids=str)
def test_a_name_beats_a_claim_and_fingerprints_cannot_be_claimed(
    local_grid, identity, nodes, known
):
    for node, (said, name) in nodes.items():
        local_grid.add(node, ClientApp() if said is None else saying(said), name=name)
    directory = Directory(identity, 0.2)
    assert directory.refresh(local_grid) == known
    by_claim = identity == "client" or not any(name for _, name in nodes.values())
    assert bool(local_grid.asked("")) == (by_claim and identity != "public-key")
    assert directory.refused.keys() <= {"node 5", "node 6"}


def test_an_unknown_identity_is_refused():
    with pytest.raises(ConfigError, match="identity='node'"):
        Directory("node")


def test_a_claim_never_keeps_a_registered_name_out(local_grid):
    """Found in a deployment with TLS and authentication: the impostor kept the real one out."""
    grid, directory = local_grid, Directory("auto", 0.2)
    grid.add(4, saying("bergen"))
    assert directory.refresh(grid) == {"bergen": 4}  # nobody is registered: claims are all there is
    grid.add(5, saying("x"), name="bergen")
    found = directory.refresh(grid)
    assert found["bergen"] == 5
    (impostor,) = set(found) - {"bergen"}
    assert impostor.startswith("key-") and found[impostor] == 4
    grid.remove(5)
    assert directory.refresh(grid) == {impostor: 4}  # nor while the real one is offline
