"""Messages and replies: matched by id, within a limit, whatever a grid does."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.flower.grid import TimedGrid, exchange


def echo():
    app = ClientApp()

    @app.query("identity")
    def answer(message, context):
        return Message(RecordDict({"r": ConfigRecord({"n": context.node_id})}), reply_to=message)

    return app


@pytest.fixture
def three(local_grid):
    for node in (1, 2, 3):
        local_grid.add(node, echo())
    return local_grid


def questions():
    return [Message(RecordDict(), node, "query.identity") for node in (3, 1, 2)]


def test_replies_belong_to_their_messages(three):
    for reply in exchange(three, questions(), timeout=1):
        assert reply.message.content["r"]["n"] == reply.sent.metadata.dst_node_id
        assert 0 <= reply.seconds < 1
    assert exchange(three, [], timeout=1) == []


@pytest.mark.parametrize("dropped", ["None", "left out"])
def test_messages_that_a_grid_does_not_accept_are_not_waited_for(three, dropped):
    """Flower's grids return None for such a message, or fewer ids than there were messages."""
    push = three.push_messages

    def picky(messages):
        ids = push(messages)
        three._replies.pop(ids[1])
        return [ids[0], None, ids[2]] if dropped == "None" else [ids[0], ids[2]]

    three.push_messages = picky
    start = time.monotonic()
    replies = exchange(three, questions(), timeout=5)
    assert sorted(r.sent.metadata.dst_node_id for r in replies) == [2, 3]
    assert time.monotonic() - start < 1


def test_a_grid_keeps_how_long_replies_took(three):
    three.silent.add(2)
    timed = TimedGrid(three, timeout=0.3)
    messages = questions()
    replies = timed.send_and_receive(messages)
    assert len(replies) == 2
    assert set(timed.seconds) == {m.metadata.message_id for m in messages[:2]}


def test_the_package_loads_neither_torch_nor_ray():
    script = """
import sys, flwr.app, flwr.clientapp, flwr.serverapp
before = set(sys.modules)
import fedcohort.flower
assert not {"torch", "ray"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
