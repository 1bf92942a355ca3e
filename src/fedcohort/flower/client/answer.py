"""A client's answers to queries, from its own data and the model it was sent.

With `model=` a client measures its PyTorch model (see `model`). Without it, losses and updates come
from the app's own handlers, whatever framework they use.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.flower import wire
from fedcohort.flower.client.data import Examples
from fedcohort.flower.client.privacy import SIGNALS_KEY, Privacy, check_covered, sketch
from fedcohort.flower.wire import LOG, RECORD, Flat, Request
from fedcohort.registry import lookup
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS, Clients, Options
from fedcohort.signals.projection import Vectors

if TYPE_CHECKING:
    from fedcohort.flower.client.attach import Answers

MAX_BYTES = 1 << 26  # of what a server may send beside arrays
SHORT = 1024  # numbers that a sketch may always have, however small the model
LOSS_METRICS = ("train_loss", "eval_loss", "loss", "val_loss", "test_loss")
OURS = "fedcohort."

Handler = Callable[[Message, Context], Message]


def own_id(context: Context) -> ClientId:
    """Return a client's id from its node config: ``client-id``, else ``partition-id``.

    Numbers of partitions are padded to the same length, so that they sort as numbers do.

    Examples
    --------
    >>> config = {"partition-id": 7, "num-partitions": 100}
    >>> own_id(Context(run_id=0, node_id=1, node_config=config, state=RecordDict(), run_config={}))
    'client-07'
    """
    config: Mapping[str, Any] = context.node_config
    if "client-id" in config:
        return str(config["client-id"])
    if "partition-id" in config:
        digits = len(str(max(int(config.get("num-partitions", 1)) - 1, 0)))
        return f"client-{int(config['partition-id']):0{digits}d}"
    raise ConfigError(
        "this client has no id: start the SuperNode with --node-config 'client-id=\"...\"'"
    )


def config_of(message: Message) -> ConfigRecord:
    """Return the ConfigRecord that carries our entries, or an empty one."""
    records = message.content.config_records.values()
    return next((r for r in records if RECORD in r), ConfigRecord())


def request_of(message: Message) -> Request:
    """Return the request in a message; a plain one if it comes from another strategy."""
    text = config_of(message).get(RECORD)
    if text is not None:
        request = Request.from_json(text)
        for signal in request.signals:
            lookup("signal", signal, SIGNALS)
        return request
    configs = message.content.config_records.values()
    numbers = [r["server-round"] for r in configs if "server-round" in r]
    name = next(iter(message.content.array_records), "arrays")
    return Request(int(numbers[0]) - 1 if numbers else 0, seed=0, arrays=name)  # type: ignore[arg-type]


def reading_in(config: ConfigRecord, name: str) -> NDArray[Any] | None:
    """Return what the server sent under a name, None if nothing."""
    return wire.from_bytes(config[name], MAX_BYTES) if name in config else None


def loss_in(content: RecordDict, name: str | None) -> float | None:
    """Return the loss among a reply's metrics: the one named, or the one with a usual name.

    Examples
    --------
    >>> from flwr.app import MetricRecord
    >>> loss_in(RecordDict({"metrics": MetricRecord({"eval_loss": 0.5, "accuracy": 0.9})}), None)
    0.5
    """
    metrics = {k: v for record in content.metric_records.values() for k, v in record.items()}
    numbers = {k: float(v) for k, v in metrics.items() if not isinstance(v, list)}
    usual = [key for key in LOSS_METRICS if key in numbers]
    similar = [key for key in numbers if "loss" in key.lower()]
    return numbers.get(name or (usual[0] if usual else similar[0] if len(similar) == 1 else ""))


class Memory:
    """What a client remembers between messages, in Flower's `Context.state`.

    The state lives in memory only and can be lost: the client then replies with an error, or works
    from what it is sent. Each entry has a stamp: a round, or the version of a model. What another
    `run` left behind is forgotten.
    """

    def __init__(self, context: Context, run: str) -> None:
        self.state: RecordDict = context.state
        stamps = self.state.config_records.get(OURS + "stamps")
        if stamps is None or stamps.get("run") != run:
            for name in [key for key in self.state if key.startswith(OURS)]:
                del self.state[name]
            self.state[OURS + "stamps"] = ConfigRecord({"run": run})
        self.stamps = self.state.config_records[OURS + "stamps"]

    def keep(self, name: str, content: Mapping[str, Any], stamp: int | str) -> None:
        """Keep records under a name, in place of those that were there."""
        self.forget(name)
        self.stamps[name] = stamp
        self.state.update({f"{OURS}{name}.{key}": record for key, record in content.items()})

    def forget(self, name: str) -> None:
        self.stamps.pop(name, None)
        for key in [key for key in self.state if key.startswith(f"{OURS}{name}.")]:
            del self.state[key]

    def recall(self, name: str, stamp: int | str | None = None) -> RecordDict | None:
        """Return what is kept under a name; None if there is nothing, or not with this stamp."""
        if name not in self.stamps or stamp not in (None, self.stamps[name]):
            return None
        start = f"{OURS}{name}."
        kept = {key: record for key, record in self.state.items() if key.startswith(start)}
        return RecordDict({key.removeprefix(start): record for key, record in kept.items()})

    def vector(self, name: str, stamp: int | str | None = None) -> Flat | None:
        kept = self.recall(name, stamp)
        return None if kept is None else wire.flatten(arrays_in(kept))


def arrays_in(content: RecordDict) -> ArrayRecord:
    """Return the first model of a message or reply."""
    return next(iter(content.array_records.values()))


@cache
def warn_of_exact(private_by: str, name: str) -> None:
    """Say once that a signal is without noise, in an app whose training is private."""
    LOG.warning(
        "%s makes this app's training private, but %r tells of the records without noise: pass "
        "attach(privacy=Privacy(...)), or signals= without it",
        private_by,
        name,
    )


class Asked(Clients):
    """One client that answers one message, as signals see it: one row of everything."""

    trained_reply: Message | None = None  # of the training, where its metrics have a signal

    def __init__(self, answers: Answers, message: Message, context: Context) -> None:
        self.answers, self.message, self.context = answers, message, context
        self.request = request_of(message)
        try:  # the name of the budget's account, which the server has no say in
            self.account = own_id(context)
        except ConfigError:
            self.account = "this client"
        self.ids = (self.request.client or self.account,)
        self._kind = ""

    @cached_property
    def memory(self) -> Memory:
        return Memory(self.context, self.request.run)

    @cached_property
    def privacy(self) -> Privacy | None:
        """What its sketches may reveal."""
        return Privacy.on_node(self.context, self.answers.privacy)

    @cached_property
    def arrays(self) -> ArrayRecord:
        """The model that the message is about: in it, or kept from an earlier one."""
        request, memory = self.request, self.memory
        sent = self.message.content.array_records.get(request.arrays)
        if sent is not None:
            if request.version:
                memory.keep("model", {"": sent}, request.version)
            return sent
        kept = memory.recall("model", request.version)
        if kept is None:
            held = memory.stamps.get("model", "")
            raise DataError(
                f"no model in the message; the client holds {held!r}, not {request.version!r}"
            )
        return arrays_in(kept)

    def check_released(self, name: str) -> None:
        """ConfigError unless app, operator and budget let a signal leave this client."""
        own, allowed = self.answers.signals, self.context.node_config.get(SIGNALS_KEY)
        if own is not None and name not in own:
            raise ConfigError(f"this client does not release {name!r}: attach(signals=...)")
        if allowed is not None and name not in map(str.strip, str(allowed).split(",")):
            raise ConfigError(
                f"the operator of this node does not release {name!r} ({SIGNALS_KEY})"
            )
        check_covered(name, self.privacy)
        private_by = self.answers.private_by()
        if private_by and self.privacy is None and SIGNALS[name].tells_of_records({}):
            warn_of_exact(private_by, name)

    def record(self, names: Iterable[str]) -> ConfigRecord:
        """Return the readings of signals, and why there is none of the others."""
        record = ConfigRecord()
        for name in names:
            try:
                self.check_released(name)
                record[name] = wire.to_bytes(self.reading(name))
                if SIGNALS[name].reveals == "sketch":
                    record[f"{name}.kind"] = self._kind
            except Exception as error:  # an update, or another signal, is worth having without it
                LOG.exception("signal %s", name)
                measured = self.answers.model is not None and SIGNALS[name].work != "data"
                hint = "; without attach(model=...), the app's own handlers answer"
                hint = hint if measured and self.answers.own_train else ""
                record[f"{name}.error"] = wire.error_line(error) + hint
        return record

    def reading(self, name: str) -> NDArray[Any]:
        options = self.request.options.get(name, {})
        k = int(options.get("k", 0))
        if k > SHORT and k > len(self.start):
            raise ConfigError(f"k={k} numbers to sketch a model of {len(self.start)}: refused")
        return np.asarray(SIGNALS[name].compute(self, options)[0])

    @cached_property
    def start(self) -> Flat:
        """The model that the message is about, flat."""
        flat = wire.flatten(self.arrays)
        if not len(flat):
            raise ConfigError("the model has no floating-point arrays, so it is not a vector")
        return flat

    @cached_property
    def data(self) -> Examples:
        return self.answers.data(self.context)

    def examples(self) -> list[tuple[Any, Any]]:
        return [self.data.arrays()]

    def sizes(self) -> NDArray[np.int64]:
        return np.array([len(self.data)], np.int64)

    def classes(self) -> int:
        """Return the number of labels: as the app states it, or the outputs of the model."""
        classes = self.answers.classes or self.request.classes
        if classes < 1:
            raise ConfigError("the server asks for label counts: pass attach(classes=...)")
        return classes

    def insights(self) -> list[ArrayLike]:
        if self.answers.insight is None:
            raise ConfigError("the server asks for 'insight': pass attach(insight=...)")
        return [self.answers.insight(x, y) for x, y in self.examples()]

    def sketches(self, options: Options) -> list[NDArray[Any]]:
        """Return the client's sketch: by its own privacy settings, or at the policy's epsilon."""
        center = reading_in(config_of(self.message), "center")
        classes = self.answers.classes or self.request.classes
        private = self.privacy is not None or bool(options.get("epsilon"))
        exact = sketch(self.data, options, classes=classes, center=center, private=private)
        digest = hashlib.blake2b(json.dumps(exact.spec, sort_keys=True).encode(), digest_size=6)
        label_columns = getattr(exact.transform, "classes", 0)
        width = getattr(exact.family, "dim", 0) - label_columns
        inputs = f"{width} inputs" if width > 0 else "tokens"
        self._kind = f"{inputs}, hashed as {digest.hexdigest()}"
        if self.privacy is not None:
            return [self.privacy.release(self.account, exact).reading()]
        epsilon = float(options.get("epsilon", 0.0))
        return [(exact.privatize(epsilon) if epsilon else exact).reading()]

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Use the function `loss`, or the mean that the app's training or evaluation reports."""
        loss = self.answers.loss
        if callable(loss):
            x, y = self.data.arrays()
            values = np.asarray(loss(self.arrays.to_numpy_ndarrays(), x, y), np.float64)
            return np.array([np.mean(values**power)])
        evaluate, reply = self.answers.own_evaluate, self.trained_reply
        value = None if reply is None else loss_in(reply.content, loss)
        # An app may abort its process where the model is empty, as Flower's XGBoost app does.
        if value is None and (reply is None or (evaluate and wire.payload(self.arrays))):
            value = loss_in(self._handled(evaluate, "@app.evaluate()").content, loss)
        if value is None:
            raise ConfigError(
                "the app reports no loss; name its metric, attach(loss='...'), or pass a function, "
                "attach(loss=f) with f(arrays, x, y)"
            )
        return np.array([value**power])

    def gradients(self) -> Vectors:
        """Return the step of the app's own training, negated."""
        return Vectors(self.start - self.trained().numpy())

    def trained(self, fresh: bool = True) -> Vectors:
        if fresh:
            reply = self._handled(self.answers.own_train, "@app.train()")
            return Vectors(wire.flatten(arrays_in(reply.content)))
        number = self.request.held_round
        held = self.memory.vector("trained", number) if number >= 0 else None
        return Vectors(self.start if held is None else held)

    def steps(self, fresh: bool = True) -> Vectors:
        return Vectors(self.trained(fresh).numpy() - self.start)

    def _handled(self, handler: Handler | None, name: str) -> Message:
        """Call a handler of the app's own, on a copy of its state: a query leaves no trace."""
        if handler is None:
            raise ConfigError(f"attach: the app has no {name}; attach after it, or pass model=")
        self.message.content[self.request.arrays] = self.arrays
        reply = handler(self.message, copy.deepcopy(self.context))
        if reply.has_error():
            raise ConfigError(f"the app's {name} failed: {reply.error.reason}")
        return reply

    def _cannot(self, what: str) -> ConfigError:
        return ConfigError(f"this client cannot give {what}; pass attach(model=...)")
