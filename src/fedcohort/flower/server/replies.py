"""What comes back from training: which replies are accepted, their signals and their weights.

The inner strategy sees only replies from selected clients that are complete, finite and alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower import wire
from fedcohort.flower.server.asking import CohortGrid, Model, reading_of, why_missing
from fedcohort.flower.wire import LOG, RAISED, Flat, WrongForm
from fedcohort.policies.base import Policy
from fedcohort.policies.readings import believed
from fedcohort.rounds import ClientId
from fedcohort.session import Session
from fedcohort.signals.catalog import SIGNALS, Clients
from fedcohort.signals.projection import Vectors
from fedcohort.simulate.clock import Pace


class Update(NamedTuple):
    """A client's reply to a training message, checked: its model, flat, and its weight."""

    message: Message
    flat: Flat
    weight: float
    rounds_late: int = 0


def by_client(
    replies: Iterable[Message], sent: Mapping[ClientId, Message]
) -> dict[ClientId, Message]:
    """Return the replies by client, in the order of `sent`: a sum must not depend on speed."""
    by_id: dict[str, Message] = {}
    for reply in replies:
        by_id.setdefault(reply.metadata.reply_to_message_id, reply)
    ids = {client: message.metadata.message_id for client, message in sent.items()}
    return {client: by_id[i] for client, i in ids.items() if i in by_id}


def _only_model(content: RecordDict, like: ArrayRecord) -> Flat:
    """Return the one model of a reply as a vector, its arrays in the order of the global one."""
    if len(content.array_records) != 1:
        raise WrongForm(f"{len(content.array_records)} ArrayRecords, not one")
    name, record = next(iter(content.array_records.items()))
    flat = wire.checked(record, like)
    if list(record) != list(like):  # some strategies go by position
        content[name] = ArrayRecord({key: record[key] for key in like})
    return flat


def _weight(metrics: MetricRecord, key: str) -> float:
    weight = metrics.get(key)
    if isinstance(weight, list) or weight is None:
        raise WrongForm(f"the metric {key!r} is {weight!r}, not a number")
    if not weight > 0:
        raise DataError(f"the metric {key!r} is {weight!r}, not a positive number")
    return float(weight)


def metrics_of(content: RecordDict) -> MetricRecord:
    """Return the one MetricRecord of a reply; DataError unless its numbers are finite."""
    if len(content.metric_records) != 1:
        raise WrongForm(f"{len(content.metric_records)} MetricRecords, not one")
    metrics = next(iter(content.metric_records.values()))
    for name, value in metrics.items():
        values = value if isinstance(value, list) else [value]
        if not all(math.isfinite(v) for v in values):
            raise DataError(f"the metric {name!r} is not finite")
    return metrics


Form = tuple[object, ...]


def form_of(content: RecordDict, with_shapes: bool = False) -> Form:
    """Return what replies must share to be averaged: the names of records, metrics and arrays."""
    metrics = tuple(
        (name, tuple(sorted((k, len(v) if isinstance(v, list) else -1) for k, v in record.items())))
        for name, record in content.metric_records.items()
    )
    arrays = tuple(
        (name, tuple((k, tuple(a.shape) if with_shapes else ()) for k, a in record.items()))
        for name, record in content.array_records.items()
    )
    return metrics + arrays


def inconsistent(forms: Mapping[ClientId, Form], earlier: Mapping[Form, int]) -> list[ClientId]:
    """Return whose replies differ in form from most; on a tie, the earlier rounds' form wins."""
    counts = Counter(forms.values())
    if len(counts) <= 1:
        return []
    usual = max(counts, key=lambda form: (counts[form], earlier.get(form, 0)))
    return [client for client, form in forms.items() if form != usual]


Kind = Literal["model", "records", "opaque"]


class Late(NamedTuple):
    """A client that was too slow for its round: the message to it, and what it trains."""

    round: int
    message_id: str
    model: Model
    reply: Message | None  # where it came in time, but others had come before


