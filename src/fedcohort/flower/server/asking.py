"""Messages to clients and their answers: collected in time, checked, no model sent twice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower import wire
from fedcohort.flower.wire import LOG, MAX_REASON, QUERY, RECORD, Flat, Request
from fedcohort.rounds import ClientId
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS, Option

FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0  # seconds between looks for replies
MAX_BYTES = 1 << 26  # of a reading whose size does not follow from the policy's options

Readings = dict[ClientId, NDArray[Any] | None]
Read = Callable[[ClientId, ConfigRecord, float], None]


class Reply(NamedTuple):
    """What came back to a message: the reply, and how many seconds after sending."""

    sent: Message
    message: Message
    seconds: float


Until = Callable[[Sequence[Reply], float], float]


def exchange(
    grid: AnyGrid, messages: Iterable[Message], timeout: float, until: Until | None = None
) -> list[Reply]:
    """Send messages and return the replies that came within `timeout` seconds.

    Replies are matched by the ids of messages, since an error in place of a node that is gone has
    the SuperLink's node id. ``until(replies, elapsed)`` returns how many seconds are left to wait.
    """
    sent = list(messages)
    started = time.monotonic()
    # A grid writes the ids into the messages, and may leave out what it did not accept.
    accepted = set(grid.push_messages(sent)) if sent else set()
    waiting = {m.metadata.message_id: m for m in sent if m.metadata.message_id in accepted}
    replies: list[Reply] = []
    pause = FIRST_PAUSE
    while waiting:
        for message in grid.pull_messages(list(waiting)):
            origin = waiting.pop(message.metadata.reply_to_message_id, None)
            if origin is not None:
                replies.append(Reply(origin, message, time.monotonic() - started))
        elapsed = time.monotonic() - started
        left = timeout - elapsed
        if until is not None:
            left = min(left, until(replies, elapsed))
        if not waiting or left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, MAX_PAUSE)
    if waiting and until is None:
        LOG.warning("%d of %d messages without reply in %g s", len(waiting), len(sent), timeout)
    return replies


class CohortGrid:
    """A grid with a time limit, which shows the nodes of ``nodes()`` and times replies.

    `until` ends the next exchange early (see `exchange`). `seconds` has how long each reply of the
    last one took, by the id of the message that it answers, `elapsed` how long all of it took.
    """

    def __init__(
        self, grid: Grid, timeout: float, nodes: Callable[[], Iterable[int]] | None = None
    ) -> None:
        self.grid, self.timeout, self.nodes = grid, timeout, nodes
        self.until: Until | None = None
        self.seconds: dict[str, float] = {}
        self.elapsed = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        until, self.until, started = self.until, None, time.monotonic()
        limit = self.timeout if timeout is None else timeout
        replies = exchange(self.grid, messages, limit, until)
        self.elapsed = time.monotonic() - started
        self.seconds = {r.sent.metadata.message_id: r.seconds for r in replies}
        return [reply.message for reply in replies]

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids() if self.nodes is None else self.nodes()


AnyGrid = Grid | CohortGrid


class Model:
    """A model as clients are sent it, with its version."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self.arrays = arrays
        self.version = wire.version(arrays)

    @cached_property
    def flat(self) -> Flat:
        return wire.flatten(self.arrays)


def reading_of(
    record: ConfigRecord, name: str, options: Mapping[str, Option]
) -> NDArray[Any] | None:
    """Return a reading from a reply; None if there is none, opaque bytes if it is malformed."""
    data = record.get(name)
    if not isinstance(data, bytes):
        return None
    limit = SIGNALS[name].form(options).max_bytes
    try:
        return wire.from_bytes(data, MAX_BYTES if limit is None else min(MAX_BYTES, limit))
    except DataError as error:
        LOG.warning("signal %s: %s", name, error)
        return wire.refused(data)


def why_missing(record: ConfigRecord, name: str) -> str:
    """Return why a reply has no reading of a signal."""
    problem = record.get(f"{name}.error")
    return problem[:MAX_REASON] if isinstance(problem, str) else "the reply came without it"


