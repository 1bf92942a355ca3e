"""The rounds of simulated training: a session a seed, all seeds one batch of models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedcohort.datasets import Federation
from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.policies.base import POLICIES, Policy
from fedcohort.rounds import ClientId, Selection, stream
from fedcohort.session import Session
from fedcohort.simulate.aggregation import AGGREGATIONS
from fedcohort.simulate.availability import Always, Availability, Durations, dropouts
from fedcohort.simulate.collect import Collector, Insight
from fedcohort.simulate.history import RoundRecord
from fedcohort.simulate.local import LocalTraining
from fedcohort.simulate.trainer import Trainer

Federations = Federation | Callable[[int], Federation]
Models = nn.Module | Callable[[int], nn.Module]
Policies = str | Policy | Callable[[], Policy]


class Aggregation(Protocol):
    """What turns trained models into the next global one (see `simulate.aggregation`)."""

    def step(
        self,
        current: torch.Tensor,
        updates: torch.Tensor,
        sizes: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> torch.Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class _Run:
    """The moving parts of one seed."""

    seed: int
    federation: Federation
    clients: tuple[ClientId, ...]
    session: Session
    collector: Collector
    aggregation: Aggregation
    durations: Durations
    selection: Selection = Selection(())
    finished: tuple[ClientId, ...] = ()
    clock: float = 0.0


class Simulation:
    """Federated training, one round a `step`; `simulate` is the short way to use it.

    Parameters are those of `simulate`.
    """

    def __init__(
        self,
        data: Federations,
        model: Models,
        policy: Policies,
        *,
        cohort_size: int,
        local: LocalTraining | None = None,
        aggregation: str | Aggregation = "mean",
        availability: Availability | None = None,
        dropout: float = 0.0,
        durations: Durations | None = None,
        seeds: Sequence[int] = (0,),
        device: str = "auto",
        engine: str = "auto",
        loss: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "cross-entropy",
        evaluate_every: int = 1,
        insight: Insight | None = None,
    ) -> None:
        if not seeds or len(set(seeds)) < len(seeds):
            raise ConfigError(f"simulate: seeds={tuple(seeds)} must be different numbers")
        if not 0 <= dropout < 1:
            raise ConfigError(f"simulate: dropout={dropout} must lie in [0, 1)")
        federations = [data if isinstance(data, Federation) else data(seed) for seed in seeds]
        models = [model if isinstance(model, nn.Module) else model(seed) for seed in seeds]
        dataset = federations[0].dataset
        if any(f.dataset is not dataset for f in federations):
            raise ConfigError("simulate: the federations of all seeds must share one data set")
        self.trainer = Trainer(
            models[0], local or LocalTraining(), loss=loss, device=device, engine=engine
        )
        self.local = self.trainer.local
        self.train_data = self.trainer.data(dataset.x, dataset.y)
        self.test_data = self.trainer.data(dataset.x_test, dataset.y_test)
        self.params = torch.stack([self.trainer.flat(m) for m in models])
        self.availability = availability or Always()
        self.dropout, self.evaluate_every = dropout, evaluate_every
        self.model_bytes = self.params[0].numel() * self.params.element_size()
        self.round_number = 0
        self._runs = [
            self._run(seed, f, policy, cohort_size, aggregation, durations, i, insight)
            for i, (seed, f) in enumerate(zip(seeds, federations, strict=True))
        ]

    def _run(
        self,
        seed: int,
        federation: Federation,
        policy: Policies,
        cohort_size: int,
        aggregation: str | Aggregation,
        durations: Durations | None,
        row: int,
        insight: Insight | None,
    ) -> _Run:
        clients = tuple(sorted(federation.parts))
        if cohort_size > len(clients):
            raise ConfigError(
                f"simulate: cohort_size={cohort_size} exceeds the {len(clients)} clients"
            )
        chosen = make_policy(policy)
        session = Session(chosen, cohort_size=cohort_size, seed=seed, model_bytes=self.model_bytes)
        collector = Collector(
            self.trainer, self.train_data, federation, chosen, seed, self.params[row], insight
        )
        return _Run(
            seed,
            federation,
            clients,
            session,
            collector,
            make_aggregation(aggregation),
            durations or Durations.draw(clients, seed, sigma=0.0),
        )

    @property
    def sessions(self) -> list[Session]:
        """The session of each seed, with its policy, signals and ledger."""
        return [run.session for run in self._runs]

    @property
    def federations(self) -> list[Federation]:
        """Who holds which examples, for each seed."""
        return [run.federation for run in self._runs]

    def step(self) -> list[RoundRecord]:
        """Run one round of every seed and return a record each."""
        number = self.round_number
        jobs = []
        for row, run in enumerate(self._runs):
            self._select(run, row)
            parts = run.federation.parts
            jobs += [self.trainer.job(run.seed, number, c, parts[c], row) for c in run.finished]
        trained = None
        if jobs:
            lr = self.local.lr_at(number)
            trained = self.trainer.train(self.params, jobs, self.train_data, lr)
        self.params = self._aggregate(trained)
        self.round_number += 1
        return self._records(number)

    def _select(self, run: _Run, row: int) -> None:
        """Pick the cohort of one seed and draw who drops out."""
        rng = stream(run.seed, "availability", self.round_number)
        available = self.availability.available(self.round_number, run.clients, rng)
        run.collector.model = self.params[row]
        run.collector.round_number = self.round_number
        run.selection = run.session.begin(available, run.collector)
        run.finished = run.selection.clients
        if self.dropout:
            done, _ = dropouts(
                run.finished, self.dropout, stream(run.seed, "dropout", self.round_number)
            )
            run.finished = tuple(done)

    def _aggregate(self, trained: torch.Tensor | None) -> torch.Tensor:
        """Average each seed's updates; those that are not finite count as not sent."""
        params = self.params.clone()
        first = 0
        for row, run in enumerate(self._runs):
            last = first + len(run.finished)
            updates = None if trained is None else trained[first:last]
            first = last
            if updates is not None and len(updates):
                updates = self._drop_diverged(run, updates)
            self._finish(run, updates)
            if updates is not None and len(updates):
                sizes = [len(run.federation.parts[c]) for c in run.finished]
                weights = _weights_of(run.selection, run.finished)
                params[row] = run.aggregation.step(self.params[row], updates, sizes, weights)
        return params

    def _drop_diverged(self, run: _Run, updates: torch.Tensor) -> torch.Tensor:
        finite = torch.isfinite(updates.sum(dim=1)).cpu().numpy()
        if finite.all():
            return updates
        run.finished = tuple(c for c, ok in zip(run.finished, finite, strict=True) if ok)
        return updates[torch.from_numpy(np.flatnonzero(finite)).to(updates.device)]

    def _finish(self, run: _Run, updates: torch.Tensor | None) -> None:
        seconds = {c: self._seconds(run, c) for c in run.selection.clients}
        replies = {}
        if updates is not None and len(updates):
            needs = run.session.policy.needs.reply
            replies = run.collector.replies(needs, run.finished, updates, seconds)
            if not run.session.policy.signal_options.get("model_sketch", {}).get("fresh", True):
                run.collector.held = dict(zip(run.finished, updates.clone(), strict=True))
        run.session.finish(replies, run.finished)
        run.clock += max(seconds.values())

    def _seconds(self, run: _Run, client: ClientId) -> float:
        n = len(run.federation.parts[client])
        steps = self.local.steps
        samples = n * self.local.epochs if steps is None else steps * self.local.batch_size
        return run.durations.seconds(client, samples, 2 * self.model_bytes)

    def _records(self, number: int) -> list[RoundRecord]:
        accuracy: Sequence[float | None] = [None] * len(self._runs)
        loss: Sequence[float | None] = [None] * len(self._runs)
        if self.evaluate_every and (number + 1) % self.evaluate_every == 0:
            measured = self.trainer.evaluate(self.params, self.test_data)
            accuracy, loss = measured[0].tolist(), measured[1].tolist()
        return [
            RoundRecord(
                run.seed,
                number,
                accuracy[row],
                loss[row],
                run.selection.clients,
                run.finished,
                run.session.ledger.total("up", number),
                run.session.ledger.total("down", number),
                run.clock,
            )
            for row, run in enumerate(self._runs)
        ]

    def model(self, seed: int | None = None) -> nn.Module:
        """Return the current global model of one seed (the first by default)."""
        seeds = [run.seed for run in self._runs]
        row = 0 if seed is None else seeds.index(seed)
        return self.trainer.load(self.params[row], copy.deepcopy(self.trainer.model))

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on."""
        return {
            "round_number": self.round_number,
            "params": self.params.cpu().numpy(),
            "initial": np.stack([run.collector.initial.cpu().numpy() for run in self._runs]),
            "runs": [
                {
                    "seed": run.seed,
                    "clock": run.clock,
                    "session": run.session.state_dict(),
                    "aggregation": run.aggregation.state_dict(),
                    "held": {c: t.cpu().numpy() for c, t in run.collector.held.items()},
                }
                for run in self._runs
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        seeds = [run.seed for run in self._runs]
        found = [saved["seed"] for saved in state["runs"]]
        if found != seeds or state["params"].shape != tuple(self.params.shape):
            raise InvalidCheckpoint(
                f"the checkpoint is of seeds {found} and {state['params'].shape[-1]} parameters, "
                f"this is of seeds {seeds} and {self.params.shape[-1]}"
            )
        self.round_number = int(state["round_number"])
        self.params = torch.from_numpy(state["params"].copy()).to(self.params.device)
        for run, saved, initial in zip(self._runs, state["runs"], state["initial"], strict=True):
            run.session.load_state_dict(saved["session"])
            run.aggregation.load_state_dict(saved["aggregation"])
            run.clock = float(saved["clock"])
            device = self.params.device
            run.collector.initial = torch.from_numpy(initial.copy()).to(device)
            run.collector.held = {
                c: torch.from_numpy(v.copy()).to(device) for c, v in saved["held"].items()
            }


def make_policy(policy: Policies) -> Policy:
    """Return a fresh policy from a name, an example or a factory."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ConfigError(f"unknown policy {policy!r}; known: {', '.join(sorted(POLICIES))}")
        return POLICIES[policy]()
    return copy.deepcopy(policy) if isinstance(policy, Policy) else policy()


def make_aggregation(aggregation: str | Aggregation) -> Aggregation:
    """Return a fresh aggregation from a name or an example."""
    if not isinstance(aggregation, str):
        return copy.deepcopy(aggregation)
    if aggregation not in AGGREGATIONS:
        known = ", ".join(sorted(AGGREGATIONS))
        raise ConfigError(f"unknown aggregation {aggregation!r}; known: {known}")
    made: Aggregation = AGGREGATIONS[aggregation]()
    return made


def _weights_of(selection: Selection, finished: tuple[ClientId, ...]) -> list[float] | None:
    """The selection's weights of those that finished."""
    if selection.weights is None:
        return None
    weights = dict(zip(selection.clients, selection.weights, strict=True))
    return [weights[c] for c in finished]
