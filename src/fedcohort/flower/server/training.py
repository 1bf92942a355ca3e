"""The training messages of one round: the inner strategy's, sent to the cohort of the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower.server.asking import GridCollector, Model, exchange
from fedcohort.flower.wire import (
    PROBE,
    RECORD,
    UPLOAD,
    Request,
    dtypes_of,
    error_reason,
    from_record,
    in_dtypes,
    pack,
)
from fedcohort.gates import Gate
from fedcohort.rounds import ClientId, Selection
from fedcohort.signals.catalog import SIGNALS

MAX_ANSWER = 1 << 16  # bytes of a client's answer to a gate; Sketch-to-Skip's has one


class Template:
    """What the inner strategy wants to send, to the nodes that it sampled itself."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = {m.metadata.dst_node_id: m for m in messages}
        self._any = messages[0]
        records = self._any.content.array_records
        self.name = next(iter(records), "arrays")
        self.arrays: ArrayRecord | None = records.get(self.name)
        self.config = next(iter(self._any.content.config_records), "config")
        self.per_node = any(
            m.content is not self._any.content and m.content != self._any.content for m in messages
        )

    @property
    def entries(self) -> dict[str, Any]:
        """The inner strategy's training config."""
        return dict(self._any.content.config_records.get(self.config, {}))

    @property
    def kind(self) -> str:
        """The inner strategy's type of message."""
        return str(self._any.metadata.message_type)

    def arrays_for(self, node: int) -> ArrayRecord | None:
        """Return the model that the inner strategy sends to this node alone, or None."""
        if not self.per_node or node not in self.messages:
            return None
        arrays = self.messages[node].content.array_records.get(self.name)
        return None if arrays is None or arrays is self.arrays or arrays == self.arrays else arrays

    def covers(self, nodes: Iterable[int]) -> bool:
        """Whether each node can be sent what the inner strategy wants to send to it."""
        return not self.per_node or all(node in self.messages for node in nodes)

    def check_covers(self, nodes: Mapping[ClientId, int]) -> None:
        """ConfigError unless the inner strategy made a message for each of the nodes."""
        missing = sorted(c for c, node in nodes.items() if node not in self.messages)
        if missing:
            raise ConfigError(
                "CohortStrategy: the inner strategy sends each node a message of its own, but none "
                f"to {', '.join(missing)}; make its configure_train build one for every node of "
                "grid.get_node_ids()"
            )

    def content_for(
        self, node: int, extra: Mapping[str, Any], arrays: ArrayRecord | None
    ) -> RecordDict:
        """Return what a node is sent: the inner strategy's records, and our entries in its config.

        `arrays` is the model, None where the node holds it already. Our entries are not a record of
        their own, since Flower's clipping mods want exactly one ConfigRecord.
        """
        inner = self.messages.get(node, self._any).content
        content = RecordDict({k: v for k, v in inner.items() if k != self.name})
        if arrays is not None:
            content[self.name] = arrays
        content[self.config] = ConfigRecord({**inner.config_records.get(self.config, {}), **extra})
        return content

    def message(self, node: int, content: RecordDict, kind: str, ttl: float) -> Message:
        """Return a message like the inner strategy's."""
        group = self._any.metadata.group_id
        return Message(content, node, kind, ttl=ttl, group_id=group or None)


class Cohort:
    """The selected clients of one round, and what is sent to them.

    `sent` has the last message to each client, `problems` why clients did not answer the gate.
    """

    def __init__(self, selection: Selection, template: Template, collector: GridCollector) -> None:
        self.selection, self.template, self.collector = selection, template, collector
        self.model, self.nodes = collector.current, collector.nodes
        policy = collector.session.policy
        names = tuple(sorted(n for n in policy.needs.reply if SIGNALS[n].work != "server"))
        options = {name: policy.signal_options.get(name, {}) for name in names}
        self.request = replace(
            collector.request, version=self.model.version, signals=names, options=options
        )
        self.sent: dict[ClientId, Message] = {}
        self.problems: dict[ClientId, str] = {}
        self._probing: dict[ClientId, float] = {}

    def train(self) -> list[Message]:
        """Return the training messages of a round without a gate."""
        return self._messages(self.template.kind, self.request, {})

    def probe(self, gate: Gate, announced: NDArray[Any] | None) -> dict[ClientId, NDArray[Any]]:
        """Let the clients train, and return what they answer to the gate."""
        request = replace(
            self.request,
            gate=gate.name,
            on_skip=gate.on_skip,
            carries_over=gate.carries_over,
            options={**self.request.options, "gate": gate.client_options},
        )
        extra: dict[str, Any] = {}
        if announced is not None:
            extra["announce"], extra["announce.form"] = pack(announced)
        messages = self._messages(PROBE, request, extra)
        client_at = {self.nodes[c]: c for c in self.selection.clients}
        answers: dict[ClientId, NDArray[Any]] = {}
        self.problems = dict.fromkeys(self.selection.clients, "no reply")
        for reply in exchange(self.collector.grid, messages, self.collector.timeout):
            client = client_at[reply.sent.metadata.dst_node_id]
            try:
                answers[client] = self._answer(client, reply.message)
                self._probing[client] = reply.seconds
                del self.problems[client]
            except DataError as error:
                self.problems[client] = str(error)
        return {c: answers[c] for c in self.selection.clients if c in answers}

    def _answer(self, client: ClientId, message: Message) -> NDArray[Any]:
        problem = error_reason(message)
        if problem is not None:
            raise DataError(problem)
        record = message.content.config_records.get(RECORD, ConfigRecord())
        self.collector.confirm(client, record)
        try:
            return from_record(record, "answer", MAX_ANSWER)
        except DataError:
            data = record.get("answer")
            size = len(data) if isinstance(data, bytes) else 0
            self.collector.session.charge("gate", "up", {client: size})
            raise

    def upload(self, admitted: Iterable[ClientId]) -> list[Message]:
        """Return the requests for the models of those that the gate admitted."""
        config = ConfigRecord({RECORD: self.request.to_json(), "decision": b"\x01"})
        content = RecordDict({self.template.config: config})
        self.sent = {c: self._message(c, content, UPLOAD) for c in admitted}
        return list(self.sent.values())

    def seconds(self, replied: Mapping[str, float]) -> dict[ClientId, float]:
        """Return how long each client took, from the seconds by id of the last message to it."""
        ids = {client: m.metadata.message_id for client, m in self.sent.items()}
        return {c: self._probing.get(c, 0.0) + replied[i] for c, i in ids.items() if i in replied}

    def _messages(self, kind: str, request: Request, extra: Mapping[str, Any]) -> list[Message]:
        entries = dict(extra)
        self.sent = {}
        for client in self.selection.clients:
            node, model = self.nodes[client], self.model
            arrays = self.template.arrays_for(node)
            if arrays is not None:
                model = Model(in_dtypes(arrays, dtypes_of(self.model.arrays)))
            entries[RECORD] = replace(request, version=model.version, client=client).to_json()
            carried = model.arrays if self.collector.must_carry(client, model) else None
            content = self.template.content_for(node, entries, carried)
            self.sent[client] = self._message(client, content, kind)
        return list(self.sent.values())

    def _message(self, client: ClientId, content: RecordDict, kind: str) -> Message:
        return self.template.message(self.nodes[client], content, kind, self.collector.timeout + 5)
