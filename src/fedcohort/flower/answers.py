"""A client's answers to queries, from its own data and the model it was sent.

With `model=` a client measures models with the simulator's code. Without it, losses and updates
come from the app's own handlers, whatever framework they use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.flower.arrays import Flat, flatten
from fedcohort.flower.data import Data, Examples
from fedcohort.flower.memory import Memory
from fedcohort.flower.messages import RECORD, Request, from_record, raw, to_record
from fedcohort.flower.privacy import Privacy, check_allowed, check_covered, sketch
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS, Clients, Options, Signal
from fedcohort.signals.projection import Vectors

if TYPE_CHECKING:
    import torch

    from fedcohort.flower.learner import Learner
    from fedcohort.simulate.local import LocalTraining

MOST_BYTES = 1 << 26  # of what a server may send beside arrays
SHORT = 1024  # numbers that a sketch may always have, however small the model
DEFAULT_LOSS = "cross-entropy"
LOSSES = ("loss", "loss_rms")
LOSS_METRICS = ("train_loss", "eval_loss", "loss", "val_loss", "test_loss")

Handler = Callable[[Message, Context], Message]


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


def loss_in(content: RecordDict, name: str | None) -> float | None:
    """Return the loss among a reply's metrics: the one named, or the one with a usual name.

    Examples
    --------
    >>> from flwr.app import MetricRecord
    >>> loss_in(RecordDict({"metrics": MetricRecord({"eval_loss": 0.5, "accuracy": 0.9})}), None)
    0.5
    """
    found = {k: v for record in content.metric_records.values() for k, v in record.items()}
    losses = {k: v for k, v in found.items() if "loss" in k.lower() and not isinstance(v, list)}
    for key in LOSS_METRICS if name is None else (name,):
        if key in found and not isinstance(found[key], list):
            return float(found[key])  # type: ignore[arg-type]
    return float(next(iter(losses.values()))) if name is None and len(losses) == 1 else None


@dataclass(frozen=True)
class Answers:
    """What a client can tell; the fields are arguments of `attach`.

    `train` and `evaluate` are the app's own handlers, where it has them.
    """

    data: Data
    model: Callable[[], torch.nn.Module] | None
    local: LocalTraining | None
    identity: Callable[[Context], ClientId]
    privacy: Privacy | None
    insight: Callable[[Any, Any], ArrayLike] | None
    classes: int
    loss: str | Callable[..., Any]
    device: str
    cache: bool
    train: Handler | None
    evaluate: Handler | None

    def can_answer(self, signal: Signal) -> bool:
        """Whether this client has what a signal takes."""
        if signal.name == "insight":
            return self.insight is not None
        if signal.work == "data" or self.model is not None:
            return signal.work != "server"
        if signal.name in LOSSES:
            return callable(self.loss) or self.evaluate is not None or self.train is not None
        return signal.work == "train" and self.train is not None

    def reply(self, name: str, message: Message, context: Context) -> Message:
        """Answer ``query.<name>``."""
        check_allowed(name, context)
        request = request_of(message)
        arrays = None
        if SIGNALS[name].needs_model(request.options.get(name, {})):
            arrays = self.arrays(request, message, Memory(context, request.run))
        record = to_record({name: self.reading(name, message, context, request, arrays)})
        if arrays is not None and self.cache:
            record["held"] = request.version
        return Message(RecordDict({RECORD: record}), reply_to=message)

    def hides_size(self, context: Context) -> bool:
        """Whether the number of this client's examples must not leave it."""
        privacy = Privacy.on_node(context, self.privacy)
        return privacy is not None and privacy.n == "private"

    def arrays(self, request: Request, message: Message, memory: Memory) -> ArrayRecord:
        """Return the model that a message is about: in it, or kept from an earlier one."""
        found = message.content.array_records.get(request.arrays)
        if found is None:
            return memory.model(request.version)
        if self.cache and request.version:
            memory.keep_model(found, request.version)
        return found

    def reading(
        self,
        name: str,
        message: Message,
        context: Context,
        request: Request,
        arrays: ArrayRecord | None,
    ) -> NDArray[Any]:
        """Compute one signal."""
        check_covered(name, Privacy.on_node(context, self.privacy))
        options = request.options.get(name, {})
        asked = AskedClient(self, message, context, request, arrays)
        if arrays is not None and int(options.get("k", 0)) > max(len(asked.start), SHORT):
            size = len(asked.start)
            raise ConfigError(f"k={options['k']} numbers to sketch a model of {size}: refused")
        return np.asarray(SIGNALS[name].compute(asked, options)[0])

    def reads_metrics(self, names: Collection[str]) -> list[str]:
        """Return the signals of these that are read from the metrics of a training reply."""
        if self.model is not None or callable(self.loss):
            return []
        return [name for name in names if name in LOSSES]

    def from_metrics(self, names: Collection[str], reply: Message) -> dict[str, NDArray[Any]]:
        """Return losses from the metrics of a training reply; none where it reports none."""
        loss = loss_in(reply.content, self.loss_metric)
        return {} if loss is None else {name: np.asarray(loss) for name in names}

    @property
    def loss_metric(self) -> str | None:
        """The metric that `loss` names, None where a usual name is looked for."""
        return self.loss if isinstance(self.loss, str) and self.loss != DEFAULT_LOSS else None

    def learner(
        self,
        context: Context,
        request: Request,
        arrays: ArrayRecord,
        mu: float = 0.0,
        held: Flat | None = None,
    ) -> Learner:
        """Return what trains and measures a model; `mu` is FedProx's, where the server sets it."""
        from fedcohort.flower.learner import Learner
        from fedcohort.simulate.local import LocalTraining

        if self.model is None:
            raise ConfigError("this client has no model: pass attach(model=...)")
        local = self.local or LocalTraining()
        if mu:
            local = replace(local, prox_mu=mu)
        x, y = self.data(context).arrays()
        client = request.client or self.identity(context)
        model = self.model()
        return Learner(client, x, y, model, arrays, request, local, self.loss, self.device, held)


