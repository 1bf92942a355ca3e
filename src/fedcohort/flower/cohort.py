"""The messages of one round: queries for signals, then the inner strategy's to the cohort."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower.arrays import dtypes_of, in_dtypes, payload
from fedcohort.flower.grid import LOG, Delivery, Model, exchange, failure
from fedcohort.flower.messages import (
    PROBE,
    QUERY,
    RECORD,
    UPLOAD,
    Request,
    from_record,
    pack,
    raw,
    refused,
)
from fedcohort.gates import Gate
from fedcohort.policies.base import Policy
from fedcohort.rounds import ClientId, Selection
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS, Option

Readings = dict[ClientId, NDArray[Any]]


def reading_of(
    record: ConfigRecord | None, name: str, options: Mapping[str, Option], limit: int
) -> NDArray[Any] | None:
    """Return a reading from a reply, None if there is none.

    What is too large or malformed comes back as opaque bytes, which the session charges, drops and
    counts, as it does readings of the wrong form.
    """
    data = raw(record, name)
    if record is None or data is None:
        return None
    most = SIGNALS[name].form(options).max_bytes
    try:
        return from_record(record, name, limit if most is None else min(limit, most))
    except DataError as error:
        LOG.warning("signal %s: %s", name, error)
        return refused(data)


class Queries:
    """Sends ``query.<signal>`` to clients and returns the readings of those that answered.

    Parameters
    ----------
    grid : Grid
    nodes : mapping
        Node id by client.
    delivery : Delivery
    request : Request
        What all queries of the round have in common.
    current, initial : Model
        Profiles are taken under the initial model, so that a newcomer's is comparable.
    options : mapping
        The policy's `signal_options`.
    timeout, limit
        Seconds to wait for replies, bytes that a reading may have.
    center : array, optional
        Public center of the data, for sketches that want one.
    config : mapping, optional
        The inner strategy's training config, which the app's own handlers and mods may read.

    Attributes
    ----------
    problems : dict
        For each signal that was asked for: why clients did not answer it, by client.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[ClientId, int],
        delivery: Delivery,
        request: Request,
        *,
        current: Model,
        initial: Model,
        options: Mapping[str, Mapping[str, Option]],
        timeout: float,
        limit: int,
        center: NDArray[np.float64] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config or {}
        self.problems: dict[str, dict[ClientId, str]] = {}
        self.grid, self.nodes, self.delivery, self.request = grid, nodes, delivery, request
        self.current, self.initial, self.options = current, initial, options
        self.timeout, self.limit, self.center = timeout, limit, center

    def __call__(self, name: str, clients: Sequence[ClientId]) -> Readings:
        """Ask clients for one signal."""
        options = self.options.get(name, {})
        if SIGNALS[name].needs_model(options) and not payload(self._model(name).arrays):
            if SIGNALS[name].model == "initial":
                raise ConfigError(
                    f"CohortStrategy: the signal {name!r} is taken under the initial model, which "
                    "is empty; use a policy that needs another signal"
                )
            LOG.info("the model is empty yet, so nobody is asked for %s", name)
            return {}
        messages = {client: self._message(name, client, options) for client in clients}
        names = {self.nodes[client]: client for client in clients}
        readings: Readings = {}
        problems = self.problems[name] = dict.fromkeys(clients, "no reply")
        for reply in exchange(self.grid, messages.values(), self.timeout):
            client = names[reply.sent.metadata.dst_node_id]
            problem = failure(reply.message)
            if problem is not None:
                problems[client] = problem
                continue
            del problems[client]
            record = reply.message.content.config_records.get(RECORD)
            self.delivery.confirm(client, None if record is None else record.get("held"))
            reading = reading_of(record, name, options, self.limit)
            if reading is not None:
                readings[client] = reading
        return readings

    def _model(self, name: str) -> Model:
        return self.initial if SIGNALS[name].model == "initial" else self.current

    def _message(self, name: str, client: ClientId, options: Mapping[str, Option]) -> Message:
        model = self._model(name)
        request = replace(
            self.request,
            version=model.version,
            signals=(name,),
            options={name: options},
            client=client,
        )
        config = ConfigRecord({**self.config, RECORD: request.to_json()})
        if name == "race_sketch" and options.get("center") and self.center is not None:
            config["center"], config["center.form"] = pack(self.center)
            self.delivery.session.charge(name, "down", {client: self.center.nbytes})
        content = RecordDict({"config": config})
        if SIGNALS[name].needs_model(options) and self.delivery.must_carry(client, model):
            content[request.arrays] = model.arrays
        node = self.nodes[client]
        return Message(content, node, f"{QUERY}{name}", ttl=self.timeout + 5)


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

    def own_arrays(self, node: int) -> ArrayRecord | None:
        """Return the model that the inner strategy sends to this node alone, or None."""
        if not self.per_node or node not in self.messages:
            return None
        own = self.messages[node].content.array_records.get(self.name)
        return None if own is None or own is self.arrays or own == self.arrays else own

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

        `arrays` is the model, None where the node holds it already.

        In its config, not beside it, since Flower's clipping mods want exactly one ConfigRecord.
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

    @property
    def kind(self) -> str:
        """The inner strategy's type of message."""
        return str(self._any.metadata.message_type)


