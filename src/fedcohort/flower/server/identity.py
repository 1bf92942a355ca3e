"""Which node is which client: ids that stay the same from run to run.

Flower draws new node ids for every connection, so a policy that remembers clients needs other
names: the name under which an operator registered the node, what the client says (its partition in
a simulation, ``client-id`` in its node config), or a fingerprint of its public key.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict

from fedcohort.flower.server.asking import AnyGrid, exchange
from fedcohort.flower.wire import LOG, QUERY, RAISED, RECORD, Request, error_reason, record_of
from fedcohort.options import typed
from fedcohort.rounds import ClientId

Identity = Literal["auto", "client", "name", "public-key"]
Eligible = str | Collection[ClientId] | Callable[[ClientId], bool]
Take = Callable[[ClientId, ConfigRecord], None]
MAX_LENGTH = 200
MAX_ASKS = 3
ASK_AGAIN = 300.0  # seconds after which a node that did not answer so often is asked once more
TAG = "tag:"
FINGERPRINTS = ("key-", "node-")


class NodeInfo(NamedTuple):
    """What the server knows about a node that is online."""

    node: int
    name: str = ""
    key: bytes = b""


def online(grid: AnyGrid) -> list[NodeInfo]:
    """Return the nodes that are online; older versions of Flower know neither names nor keys."""
    if not hasattr(grid, "get_nodes"):
        return [NodeInfo(node) for node in grid.get_node_ids()]
    nodes = grid.get_nodes()
    return [
        NodeInfo(n.node_id, getattr(n, "name", ""), getattr(n, "public_key", b"")) for n in nodes
    ]


class Directory:
    """The clients that are online and eligible, by id.

    A registered name always wins, also before its node comes online, and fingerprints cannot be
    claimed. Of two nodes that claim the same id, the first keeps it while it is online.

    `identity` is where ids come from. "auto": the name under which an operator registered the node;
    while no node has such a name, what the client says; else a fingerprint of its public key. New
    nodes are waited for `timeout` seconds. `eligible` is that of `CohortStrategy`, but a function
    takes the id alone.
    """

    def __init__(
        self, identity: Identity = "auto", timeout: float = 60.0, eligible: Eligible | None = None
    ) -> None:
        self.identity: Identity = typed(Identity, identity, "identity")
        self.timeout, self.eligible = timeout, eligible
        self.nodes: dict[ClientId, int] = {}
        self.refused: Counter[str] = Counter()
        self.registered: set[ClientId] = set()
        self._ids: dict[int, ClientId] = {}
        self._tags: dict[int, frozenset[str]] = {}
        by_tag = isinstance(eligible, str) and eligible.startswith(TAG)
        self._tag = str(eligible).removeprefix(TAG) if by_tag else None
        self._asks: dict[int, list[float]] = {}  # when each node was asked
        self._duplicates: set[int] = set()

    def refresh(
        self, grid: AnyGrid, question: RecordDict | None = None, take: Take | None = None
    ) -> dict[ClientId, int]:
        """Find out who is online, asking those that are new; return node ids by client.

        `question` is what new nodes are asked, as `GridCollector.content` makes it: beside their
        ids, they may be asked for signals; ``take(client, record)`` receives the answers.
        """
        present = {info.node: info for info in online(grid)}
        if self.identity in ("auto", "name"):
            self.registered.update(info.name for info in present.values() if info.name)
        vouched = {node: self._vouched(node, info) for node, info in present.items()}
        self._ids.update({node: client for node, client in vouched.items() if client is not None})
        by_claim, by_tag = self.identity in ("auto", "client"), self._tag is not None
        unknown = [
            info
            for node, info in present.items()
            if (by_claim and node not in self._ids) or (by_tag and node not in self._tags)
        ]
        self._ask(grid, list(filter(self._may_ask, unknown)), question, take)
        nodes = {c: n for c, n in self.nodes.items() if n in present and self._ids[n] == c}
        for node in sorted(present.keys() & self._ids.keys()):
            client = self._ids[node]
            if nodes.setdefault(client, node) != node and node not in self._duplicates:
                self._duplicates.add(node)
                self.refused[client] += 1
                LOG.warning("node %d says that it is %r, which is online already", node, client)
        self.nodes = {c: node for c, node in nodes.items() if self._is_eligible(c, node)}
        return self.nodes

    def _is_eligible(self, client: ClientId, node: int) -> bool:
        rule = self.eligible
        if rule is None:
            return True
        if self._tag is not None:
            return self._tag in self._tags.get(node, ())
        if isinstance(rule, str):
            return fnmatchcase(client, rule)
        return bool(rule(client)) if callable(rule) else client in rule

    def _may_ask(self, info: NodeInfo) -> bool:
        asks = self._asks.get(info.node, [])
        return len(asks) < MAX_ASKS or time.monotonic() - asks[-1] > ASK_AGAIN

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

    def _ask(
        self, grid: AnyGrid, asked: list[NodeInfo], question: RecordDict | None, take: Take | None
    ) -> None:
        """Ask nodes for their ids and tags, and for what else the question has."""
        for info in asked:
            self._asks.setdefault(info.node, []).append(time.monotonic())
        if question is None:
            question = RecordDict({"config": ConfigRecord({RECORD: Request(0, 0).to_json()})})
        ttl = self.timeout + 60
        messages = [Message(question, info.node, QUERY, ttl=ttl) for info in asked]
        infos = {info.node: info for info in asked}
        for reply in exchange(grid, messages, self.timeout):
            info, message = infos[reply.sent.metadata.dst_node_id], reply.message
            record = ConfigRecord()
            if message.has_content():
                record = record_of(message)
                tags = str(record.get("tags", "")).split(",")
                self._tags[info.node] = frozenset(tag.strip() for tag in tags)
            if info.node not in self._ids:
                client = self._claim(info, message, record)
                if client is None:
                    continue
                self._ids[info.node] = client
            if take is not None:
                take(self._ids[info.node], record)

    def _claim(self, info: NodeInfo, message: Message, record: ConfigRecord) -> ClientId | None:
        """Return the id that a new node goes by, None for none."""
        failed = message.has_error() and message.error.code in RAISED
        reason = error_reason(message) or record.get("id.error")
        if reason is None:
            client = record.get("id")
            if not isinstance(client, str) or not client.isprintable():
                problem = "an id must be a printable text"
            elif not 0 < len(client) <= MAX_LENGTH:
                problem = f"an id must have from 1 to {MAX_LENGTH} characters"
            elif client.startswith(FINGERPRINTS):
                problem = f"the id {client!r} looks like a fingerprint, which cannot be claimed"
            else:
                return client
            self.refused[f"node {info.node}"] += 1
            LOG.warning("node %d: %s", info.node, problem)
        elif self.identity == "auto" and (failed or message.has_content()):
            LOG.warning(
                "node %d did not say who it is (%s): %s", info.node, reason, fingerprint(info)
            )
            return fingerprint(info)
        return None


def fingerprint(info: NodeInfo) -> ClientId:
    """Return an id made of a node's public key, or of its node id if it has none."""
    if not info.key:
        return f"node-{info.node}"
    return f"key-{hashlib.sha256(info.key).hexdigest()[:16]}"
