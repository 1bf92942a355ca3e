"""A client's answers to queries, from its own data and the model it was sent.

With `model=` a client measures its PyTorch model. Without it, losses and updates come from the
app's own handlers, whatever framework they use.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.flower.client.data import Data, Examples
from fedcohort.flower.client.memory import Memory
from fedcohort.flower.client.privacy import Privacy, allowed_signals, check_covered, sketch
from fedcohort.flower.wire import (
    LOG,
    RECORD,
    Flat,
    Request,
    error_line,
    flatten,
    from_record,
    to_record,
)
from fedcohort.registry import lookup
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS, Clients, Options
from fedcohort.signals.projection import Vectors

if TYPE_CHECKING:
    import torch

    from fedcohort.flower.client.model import ModelClient
    from fedcohort.simulate.local import LocalTraining

MAX_BYTES = 1 << 26  # of what a server may send beside arrays
SHORT = 1024  # numbers that a sketch may always have, however small the model
DEFAULT_LOSS = "cross-entropy"
LOSS_METRICS = ("train_loss", "eval_loss", "loss", "val_loss", "test_loss")
_warned_of: set[str] = set()

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
        "this client has no id: start the SuperNode with --node-config 'client-id=\"...\"', or "
        "pass attach(identity=function of the context)"
    )


def config_of(message: Message) -> ConfigRecord:
    """Return the ConfigRecord that carries our entries, or an empty one."""
    records = message.content.config_records.values()
    return next((r for r in records if RECORD in r), ConfigRecord())


def request_of(message: Message) -> Request:
    """Return the request in a message; a plain one if it comes from another strategy."""
    text = config_of(message).get(RECORD)
    if text is not None:
        return Request.from_json(text)
    configs = message.content.config_records.values()
    numbers = [r["server-round"] for r in configs if "server-round" in r]
    name = next(iter(message.content.array_records), "arrays")
    return Request(int(numbers[0]) - 1 if numbers else 0, seed=0, arrays=name)  # type: ignore[arg-type]


def reading_in(config: ConfigRecord, name: str) -> NDArray[Any] | None:
    """Return what the server sent under a name, None if nothing."""
    return from_record(config, name, MAX_BYTES) if name in config else None


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
    for key in LOSS_METRICS if name is None else (name,):
        if key in numbers:
            return numbers[key]
    losses = [value for key, value in numbers.items() if "loss" in key.lower()]
    return losses[0] if name is None and len(losses) == 1 else None


@dataclass(frozen=True)
class Answers:
    """What a client can tell; the fields are arguments of `attach`.

    `train` and `evaluate` are the app's own handlers, where it has them; `private_by` names what
    makes its training private.
    """

    data: Data
    model: Callable[[Context], torch.nn.Module] | None
    local: LocalTraining | None
    identity: Callable[[Context], ClientId]
    signals: frozenset[str] | None
    privacy: Privacy | None
    insight: Callable[[Any, Any], ArrayLike] | None
    classes: int
    loss: str | Callable[..., Any]
    device: str
    cache: bool
    train: Handler | None
    evaluate: Handler | None
    private_by: str = ""

    def reply(self, message: Message, context: Context) -> Message:
        """Say who this client is, where the server does not know, and answer its questions."""
        request = request_of(message)
        arrays = None
        if any(SIGNALS[n].needs_model(request.options.get(n, {})) for n in request.signals):
            arrays = self.arrays(request, message, Memory(context, request.run))
        record = ConfigRecord()
        if not request.client:
            try:
                record["id"] = self.identity(context)
            except ConfigError as error:  # it may be known by a key or name
                record["id.error"] = error_line(error)
            record["tags"] = str(context.node_config.get("fedcohort-tags", ""))
        record.update(self.record(request.signals, message, context, request, arrays))
        if arrays is not None and self.cache:
            record["held"] = request.version
        return Message(RecordDict({RECORD: record}), reply_to=message)

    def record(
        self,
        names: Collection[str],
        message: Message,
        context: Context,
        request: Request,
        arrays: ArrayRecord | None,
    ) -> ConfigRecord:
        """Return the readings of signals, and why there is none of the others."""
        record, asked = ConfigRecord(), Asked(self, message, context, request, arrays)
        for name in names:
            try:
                self.check_released(name, context)
                record.update(to_record({name: asked.reading(name)}))
                record.update({f"{name}.kind": kind for kind in asked.kinds(name)})
            except Exception as error:  # an update, or another signal, is worth having without it
                LOG.exception("signal %s", name)
                record[f"{name}.error"] = error_line(error) + self._hint(name)
        return record

    def _hint(self, name: str) -> str:
        """Say what may help where the measuring of the model fails."""
        if self.model is None or SIGNALS[name].work == "data" or self.train is None:
            return ""
        return "; without attach(model=...), the app's own handlers answer"

    def check_released(self, name: str, context: Context) -> None:
        """ConfigError unless app, operator and budget let a signal leave this client."""
        lookup("signal", name, SIGNALS)
        if self.signals is not None and name not in self.signals:
            raise ConfigError(f"this client does not release {name!r}: attach(signals=...)")
        allowed = allowed_signals(context)
        if allowed is not None and name not in allowed:
            raise ConfigError(
                f"the operator of this node does not release {name!r} (fedcohort-signals)"
            )
        privacy = Privacy.on_node(context, self.privacy)
        check_covered(name, privacy)
        exact = SIGNALS[name].reveals not in ("nothing", "size") and privacy is None
        if exact and self.private_by and name not in _warned_of:
            _warned_of.add(name)
            LOG.warning(
                "%s makes this app's training private, but %r tells of the records without noise: "
                "pass attach(privacy=Privacy(...)), or signals= without it",
                self.private_by,
                name,
            )

    def hides_size(self, context: Context) -> bool:
        """Whether the number of this client's examples must not leave it."""
        privacy = Privacy.on_node(context, self.privacy)
        return privacy is not None and privacy.n == "private"

    def arrays(self, request: Request, message: Message, memory: Memory) -> ArrayRecord:
        """Return the model that a message is about: in it, or kept from an earlier one."""
        sent = message.content.array_records.get(request.arrays)
        if sent is None:
            return memory.model(request.version)
        if self.cache and request.version:
            memory.keep_model(sent, request.version)
        return sent

    def reads_metrics(self, name: str) -> bool:
        """Whether a signal is read from the metrics of a training reply: a loss, without model."""
        computed = self.model is not None or callable(self.loss)
        return SIGNALS[name].work == "forward" and not computed

    def record_of_metrics(
        self, names: Collection[str], reply: Message, context: Context
    ) -> ConfigRecord:
        """Return losses from the metrics of a training reply; nothing where it reports none."""
        loss, record = loss_in(reply.content, self.loss_metric), ConfigRecord()
        for name in names if loss is not None else ():
            try:
                self.check_released(name, context)
                record.update(to_record({name: np.asarray(loss)}))
            except ConfigError as error:
                record[f"{name}.error"] = error_line(error)
        return record

    @property
    def loss_metric(self) -> str | None:
        """The metric that `loss` names, None where a usual name is looked for."""
        return self.loss if isinstance(self.loss, str) and self.loss != DEFAULT_LOSS else None

    def model_client(
        self,
        context: Context,
        request: Request,
        arrays: ArrayRecord,
        mu: float = 0.0,
        held: Flat | None = None,
    ) -> ModelClient:
        """Return what trains and measures a model; `mu` is FedProx's, where the server sets it."""
        from fedcohort.flower.client.model import ModelClient
        from fedcohort.simulate.local import LocalTraining

        if self.model is None:
            raise ConfigError("this client has no model: pass attach(model=...)")
        local = self.local or LocalTraining()
        if mu:
            local = replace(local, prox_mu=mu)
        x, y = self.data(context).arrays()
        client, model = request.client or self.identity(context), self.model(context)
        return ModelClient(
            client, x, y, model, arrays, request, local, self.loss, self.device, held
        )


