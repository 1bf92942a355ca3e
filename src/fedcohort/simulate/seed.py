"""The federation of one seed: its session, its clients' answers, its aggregation, its clock."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fedcohort.datasets import Federation
from fedcohort.exceptions import ConfigError
from fedcohort.gates import GATES, Gate
from fedcohort.policies.base import POLICIES, Policy
from fedcohort.registry import make
from fedcohort.rounds import ClientId, Selection, stream
from fedcohort.session import Session
from fedcohort.simulate.aggregation import AGGREGATIONS, Mean
from fedcohort.simulate.availability import Always, Availability, Durations, dropouts
from fedcohort.simulate.clients import (
    Collector,
    Embed,
    Insight,
    Readings,
    SimulatedClients,
    TensorVectors,
)
from fedcohort.simulate.local import Data, Trainer

Policies = str | Policy | Callable[[], Policy]


class Aggregation(Protocol):
    """What turns trained models into the next global one (see `simulate.aggregation`)."""

    def step(
        self,
        current: torch.Tensor,
        updates: torch.Tensor,
        sizes: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Return the next global model."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""


class Seed:
    """One seed's federation; `Simulation` trains the cohorts of all seeds as one batch.

    A client that a gate held back keeps the difference between its model and the global one, and
    starts its next training from the global model plus that difference.
    """

    def __init__(
        self,
        seed: int,
        federation: Federation,
        trainer: Trainer,
        data: Data,
        model: torch.Tensor,
        *,
        policy: Policies,
        cohort_size: int,
        aggregation: str | Aggregation,
        durations: Durations | None,
        gate: str | Gate | None,
        insight: Insight | None,
        embed: Embed | None,
    ) -> None:
        self.clients = tuple(sorted(federation.parts))
        if cohort_size > len(self.clients):
            raise ConfigError(
                f"simulate: cohort_size={cohort_size} exceeds the {len(self.clients)} clients"
            )
        self.seed, self.federation, self.trainer, self.model = seed, federation, trainer, model
        self.model_bytes = model.numel() * model.element_size()
        self.aggregation: Aggregation = made(aggregation, AGGREGATIONS, "aggregation", object)
        self.session = Session(
            made(policy, POLICIES, "policy", Policy),
            cohort_size=cohort_size,
            seed=seed,
            gate=None if gate is None else made(gate, GATES, "gate", Gate),
            model_bytes=self.model_bytes,
            averaging=_averaging(self.aggregation),
        )
        everybody = SimulatedClients(
            self.clients, trainer, data, federation, seed, 0, model, insight, embed
        )
        self.collector = Collector(everybody, self.session.policy)
        self.durations = durations or Durations.draw(self.clients, seed, sigma=0.0)
        self.selection = Selection(())
        self.training: tuple[ClientId, ...] = ()
        self.finished: tuple[ClientId, ...] = ()
        self.withheld: tuple[ClientId, ...] = ()
        self.differences: dict[ClientId, torch.Tensor] = {}
        self.clock = self.round_seconds = 0.0
        self._known_seconds: dict[ClientId, float] = {}
        self._round_seconds: dict[ClientId, float] = {}
        self._replies: dict[str, Readings] = {}

    def select(self, number: int, availability: Availability, dropout: float) -> None:
        """Pick the cohort and draw who drops out before the end of training."""
        available: Sequence[ClientId] = self.clients
        if not isinstance(availability, Always):
            rng = stream(self.seed, "availability", number)
            available = availability.available(number, self.clients, rng)
        self.collector.model, self.collector.round_number = self.model, number
        if number == 0 and self.session.policy.profile_first:
            self.session.profile(self.clients, self.collector)
        self.selection = self.session.begin(available, self.collector)
        self.training = self.selection.clients
        if dropout:
            done, _ = dropouts(self.training, dropout, stream(self.seed, "dropout", number))
            self.training = tuple(done)

    def starts(self) -> list[torch.Tensor | None]:
        """Return the model that each training client starts from, None for the global one."""
        return [
            self.model + self.differences[c] if c in self.differences else None
            for c in self.training
        ]

    def takes_plain_mean(self) -> bool:
        """Whether the next model is the mean of all trained models, if all are finite."""
        plain = type(self.aggregation) is Mean and self.session.gate is None
        return plain and self.selection.weights is None and bool(self.training)

    def aggregate(
        self, trained: torch.Tensor, finite: NDArray[np.bool_], mean: torch.Tensor | None = None
    ) -> None:
        """Take the trained models, one row per training client, through gate and aggregation.

        Clients whose model is not finite count as not having answered. `mean` is the next model
        where it is known already. `finish` must follow; in between, a GPU can evaluate the new
        model.
        """
        clients, models = self._finite(trained, finite)
        self.finished = self._admitted(clients, models)
        updates = models
        if self.finished != clients:  # the usual case copies nothing
            position = {c: i for i, c in enumerate(clients)}
            rows = [position[c] for c in self.finished]
            updates = models[torch.tensor(rows, dtype=torch.int64, device=models.device)]
        self._round_seconds = {c: self._seconds(c) for c in self.selection.clients}
        self._replies = {}
        if self.finished:
            needs = self.session.policy.needs.reply
            given = (self.finished, updates, self._round_seconds)
            self._replies = self.collector.replies(needs, *given)
            if sent := self.collector.gradient_bytes():
                self.session.charge("update_distance", "up", dict.fromkeys(self.finished, sent))
            self.collector.remember(self.finished, updates)
            if mean is None:
                self._aggregate(updates)
            else:
                self.model = mean

    def finish(self) -> None:
        """End the session's round and advance the clock."""
        self.withheld = self.session.finish(self._replies, self.finished).withheld
        self.round_seconds = max(self._round_seconds.values())
        self.clock += self.round_seconds

    def _finite(
        self, trained: torch.Tensor, finite: NDArray[np.bool_]
    ) -> tuple[tuple[ClientId, ...], torch.Tensor]:
        if finite.all():
            return self.training, trained
        keep = np.flatnonzero(finite)
        clients = tuple(self.training[i] for i in keep)
        return clients, trained[torch.from_numpy(keep).to(trained.device)]

    def _admitted(
        self, clients: tuple[ClientId, ...], models: torch.Tensor
    ) -> tuple[ClientId, ...]:
        """Ask the gate who uploads, and let the others keep what they learned."""
        gate = self.session.gate
        if gate is None:
            return clients
        start = TensorVectors(self.model)
        announced = self.session.announce(start)
        answers = gate.probe(announced, start, TensorVectors(models))
        admitted = self.session.admit(dict(zip(clients, answers, strict=True)))
        for client, model in zip(clients, models, strict=True):
            if client in admitted or gate.on_skip == "reset":
                self.differences.pop(client, None)
            else:
                self.differences[client] = model - self.model
        return admitted

    def next_model(self, finished: Sequence[ClientId], updates: torch.Tensor) -> torch.Tensor:
        """Return the global model after the updates of these clients."""
        sizes = [len(self.federation.parts[c]) for c in finished]
        weights = self.selection.weights_of(finished)
        return self.aggregation.step(self.model, updates, sizes, weights)

    def _aggregate(self, updates: torch.Tensor) -> None:
        before = self.model
        self.model = self.next_model(self.finished, updates)
        if self.session.gate is not None:
            step = TensorVectors(before), TensorVectors(self.model)
            self.session.gate.aggregated(*step)
            if not self.session.gate.carries_over:
                self.differences.clear()

    def _seconds(self, client: ClientId) -> float:
        if client not in self._known_seconds:
            self._known_seconds[client] = self._simulated_seconds(client)
        return self._known_seconds[client]

    def _simulated_seconds(self, client: ClientId) -> float:
        local = self.trainer.local
        n = len(self.federation.parts[client])
        samples = n * local.epochs if local.steps is None else local.steps * local.batch_size
        return self.durations.seconds(client, samples, 2 * self.model_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on, the data aside."""
        return {
            "seed": self.seed,
            "clock": self.clock,
            "model": self.model.cpu().numpy(),
            "session": self.session.state_dict(),
            "collector": self.collector.state_dict(),
            "aggregation": self.aggregation.state_dict(),
            "differences": {c: d.cpu().numpy() for c, d in self.differences.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        device = self.model.device
        self.clock = float(state["clock"])
        self.model = torch.from_numpy(state["model"].copy()).to(device)
        self.session.load_state_dict(state["session"])
        self.collector.load_state_dict(state["collector"])
        self.aggregation.load_state_dict(state["aggregation"])
        self.differences = {
            c: torch.from_numpy(d.copy()).to(device) for c, d in state["differences"].items()
        }


def _averaging(aggregation: Aggregation) -> Literal["equal", "size"] | None:
    """Return how models are averaged; None for an object that does not say."""
    weighted = getattr(aggregation, "weighted", None)
    return None if weighted is None else "size" if weighted else "equal"


def made(thing: Any, registry: Any, what: str, kind: type) -> Any:
    """Return a fresh object from a registry's name, an example of it or a factory."""
    if isinstance(thing, str):
        return make(what, thing, registry)
    is_factory = isinstance(thing, type) or not isinstance(thing, kind)
    return thing() if is_factory else copy.deepcopy(thing)
