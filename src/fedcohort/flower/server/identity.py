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
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcohort.exceptions import ConfigError, DataError, NoClients
from fedcohort.flower.server.asking import CohortGrid, Reply, exchange
from fedcohort.flower.wire import LOG, QUERY, RAISED, RECORD, Request, error_reason, untrusted
from fedcohort.rounds import ClientId

Identity = Literal["auto", "client", "name", "public-key"]
Eligible = str | Collection[ClientId] | Callable[[ClientId], bool]
IDENTITIES = ("auto", "client", "name", "public-key")
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


def online(grid: Grid) -> list[NodeInfo]:
    """Return the nodes that are online, with names and keys where Flower tells them."""
    nodes = CohortGrid(grid, 0).get_nodes()
    return [
        NodeInfo(n.node_id, getattr(n, "name", ""), getattr(n, "public_key", b"")) for n in nodes
    ]


class Directory:
    """The clients that are online and eligible, by id.

    Parameters
    ----------
    identity : {"auto", "client", "name", "public-key"}
        Where ids come from. "auto": the name under which an operator registered the node; while no
        node has such a name, what the client says; else a fingerprint of its public key.
    timeout : float
        Seconds to wait for new nodes that are asked who they are.
    eligible : str, collection of str or callable, optional
        As in `CohortStrategy`; a function takes the id alone.

    Notes
    -----
    A registered name always wins, also before its node comes online, and fingerprints cannot be
    claimed. Of two nodes that claim the same id, the first keeps it while it is online.
    """

    def __init__(
        self,
        identity: Identity = "auto",
        timeout: float = 60.0,
        eligible: Eligible | None = None,
    ) -> None:
        if identity not in IDENTITIES:
            raise ConfigError(f"identity={identity!r} must be one of {', '.join(IDENTITIES)}")
        self.identity, self.timeout, self._eligible = identity, timeout, eligible
        self._wants_tags = isinstance(eligible, str) and eligible.startswith(TAG)
        self._tags: dict[int, frozenset[str]] = {}
        self.nodes: dict[ClientId, int] = {}
        self.refused: Counter[str] = Counter()
        self.registered: set[ClientId] = set()
        self.told: dict[ClientId, ConfigRecord] = {}
        self._ids: dict[int, ClientId] = {}
        self._asked: Counter[int] = Counter()
        self._last_asked: dict[int, float] = {}
        self._duplicates: set[int] = set()

    def refresh(self, grid: Grid, question: RecordDict | None = None) -> dict[ClientId, int]:
        """Find out who is online, asking those that are new; return node ids by client.

        `question` is what new nodes are asked, as `GridCollector.content` makes it: beside their
        ids, they may be asked for signals, and `told` keeps the answers of those that were new.
        """
        present = {info.node: info for info in online(grid)}
        if self.identity in ("auto", "name"):
            self.registered.update(info.name for info in present.values() if info.name)
        vouched = {node: self._vouched(node, info) for node, info in present.items()}
        self._ids.update({node: client for node, client in vouched.items() if client is not None})
        if self.identity in ("auto", "client"):
            unnamed = [info for info in present.values() if info.node not in self._ids]
            self._ids.update(self._claims(grid, list(filter(self._may_ask, unnamed)), question))
        if self._wants_tags:
            untold = [
                i for i in present.values() if i.node in self._ids and i.node not in self._tags
            ]
            told = dict(self.told)  # what these say of themselves does not count
            self._claims(grid, list(filter(self._may_ask, untold)), None)
            self.told = told
        kept = {c: n for c, n in self.nodes.items() if n in present and self._ids[n] == c}
        self.nodes = {c: node for c, node in kept.items() if self._is_eligible(c, node)}
        for node in sorted(present):
            self._admit(node)
        return self.nodes

    def shown(
        self, grid: Grid, wait: float, question: RecordDict | None = None
    ) -> Callable[[], Iterable[int]]:
        """Return a function that returns the nodes; a strategy may call it until there are enough.

        NoClients once the strategy has waited more than `wait` seconds for more.
        """
        calls, start = 0, time.monotonic()

        def nodes() -> Iterable[int]:
            nonlocal calls
            shown, calls = sorted(self.refresh(grid, question).values()), calls + 1
            waited = time.monotonic() - start
            if calls > 3 and waited > wait:
                raise NoClients(
                    f"too few clients: {len(shown)} online after {waited:.0f} s, and the strategy "
                    "still waits for more; start more SuperNodes, lower its min_available_nodes "
                    "and min_train_nodes, or raise CohortStrategy(wait=...)"
                )
            return shown

        return nodes

    def _is_eligible(self, client: ClientId, node: int) -> bool:
        rule = self._eligible
        if rule is None:
            return True
        if isinstance(rule, str):
            if self._wants_tags:
                return rule.removeprefix(TAG) in self._tags.get(node, ())
            return fnmatchcase(client, rule)
        return bool(rule(client)) if callable(rule) else client in rule

    def _may_ask(self, info: NodeInfo) -> bool:
        waited = time.monotonic() - self._last_asked.get(info.node, -math.inf)
        return self._asked[info.node] < MAX_ASKS or waited > ASK_AGAIN

    def _admit(self, node: int) -> None:
        client = self._ids.get(node)
        if client is None or not self._is_eligible(client, node):
            return
        if self.nodes.setdefault(client, node) != node and node not in self._duplicates:
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
        self, grid: Grid, asked: list[NodeInfo], question: RecordDict | None
    ) -> dict[int, ClientId]:
        """Ask nodes who they are and return the ids that are accepted."""
        self._asked.update(info.node for info in asked)
        self._last_asked.update(dict.fromkeys((i.node for i in asked), time.monotonic()))
        if question is None:
            question = RecordDict({"config": ConfigRecord({RECORD: Request(0, 0).to_json()})})
        ttl = self.timeout + 60
        messages = [Message(question, info.node, QUERY, ttl=ttl) for info in asked]
        infos = {info.node: info for info in asked}
        claims: dict[int, ClientId] = {}
        for reply in exchange(grid, messages, self.timeout):
            info = infos[reply.sent.metadata.dst_node_id]
            client = self._claim(info, reply)
            if client is not None:
                claims[info.node] = client
        return claims

    def _claim(self, info: NodeInfo, reply: Reply) -> ClientId | None:
        """Return the id that a new node goes by, None for none."""
        reason, record = error_reason(reply.message), ConfigRecord()
        nameless = reply.message.has_error() and reply.message.error.code in RAISED
        if reason is None:
            record = reply.message.content.config_records.get(RECORD, record)
            tags = str(record.get("tags", "")).split(",")
            self._tags[info.node] = frozenset(tag.strip() for tag in tags)
            reason = record.get("id.error")  # type: ignore[assignment]
            nameless = isinstance(reason, str)
        if nameless and self.identity == "auto":
            client = fingerprint(info)
            LOG.warning("node %d did not say who it is (%s): %s", info.node, reason, client)
        elif reason is None:
            try:
                with untrusted("an id"):
                    client = claimed_id(record.get("id"))
            except DataError as error:
                self.refused[f"node {info.node}"] += 1
                LOG.warning("node %d: %s", info.node, error)
                return None
        else:
            return None
        self.told[client] = record
        return client


def claimed_id(client: Any) -> ClientId:
    """Return the id that a client claims; DataError for one that cannot be accepted."""
    if not isinstance(client, str) or not 0 < len(client) <= MAX_LENGTH or not client.isprintable():
        raise DataError(f"an id must be a printable text of at most {MAX_LENGTH} characters")
    if client.startswith(FINGERPRINTS):
        raise DataError(f"the id {client!r} looks like a fingerprint, which cannot be claimed")
    return client


def fingerprint(info: NodeInfo) -> ClientId:
    """Return an id made of a node's public key, or of its node id if it has none."""
    if not info.key:
        return f"node-{info.node}"
    return f"key-{hashlib.sha256(info.key).hexdigest()[:16]}"