class Replies:
    """Checks training replies; refuses and counts those that the inner strategy must not see.

    `kind` is what a reply holds. "model": one ArrayRecord like the global model. "records": what a
    custom strategy aggregates, in the same form in all replies. "opaque": arrays that may change
    their shapes, such as serialized trees, which `check_opaque` looks at.
    """

    def __init__(
        self, session: Session, weight_key: str, check_opaque: Callable[[ArrayRecord], None]
    ) -> None:
        self.session, self.weight_key, self.check_opaque = session, weight_key, check_opaque
        self.kind: Kind = "model"
        self.refused: Counter[str] = Counter()  # messages without an update, by reason
        self.failed: dict[ClientId, str] = {}  # why clients of this round brought none
        self.late: dict[ClientId, Late] = {}  # too slow for their round, and still waited for
        self._forms: Counter[Form] = Counter()
        self._wrong: Counter[ClientId] = Counter()
        self.weights: dict[ClientId, float] = {}
        self._any_accepted = False

    def accepted(
        self, replied: Mapping[ClientId, Message], sent: Iterable[ClientId], like: ArrayRecord
    ) -> dict[ClientId, Update]:
        """Return the updates by client, in the order of `sent`, and charge what was refused.

        ConfigError if all are refused because of their form: the model would never change.
        """
        self.count("no reply", {client: "no reply" for client in sent if client not in replied})
        updates: dict[ClientId, Update] = {}
        wrong: dict[ClientId, DataError] = {}
        for client in filter(replied.__contains__, sent):
            message = replied[client]
            try:
                updates[client] = self.checked(message, like)
            except DataError as error:
                self._refuse(client, message, error)
                raised = message.has_error() and message.error.code in RAISED
                if isinstance(error, WrongForm) or (raised and not self._any_accepted):
                    wrong[client] = error
        by_shape = self.kind == "records"
        forms = {c: form_of(update.message.content, by_shape) for c, update in updates.items()}
        for client in inconsistent(forms, self._forms):
            why = "records or metrics unlike most clients'"
            self._refuse(client, updates.pop(client).message, why)
        self._forms.update(forms[client] for client in updates)
        self._stop_if_all_wrong(updates, wrong)
        self._clip_weights(updates)
        for client, update in updates.items():  # `Session.finish` charges what models weigh
            size = sum(map(wire.payload, update.message.content.array_records.values()))
            self.session.charge("model", "up", {client: size - self.session.model_bytes})
        return updates

    def _clip_weights(self, updates: dict[ClientId, Update]) -> None:
        """Keep a client that claims 2^62 examples from making the next model its own."""
        self.weights.update({client: update.weight for client, update in updates.items()})
        clipped = believed(np.array(list(self.weights.values())))
        limits = dict(zip(self.weights, clipped.tolist(), strict=True))
        for client, update in updates.items():
            if update.weight > (limit := limits[client]):
                LOG.warning("%s weighs %g; %g is used", client, update.weight, limit)
                updates[client] = update._replace(weight=limit)
                metrics = next(iter(update.message.content.metric_records.values()))
                is_whole = isinstance(metrics[self.weight_key], int)
                metrics[self.weight_key] = int(limit) if is_whole else limit

    def count(self, reason: str, problems: Mapping[ClientId, str]) -> None:
        """Count clients that brought no update."""
        if problems:
            self.refused[reason] += len(problems)
            self.failed.update(problems)

    def checked(self, message: Message, like: ArrayRecord) -> Update:
        """Return a reply as an update; DataError says what is wrong with it."""
        content, key = wire.content_of(message), self.weight_key
        with wire.untrusted("an update"):
            if self.kind == "model":
                flat = _only_model(content, like)
                return Update(message, flat, _weight(metrics_of(content), key))
            for record in content.array_records.values():
                wire.decoded(record)
                self.check_opaque(record)
            metrics = metrics_of(content) if content.metric_records else MetricRecord()
            weight = _weight(metrics, key) if key in metrics else 1.0
            return Update(message, np.empty(0, np.float32), weight)

    def _stop_if_all_wrong(
        self, updates: Mapping[ClientId, Update], wrong: Mapping[ClientId, DataError]
    ) -> None:
        """Stop where no update was accepted and two clients, or one three times, had none.

        One client alone cannot stop a run: it may be hostile. What raises counts before the first
        update of a run, forms that are refused always.
        """
        if updates:
            self._wrong.clear()
            self._any_accepted = True
            return
        self._wrong.update(list(wrong))
        if wrong and (len(self._wrong) > 1 or max(self._wrong.values()) > 2):
            client, error = next(iter(wrong.items()))
            raise ConfigError(
                f"round {self.session.round_number + 1}: none of {len(wrong)} clients brought an "
                f"update that can be used, so the model would never change. {client}: {error}. "
                "Training must not raise, and return the arrays that it was sent, under the same "
                f"names and in the same shapes, and one MetricRecord with {self.weight_key!r}"
            )

    def _refuse(self, client: ClientId, message: Message, why: object) -> None:
        """Count a client without an update, and charge what its message weighed."""
        if message.has_error():
            self.count("error", {client: f"error: {why}"})
            return
        self.count("invalid", {client: f"invalid: {why}"})
        records = message.content.array_records.values()
        size = sum(len(array.data) for record in records for array in record.values())
        self.session.charge("model", "up", {client: size})

    def late_updates(self, grid: CohortGrid, model: Model) -> dict[ClientId, Update]:
        """Return the updates of earlier rounds that arrived: the same steps, from this model."""
        waiting = [pending.message_id for pending in self.late.values() if not pending.reply]
        replies = {m.metadata.reply_to_message_id: m for m in grid.pull_messages(waiting)}
        updates: dict[ClientId, Update] = {}
        for client, pending in list(self.late.items()):
            message = pending.reply or replies.get(pending.message_id)
            if message is None:
                continue
            del self.late[client]
            try:
                update = self.checked(message, pending.model.arrays)
            except DataError as error:
                LOG.info("%s, late from round %d: %s", client, pending.round + 1, error)
                continue
            flat = update.flat - pending.model.flat + model.flat
            name, arrays = next(iter(message.content.array_records.items()))
            message.content[name] = wire.unflatten(flat, model.arrays, arrays)
            age = self.session.round_number - pending.round
            updates[client] = update._replace(flat=flat, rounds_late=age)
            self.session.charge("model", "up", {client: self.session.model_bytes})
        self._clip_weights(updates)
        return updates

    def weigh(
        self,
        updates: Mapping[ClientId, Update],
        late: Mapping[ClientId, Update],
        model: Model,
        pace: Pace,
    ) -> None:
        """Give updates the weights of the policy or gate, if any, and late ones less."""
        together, fresh = [*updates.values(), *late.values()], len(updates)
        weights = self.session.selection.weights_of(tuple(updates)) if updates else None
        if late:
            shares = [update.weight for update in together]
            if weights:
                shares = [*weights, *[sum(weights) / fresh] * len(late)]
            total = 1.0 if weights else sum(shares[:fresh] or shares)
            far: list[float] = []
            if pace.deviation and updates:
                middle = np.mean([update.flat for update in updates.values()], axis=0)
                far = [float(np.square(u.flat - middle).sum()) for u in late.values()]
            stale = [
                (share / total, update.rounds_late)
                for share, update in zip(shares[fresh:], late.values(), strict=True)
            ]
            weights = pace.stale_weights([share / total for share in shares[:fresh]], stale, far)
        if weights is not None:
            apply_weights(together, weights, model, self.weight_key)