class Asked(Clients):
    """One client, as a signal sees it: one row of everything."""

    def __init__(
        self,
        answers: Answers,
        message: Message,
        context: Context,
        request: Request,
        arrays: ArrayRecord | None,
    ) -> None:
        self.answers, self.message, self.context = answers, message, context
        self.request, self.arrays = request, arrays
        self.ids = (request.client or self._account,)
        self._kinds: tuple[str, ...] = ()

    def reading(self, name: str) -> NDArray[Any]:
        """Compute a signal."""
        options = self.request.options.get(name, {})
        if self.arrays is not None and int(options.get("k", 0)) > max(len(self.start), SHORT):
            size = len(self.start)
            raise ConfigError(f"k={options['k']} numbers to sketch a model of {size}: refused")
        return np.asarray(SIGNALS[name].compute(self, options)[0])

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return what readings of all clients must have in common, where anything is known."""
        return self._kinds if SIGNALS[name].reveals == "sketch" else ()

    @property
    def _account(self) -> ClientId:
        """The name of this client's budget account, which the server has no say in."""
        try:
            return self.answers.identity(self.context)
        except ConfigError:
            return "this client"

    @cached_property
    def start(self) -> Flat:
        """The model that the question is about, flat."""
        return flatten(self._model())

    @cached_property
    def data(self) -> Examples:
        """The client's examples."""
        return self.answers.data(self.context)

    def examples(self) -> list[tuple[Any, Any]]:
        """Return the client's inputs and labels."""
        return [self.data.arrays()]

    def sizes(self) -> NDArray[np.int64]:
        """Return the client's number of examples."""
        return np.array([len(self.data)], np.int64)

    def classes(self) -> int:
        """Return the number of labels: as the app states it, or the outputs of the model."""
        classes = self.answers.classes or self.request.classes
        if classes < 1:
            raise ConfigError("the server asks for label counts: pass attach(classes=...)")
        return classes

    def insights(self) -> list[ArrayLike]:
        """Return the user's own vector."""
        if self.answers.insight is None:
            raise ConfigError("the server asks for 'insight': pass attach(insight=...)")
        return [self.answers.insight(x, y) for x, y in self.examples()]

    def sketches(self, options: Options) -> list[NDArray[Any]]:
        """Return the client's sketch: by its own privacy settings, or at the policy's epsilon."""
        center = reading_in(config_of(self.message), "center")
        classes = self.answers.classes or self.request.classes
        exact = sketch(self.data, options, classes=classes, center=center)
        digest = hashlib.blake2b(json.dumps(exact.spec, sort_keys=True).encode(), digest_size=6)
        appended = getattr(exact.transform, "classes", 0)  # columns for the labels
        width = getattr(exact.family, "dim", 0) - appended
        inputs = f"{width} inputs" if width > 0 else "tokens"
        self._kinds = (f"{inputs}, hashed as {digest.hexdigest()}",)
        privacy = Privacy.on_node(self.context, self.answers.privacy)
        if privacy is not None:
            return [privacy.release(self._account, exact).reading()]
        epsilon, delta = float(options.get("epsilon", 0.0)), float(options.get("delta", 0.0))
        return [(exact.privatize(epsilon, delta) if epsilon else exact).reading()]

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Return the mean of loss^power over the client's examples.

        Without `model=`: from the function `loss`, or from the loss that the app's own evaluation
        reports, whose mean stands for every example.
        """
        answers = self.answers
        if answers.model is not None:
            return self._measured.losses(power)
        if callable(answers.loss):
            x, y = self.data.arrays()
            values = np.asarray(answers.loss(self._model().to_numpy_ndarrays(), x, y), np.float64)
            return np.array([np.mean(values**power)])
        reply = self._handled(answers.evaluate, "@app.evaluate()")
        loss = loss_in(reply.content, answers.loss_metric)
        if loss is None:
            raise ConfigError(
                "the app's evaluation reports no loss; name its metric, attach(loss='...'), or "
                "pass a function, attach(loss=f) with f(arrays, x, y)"
            )
        return np.array([loss**power])

    def expected_durations(self) -> NDArray[np.float64]:
        """Return the seconds that a round's training should take, timed on an untrained model."""
        if self.answers.model is None:
            raise ConfigError("a client times its training with attach(model=...) only")
        arrays = ArrayRecord(self.answers.model(self.context).state_dict())
        return self.answers.model_client(self.context, self.request, arrays).expected_durations()

    def features(self) -> NDArray[Any]:
        """Return the mean output of the first dense layer."""
        return self._measured.features()

    def gradients(self) -> Vectors:
        """Return the full-batch gradient; without `model=`, the step of the app's own training."""
        if self.answers.model is None:
            return Vectors(self.start - self.trained().numpy())
        return self._measured.gradients()

    def gradient_spreads(self) -> NDArray[np.float64]:
        """Return the spread of the gradients of local batches."""
        return self._measured.gradient_spreads()

    def trained(self, fresh: bool = True) -> Vectors:
        """Return the model after training now, by the app's own handler where there is one."""
        if self.answers.train is None or not fresh:
            return self._measured.trained(fresh)
        reply = self._handled(self.answers.train, "@app.train()")
        return Vectors(flatten(next(iter(reply.content.array_records.values())))[None])

    def steps(self, fresh: bool = True) -> Vectors:
        """Return `trained` minus the model."""
        return Vectors(self.trained(fresh).numpy() - self.start)

    def _model(self) -> ArrayRecord:
        if self.arrays is None:
            raise ConfigError("this question came without a model")
        return self.arrays

    def _handled(self, handler: Handler | None, name: str) -> Message:
        """Call a handler of the app's own, on a copy of its state: a query leaves no trace."""
        if handler is None:
            raise ConfigError(f"attach: the app has no {name}; attach after it, or pass model=")
        self.message.content[self.request.arrays] = self._model()
        reply = handler(self.message, copy.deepcopy(self.context))
        if reply.has_error():
            raise ConfigError(f"the app's {name} failed: {reply.error.reason}")
        return reply

    @cached_property
    def _measured(self) -> ModelClient:
        held, memory = None, Memory(self.context, self.request.run)
        number = self.request.held_round
        if number >= 0 and memory.stamp("trained") == number:
            held = memory.vector("trained")
        return self.answers.model_client(self.context, self.request, self._model(), held=held)
