"""Which node is which client: lasting ids, newcomers, duplicates, and nodes without an answer."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.exceptions import ConfigError
from fedcohort.flower import Directory, attach, own_id
from fedcohort.flower.server.identity import MAX_ASKS
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


def test_clients_without_fedcohort_go_by_their_keys(local_grid):
    grid, directory = local_grid, Directory(timeout=0.2)
    grid.add(5, ClientApp())
    (name,) = directory.refresh(grid)
    assert name.startswith("key-")
    assert Directory("client", 0.2).refresh(grid) == {}


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


def test_registered_names_need_no_question(local_grid):
    grid = local_grid
    grid.add(5, saying("liar"), name="hospital-a")
    assert Directory("auto", 0.2).refresh(grid) == {"hospital-a": 5}
    assert Directory("name", 0.2).refresh(grid) == {"hospital-a": 5}
    assert grid.asked("") == []
    (name,) = Directory("public-key", 0.2).refresh(grid)
    assert name.startswith("key-")
    assert Directory("client", 0.2).refresh(grid) == {"liar": 5}
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


def test_no_claim_counts_where_names_are_registered(local_grid):
    grid, directory = local_grid, Directory("auto", 0.2)
    grid.add(5, saying("x"), name="bergen")
    grid.add(6, saying("como"))
    found = directory.refresh(grid)
    assert found.pop("bergen") == 5 and list(found.values()) == [6]
    assert next(iter(found)).startswith("key-")
    assert grid.asked("") == []


@pytest.mark.parametrize("value", ["key-0123456789abcdef", "node-5"])
def test_fingerprints_cannot_be_claimed(local_grid, value):
    grid, directory = local_grid, Directory("auto", 0.2)
    grid.add(5, saying(value))
    assert directory.refresh(grid) == {}
    assert directory.refused == {"node 5": 1}