def usable_evaluations(replies: Iterable[Message]) -> list[Message]:
    """Leave out evaluation replies that an average would fail on."""
    usable: dict[str, Message] = {}
    for i, reply in enumerate(replies):
        try:
            with wire.untrusted("an evaluation"):
                metrics_of(wire.content_of(reply))
            usable[str(i)] = reply
        except DataError as error:
            LOG.warning("an evaluation was left out: %s", error)
    odd = set(inconsistent({i: form_of(reply.content) for i, reply in usable.items()}, {}))
    return [reply for i, reply in usable.items() if i not in odd]


def reply_signals(
    policy: Policy,
    updates: Mapping[ClientId, Update],
    model: Model,
    seconds: Mapping[ClientId, float],
) -> tuple[dict[str, dict[ClientId, Any]], dict[str, dict[ClientId, str]]]:
    """Return the signals that come with updates, sent along or computed, and why some lack them."""
    answers: dict[str, dict[ClientId, Any]] = {}
    problems: dict[str, dict[ClientId, str]] = {}
    sent = {client: wire.record_of(update.message) for client, update in updates.items()}
    for name in sorted(policy.needs.reply) if updates else ():
        options = policy.signal_options.get(name, {})
        if SIGNALS[name].work == "server":
            answers[name] = SIGNALS[name].readings(ArrivedUpdates(updates, model, seconds), options)
            continue
        readings = {client: reading_of(record, name, options) for client, record in sent.items()}
        answers[name] = {c: reading for c, reading in readings.items() if reading is not None}
        problems[name] = {c: why_missing(sent[c], name) for c in sent.keys() - answers[name].keys()}
    return answers, problems


class ArrivedUpdates(Clients):
    """The clients whose updates arrived, as the server sees them."""

    def __init__(
        self, updates: Mapping[ClientId, Update], model: Model, seconds: Mapping[ClientId, float]
    ) -> None:
        self.ids = tuple(updates)
        self.arrived, self.model, self.seconds = updates, model, seconds

    def sizes(self) -> NDArray[Any]:
        """Return the weights that came with the updates, usually numbers of examples."""
        return np.array([u.weight for u in self.arrived.values()])

    def updates(self) -> Vectors:
        rows = np.stack([u.flat for u in self.arrived.values()])
        return Vectors(rows - self.model.flat)

    def durations(self) -> NDArray[np.float64]:
        """Return the seconds that each client took; NaN, which is not a reading, if unknown."""
        return np.array([self.seconds.get(c, np.nan) for c in self.ids])

    def last_array(self) -> int:
        own = [a for a in self.model.arrays.values() if wire.is_float(a)]
        return int(np.prod(own[-1].shape))


def apply_weights(
    updates: Sequence[Update], weights: Sequence[float], model: Model, key: str
) -> None:
    """Make the inner strategy's mean use these weights: the next model is c + sum w (x - c).

    The inner strategy normalizes weights, so updates are multiplied by the sum where it is not one.
    """
    total, start = sum(weights), model.flat
    for update, weight in zip(updates, weights, strict=True):
        content = update.message.content
        metrics, old = next(iter(content.metric_records.items()))
        content[metrics] = MetricRecord({**old, key: float(weight)})
        if abs(total - 1) > 1e-9:
            name, record = next(iter(content.array_records.items()))
            moved = start + np.float32(total) * (update.flat - start)
            content[name] = wire.unflatten(moved, model.arrays, record)
