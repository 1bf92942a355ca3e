"""The rounds of simulated training: one federation per seed, all seeds in one batch of models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fedcohort.datasets import Federation
from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.gates import Gate
from fedcohort.options import Count, ShareBelowOne, typed
from fedcohort.policies.base import Policy
from fedcohort.rounds import History, RoundRecord, is_over
from fedcohort.session import LOG
from fedcohort.simulate.aggregation import Mean
from fedcohort.simulate.clients import Embed, Insight
from fedcohort.simulate.clock import Availability, Durations, Pace
from fedcohort.simulate.local import Data, Job, LocalTraining, Trainer, config_errors, jobs, lr_at
from fedcohort.simulate.seed import Seed

BATCHED_MEANS = {"cuda"}  # devices that average the cohorts of all seeds at once
Federations = Federation | Callable[[int], Federation]
Models = nn.Module | Callable[[int], nn.Module]


class Simulation:
    """Federated training, one round per `step`; `simulate` is the short way to use it.

    Each of `seeds` has the `federation`, the `session` (policy, signals, ledger) and the `model` of
    one seed.

    Parameters
    ----------
    data : Federation or callable
        The clients' data, or a function from seed to them; all seeds share one data set.
    model : nn.Module or callable
        The model, or a function from seed to it. Any module without running statistics.
    policy, gate : str or object
        Who is selected, and who uploads: names of the registry, or objects, which are copied.
    cohort_size, seeds, evaluate_every, train_accuracy, holdout, dropout
        As in `fedcohort.experiments.config.Experiment`; `evaluate_every` may be 0 for never.
    local : LocalTraining, optional
        What a client does with the model.
    aggregation : str or object, default="mean"
        "mean", "size-weighted", "fedavgm", "fedadam", or an object derived from `aggregation.Mean`.
    availability : Availability, optional
        Who is there in each round; everybody by default.
    durations : Durations or callable, optional
        Compute speed and bandwidth of each client, or a function from (clients, seed) to them; all
        alike by default.
    pace : Pace, optional
        How long a round waits, and for whom; for everybody by default.
    insight : callable, optional
        ``insight(x, y)`` of one client, for policies that ask for that signal.
    embed : callable, optional
        ``embed(x)`` returns one vector per example, which are sketched instead of the inputs; see
        `embedding_of`. ``SketchMatch(embed="model")`` takes the model in training.
    trainer : callable, default=Trainer
        Makes the trainer; see `fedcohort.distribute.rounds`.
    **engine
        ``device``, ``engine``, ``precision``, ``max_memory`` and ``loss`` of the `Trainer`.
    """

    @config_errors()
    def __init__(
        self,
        data: Federations,
        model: Models,
        policy: str | Policy,
        *,
        cohort_size: int,
        local: LocalTraining | None = None,
        aggregation: str | Mean = "mean",
        availability: Availability | None = None,
        dropout: float = 0.0,
        durations: Durations | Callable[[Sequence[str], int], Durations] | None = None,
        pace: Pace | None = None,
        gate: str | Gate | None = None,
        seeds: Sequence[int] = (0,),
        evaluate_every: int = 1,
        train_accuracy: bool = False,
        holdout: float = 0.0,
        insight: Insight | None = None,
        embed: Embed | None = None,
        trainer: Callable[..., Trainer] = Trainer,
        **engine: Any,
    ) -> None:
        if not seeds or len(set(seeds)) < len(seeds):
            raise ConfigError(f"simulate: seeds={tuple(seeds)} must be different numbers")
        for name, share in (("dropout", dropout), ("holdout", holdout)):
            typed(ShareBelowOne, share, f"simulate: {name}")
        federations = [data if isinstance(data, Federation) else data(seed) for seed in seeds]
        models = [model if isinstance(model, nn.Module) else model(seed) for seed in seeds]
        dataset = federations[0].dataset
        if any(f.dataset is not dataset for f in federations):
            raise ConfigError("simulate: the federations of all seeds must share one data set")
        self.trainer = trainer(models[0], local or LocalTraining(), **engine)
        self.architecture = models[0]
        self.train_data = self.trainer.data(dataset.x, dataset.y)
        self.test_data = self.trainer.data(dataset.x_test, dataset.y_test)
        self.availability = availability or Availability()
        self.dropout, self.evaluate_every = dropout, evaluate_every
        self.train_accuracy = train_accuracy
        self.round_number = 0
        self._diverged = False
        self.seeds = [
            Seed(
                seed,
                federation,
                self.trainer,
                self.train_data,
                self.trainer.flat(start),
                policy=policy,
                cohort_size=cohort_size,
                aggregation=aggregation,
                durations=durations,
                pace=pace or Pace(),
                gate=gate,
                insight=insight,
                embed=embed,
                holdout=holdout,
            )
            for seed, federation, start in zip(seeds, federations, models, strict=True)
        ]

    @config_errors()
    def step(self) -> list[RoundRecord]:
        """Run one round of every seed and return one record per seed."""
        number = self.round_number
        for seed in self.seeds:
            seed.select(number, self.availability, self.dropout)
        trained = self._train(number)
        cohorts = torch.split(trained, [len(seed.training) for seed in self.seeds])
        means = self._means(trained)
        usable = [
            seed.aggregate(models, mean)
            for seed, models, mean in zip(self.seeds, cohorts, means, strict=True)
        ]
        if len(trained) and not any(usable) and not self._diverged:
            self._diverged = True
            LOG.warning(
                "round %d: training diverged, no client's model is finite; the learning rate is "
                "probably too high",
                number + 1,
            )
        due = self.evaluate_every and not (number + 1) % self.evaluate_every
        test = self._scores(self.test_data) if due else None
        training = self._scores(self.train_data) if due and self.train_accuracy else None
        for seed in self.seeds:  # while a GPU evaluates
            seed.finish()
        self.round_number += 1
        unknown = [(None, None)] * len(self.seeds)
        measured = (unknown if rows is None else rows.tolist() for rows in (test, training))
        return [
            seed.record(accuracy, loss, train_accuracy)
            for seed, (accuracy, loss), (train_accuracy, _) in zip(
                self.seeds, *measured, strict=True
            )
        ]

    def _train(self, number: int) -> torch.Tensor:
        """Train the cohorts of all seeds together, one row per client, in their order."""
        models = [seed.model for seed in self.seeds]
        work: list[Job] = []
        for row, seed in enumerate(self.seeds):
            rows = [row] * len(seed.training)
            for i, client in enumerate(seed.training):
                if client in seed.differences:  # a gate held it back: it goes on from its model
                    rows[i] = len(models)
                    models.append(seed.model + seed.differences[client])
            parts = [seed.federation.parts[client] for client in seed.training]
            work += jobs(self.trainer, seed.seed, number, seed.training, parts, rows)
        if not work:
            return models[0].new_empty((0, len(models[0])))
        lr = lr_at(self.trainer, number)
        return self.trainer.train(torch.stack(models), work, self.train_data, lr)

    def _means(self, trained: torch.Tensor) -> list[torch.Tensor] | list[None]:
        """Return the next models where a GPU can average all cohorts at once, else None."""
        alike = len({len(seed.training) for seed in self.seeds}) == 1 < len(self.seeds)
        plain = all(seed.takes_plain_mean() for seed in self.seeds)
        if trained.device.type in BATCHED_MEANS and alike and plain:
            current = torch.stack([seed.model for seed in self.seeds])
            means = Mean().step(current, trained.view(len(current), -1, trained.shape[1]), ())
            if bool(torch.isfinite(means.sum())):
                return list(means)
        return [None] * len(self.seeds)

    def _scores(self, data: Data) -> torch.Tensor:
        return self.trainer.scores(torch.stack([seed.model for seed in self.seeds]), data)

    def advance(
        self,
        histories: Sequence[History],
        rounds: int,
        patience: int | None = None,
        on_round: Callable[[list[RoundRecord]], None] | None = None,
    ) -> None:
        """Go on until there are so many rounds, or no seed has improved for `patience` evaluations.

        Records are added to the history of their seed; then `on_round` is called with them.
        """
        while not is_over(histories, rounds, patience):
            records = self.step()
            for history, record in zip(histories, records, strict=True):
                history.rounds.append(record)
            if on_round is not None:
                on_round(records)

    def model(self, row: int = 0) -> nn.Module:
        """Return a copy of the current global model of a seed, by its position in `seeds`."""
        return self.trainer.load(self.seeds[row].model, copy.deepcopy(self.architecture))

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on."""
        return {
            "round_number": self.round_number,
            "seeds": [seed.state_dict() for seed in self.seeds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: the same seeds and the same architecture."""
        saved_seeds = [(saved["seed"], saved["model"].shape[0]) for saved in state["seeds"]]
        expected = [(seed.seed, len(seed.model)) for seed in self.seeds]
        if saved_seeds != expected:
            raise InvalidCheckpoint(
                f"the checkpoint is of (seed, parameters) {saved_seeds}, this is {expected}"
            )
        self.round_number = int(state["round_number"])
        for seed, saved in zip(self.seeds, state["seeds"], strict=True):
            seed.load_state_dict(saved)


def simulate(
    data: Federations,
    model: Models,
    policy: str | Policy,
    *,
    cohort_size: int,
    rounds: int,
    patience: int | None = None,
    on_round: Callable[[list[RoundRecord]], None] | None = None,
    **options: Any,
) -> list[History]:
    """Train a model by federated learning, as `Simulation` does, and return a history per seed.

    `patience` and `on_round` are those of `Simulation.advance`.

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
    for name, value in (("rounds", rounds), ("patience", 1 if patience is None else patience)):
        typed(Count, value, f"simulate: {name}")
    simulation = Simulation(data, model, policy, cohort_size=cohort_size, **options)
    histories = [History(seed.seed) for seed in simulation.seeds]
    simulation.advance(histories, rounds, patience, on_round)
    return histories
