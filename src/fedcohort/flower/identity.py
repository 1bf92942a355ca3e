"""Which node is which client: ids that stay the same from run to run.

Flower draws new node ids for every connection, so a policy that remembers clients needs other
names: the name under which an operator registered the node, what the client says (its partition in
a simulation, ``client-id`` in its node config), or a fingerprint of its public key.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from fedcohort.exceptions import ConfigError, DataError, NoClients
from fedcohort.flower.grid import LOG, TimedGrid, exchange, failure, raised
from fedcohort.flower.messages import QUERY, RECORD, untrusted
from fedcohort.rounds import ClientId

Identity = Literal["auto", "client", "name", "public-key"]
IDENTITIES = ("auto", "client", "name", "public-key")
MAX_LENGTH = 200
MAX_ASKS = 3
ASK_AGAIN = 300.0  # seconds after which a node that did not answer so often is asked once more
FINGERPRINTS = ("key-", "node-")


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
        Where ids come from. "auto": the name under which an operator registered the node; while no
        node has such a name, what the client says; else a fingerprint of its public key.
    timeout : float
        Seconds to wait for new nodes that are asked who they are.

    Notes
    -----
    A registered name always wins: nobody else can claim it, not even before its node comes online,
    once the server has seen it. Fingerprints cannot be claimed. Of two nodes that claim the same
    id, the first one keeps it while it is online; the other is left out and counted in `refused`.
    """

    def __init__(self, identity: Identity = "auto", timeout: float = 60.0) -> None:
        if identity not in IDENTITIES:
            raise ConfigError(f"identity={identity!r} must be one of {', '.join(IDENTITIES)}")
        self.identity, self.timeout = identity, timeout
        self.nodes: dict[ClientId, int] = {}
        self.refused: Counter[str] = Counter()
        self.registered: set[ClientId] = set()
        self._ids: dict[int, ClientId] = {}
        self._asked: Counter[int] = Counter()
        self._last_asked: dict[int, float] = {}
        self._duplicates: set[int] = set()

    def refresh(self, grid: Grid, config: Mapping[str, Any] | None = None) -> dict[ClientId, int]:
        """Find out who is online, asking those that are new; return node ids by client.

        `config` is the training config, which the app's mods may read.
        """
        present = {info.node: info for info in online(grid)}
        if self.identity in ("auto", "name"):
            self.registered.update(info.name for info in present.values() if info.name)
        self._ids.update(
            {n: known for n, info in present.items() if (known := self._vouched(n, info))}
        )
        unknown = [i for i in present.values() if i.node not in self._ids]
        if self.identity in ("auto", "client"):
            self._ids.update(
                self._claims(grid, [i for i in unknown if self._may_ask(i.node)], config or {})
            )
        self.nodes = {c: n for c, n in self.nodes.items() if n in present and self._ids[n] == c}
        for node in sorted(present):
            self._admit(node)
        return self.nodes

    def _may_ask(self, node: int) -> bool:
        waited = time.monotonic() - self._last_asked.get(node, -math.inf)
        return self._asked[node] < MAX_ASKS or waited > ASK_AGAIN

    def _admit(self, node: int) -> None:
        client = self._ids.get(node)
        if client is None or self.nodes.setdefault(client, node) == node:
            return
        if node not in self._duplicates:
            self._duplicates.add(node)
            self.refused[client] += 1
            LOG.warning("node %d says that it is %r, which is online already", node, client)

    def _vouched(self, node: int, info: NodeInfo) -> ClientId | None:
        """Return the id that the SuperLink vouches for, None if the client must be asked."""
        if self.identity in ("auto", "name") and info.name:
            return info.name
        if self.identity == "public-key" and info.key:
            return fingerprint(info)
        if self.identity == "auto" and self.registered:
            # Operators register names here, so a client's own word counts for nothing.
            if self._ids.get(node) != fingerprint(info):
                LOG.warning("node %d is not registered under a name: %s", node, fingerprint(info))
            return fingerprint(info)
        return None

    def _claims(
        self, grid: Grid, asked: list[NodeInfo], config: Mapping[str, Any]
    ) -> dict[int, ClientId]:
        """Ask nodes who they are and return the ids that are accepted."""
        self._asked.update(info.node for info in asked)
        self._last_asked.update(dict.fromkeys((i.node for i in asked), time.monotonic()))
        content = RecordDict({"config": ConfigRecord(dict(config))})
        messages = [
            Message(content, i.node, f"{QUERY}identity", ttl=self.timeout + 60) for i in asked
        ]
        infos = {info.node: info for info in asked}
        found: dict[int, ClientId] = {}
        for reply in exchange(grid, messages, self.timeout):
            info = infos[reply.sent.metadata.dst_node_id]
            try:
                with untrusted("an id"):
                    client = claimed_id(reply.message)
            except DataError as error:
                self.refused[f"node {info.node}"] += 1
                LOG.warning("node %d: %s", info.node, error)
                continue
            if client is None and self.identity == "auto" and raised(reply.message):
                client = fingerprint(info)
                reason = failure(reply.message)
                LOG.warning("node %d did not say who it is (%s): %s", info.node, reason, client)
            if client is not None:
                found[info.node] = client
        return found


