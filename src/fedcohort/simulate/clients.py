"""What simulated clients answer: every signal of the catalog, computed from their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedcohort.datasets import Federation
from fedcohort.exceptions import ConfigError
from fedcohort.policies.base import Policy
from fedcohort.rounds import ClientId, stream
from fedcohort.signals.projection import Projection
from fedcohort.signals.updates import last_layer, update_distance
from fedcohort.simulate.engine.jobs import Data, Job
from fedcohort.simulate.engine.trainer import Trainer
from fedcohort.simulate.projector import project
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

Readings = dict[ClientId, Any]
Insight = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Collector:
    """The clients of one seed, as seen by the session's `collect`.

    Parameters
    ----------
    trainer : Trainer
        Computes losses, features, gradients and local training.
    data : Data
        All training examples, on the trainer's device.
    federation : Federation
        Who holds which examples.
    policy : Policy
        Its `signal_options` say how signals are made.
    seed : int
        Of the local batches of clients that train for a query.
    initial : torch.Tensor
        The model that profiles are taken under, so that a newcomer's is comparable.
    insight : callable, optional
        ``insight(x, y)`` of one client's examples, for the signal of that name.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: Data,
        federation: Federation,
        policy: Policy,
        seed: int,
        initial: torch.Tensor,
        insight: Insight | None = None,
    ) -> None:
        self.trainer, self.data, self.federation = trainer, data, federation
        self.policy, self.seed, self.initial, self.insight = policy, seed, initial, insight
        self.model = initial
        self.round_number = 0
        self.held: dict[ClientId, torch.Tensor] = {}
        self._projections: dict[tuple[object, ...], Projection] = {}

    def __call__(self, name: str, clients: Sequence[ClientId]) -> Readings:
        """Answer a query of the session."""
        answer = getattr(self, f"_{name}", None)
        if answer is None:
            raise ConfigError(f"the simulator has no client-side signal {name!r}")
        readings: Readings = answer(clients, dict(self.policy.signal_options.get(name, {})))
        return readings

    def replies(
        self,
        names: frozenset[str],
        clients: Sequence[ClientId],
        trained: torch.Tensor,
        durations: Mapping[ClientId, float],
    ) -> dict[str, Readings]:
        """Return what comes with the updates; `trained` has a row a client."""
        answers: dict[str, Readings] = {}
        for name in sorted(names):
            if name == "duration":
                answers[name] = {c: durations[c] for c in clients}
            elif name in ("update_distance", "update_sketch"):
                options = dict(self.policy.signal_options.get(name, {}))
                answers[name] = getattr(self, f"_{name}")(clients, trained, options)
            else:
                answers[name] = self(name, clients)
        return answers

    def remember(self, clients: Sequence[ClientId], trained: torch.Tensor) -> None:
        """Keep the models that clients hold now, where the policy sketches those (literally)."""
        if not self.policy.signal_options.get("model_sketch", {}).get("fresh", True):
            self.held = dict(zip(clients, trained.clone(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return what later answers depend on, the data aside."""
        return {
            "initial": self.initial.cpu().numpy(),
            "held": {c: model.cpu().numpy() for c, model in self.held.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        device = self.initial.device
        self.initial = torch.from_numpy(state["initial"].copy()).to(device)
        self.held = {c: torch.from_numpy(m.copy()).to(device) for c, m in state["held"].items()}

    def _jobs(self, clients: Sequence[ClientId]) -> list[Job]:
        return [Job(0, self.federation.parts[c]) for c in clients]

    def _num_examples(self, clients: Sequence[ClientId], options: dict[str, Any]) -> Readings:
        return {c: np.int64(len(self.federation.parts[c])) for c in clients}

    def _race_sketch(self, clients: Sequence[ClientId], options: dict[str, Any]) -> Readings:
        epsilon, delta = options.pop("epsilon", 0.0), options.pop("delta", 0.0)
        blank = self._blank_sketch(**options)
        dataset, parts = self.federation.dataset, self.federation.parts
        readings = {}
        for client in clients:
            sketch = blank.empty_like()
            x = dataset.x[parts[client]].reshape(len(parts[client]), -1)
            sketch.add(x, dataset.y[parts[client]] if options.get("label_weight") else None)
            if epsilon:
                noise = stream(self.seed, "sketch noise", client)
                sketch = sketch.privatize(epsilon, delta, rng=noise)
            readings[client] = sketch.reading()
        return readings

    def _blank_sketch(
        self, rows: int, bits: int, seed: int = 0, label_weight: float = 0.0, center: bool = False
    ) -> RaceSketch:
        """An empty sketch; the center is the mean of the test set, which the server holds."""
        dataset = self.federation.dataset
        flat = dataset.x_test.reshape(len(dataset.x_test), -1)
        transform = Transform(
            center=flat.mean(axis=0) if center else 0.0,
            unit=True,
            classes=dataset.classes if label_weight else 0,
            label_weight=label_weight,
        )
        return RaceSketch.srp(flat.shape[1], rows, bits, seed, transform=transform)

    def _insight(self, clients: Sequence[ClientId], options: dict[str, Any]) -> Readings:
        if self.insight is None:
            raise ConfigError("the policy asks for 'insight': pass insight=function(x, y)")
        dataset, parts = self.federation.dataset, self.federation.parts
        return {c: self.insight(dataset.x[parts[c]], dataset.y[parts[c]]) for c in clients}

    def _feature_profile(self, clients: Sequence[ClientId], options: dict[str, Any]) -> Readings:
        rows = self.trainer.features(self.initial, self._jobs(clients), self.data)
        return dict(zip(clients, rows, strict=True))

    def _loss(self, clients: Sequence[ClientId], options: dict[str, Any]) -> Readings:
        losses = self.trainer.losses(self.model, self._jobs(clients), self.data)
        return dict(zip(clients, losses, strict=True))

    def _loss_rms(self, clients: Sequence[ClientId], options: dict[str, Any]) -> Readings:
        means = self.trainer.losses(self.model, self._jobs(clients), self.data, power=2)
        return dict(zip(clients, np.sqrt(means), strict=True))

    def _model_sketch(self, clients: Sequence[ClientId], options: dict[str, Any]) -> Readings:
        """Sketch models after fresh local training, or, literally, the models clients hold.

        Or only their steps away from the global model.
        """
        if options.pop("fresh", True):
            models = self._trained(clients)
        else:
            models = torch.stack([self.held.get(c, self.model) for c in clients])
        if options.pop("step", False):
            models -= self.model
        return self._projected(clients, models, options)

    def _gradient_sketch(self, clients: Sequence[ClientId], options: dict[str, Any]) -> Readings:
        gradients = self.trainer.gradients(self.model, self._jobs(clients), self.data)
        return self._projected(clients, gradients, options)

    def _update_sketch(
        self, clients: Sequence[ClientId], trained: torch.Tensor, options: dict[str, Any]
    ) -> Readings:
        return self._projected(clients, trained - self.model, options)

    def _update_distance(
        self, clients: Sequence[ClientId], trained: torch.Tensor, options: dict[str, Any]
    ) -> Readings:
        """Distances of updates from their mean (paper 1, eq. 14), with FedACS's options."""
        if options.get("insight_step", False):
            updates = -self.trainer.gradients(self.model, self._jobs(clients), self.data)
        else:
            updates = trained - self.model
        if options.get("last_layer", False):
            named = dict(self.trainer.worker.model.named_parameters())
            updates = updates[:, -last_layer(list(named), [p.numel() for p in named.values()]) :]
        distances = update_distance(
            updates.cpu().numpy(),
            [len(self.federation.parts[c]) for c in clients],
            weighted=options.get("weighted", False),
            scale_by_size=options.get("scale_by_size", False),
        )
        return dict(zip(clients, distances, strict=True))

    def _trained(self, clients: Sequence[ClientId]) -> torch.Tensor:
        """Local training from the current model, on batches of its own so that none is reused."""
        parts, number = self.federation.parts, self.round_number
        jobs = [self.trainer.job(self.seed, number, f"query/{c}", parts[c]) for c in clients]
        lr = self.trainer.local.lr_at(number)
        return self.trainer.train(self.model, jobs, self.data, lr).clone()

    def _projected(
        self, clients: Sequence[ClientId], vectors: torch.Tensor, options: dict[str, Any]
    ) -> Readings:
        key = tuple(sorted(options.items()))
        if key not in self._projections:
            self._projections[key] = Projection(self.trainer.size, **options)
        rows = project(self._projections[key], vectors)
        return dict(zip(clients, np.asarray(rows, np.float32), strict=True))
