"""`attach`: what a Flower client needs to answer a `CohortStrategy`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client.mod.utils import make_ffn
from flwr.clientapp import ClientApp
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower import wire
from fedcohort.flower.client.answer import Asked, Handler, arrays_in, config_of, own_id, reading_in
from fedcohort.flower.client.data import Data, Keys, data_function, from_settings
from fedcohort.flower.client.privacy import COUNT_METRICS, Privacy, check_covered
from fedcohort.flower.wire import LOG, PROBE, QUERY, RAISED, RECORD, UPLOAD
from fedcohort.gates import GATES
from fedcohort.registry import lookup
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.projection import Vectors

if TYPE_CHECKING:
    import torch

    from fedcohort.simulate.local import LocalTraining


def attach(
    app: ClientApp,
    data: Any,
    model: Callable[..., torch.nn.Module] | None = None,
    *,
    keys: Keys | None = None,
    local: LocalTraining | None = None,
    signals: Collection[str] | None = None,
    privacy: Privacy | None = None,
    insight: Callable[[Any, Any], ArrayLike] | None = None,
    classes: int = 0,
    loss: str | Callable[..., Any] | None = None,
    device: str = "cpu",
) -> None:
    """Add to an app what a client must answer: signals, and the two phases of a gate.

    Call it at the end of the module. ``@app.train()`` and ``@app.evaluate()`` stay as they are.

    Parameters
    ----------
    data : object
        This client's training data: ``(x, y)`` arrays, a torch ``DataLoader`` or ``Dataset``, a
        Hugging Face ``Dataset``; or a function that returns one of them, or a tuple that starts
        with it. The function takes the context, or arguments named as in the node or run config.
    model : callable, optional
        Returns the ``nn.Module`` that is trained. With it, our own code measures signals, and
        trains where there is no ``@app.train()``, as `local` says. Without it, losses and updates
        come from the app's handlers, and feature profiles are not available.
    keys : (str, str), optional
        Names of the inputs and labels in batches that are dicts; the usual ones are recognized.
    signals : collection of str, optional
        What this client answers; the node config's ``fedcohort-signals`` restricts it further.
    privacy : Privacy, optional
        Noise and budget of its sketches. What tells more of the records is then not released.
    insight : callable, optional
        ``insight(x, y)`` returns a vector, for the signal of that name.
    classes : int, optional
        Number of labels; by default the outputs of the model.
    loss : str or callable, optional
        With `model`: ``loss(outputs, y)`` of each example. Without: ``loss(arrays, x, y)``, or the
        name of the metric that the app's handlers report, if it is not a usual one.
    device : str
        Where our code measures and trains.

    Examples
    --------
    >>> import numpy as np
    >>> app = ClientApp()
    >>> attach(app, data=(np.eye(4), np.arange(4)))
    """
    if app._call is not None:
        raise ConfigError(
            "attach: this app was made with client_fn, whose messages carry no queries; turn its "
            "client into functions under @app.train() and @app.evaluate(), as Flower's message "
            "API has them, then attach"
        )
    handlers = app._registered_funcs
    for name in (QUERY, PROBE, UPLOAD):
        if name in handlers:
            raise ConfigError(f"attach: the app has a handler for {name!r}: attach once")
    for name in signals or ():
        lookup("signal", name, SIGNALS)
        check_covered(name, privacy)
    own_train, own_evaluate = (handlers.get(f"{kind}.default") for kind in ("train", "evaluate"))
    answers = Answers(
        data_function(data, keys),
        None if model is None else partial(from_settings, model),
        local,
        None if signals is None else frozenset(signals),
        privacy,
        insight,
        classes,
        loss,
        device,
        own_train,
        own_evaluate,
        app._mods,
    )
    around = [mod for mod in app._mods if not _is_private(mod)]  # which fail without a model
    handlers[QUERY] = make_ffn(answers.reply, [replying_with_errors, *around])
    if own_evaluate is not None:
        handlers["evaluate.default"] = make_ffn(own_evaluate, [answers.hide_size])
    if model is not None or own_train is not None:
        handlers["train.default"] = make_ffn(answers.train, [replying_with_errors])
        handlers[PROBE] = make_ffn(answers.probe, [replying_with_errors])
        handlers[UPLOAD] = make_ffn(answers.upload, [replying_with_errors, *around])


@dataclass(frozen=True)
class Answers:
    """What a client can tell, and the handlers of its messages; fields as arguments of `attach`."""

    data: Data
    model: Callable[[Context], torch.nn.Module] | None
    local: LocalTraining | None
    signals: frozenset[str] | None
    privacy: Privacy | None
    insight: Callable[[Any, Any], ArrayLike] | None
    classes: int
    loss: str | Callable[..., Any] | None
    device: str
    own_train: Handler | None  # the app's, where it has one
    own_evaluate: Handler | None
    mods: list[Any]  # the app's

    def asked(self, message: Message, context: Context) -> Asked:
        """Return what answers one message; PyTorch is loaded only where there is a model."""
        if self.model is None:
            return Asked(self, message, context)
        from fedcohort.flower.client.model import Measured

        return Measured(self, message, context)

    def reply(self, message: Message, context: Context) -> Message:
        """Say who this client is, where the server does not know, and answer its questions."""
        client, record = self.asked(message, context), ConfigRecord()
        request = client.request
        if any(SIGNALS[n].needs_model(request.options.get(n, {})) for n in request.signals):
            wire.payload(client.arrays)  # an error if it holds none
            record["held"] = request.version
        if not request.client:
            try:
                record["id"] = own_id(context)
            except ConfigError as error:  # it may be known by a key or name
                record["id.error"] = wire.error_line(error)
            record["tags"] = str(context.node_config.get("fedcohort-tags", ""))
        record.update(client.record(request.signals))
        return Message(RecordDict({RECORD: record}), reply_to=message)

    def private_by(self) -> str:
        """Return what makes this app's training private, "" if nothing does."""
        if "opacus" in sys.modules:
            return "Opacus"
        private = [mod for mod in self.mods if _is_private(mod)]
        return str(getattr(private[0], "__name__", type(private[0]).__name__)) if private else ""

    def hide_size(self, message: Message, context: Context, call_next: Handler) -> Message:
        """Let replies say 1 where the number of examples is private, as a mod."""
        reply, privacy = call_next(message, context), Privacy.on_node(context, self.privacy)
        if privacy is not None and privacy.n == "private" and reply.has_content():
            for record in reply.content.metric_records.values():
                record.update({key: 1 for key in COUNT_METRICS if key in record})
        return reply

    def train(self, message: Message, context: Context) -> Message:
        """Train, and reply with the update and the signals that were asked for."""
        client = self.asked(message, context)
        reply = self._trained(client, client.arrays)
        if client.request.remember and not reply.has_error():
            client.memory.keep("trained", {"": arrays_in(reply.content)}, client.request.round)
        return reply

    def probe(self, message: Message, context: Context) -> Message:
        """Train, keep the update, and answer the gate.

        A client that was not asked for its last update goes on from what it learned, where the
        gate says so: it starts from the global model plus the difference it kept.
        """
        client = self.asked(message, context)
        request, memory = client.request, client.memory
        begin, difference = client.arrays, None
        if request.on_skip == "keep":
            stamp = None if request.carries_over else request.version
            difference = memory.vector("difference", stamp)
        if difference is not None:
            begin = wire.unflatten(client.start + difference, begin)
        reply = self._trained(client, begin)
        if reply.has_error():
            return reply
        trained = wire.flatten(arrays_in(reply.content))
        if not np.isfinite(trained).all():
            raise DataError("training gave a model that is not finite")
        gate = lookup("gate", request.gate or "", GATES)(**request.options.get("gate", {}))
        announced = reading_in(config_of(message), "announce")
        answer = gate.probe(announced, Vectors(client.start), Vectors(trained))[0]
        memory.keep("update", reply.content, request.round)
        learned = ArrayRecord({"0": Array(trained - client.start)})
        memory.keep("difference", {"": learned}, request.version)
        record = ConfigRecord({"answer": wire.to_bytes(answer), "held": request.version})
        return Message(RecordDict({RECORD: record}), reply_to=message)

    def upload(self, message: Message, context: Context) -> Message:
        """Send the update that the last probe was about."""
        client = self.asked(message, context)
        request, memory = client.request, client.memory
        content = memory.recall("update", request.round)
        if content is None:
            raise DataError(f"no update of round {request.round + 1} is stored for an upload")
        memory.forget("update")
        memory.forget("difference")
        if request.remember:
            memory.keep("trained", {"": arrays_in(content)}, request.round)
        return Message(content, reply_to=message)

    def _trained(self, client: Asked, begin: ArrayRecord) -> Message:
        """Train from `begin`, and add the signals; those are taken under the global model."""
        request, content = client.request, client.message.content
        later = {name for name in request.signals if SIGNALS[name].work == "forward"}
        if self.model is not None or callable(self.loss):
            later.clear()  # only a loss among the metrics of the reply waits for it
        record = client.record(name for name in request.signals if name not in later)
        content[request.arrays] = begin
        ours = make_ffn(self._train_by_our_code, self.mods)
        reply = self.hide_size(client.message, client.context, self.own_train or ours)
        if request.signals and not reply.has_error():
            client.trained_reply = reply
            record.update(client.record(later))
            reply.content[RECORD] = record
        return reply

    def _train_by_our_code(self, message: Message, context: Context) -> Message:
        """Train as the simulator does, with FedProx's mu where the server sets it."""
        from fedcohort.flower.client.model import Measured

        client = Measured(self, message, context)
        name = client.request.arrays
        # After a skipped round it is not the global model, whose version the message has.
        client.arrays = arrays = message.content.array_records[name]
        mu = float(config_of(message).get("proximal-mu", 0.0))  # type: ignore[arg-type]
        trained = wire.unflatten(client.train(prox_mu=mu), arrays)
        metrics = MetricRecord({"num-examples": len(client.data)})
        return Message(RecordDict({name: trained, "metrics": metrics}), reply_to=message)


def replying_with_errors(message: Message, context: Context, call_next: Handler) -> Message:
    """Reply with an error in one line, as a mod; Flower's simulation buries it in a traceback."""
    try:
        return call_next(message, context)
    except Exception as error:
        LOG.exception("%s", message.metadata.message_type)
        return Message(Error(RAISED[1], wire.error_line(error)), reply_to=message)


def _is_private(mod: Any) -> bool:
    """Whether a mod is one of Flower's for differential privacy."""
    module = str(getattr(mod, "__module__", type(mod).__module__))
    return module.startswith("flwr.") and "dp_mod" in module
