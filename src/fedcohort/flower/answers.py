"""A client's distribution sketch: its own epsilon, its own budget, both beyond the server's reach.

The server says how sketches are made (rows, bits, seed), for they must be comparable. What a sketch
may reveal is the client's to decide: it adds its own noise and enters every release into a file of
its own before the sketch leaves. A release is kept in a file as well, so that the same question
gets the same answer and costs nothing, also after a restart.

A client's answers to queries, from its own data and the model it was sent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.flower.arrays import Flat, flatten
from fedcohort.flower.memory import Memory
from fedcohort.flower.messages import RECORD, Request, from_record, raw, to_record
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS, Clients, Option, Options
from fedcohort.signals.projection import Vectors
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

if TYPE_CHECKING:
    import torch

    from fedcohort.flower.learner import Learner
    from fedcohort.simulate.local import LocalTraining

MOST_COUNTERS = 1 << 24


@dataclass(frozen=True)
class Privacy:
    """What a client's sketches may reveal.

    Parameters
    ----------
    epsilon, delta : float
        Of one release.
    folder : path
        The client's own: budget and releases are kept there.
    total : float, optional
        Epsilon of all releases together; by default that of one. The total delta is `delta`.
    n : {"public", "private"}
        Whether the number of examples is published as it is.
    """

    epsilon: float
    delta: float = 0.0
    folder: str | os.PathLike[str] = "fedcohort-privacy"
    total: float | None = None
    n: Literal["public", "private"] = "public"

    def release(self, client: ClientId, sketch: RaceSketch) -> RaceSketch:
        """Return the private sketch: the one released before, or a new one out of the budget."""
        folder = Path(self.folder).expanduser()
        path = folder / f"{self._name(client, sketch)}.sketch"
        if path.exists():
            return RaceSketch.load(path)
        folder.mkdir(parents=True, exist_ok=True)
        total = self.epsilon if self.total is None else self.total
        ledger = BudgetLedger(folder / "budget.json", total, self.delta)
        private = ledger.release(client, sketch, self.epsilon, self.delta, n=self.n)
        private.save(path)
        return private

    def _name(self, client: ClientId, sketch: RaceSketch) -> str:
        """Name a release by the client and by how, and of what, the sketch was made.

        The counts are part of it: data that changed need a new release. The name never leaves the
        client's folder.
        """
        settings = [client, sketch.spec, self.epsilon, self.delta, self.n]
        digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
        digest.update(sketch.counts.tobytes())
        return digest.hexdigest()


def sketch(
    x: NDArray[Any],
    y: NDArray[Any] | None,
    options: Mapping[str, Option],
    *,
    classes: int = 0,
    center: NDArray[np.float64] | None = None,
) -> RaceSketch:
    """Sketch a client's examples as the policy's options say.

    Parameters
    ----------
    x, y : array
        Examples and labels.
    options : mapping
        rows, bits, seed, label_weight, center: those of the signal ``race_sketch``.
    classes : int
        Number of labels, where they are hashed.
    center : array, optional
        The public center, where data are centered.

    Examples
    --------
    >>> sketch(np.eye(4), None, {"rows": 10, "bits": 3})
    RaceSketch(srp, 10 x 8, n=4)
    """
    rows, bits = int(options["rows"]), int(options["bits"])
    if rows < 1 or bits < 1 or bits > 30 or rows << bits > MOST_COUNTERS:
        raise ConfigError(f"a sketch of rows={rows}, bits={bits} is refused: too many counters")
    weight = float(options.get("label_weight", 0.0))
    if bool(options.get("center")) != (center is not None):
        raise ConfigError("a centered sketch needs the public center, and only that one")
    if weight and classes < 2:
        raise ConfigError(f"label_weight={weight}: pass attach(classes=...), the number of labels")
    flat = np.asarray(x).reshape(len(x), -1)
    transform = Transform(
        center=0.0 if center is None else center,
        unit=True,
        classes=classes if weight else 0,
        label_weight=weight,
    )
    seed = int(options.get("seed", 0))
    out = RaceSketch.srp(flat.shape[1], rows, bits, seed, transform=transform)
    out.add(flat, y if weight else None)
    return out


MOST_BYTES = 1 << 26  # of what a server may send beside arrays
SHORT = 1024  # numbers that a sketch may always have, however small the model


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


class Answers:
    """All that a client can tell; the arguments are those of `attach`."""

    def __init__(
        self,
        data: Callable[[Context], tuple[Any, Any]] | tuple[Any, Any],
        model: Callable[[], torch.nn.Module] | None,
        local: LocalTraining | None,
        identity: Callable[[Context], ClientId],
        privacy: Privacy | None,
        insight: Callable[[Any, Any], ArrayLike] | None,
        classes: int,
        loss: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        device: str,
        cache: bool,
        train: Callable[[Message, Context], Message] | None,
    ) -> None:
        self.data, self.model, self.local, self.identity = data, model, local, identity
        self.privacy, self.insight, self.classes = privacy, insight, classes
        self.loss, self.device, self.cache, self.train = loss, device, cache, train

    def reply(self, name: str, message: Message, context: Context) -> Message:
        """Answer ``query.<name>``."""
        request, memory = request_of(message), Memory(context)
        record = ConfigRecord()
        arrays = None
        if SIGNALS[name].needs_model:
            arrays = self.arrays(request, message, memory)
        record = to_record({name: self.reading(name, message, context, request, arrays)})
        if arrays is not None and self.cache:
            record["held"] = request.version
        return Message(RecordDict({RECORD: record}), reply_to=message)

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
        options = request.options.get(name, {})
        asked = AskedClient(self, message, context, request, arrays)
        if arrays is not None and int(options.get("k", 0)) > max(len(asked.start), SHORT):
            size = len(asked.start)
            raise ConfigError(f"k={options['k']} numbers to sketch a model of {size}: refused")
        return np.asarray(SIGNALS[name].compute(asked, options)[0])

    def examples(self, context: Context) -> tuple[Any, Any]:
        """Return the client's examples and labels."""
        return self.data(context) if callable(self.data) else self.data

    def learner(self, context: Context) -> Learner:
        """Return what trains and measures models."""
        from fedcohort.flower.learner import Learner
        from fedcohort.simulate.local import LocalTraining

        if self.model is None:
            raise ConfigError("this client has no model: pass attach(model=...)")
        x, y = self.examples(context)
        local = self.local or LocalTraining()
        client = self.identity(context)
        return Learner(client, x, y, self.model(), local, self.loss, self.device)


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
        self.ids = (answers.identity(context),)

    @cached_property
    def start(self) -> Flat:
        """The model that the question is about, flat."""
        if self.arrays is None:
            raise ConfigError("this question came without a model")
        return flatten(self.arrays)

    def examples(self) -> list[tuple[Any, Any]]:
        """Return the client's inputs and labels."""
        return [self.answers.examples(self.context)]

    def sizes(self) -> NDArray[np.int64]:
        """Return the client's number of examples."""
        return np.array([len(x) for x, _ in self.examples()], np.int64)

    def insights(self) -> list[ArrayLike]:
        """Return the user's own vector."""
        if self.answers.insight is None:
            raise ConfigError("the server asks for 'insight': pass attach(insight=...)")
        return [self.answers.insight(x, y) for x, y in self.examples()]

    def sketches(self, options: Options) -> list[NDArray[Any]]:
        """Return the client's sketch: by its own privacy settings, or at the policy's epsilon."""
        config = config_of(self.message)
        center = from_record(config, "center", MOST_BYTES) if raw(config, "center") else None
        [(x, y)] = self.examples()
        made = sketch(x, y, options, classes=self.answers.classes, center=center)
        if self.answers.privacy is not None:
            return [self.answers.privacy.release(self.ids[0], made).reading()]
        epsilon, delta = float(options.get("epsilon", 0.0)), float(options.get("delta", 0.0))
        return [(made.privatize(epsilon, delta) if epsilon else made).reading()]

    def losses(self, power: int = 1) -> NDArray[np.float64]:
        """Return the mean of loss^power over the client's examples."""
        return self._learned().losses(power)

    def features(self) -> NDArray[Any]:
        """Return the mean output of the first dense layer."""
        return self._learned().features()

    def gradients(self) -> Vectors:
        """Return the full-batch gradient."""
        return self._learned().gradients()

    def trained(self, fresh: bool = True) -> Vectors:
        """Return the model after training now, by the user's own way where there is one."""
        if self.answers.train is None or not fresh:
            return self._learned().trained(fresh)
        if self.arrays is not None:
            self.message.content[self.request.arrays] = self.arrays
        reply = self.answers.train(self.message, self.context)
        return Vectors(flatten(next(iter(reply.content.array_records.values())))[None])

    def steps(self, fresh: bool = True) -> Vectors:
        """Return `trained` minus the model."""
        return Vectors(self.trained(fresh).numpy() - self.start)

    def last_layer(self) -> int:
        """Return how many parameters the model's last layer has."""
        return self._learned().last_layer()

    def _learned(self) -> Clients:
        held, memory = None, Memory(self.context)
        number = self.request.held_round
        if number >= 0 and memory.stamp("trained") == number:
            held = memory.vector("trained")
        return self.answers.learner(self.context).clients(self.start, self.request, held)
