"""Messages to clients: sent and collected within a time limit, without sending a model twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcohort.flower.arrays import version
from fedcohort.rounds import ClientId
from fedcohort.session import Session

LOG = logging.getLogger("flwr.fedcohort")
RAISED = (1, 2)  # Flower's codes of a client app that could not be loaded, and of one that raised
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0  # seconds between looks for replies


class Reply(NamedTuple):
    """What came back to a message: the reply, and how many seconds after sending."""

    sent: Message
    message: Message
    seconds: float


def exchange(grid: Grid, messages: Iterable[Message], timeout: float) -> list[Reply]:
    """Send messages and return the replies that came within `timeout` seconds.

    Replies are matched by the id of the message they answer: an error that a SuperLink sends in
    place of a node that is gone carries the SuperLink's own node id. A message that could not be
    sent, or is not answered in time, has no reply.
    """
    sent = list(messages)
    started = time.monotonic()
    waiting = _pushed(grid, sent)
    replies: list[Reply] = []
    pause = FIRST_PAUSE
    while waiting:
        for message in grid.pull_messages(list(waiting)):
            origin = waiting.pop(message.metadata.reply_to_message_id, None)
            if origin is not None:
                replies.append(Reply(origin, message, time.monotonic() - started))
        left = timeout - (time.monotonic() - started)
        if not waiting or left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, LAST_PAUSE)
    if waiting:
        LOG.warning("%d of %d messages without reply in %g s", len(waiting), len(sent), timeout)
    return replies


def failure(message: Message) -> str | None:
    """Return why a reply has no content, None if it has some.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> failure(SimpleNamespace(has_content=lambda: True))
    >>> failure(SimpleNamespace(has_content=lambda: False, has_error=lambda: False))
    'an empty reply'
    """
    if message.has_content():
        return None
    return last_line(str(message.error.reason)) if message.has_error() else "an empty reply"


def last_line(text: str) -> str:
    r"""Return the last line of a traceback, which names the error.

    Examples
    --------
    >>> last_line("<class 'RayTaskError'>:<'ray::run()\n  File x.py\nValueError: no data'>")
    'ValueError: no data'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removesuffix("'>")[:500] if lines else "an error without a reason"


def raised(message: Message) -> bool:
    """Whether a reply says that the client's app raised or cannot be imported."""
    return message.has_error() and message.error.code in RAISED


def _pushed(grid: Grid, messages: list[Message]) -> dict[str, Message]:
    """Push messages and return those that were accepted, by their ids."""
    if not messages:
        return {}
    ids = list(grid.push_messages(messages))
    if len(ids) == len(messages):
        pairs = zip(ids, messages, strict=True)
        return {identifier: message for identifier, message in pairs if identifier}
    # A grid may leave out what it did not accept; it writes the ids into the messages as well.
    known = set(ids)
    return {m.metadata.message_id: m for m in messages if m.metadata.message_id in known}


class TimedGrid(Grid):
    """A grid with a time limit that records how long each reply took.

    Parameters
    ----------
    grid : Grid
        The grid that sends and receives.
    timeout : float
        Limit in seconds where the caller gives none.
    """

    def __init__(self, grid: Grid, timeout: float) -> None:
        self.grid, self.timeout = grid, timeout
        self.seconds: dict[str, float] = {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Exchange messages and remember how long each reply took, by its own id."""
        replies = exchange(self.grid, messages, self.timeout if timeout is None else timeout)
        self.seconds = {r.sent.metadata.message_id: r.seconds for r in replies}
        return [reply.message for reply in replies]

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are online."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return what is known about online nodes; older versions of Flower know ids only."""
        if hasattr(self.grid, "get_nodes"):
            return self.grid.get_nodes()
        return [SimpleNamespace(node_id=node) for node in self.grid.get_node_ids()]

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """The run."""
        return self.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Look for replies."""
        return self.grid.pull_messages(message_ids)


class Model:
    """A model as clients are sent it, with its version."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self.arrays = arrays
        self.version = version(arrays)


class Delivery:
    """Decides whether a message must carry the model, and charges copies that are sent again.

    A session charges one download per client and round. A client that says it kept the model is
    not sent another copy. One that did not, or that was asked about another model before, is sent
    one more, which is charged here.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._held: dict[ClientId, str] = {}
        self._charged: set[ClientId] = set()

    def begin(self, continuing: Iterable[ClientId] = ()) -> None:
        """Start a round; `continuing` clients go on after a round that a gate skipped.

        The session assumes that those still hold the model, and charges them nothing.
        """
        self._charged = set(continuing)
        self._held = {c: held for c, held in self._held.items() if c in self._charged}

    def confirm(self, client: ClientId, held: object) -> None:
        """Note which model a client says it holds."""
        if isinstance(held, str) and held:
            self._held[client] = held

    def must_carry(self, client: ClientId, model: Model) -> bool:
        """Whether a message to the client must carry the model; it is then charged."""
        if self._held.get(client) == model.version:
            return False
        if client in self._charged:
            session = self.session
            number, size = session.round_number, session.model_bytes
            session.ledger.charge(number, "model", "down", [client], size)
        self._charged.add(client)
        return True