class GridCollector:
    """Asks the nodes of a grid for signals: a session's `collect`, for all its rounds.

    Signals that are wanted at the same time, under the same model, go into one message, and no
    client is sent a model that it says it holds.

    The session's policy says what is needed and how it is made, and its ledger is charged. Replies
    are waited for `timeout` seconds; `center` is a public center of the data. `problems` has, by
    signal, why clients did not answer, and `kinds` what their readings must share to be compared.
    Profiles are taken under the `initial` model, that of the first round.
    """

    def __init__(
        self, session: Session, timeout: float = 600.0, center: ArrayLike | None = None
    ) -> None:
        self.session, self.timeout = session, timeout
        self.center = None if center is None else np.asarray(center, np.float64).ravel()
        self.nodes: Mapping[ClientId, int] = {}
        self.initial: Model | None = None
        self.problems: dict[str, dict[ClientId, str]] = {}
        self.config: Mapping[str, Any] = {}
        self.request = Request(0, session.seed)
        self.kinds: dict[str, dict[ClientId, str]] = {}
        self._answers: dict[tuple[str, ClientId], NDArray[Any] | None] = {}
        self._held: dict[ClientId, str] = {}
        self._charged: set[tuple[ClientId, bool]] = set()
        options = session.policy.signal_options
        if options.get("race_sketch", {}).get("center") and center is None:
            LOG.info("no center= is given, so sketches are not centered")
        for name, given in options.items():
            for option, remedy in SIGNALS[name].simulated.items():
                if given.get(option):
                    raise ConfigError(f"CohortStrategy: {option} is for simulations; {remedy}")

    def begin(
        self,
        grid: AnyGrid,
        nodes: Mapping[ClientId, int],
        arrays: ArrayRecord,
        config: Mapping[str, Any] | None = None,
        **entries: Any,
    ) -> None:
        """Start a round: its model, its training config and further `entries` of `Request`."""
        session = self.session
        self.grid = grid if isinstance(grid, CohortGrid) else CohortGrid(grid, self.timeout)
        self.nodes, self.config = nodes, config or {}
        self.current = Model(arrays)
        self.initial = self.initial or self.current
        session.model_bytes = wire.payload(arrays)
        fresh = session.policy.signal_options.get("model_sketch", {}).get("fresh", True)
        number, classes = session.round_number, wire.outputs_of(arrays)
        self.request = Request(number, session.seed, remember=not fresh, classes=classes, **entries)
        self.problems, self._answers = {}, {}
        # After a skipped round the session assumes that the same clients still hold the model.
        continuing = session.selection.clients if session.skipped else ()
        self._charged = {(client, False) for client in continuing}
        self._held = {c: held for c, held in self._held.items() if c in continuing}

    def confirm(self, client: ClientId, record: ConfigRecord) -> None:
        """Note which model a client says it holds."""
        held = record.get("held")
        if isinstance(held, str) and held:
            self._held[client] = held

    def must_carry(self, client: ClientId, model: Model, is_profile: bool = False) -> bool:
        """Whether a message to the client must carry the model, which is then charged.

        A session charges one download per client and round, and one for a profile of a later round.
        Further copies are charged here, and one that need not be sent is taken back.
        """
        paid = (client, is_profile and self.session.round_number > 0)
        is_first, size = paid not in self._charged, self.session.model_bytes
        self._charged.add(paid)
        must = self._held.get(client) != model.version
        if must != is_first:
            self.session.charge("model", "down", {client: size if must else -size})
        return must

    def __call__(self, name: str, clients: Sequence[ClientId]) -> Readings:
        """Return the readings of one signal, asking for others of its kind in the same message."""
        if self.needed(name) != "none" and not wire.payload(self._model(name).arrays):
            if SIGNALS[name].model == "initial":
                raise ConfigError(
                    f"CohortStrategy: the signal {name!r} is taken under the initial model, which "
                    "is empty; use a policy that needs another signal"
                )
            LOG.info("the model is empty yet, so nobody is asked for %s", name)
            return {}
        unasked = [client for client in clients if (name, client) not in self._answers]
        if unasked:
            self._ask(name, unasked)
        asked, problems = set(clients), self.problems.get(name, {})
        self.problems[name] = {c: why for c, why in problems.items() if c in asked}
        self._refuse_other_kinds(name, clients)
        return {client: self._answers.get((name, client)) for client in clients}

    def _refuse_other_kinds(self, name: str, clients: Sequence[ClientId]) -> None:
        """Refuse readings that cannot be compared with most: of other inputs, hashed otherwise."""
        kinds = self.kinds.get(name, {})
        usual, _ = Counter(kinds.values()).most_common(1)[0] if kinds else ("", 0)
        others = [c for c in clients if kinds.get(c, usual) != usual]
        for client in others:
            reading = self._answers.get((name, client))
            if reading is not None:
                self._answers[name, client] = wire.refused(reading.tobytes())
        if others:
            self.problems[name].update({c: f"{kinds[c]}, unlike {usual}" for c in others})
            LOG.warning(
                "%s of %d clients is refused, because it cannot be compared: %s has %s, most have "
                "%s; give all clients the same columns in the same order",
                name, len(others), others[0], kinds[others[0]], usual,
            )  # fmt: skip

    @property
    def profile(self) -> frozenset[str]:
        """The signals that are asked once, when a client is first seen."""
        gate = self.session.gate
        return self.session.policy.needs.profile | (gate.profile if gate else frozenset())

    def _together(self, name: str) -> tuple[str, ...]:
        """Return the signals that one message can ask for: same time, same model."""
        queries = self.session.policy.needs.query
        group = self.profile if name in self.profile else queries | {name}
        model = self.needed(name)
        return tuple(sorted(other for other in group if self.needed(other) == model))

    def needed(self, name: str) -> str:
        """Return which model a client must hold to answer: "none", "initial" or "current"."""
        needs_model = SIGNALS[name].needs_model(self.options(name))
        return SIGNALS[name].model if needs_model else "none"

    def options(self, name: str) -> dict[str, Option]:
        """Return how clients are asked to make a signal."""
        options = dict(self.session.policy.signal_options.get(name, {}))
        if options.get("center") and self.center is None:
            options["center"] = False
        return options

    def _model(self, name: str) -> Model:
        initial = self.initial if SIGNALS[name].model == "initial" else None
        return initial or self.current

    def content(self, names: Sequence[str], client: ClientId = "", version: str = "") -> RecordDict:
        """Return what a client is asked; without its id, it says that as well."""
        options = {name: self.options(name) for name in names}
        request = replace(
            self.request, version=version, signals=tuple(names), options=options, client=client
        )
        config = ConfigRecord({**self.config, RECORD: request.to_json()})
        if self.center is not None and any(each.get("center") for each in options.values()):
            config["center"] = wire.to_bytes(self.center)
        return RecordDict({"config": config})

    def _ask(self, name: str, clients: Sequence[ClientId]) -> None:
        names, model = self._together(name), self._model(name)
        messages = {}
        for client in clients:
            content = self.content(names, client, model.version)
            is_profile = SIGNALS[name].when == "profile"
            if self.needed(name) != "none" and self.must_carry(client, model, is_profile):
                content[self.request.arrays] = model.arrays
            messages[client] = Message(content, self.nodes[client], QUERY, ttl=self.timeout + 5)
        problems = self.exchange(messages, lambda c, record, _: self.take(c, record, names))
        for other in names:
            self._answers.update({(other, client): None for client in problems})
            self.problems.setdefault(other, {}).update(problems)

    def exchange(self, messages: Mapping[ClientId, Message], read: Read) -> dict[ClientId, str]:
        """Exchange messages, and return why clients brought nothing.

        ``read(client, record, seconds)`` takes the others' answers, or raises a DataError.
        """
        problems = dict.fromkeys(messages, "no reply")
        client_at = {m.metadata.dst_node_id: client for client, m in messages.items()}
        for reply in exchange(self.grid, messages.values(), self.timeout):
            client = client_at[reply.sent.metadata.dst_node_id]
            try:
                read(client, wire.record_of(reply.message), reply.seconds)
                del problems[client]
            except DataError as error:
                problems[client] = str(error)
        return problems

    def take(self, client: ClientId, record: ConfigRecord, names: Sequence[str]) -> None:
        """Read the answers of a client to the questions `names`."""
        self.confirm(client, record)
        for name in names:
            options = self.options(name)
            reading = self._answers[name, client] = reading_of(record, name, options)
            if options.get("center") and self.center is not None:
                self.session.charge(name, "down", {client: self.center.nbytes})
            if reading is None:
                self.problems.setdefault(name, {})[client] = why_missing(record, name)
            kind = record.get(f"{name}.kind")
            if isinstance(kind, str):
                self.kinds.setdefault(name, {})[client] = kind[:MAX_REASON]
