"""Replies that a strategy may see: from known clients, whole, finite and alike.

Between replies and the inner strategy: signals from updates, and the policy's weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.flower.arrays import Flat, checked, flatten, is_float, unflatten
from fedcohort.flower.cohort import reading_of
from fedcohort.flower.grid import LOG, Model, failure
from fedcohort.flower.messages import RECORD
from fedcohort.policies.base import Option, Policy
from fedcohort.rounds import ClientId, Selection
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.projection import Projection
from fedcohort.signals.updates import last_layer, update_distance


class Update(NamedTuple):
    """A client's reply to a training message, checked: its model, flat, and its weight."""

    message: Message
    flat: Flat
    weight: float


def by_client(
    replies: Iterable[Message], sent: Mapping[ClientId, Message]
) -> dict[ClientId, Message]:
    """Return the replies by client, in the order in which the messages were made.

    That order, not that of arrival, so that a sum of floats does not depend on who was faster.
    """
    ids = {m.metadata.message_id: client for client, m in sent.items()}
    found: dict[ClientId, Message] = {}
    for reply in replies:
        client = ids.get(reply.metadata.reply_to_message_id)
        if client is not None:
            found.setdefault(client, reply)
    return {client: found[client] for client in sent if client in found}


def update_of(message: Message, like: ArrayRecord, weight_key: str) -> Update:
    """Check a training reply; DataError says what is wrong with it."""
    content = message.content
    if len(content.array_records) != 1:
        raise DataError(f"{len(content.array_records)} ArrayRecords in place of one")
    flat = checked(next(iter(content.array_records.values())), like)
    weight = metrics_of(content).get(weight_key)
    if isinstance(weight, list) or weight is None or not weight > 0:
        raise DataError(f"the metric {weight_key!r} is {weight!r}, no positive number")
    return Update(message, flat, float(weight))


def metrics_of(content: RecordDict) -> MetricRecord:
    """Return the one MetricRecord of a reply; DataError unless its numbers are finite."""
    if len(content.metric_records) != 1:
        raise DataError(f"{len(content.metric_records)} MetricRecords in place of one")
    metrics = next(iter(content.metric_records.values()))
    for name, value in metrics.items():
        values = value if isinstance(value, list) else [value]
        if not all(math.isfinite(v) for v in values):
            raise DataError(f"the metric {name!r} is not finite")
    return metrics


def form(content: RecordDict) -> tuple[object, ...]:
    """Return what replies must share to be averaged: names of records and of metrics."""
    return tuple(
        (name, tuple(sorted((k, len(v) if isinstance(v, list) else -1) for k, v in record.items())))
        for name, record in content.metric_records.items()
    ) + tuple(content.array_records)


def odd_ones(contents: Mapping[ClientId, RecordDict]) -> tuple[ClientId, ...]:
    """Return the clients whose replies are formed otherwise than most: no average takes them."""
    forms = {client: form(content) for client, content in contents.items()}
    if len(set(forms.values())) <= 1:
        return ()
    usual = Counter(forms.values()).most_common(1)[0][0]
    return tuple(client for client, own in forms.items() if own != usual)


class Replies:
    """Turns replies into updates; counts and leaves out what is none.

    Parameters
    ----------
    session : Session
        Its ledger is charged for what came in vain.
    weight_key : str
        The metric by which the inner strategy weighs updates.
    """

    def __init__(self, session: Session, weight_key: str) -> None:
        self.session, self.weight_key = session, weight_key
        self.refused: Counter[str] = Counter()

    def sound(
        self, replies: Iterable[Message], sent: Mapping[ClientId, Message], like: ArrayRecord
    ) -> dict[ClientId, Update]:
        """Return the updates by client, in the order of `sent`."""
        found = by_client(replies, sent)
        self.miss("no reply", len(sent) - len(found))
        updates = {}
        for client, message in found.items():
            problem = failure(message)
            if problem is not None:
                self._refuse(client, "error", problem)
                continue
            try:
                updates[client] = update_of(message, like, self.weight_key)
            except DataError as error:
                self._refuse(client, "invalid", error)
                self._charge(client, message)
        for client in odd_ones({c: u.message.content for c, u in updates.items()}):
            self._refuse(client, "invalid", "metrics named otherwise than most clients'")
            self._charge(client, updates.pop(client).message)
        return updates

    def miss(self, reason: str, number: int) -> None:
        """Count messages that brought nothing at all."""
        if number:
            self.refused[reason] += number

    def _refuse(self, client: ClientId, reason: str, why: object) -> None:
        self.refused[reason] += 1
        LOG.warning("no update from %s (%s): %s", client, reason, why)

    def _charge(self, client: ClientId, message: Message) -> None:
        records = message.content.array_records.values()
        size = sum(len(array.data) for record in records for array in record.values())
        ledger, number = self.session.ledger, self.session.round_number
        ledger.charge(number, "model", "up", [client], size)