def first_request(session: Session) -> Request:
    """Return what all messages of a round have in common."""
    fresh = session.policy.signal_options.get("model_sketch", {}).get("fresh", True)
    return Request(session.round_number, session.seed, remember=not fresh)


def training_request(request: Request, policy: Policy) -> Request:
    """Return a request to train, and to send along the signals that a policy wants with updates."""
    names = tuple(sorted(n for n in policy.needs.reply if SIGNALS[n].work != "server"))
    options = {name: policy.signal_options.get(name, {}) for name in names}
    return replace(request, signals=names, options=options)


class Cohort:
    """The selected clients of one round, and what is sent to them."""

    def __init__(
        self,
        selection: Selection,
        template: Template,
        request: Request,
        model: Model,
        nodes: Mapping[ClientId, int],
        delivery: Delivery,
        timeout: float,
    ) -> None:
        self.selection, self.template, self.request = selection, template, request
        self.model, self.nodes, self.delivery, self.timeout = model, nodes, delivery, timeout
        self.sent: dict[ClientId, Message] = {}
        self.probing: dict[ClientId, float] = {}
        self.problems: dict[ClientId, str] = {}

    def train(self) -> list[Message]:
        """Return the training messages of a round without a gate."""
        return self._messages(self.selection.clients, self.template.kind, self.request, {})

    def probe(
        self, gate: Gate, announced: NDArray[Any] | None, grid: Grid
    ) -> dict[ClientId, NDArray[Any]]:
        """Let the clients train, and return what they answer to the gate."""
        options = {**self.request.options, "gate": gate.client_options}
        request = replace(self.request, gate=gate.name, on_skip=gate.on_skip, options=options)
        extra: dict[str, Any] = {}
        if announced is not None:
            extra["announce"], extra["announce.form"] = pack(announced)
        messages = self._messages(self.selection.clients, PROBE, request, extra)
        names = {self.nodes[c]: c for c in self.selection.clients}
        answers: dict[ClientId, NDArray[Any]] = {}
        self.problems = dict.fromkeys(self.selection.clients, "no reply")
        for reply in exchange(grid, messages, self.timeout):
            client = names[reply.sent.metadata.dst_node_id]
            answer = self._answer(client, reply.message)
            if answer is not None:
                answers[client], self.probing[client] = answer, reply.seconds
        return {c: answers[c] for c in self.selection.clients if c in answers}

    def _answer(self, client: ClientId, message: Message) -> NDArray[Any] | None:
        problem = failure(message)
        if problem is not None:
            self.problems[client] = problem
            return None
        del self.problems[client]
        record = message.content.config_records.get(RECORD, ConfigRecord())
        self.delivery.confirm(client, record.get("held"))
        try:
            return from_record(record, "answer", MAX_ANSWER)
        except DataError as error:
            self.problems[client] = f"an invalid answer to the gate: {error}"
            size = {client: len(raw(record, "answer") or b"")}
            self.delivery.session.charge("gate", "up", size)
            return None

    def upload(self, admitted: Iterable[ClientId]) -> list[Message]:
        """Return the requests for the models of those that the gate admitted."""
        config = ConfigRecord({RECORD: self.request.to_json(), "decision": b"\x01"})
        content = RecordDict({self.template.config: config})
        self.sent = {c: self._message(c, content, UPLOAD) for c in admitted}
        return list(self.sent.values())

    def seconds(self, replied: Mapping[str, float]) -> dict[ClientId, float]:
        """Return how long each client took, from the seconds by id of the last message to it."""
        ids = {client: m.metadata.message_id for client, m in self.sent.items()}
        known = {client: i for client, i in ids.items() if i in replied}
        return {c: self.probing.get(c, 0.0) + replied[i] for c, i in known.items()}

    def _messages(
        self,
        clients: Iterable[ClientId],
        kind: str,
        request: Request,
        extra: Mapping[str, Any],
    ) -> list[Message]:
        entries = dict(extra)
        self.sent = {}
        for client in clients:
            own = self.template.own_arrays(self.nodes[client])
            model = (
                self.model if own is None else Model(in_dtypes(own, dtypes_of(self.model.arrays)))
            )
            entries[RECORD] = replace(request, version=model.version, client=client).to_json()
            arrays = model.arrays if self.delivery.must_carry(client, model) else None
            content = self.template.content_for(self.nodes[client], entries, arrays)
            self.sent[client] = self._message(client, content, kind)
        return list(self.sent.values())

    def _message(self, client: ClientId, content: RecordDict, kind: str) -> Message:
        return self.template.message(self.nodes[client], content, kind, self.timeout + 5)
