"""Which node is which client: ids that stay the same from run to run.

Flower draws node ids anew, so a policy that remembers clients needs names of its own: the name
under which an operator registered the node, what the client says of itself (its partition in a
simulation, ``client-id`` in its node config), or its public key.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower.grid import LOG, TimedGrid, exchange, failure
from fedcohort.flower.messages import RECORD
from fedcohort.rounds import ClientId

Identity = Literal["auto", "client", "name", "public-key"]
IDENTITIES = ("auto", "client", "name", "public-key")
QUERY = "query.identity"
MAX_LENGTH = 200
MAX_ASKS = 3
RAISED = 2  # Flower's code of a client app that raised: here, one that fedcohort is not attached to


def own_id(context: Context) -> ClientId:
    """Return a client's id from its node config: ``client-id``, else ``partition-id``.

    Numbers of partitions are padded to the same length, so that they sort as numbers do.

    Examples
    --------
    >>> config = {"partition-id": 7, "num-partitions": 100}
    >>> own_id(Context(run_id=0, node_id=1, node_config=config, state=RecordDict(), run_config={}))
    'client-07'
    """
    config: Mapping[str, Any] = context.node_config
    if "client-id" in config:
        return str(config["client-id"])
    if "partition-id" in config:
        digits = len(str(max(int(config.get("num-partitions", 1)) - 1, 0)))
        return f"client-{int(config['partition-id']):0{digits}d}"
    raise ConfigError(
        "this client has no id: start the SuperNode with --node-config 'client-id=\"...\"', or "
        "pass attach(identity=function of the context)"
    )


class NodeInfo(NamedTuple):
    """What the server knows about a node that is online."""

    node: int
    name: str = ""
    key: bytes = b""


def online(grid: Grid) -> list[NodeInfo]:
    """Return the nodes that are online, with names and keys where Flower tells them."""
    nodes = TimedGrid(grid, 0).get_nodes()
    return [
        NodeInfo(n.node_id, getattr(n, "name", ""), getattr(n, "public_key", b"")) for n in nodes
    ]


class Directory:
    """The clients that are online, by id.

    Parameters
    ----------
    identity : {"auto", "client", "name", "public-key"}
        Where ids come from. "auto": the name of a registered node, else the client's own word,
        else, if fedcohort is not attached to the client, its key or node id.
    timeout : float
        For the query that asks new nodes who they are.

    Notes
    -----
    A client's own word can be a lie. Of two nodes with one id, the one that was there first keeps
    it while it is online; the other is left out and counted in `refused`.
    """

    def __init__(self, identity: Identity = "auto", timeout: float = 60.0) -> None:
        if identity not in IDENTITIES:
            raise ConfigError(f"identity={identity!r} must be one of {', '.join(IDENTITIES)}")
        self.identity, self.timeout = identity, timeout
        self.nodes: dict[ClientId, int] = {}
        self.refused: Counter[str] = Counter()
        self._ids: dict[int, ClientId] = {}
        self._asks: Counter[int] = Counter()
        self._doubles: set[int] = set()

    def refresh(self, grid: Grid) -> dict[ClientId, int]:
        """Find out who is online, asking those that are new; return node ids by client."""
        present = {info.node: info for info in online(grid)}
        self.nodes = {c: node for c, node in self.nodes.items() if node in present}
        fresh = [info for node, info in present.items() if node not in self._ids]
        self._ids.update({i.node: known for i in fresh if (known := self._known(i))})
        if self.identity in ("auto", "client"):
            self._ids.update(self._answers(grid, [i for i in fresh if self._may_ask(i.node)]))
        for node in sorted(present):
            self._seat(node)
        return self.nodes

    def _seat(self, node: int) -> None:
        client = self._ids.get(node)
        if client is None:
            return
        if self.nodes.setdefault(client, node) != node and node not in self._doubles:
            self._doubles.add(node)
            self.refused[client] += 1
            LOG.warning("node %d says that it is %r, which is online already", node, client)

    def _may_ask(self, node: int) -> bool:
        return node not in self._ids and self._asks[node] < MAX_ASKS

    def _known(self, info: NodeInfo) -> ClientId | None:
        """Return the id that needs no question."""
        if self.identity in ("auto", "name") and info.name:
            return info.name
        if self.identity == "public-key" and info.key:
            return _fingerprint(info)
        return None

    def _answers(self, grid: Grid, asked: list[NodeInfo]) -> dict[int, ClientId]:
        self._asks.update(info.node for info in asked)
        content = RecordDict({RECORD: ConfigRecord()})
        messages = [Message(content, i.node, QUERY, ttl=self.timeout + 60) for i in asked]
        infos = {info.node: info for info in asked}
        found: dict[int, ClientId] = {}
        for reply in exchange(grid, messages, self.timeout):
            info = infos[reply.sent.metadata.dst_node_id]
            try:
                client = said(reply.message)
            except DataError as error:
                self.refused[f"node {info.node}"] += 1
                LOG.warning("node %d: %s", info.node, error)
                continue
            if client is None and self.identity == "auto" and _is_plain(reply.message):
                client = _fingerprint(info)
                reason = failure(reply.message)
                LOG.info("node %d did not say who it is (%s): %s", info.node, reason, client)
            if client is not None:
                found[info.node] = client
        return found


def said(message: Message) -> ClientId | None:
    """Return the id in a reply, None in an error; DataError for an id that is none."""
    if failure(message) is not None:
        return None
    record = message.content.config_records.get(RECORD)
    client = None if record is None else record.get("id")
    if not isinstance(client, str) or not 0 < len(client) <= MAX_LENGTH or not client.isprintable():
        raise DataError(f"an id must be a printable text of at most {MAX_LENGTH} characters")
    return client


def answer(message: Message, context: Context, identity: Callable[[Context], ClientId]) -> Message:
    """Reply to the server's question who this client is."""
    content = RecordDict({RECORD: ConfigRecord({"id": identity(context)})})
    return Message(content, reply_to=message)


def _is_plain(message: Message) -> bool:
    return message.has_error() and message.error.code == RAISED


def _fingerprint(info: NodeInfo) -> ClientId:
    if not info.key:
        return f"node-{info.node}"
    return f"key-{hashlib.sha256(info.key).hexdigest()[:16]}"
