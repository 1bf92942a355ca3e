"""A client's training, at once or in a gate's two phases, and what it remembers in between."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.flower.client.answer import Answers, Handler, config_of, reading_in, request_of
from fedcohort.flower.client.memory import Memory
from fedcohort.flower.client.privacy import hide_size
from fedcohort.flower.wire import RECORD, Request, flatten, to_record, unflatten
from fedcohort.gates import GATES
from fedcohort.registry import lookup
from fedcohort.signals.projection import Vectors


class Training:
    """The handlers of ``train`` and of a gate's two phases; `handler` is what trains."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.handler: Handler = answers.train or self.train_by_our_code

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
        if request.on_skip != "keep" or not (
            request.carries_over or memory.notes.get("difference-from") == request.version
        ):
            memory.forget("difference")
        start, difference = flatten(arrays), memory.vector("difference")
        begin = arrays if difference is None else unflatten(start + difference, arrays)
        message.content[request.arrays] = begin
        reply = self._trained(message, context, request, arrays)
        if reply.has_error():
            return reply
        trained = flatten(_update(reply.content))
        if not np.isfinite(trained).all():
            raise DataError("training gave a model that is not finite")
        gate = lookup("gate", request.gate or "", GATES)(**request.options.get("gate", {}))
        announced = reading_in(config_of(message), "announce")
        answer: NDArray[Any] = gate.probe(announced, Vectors(start), Vectors(trained))[0]
        memory.keep_update(reply.content, request.round)
        memory.keep_vector("difference", trained - start, request.round)
        memory.notes["difference-from"] = request.version
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
        answers, names = self.answers, request.signals
        later = [name for name in names if answers.reads_metrics(name)]
        now = [name for name in names if name not in later]
        record = answers.record(now, message, context, request, arrays)
        reply = self.handler(message, context)
        if names and not reply.has_error():
            record.update(answers.record_of_metrics(later, reply, context))
            reply.content[RECORD] = record
        return hide_size(reply) if answers.hides_size(context) else reply

    def train_by_our_code(self, message: Message, context: Context) -> Message:
        """Train as the simulator does, with FedProx's mu where the server sets it."""
        request = request_of(message)
        arrays = message.content.array_records[request.arrays]
        mu = float(config_of(message).get("proximal-mu", 0.0))  # type: ignore[arg-type]
        model = self.answers.model_client(context, request, arrays, mu)
        trained = unflatten(model.train(), arrays)
        metrics = MetricRecord({"num-examples": len(model.y)})
        return Message(RecordDict({request.arrays: trained, "metrics": metrics}), reply_to=message)


def _update(content: RecordDict) -> ArrayRecord:
    return next(iter(content.array_records.values()))
