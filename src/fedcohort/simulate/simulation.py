"""The rounds of simulated training: one federation per seed, all seeds in one batch of models.

`simulate`: federated training from a call, with checkpoints.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcohort import storage
from fedcohort.datasets import Federation
from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.gates import Gate
from fedcohort.progress import watched
from fedcohort.session import LOG, Session
from fedcohort.simulate.aggregation import equal_means
from fedcohort.simulate.availability import Always, Availability, Durations
from fedcohort.simulate.clients import Embed, Insight
from fedcohort.simulate.history import History, RoundRecord, record_from
from fedcohort.simulate.local import (
    Job,
    LocalTraining,
    MultiDeviceTrainer,
    Trainer,
    config_errors,
    jobs,
    lr_at,
)
from fedcohort.simulate.models import embedding_of
from fedcohort.simulate.seed import Aggregation, Policies, Seed

BATCHED_MEANS = {"cuda"}  # devices that average the cohorts of all seeds at once
Federations = Federation | Callable[[int], Federation]
Models = nn.Module | Callable[[int], nn.Module]


class Options(TypedDict, total=False):
    """The optional arguments of `Simulation`, which `simulate` passes on."""

    local: LocalTraining | None
    aggregation: str | Aggregation
    availability: Availability | None
    dropout: float
    durations: Durations | None
    gate: str | Gate | None
    seeds: Sequence[int]
    device: str
    engine: str
    precision: str
    max_memory: int | None
    loss: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    evaluate_every: int
    insight: Insight | None
    embed: Embed | nn.Module | None
    trainer: Callable[..., Trainer]


class Simulation:
    """Federated training, one round per `step`; `simulate` is the short way to use it.

    Parameters
    ----------
    data : Federation or callable
        The clients' data, or a function from seed to them; all seeds share one data set.
    model : nn.Module or callable
        The model, or a function from seed to it. Any module without running statistics.
    policy : str, Policy or callable
        A name of the registry, a policy (copied for each seed) or a function that makes one.
    cohort_size : int
        Clients per round.
    local : LocalTraining, optional
        What a client does with the model.
    aggregation : str or object, default="mean"
        "mean", "size-weighted", "agreeing-mean", "fedavgm", "fedadam", or an object with a `step`
        of its own.
    availability : Availability, optional
        Who is there in each round; everybody by default.
    dropout : float, default=0
        Probability that a selected client does not finish.
    durations : Durations, optional
        Compute speed and bandwidth of each client; all alike by default.
    gate : str or Gate, optional
        Decides after local training who uploads.
    seeds : sequence of int, default=(0,)
        Each is a federation of its own.
    device, engine : str, default="auto"
        Where and how the models train; see `Trainer`. Several devices, separated by commas
        ("cuda:0,cuda:1"), share the clients of all seeds.
    precision : {"float32", "tf32", "bf16"}
        How products are rounded; see `Trainer`.
    max_memory : int, optional
        Bytes for clients that train side by side; see `Trainer`.
    loss : str or callable, default="cross-entropy"
        Or a function (outputs, labels) -> loss of each example.
    evaluate_every : int, default=1
        Rounds between evaluations on the test set; 0 for never.
    insight : callable, optional
        ``insight(x, y)`` of one client, for policies that ask for that signal.
    embed : callable or nn.Module, optional
        ``embed(x)`` returns one vector per example, and sketches are of those instead of the
        inputs. Of a public module, the outputs of the first dense layer that runs.
        ``SketchMatch(embed="model")`` takes the model in training instead.
    trainer : callable, default=Trainer
        Makes the trainer, with `Trainer`'s arguments; see `fedcohort.distribute.rounds`.
    """

    @config_errors()
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
        gate: str | Gate | None = None,
        seeds: Sequence[int] = (0,),
        device: str = "auto",
        engine: str = "auto",
        precision: str = "float32",
        max_memory: int | None = None,
        loss: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "cross-entropy",
        evaluate_every: int = 1,
        insight: Insight | None = None,
        embed: Embed | nn.Module | None = None,
        trainer: Callable[..., Trainer] = Trainer,
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
        if "," in device and trainer is Trainer:
            trainer = MultiDeviceTrainer
        self.trainer = trainer(
            models[0],
            local or LocalTraining(),
            loss=loss,
            device=device,
            engine=engine,
            precision=precision,
            max_memory=max_memory,
        )
        self.architecture = models[0]
        self.train_data = self.trainer.data(dataset.x, dataset.y)
        self.test_data = self.trainer.data(dataset.x_test, dataset.y_test)
        self.availability = availability or Always()
        self.dropout, self.evaluate_every = dropout, evaluate_every
        self.round_number = 0
        self._diverged = False
        self.seeds = [
            Seed(
                seed,
                federation,
                self.trainer,
                self.train_data,
                self.trainer.flat(own),
                policy=policy,
                cohort_size=cohort_size,
                aggregation=aggregation,
                durations=durations,
                gate=gate,
                insight=insight,
                embed=embedding_of(embed) if isinstance(embed, nn.Module) else embed,
            )
            for seed, federation, own in zip(seeds, federations, models, strict=True)
        ]

    @property
    def sessions(self) -> list[Session]:
        """The session of each seed, with its policy, signals and ledger."""
        return [seed.session for seed in self.seeds]

    @property
    def federations(self) -> list[Federation]:
        """Who holds which examples, for each seed."""
        return [seed.federation for seed in self.seeds]

    @config_errors()
    def step(self) -> list[RoundRecord]:
        """Run one round of every seed and return one record per seed."""
        number = self.round_number
        for seed in self.seeds:
            seed.select(number, self.availability, self.dropout)
        trained = self._train(number)
        means = self._means(trained)
        finite = self._finite(trained, means)
        if len(finite) and not finite.any() and not self._diverged:
            self._diverged = True
            LOG.warning(
                "round %d: training diverged, no client's model is finite; the learning rate is "
                "probably too high",
                number,
            )
        for row, (seed, rows) in enumerate(zip(self.seeds, self._cohorts(), strict=True)):
            mean = means[row] if means is not None and finite[rows].all() else None
            seed.aggregate(trained[rows], finite[rows], mean)
        scores = self._scores(number)
        for seed in self.seeds:  # while a GPU evaluates
            seed.finish()
        self.round_number += 1
        return self._records(number, scores)

    def _train(self, number: int) -> torch.Tensor:
        """Train the cohorts of all seeds together, one row per client, in their order."""
        models = [seed.model for seed in self.seeds]
        work: list[Job] = []
        for row, seed in enumerate(self.seeds):
            rows = []
            for start in seed.starts():
                rows.append(row if start is None else len(models))
                models += [] if start is None else [start]
            parts = [seed.federation.parts[client] for client in seed.training]
            work += jobs(self.trainer, seed.seed, number, seed.training, parts, rows)
        if not work:
            return models[0].new_empty((0, len(models[0])))
        lr = lr_at(self.trainer, number)
        return self.trainer.train(torch.stack(models), work, self.train_data, lr)

    def _cohorts(self) -> list[slice]:
        """Return the rows of each seed's clients among all trained models."""
        ends = np.cumsum([0, *(len(seed.training) for seed in self.seeds)]).tolist()
        return [slice(first, last) for first, last in pairwise(ends)]

    def _means(self, trained: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the next model of each seed if all trained models are finite.

        None where a seed does not take the plain mean. A GPU averages all cohorts at once, so that
        it need not wait for the host.
        """
        if not all(seed.takes_plain_mean() for seed in self.seeds):
            return None
        alike = len({len(seed.training) for seed in self.seeds}) == 1 < len(self.seeds)
        if trained.device.type in BATCHED_MEANS and alike:
            current = torch.stack([seed.model for seed in self.seeds])
            groups = trained.view(len(self.seeds), -1, trained.shape[1])
            return list(equal_means(current, groups))
        cohorts = zip(self.seeds, self._cohorts(), strict=True)
        return [seed.next_model(seed.training, trained[rows]) for seed, rows in cohorts]

    @staticmethod
    def _finite(trained: torch.Tensor, means: list[torch.Tensor] | None) -> NDArray[np.bool_]:
        """Return which trained models are finite; finite means show that all of them are."""
        if means is not None and bool(torch.isfinite(torch.stack(means).sum())):
            return np.ones(len(trained), bool)
        found: NDArray[np.bool_] = torch.isfinite(trained.sum(dim=1)).cpu().numpy()
        return found

    def _scores(self, number: int) -> torch.Tensor | None:
        """Evaluate the models where it is due, without waiting for a GPU."""
        if not self.evaluate_every or (number + 1) % self.evaluate_every:
            return None
        return self.trainer.scores(torch.stack([seed.model for seed in self.seeds]), self.test_data)

    def _records(self, number: int, scores: torch.Tensor | None) -> list[RoundRecord]:
        rows = [(None, None)] * len(self.seeds) if scores is None else scores.tolist()
        return [
            RoundRecord(
                seed=seed.seed,
                round=number,
                accuracy=accuracy,
                loss=loss,
                selected=seed.selection.clients,
                finished=seed.finished,
                bytes_up=seed.session.ledger.total("up", number),
                bytes_down=seed.session.ledger.total("down", number),
                seconds=seed.round_seconds,
                elapsed=seed.clock,
                skipped=seed.session.skipped,
                withheld=seed.withheld,
            )
            for seed, (accuracy, loss) in zip(self.seeds, rows, strict=True)
        ]

    def model(self, row: int = 0) -> nn.Module:
        """Return a copy of the current global model of a seed, by its position."""
        return self.trainer.load(self.seeds[row].model, copy.deepcopy(self.architecture))

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on."""
        return {
            "round_number": self.round_number,
            "seeds": [seed.state_dict() for seed in self.seeds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same seeds and the same architecture."""
        found = [(saved["seed"], saved["model"].shape[0]) for saved in state["seeds"]]
        expected = [(seed.seed, len(seed.model)) for seed in self.seeds]
        if found != expected:
            raise InvalidCheckpoint(
                f"the checkpoint is of (seed, parameters) {found}, this is {expected}"
            )
        self.round_number = int(state["round_number"])
        for seed, saved in zip(self.seeds, state["seeds"], strict=True):
            seed.load_state_dict(saved)


def simulate(
    data: Federations,
    model: Models,
    policy: Policies,
    *,
    cohort_size: int,
    rounds: int,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    on_round: Callable[[list[RoundRecord]], None] | None = None,
    progress: bool = False,
    **options: Unpack[Options],
) -> list[History]:
    """Train a model by federated learning and return one history per seed.

    Parameters
    ----------
    data : Federation or callable
        The clients' data, or a function from seed to them; all seeds share one data set.
    model : nn.Module or callable
        The model, or a function from seed to it. Any module without running statistics.
    policy : str, Policy or callable
        A name of the registry, a policy (copied for each seed) or a function that makes one.
    cohort_size, rounds : int
        Clients per round, and rounds.
    checkpoint : path, optional
        A file to continue from if it exists, and to save to every `checkpoint_every` rounds.
    on_round : callable, optional
        Called with the records of every round.
    progress : bool, default=False
        Show the rounds on standard error: a bar on a terminal, plain lines elsewhere.
    **options
        ``local`` (LocalTraining), ``aggregation`` (a name or an object), ``availability``,
        ``dropout`` (probability that a selected client does not finish), ``durations``, ``seeds``,
        ``device``, ``engine``, ``precision`` (kept in the history), ``max_memory``, ``loss``,
        ``evaluate_every``, ``insight``, ``embed``: see `Simulation`.

    Examples
    --------
    >>> from fedcohort.datasets import federate, load
    >>> from fedcohort.simulate import build, simulate
    >>> clients = federate(load("digits"), "shards", clients=20, seed=0)
    >>> model = build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
    >>> history = simulate(clients, model, "uniform", cohort_size=5, rounds=2)[0]
    >>> len(history.accuracy), len(history.selections[0])
    (2, 5)
    """
    if rounds < 1:
        raise ConfigError(f"simulate: rounds={rounds} must be at least 1")
    simulation = Simulation(data, model, policy, cohort_size=cohort_size, **options)
    precision = options.get("precision", "float32")
    histories = [History(s.seed, precision=precision) for s in simulation.sessions]
    if checkpoint is not None and Path(checkpoint).exists():
        _restore(simulation, histories, storage.load(checkpoint))
    left = rounds - simulation.round_number
    steps = (simulation.step() for _ in range(left))
    for records in watched(steps, "rounds", left, patience=0.0) if progress else steps:
        for history, record in zip(histories, records, strict=True):
            history.rounds.append(record)
        if on_round is not None:
            on_round(records)
        last = simulation.round_number == rounds
        if checkpoint is not None and (last or simulation.round_number % checkpoint_every == 0):
            records_so_far = [[asdict(r) for r in h.rounds] for h in histories]
            state = {"simulation": simulation.state_dict(), "records": records_so_far}
            storage.save(checkpoint, state)
    return histories


def _restore(simulation: Simulation, histories: list[History], state: dict[str, Any]) -> None:
    simulation.load_state_dict(state["simulation"])
    for history, records in zip(histories, state["records"], strict=True):
        history.rounds = [record_from(r) for r in records]
