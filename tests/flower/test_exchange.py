"""Messages and replies: matched by id, within a limit, whatever a grid does."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcohort.flower.server.asking import exchange


def echo():
    app = ClientApp()

    @app.query("fedcohort")
    def answer(message, context):
        return Message(RecordDict({"r": ConfigRecord({"n": context.node_id})}), reply_to=message)

    return app


@pytest.fixture
def three(local_grid):
    for node in (1, 2, 3):
        local_grid.add(node, echo())
    return local_grid


def questions():
    return [Message(RecordDict(), node, "query.fedcohort") for node in (3, 1, 2)]


def test_replies_belong_to_their_messages(three, clock):
    three.on_push = lambda message: clock.sleep(0.2)
    for reply in exchange(three, questions(), timeout=1):
        assert reply.message.content["r"]["n"] == reply.sent.metadata.dst_node_id
        assert reply.seconds == pytest.approx(0.6)  # since the first of three was sent
    assert exchange(three, [], timeout=1) == []


@pytest.mark.parametrize("dropped", ["None", "left out"])
def test_messages_that_a_grid_does_not_accept_are_not_waited_for(three, dropped, clock):
    """Flower's grids return None for such a message, or fewer ids than there were messages."""
    push = three.push_messages

    def picky(messages):
        ids = push(messages)
        three._replies.pop(ids[1])
        return [ids[0], None, ids[2]] if dropped == "None" else [ids[0], ids[2]]

    three.push_messages = picky
    replies = exchange(three, questions(), timeout=5)
    assert sorted(r.sent.metadata.dst_node_id for r in replies) == [2, 3]
    assert clock.now == 0
