"""A client's training: at once, or in a gate's two phases."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.flower.answers import MOST_BYTES, Answers, Handler, config_of, request_of
from fedcohort.flower.arrays import flatten, unflatten
from fedcohort.flower.grid import LOG, RAISED
from fedcohort.flower.memory import Memory, metrics
from fedcohort.flower.messages import RECORD, Request, from_record, raw, to_record
from fedcohort.flower.privacy import allowed_signals, hide_size
from fedcohort.gates import GATES
from fedcohort.registry import lookup
from fedcohort.signals.projection import Vectors


def through(mods: Sequence[Any], handler: Handler) -> Handler:
    """Return a handler with mods around it, the first one outermost, as Flower calls them."""
    for mod in reversed(mods):
        handler = partial(_call_mod, mod, handler)
    return handler


def _call_mod(mod: Any, call_next: Handler, message: Message, context: Context) -> Message:
    reply: Message = mod(message, context, call_next)
    return reply


def with_errors(handler: Handler) -> Handler:
    """Return a handler that replies with an error where it raises.

    Flower would do so too, but its simulation buries the message in a traceback of Ray.
    """

    def safe(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except Exception as error:
            LOG.exception("%s", message.metadata.message_type)
            return Message(Error(RAISED[1], error_line(error)), reply_to=message)

    return safe


def error_line(error: Exception) -> str:
    """Return an error in one line: its class and what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


class Training:
    """The handlers of ``train``, ``train.probe`` and ``train.upload``.

    Parameters
    ----------
    answers : Answers
        The client's data and model, and its own training where it has one.
    mods : sequence
        Flower mods around our training; the client's own has them already.
    signals : frozenset of str
        What the client is willing to send along with its update.
    """

    def __init__(self, answers: Answers, mods: Sequence[Any], signals: frozenset[str]) -> None:
        self.answers, self.signals = answers, signals
        self.handler = through(mods, self._ours) if answers.train is None else answers.train

    def train(self, message: Message, context: Context) -> Message:
        """Train, and reply with the update and the signals that were asked for."""
        request = request_of(message)
        memory = Memory(context, request.run)
        arrays = self.answers.arrays(request, message, memory)
        message.content[request.arrays] = arrays
        reply = self._trained(message, context, request, arrays)
        if request.remember and not reply.has_error():
            memory.keep_vector("trained", flatten(_update(reply.content)), request.round)
        return reply

    def probe(self, message: Message, context: Context) -> Message:
        """Train, keep the update, and answer the gate.

        A client that was not asked for its last update goes on from what it learned, where the
        gate says so: it starts from the global model plus the difference it kept.
        """
        request = request_of(message)
        memory = Memory(context, request.run)
        arrays = self.answers.arrays(request, message, memory)
        start = flatten(arrays)
        difference = memory.vector("difference") if request.on_skip == "keep" else None
        begin = arrays if difference is None else unflatten(start + difference, arrays)
        message.content[request.arrays] = begin
        reply = self._trained(message, context, request, arrays)
        if reply.has_error():
            return reply
        trained = flatten(_update(reply.content))
        if not np.isfinite(trained).all():
            raise DataError("training gave a model that is not finite")
        vectors = Vectors(start), Vectors(trained)
        answer = _gate(request).probe(_announced(message), *vectors)[0]
        memory.keep_update(reply.content, request.round)
        memory.keep_vector("difference", trained - start, request.round)
        record = to_record({"answer": answer})
        if self.answers.cache:
            record["held"] = request.version
        return Message(RecordDict({RECORD: record}), reply_to=message)

    def upload(self, message: Message, context: Context) -> Message:
        """Send the update that the last probe was about."""
        request = request_of(message)
        memory = Memory(context, request.run)
        content = memory.update(request.round)
        memory.drop_update()
        memory.forget("difference")
        if request.remember:
            memory.keep_vector("trained", flatten(_update(content)), request.round)
        return Message(content, reply_to=message)

    def _trained(
        self, message: Message, context: Context, request: Request, arrays: ArrayRecord
    ) -> Message:
        """Train, and add the signals; those are taken under the global model."""
        allowed = allowed_signals(context)
        sent = self.signals if allowed is None else self.signals & allowed
        names = [name for name in request.signals if name in sent]
        later = self.answers.reads_metrics(names)
        now = [name for name in names if name not in later]
        readings, problems = {}, {}
        for name in now:
            try:
                readings[name] = self.answers.reading(name, message, context, request, arrays)
            except Exception as error:  # the update is worth more than a signal
                LOG.exception("signal %s", name)
                problems[name] = error_line(error)
        reply = self.handler(message, context)
        if names and not reply.has_error():
            readings |= self.answers.from_metrics(later, reply)
            record = to_record(readings)
            record.update({f"{name}.error": problem for name, problem in problems.items()})
            reply.content[RECORD] = record
        return hide_size(reply) if self.answers.hides_size(context) else reply

    def _ours(self, message: Message, context: Context) -> Message:
        """Train as the simulator does, with FedProx's mu where the server sets it."""
        request = request_of(message)
        arrays = message.content.array_records[request.arrays]
        mu = float(config_of(message).get("proximal-mu", 0.0))  # type: ignore[arg-type]
        learner = self.answers.learner(context, request, arrays, mu)
        trained = unflatten(learner.train(), arrays)
        content = RecordDict({request.arrays: trained, "metrics": metrics(len(learner.y))})
        return Message(content, reply_to=message)


def _update(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))


def _gate(request: Request) -> Any:
    gate = lookup("gate", request.gate or "", GATES)
    return gate(**request.options.get("gate", {}))


def _announced(message: Message) -> NDArray[Any] | None:
    config: ConfigRecord = config_of(message)
    data = raw(config, "announce")
    return None if data is None else from_record(config, "announce", MOST_BYTES)