def account_of(context: Context, identity: Callable[[Context], ClientId]) -> ClientId:
    """Return the name of this client's budget account, which the server has no say in."""
    try:
        return identity(context)
    except ConfigError:
        return "this client"


class AskedClient(Clients):
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
        self.ids = (request.client or account_of(context, answers.identity),)

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
        """Return the number of labels that the app states."""
        if self.answers.classes < 1:
            raise ConfigError("the server asks for label counts: pass attach(classes=...)")
        return self.answers.classes

    def insights(self) -> list[ArrayLike]:
        """Return the user's own vector."""
        if self.answers.insight is None:
            raise ConfigError("the server asks for 'insight': pass attach(insight=...)")
        return [self.answers.insight(x, y) for x, y in self.examples()]

    def sketches(self, options: Options) -> list[NDArray[Any]]:
        """Return the client's sketch: by its own privacy settings, or at the policy's epsilon."""
        config = config_of(self.message)
        center = from_record(config, "center", MOST_BYTES) if raw(config, "center") else None
        classes = self.answers.classes or self.request.classes
        made = sketch(self.data, options, classes=classes, center=center)
        privacy = Privacy.on_node(self.context, self.answers.privacy)
        if privacy is not None:
            account = account_of(self.context, self.answers.identity)
            return [privacy.release(account, made).reading()]
        epsilon, delta = float(options.get("epsilon", 0.0)), float(options.get("delta", 0.0))
        return [(made.privatize(epsilon, delta) if epsilon else made).reading()]

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Return the mean of loss^power over the client's examples.

        Without `model=`: from the function `loss`, or from the loss that the app's own evaluation
        reports, whose mean stands for every example.
        """
        answers = self.answers
        if answers.model is not None:
            return self._learned().losses(power)
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

    def features(self) -> NDArray[Any]:
        """Return the mean output of the first dense layer."""
        return self._learned().features()

    def gradients(self) -> Vectors:
        """Return the full-batch gradient; without `model=`, the step of the app's own training."""
        if self.answers.model is None:
            return Vectors(self.start - self.trained().numpy())
        return self._learned().gradients()

    def trained(self, fresh: bool = True) -> Vectors:
        """Return the model after training now, by the app's own handler where there is one."""
        if self.answers.train is None or not fresh:
            return self._learned().trained(fresh)
        reply = self._handled(self.answers.train, "@app.train()")
        return Vectors(flatten(next(iter(reply.content.array_records.values())))[None])

    def steps(self, fresh: bool = True) -> Vectors:
        """Return `trained` minus the model."""
        return Vectors(self.trained(fresh).numpy() - self.start)

    def gradient_spreads(self) -> NDArray[np.float64]:
        """Return the spread of the gradients of local batches."""
        return self._learned().gradient_spreads()

    def last_layer(self) -> int:
        """Return how many parameters the model's last layer has."""
        return self._learned().last_layer()

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

    def _learned(self) -> Clients:
        held, memory = None, Memory(self.context, self.request.run)
        number = self.request.held_round
        if number >= 0 and memory.stamp("trained") == number:
            held = memory.vector("trained")
        return self.answers.learner(self.context, self.request, self._model(), held=held)