def sound_metrics(replies: Iterable[Message]) -> list[Message]:
    """Leave out evaluation replies that an average would fail on."""
    sound: dict[str, Message] = {}
    for i, reply in enumerate(replies):
        problem = failure(reply)
        if problem is not None:
            LOG.warning("an evaluation failed: %s", problem)
            continue
        try:
            metrics_of(reply.content)
        except DataError as error:
            LOG.warning("an evaluation was left out: %s", error)
            continue
        sound[str(i)] = reply
    odd = set(odd_ones({i: reply.content for i, reply in sound.items()}))
    return [reply for i, reply in sound.items() if i not in odd]


Readings = dict[ClientId, Any]
Options = Mapping[str, Option]


def reply_signals(
    policy: Policy,
    updates: Mapping[ClientId, Update],
    model: Model,
    seconds: Mapping[ClientId, float],
    limit: int,
) -> dict[str, Readings]:
    """Return the signals that come with updates: read from replies, or computed from the updates.

    Parameters
    ----------
    policy : Policy
    updates : mapping
        The checked replies.
    model : Model
        The global model that training started from.
    seconds : mapping
        How long each client took.
    limit : int
        Bytes that a reading may have.
    """
    answers: dict[str, Readings] = {}
    for name in sorted(policy.needs.reply):
        options = policy.signal_options.get(name, {})
        if name == "duration":
            answers[name] = {c: np.float64(seconds[c]) for c in updates if c in seconds}
        elif SIGNALS[name].work == "server":
            answers[name] = from_updates(name, updates, model, options)
        else:
            answers[name] = _sent_along(name, updates, options, limit)
    return answers


def _sent_along(
    name: str, updates: Mapping[ClientId, Update], options: Options, limit: int
) -> Readings:
    records: dict[ClientId, ConfigRecord | None] = {
        c: u.message.content.config_records.get(RECORD) for c, u in updates.items()
    }
    readings = {c: reading_of(record, name, options, limit) for c, record in records.items()}
    return {c: reading for c, reading in readings.items() if reading is not None}


def from_updates(
    name: str, updates: Mapping[ClientId, Update], model: Model, options: Options
) -> Readings:
    """Compute a signal from the updates themselves."""
    if not updates:
        return {}
    steps = np.stack([u.flat for u in updates.values()]) - flatten(model.arrays)
    if name == "update_sketch":
        rows: NDArray[Any] = Projection(steps.shape[1], **options).apply(steps)  # type: ignore[arg-type]
        return dict(zip(updates, rows.astype(np.float32), strict=True))
    if options.get("last_layer"):
        own = {n: a for n, a in model.arrays.items() if is_float(a)}
        steps = steps[:, -last_layer(list(own), [int(np.prod(a.shape)) for a in own.values()]) :]
    distances = update_distance(
        steps,
        [u.weight for u in updates.values()],
        weighted=bool(options.get("weighted")),
        scale_by_size=bool(options.get("scale_by_size")),
    )
    return dict(zip(updates, distances, strict=True))


def weigh(updates: Mapping[ClientId, Update], selection: Selection, model: Model, key: str) -> None:
    """Make the inner strategy's weighted mean use the policy's weights, where there are some.

    With weights w of sum s the next model is to be c + sum w (x - c) for the global model c. The
    inner strategy normalizes weights, so that updates are stretched by s where it is not one.
    """
    if selection.weights is None or not updates:
        return
    known = dict(zip(selection.clients, selection.weights, strict=True))
    total = sum(known[client] for client in updates)
    start = flatten(model.arrays)
    for client, update in updates.items():
        content = update.message.content
        metrics, old = next(iter(content.metric_records.items()))
        content[metrics] = MetricRecord({**old, key: float(known[client])})
        if abs(total - 1) > 1e-9:
            name, record = next(iter(content.array_records.items()))
            content[name] = unflatten(start + np.float32(total) * (update.flat - start), record)