class IdentifiedGrid(TimedGrid):
    """Shows the nodes whose ids are known; a strategy may wait for more, up to a limit.

    Flower's strategies ask for the nodes again and again until there are enough. The first call
    starts the clock.
    """

    def __init__(
        self,
        grid: Grid,
        directory: Directory,
        wait: float,
        timeout: float,
        config: Mapping[str, Any],
    ) -> None:
        super().__init__(grid, timeout)
        self.directory, self.wait, self.config = directory, wait, config
        self._calls = 0
        self._start = time.monotonic()

    def get_node_ids(self) -> Iterable[int]:
        """Return the known nodes; NoClients once the strategy has waited too long for more."""
        nodes = sorted(self.directory.refresh(self.grid, self.config).values())
        self._calls += 1
        waited = time.monotonic() - self._start
        if self._calls > 3 and waited > self.wait:
            raise NoClients(
                f"too few clients: {len(nodes)} online after {waited:.0f} s, and the strategy "
                "still waits for more; start more SuperNodes, lower its min_available_nodes and "
                "min_train_nodes, or raise CohortStrategy(wait=...)"
            )
        return nodes


class FixedGrid(TimedGrid):
    """Shows the given nodes and no others."""

    def __init__(self, grid: Grid, nodes: Iterable[int], timeout: float) -> None:
        super().__init__(grid, timeout)
        self.fixed = list(nodes)

    def get_node_ids(self) -> Iterable[int]:
        """Return the given nodes."""
        return self.fixed


def claimed_id(message: Message) -> ClientId | None:
    """Return the id in a reply, None in an error; DataError for an id that cannot be accepted."""
    if failure(message) is not None:
        return None
    record = message.content.config_records.get(RECORD)
    client = None if record is None else record.get("id")
    if not isinstance(client, str) or not 0 < len(client) <= MAX_LENGTH or not client.isprintable():
        raise DataError(f"an id must be a printable text of at most {MAX_LENGTH} characters")
    if client.startswith(FINGERPRINTS):
        raise DataError(f"the id {client!r} looks like a fingerprint, which cannot be claimed")
    return client


def answer(message: Message, context: Context, identity: Callable[[Context], ClientId]) -> Message:
    """Reply to the server's question who this client is."""
    content = RecordDict({RECORD: ConfigRecord({"id": identity(context)})})
    return Message(content, reply_to=message)


def fingerprint(info: NodeInfo) -> ClientId:
    """Return an id made of a node's public key, or of its node id if it has none."""
    if not info.key:
        return f"node-{info.node}"
    return f"key-{hashlib.sha256(info.key).hexdigest()[:16]}"
