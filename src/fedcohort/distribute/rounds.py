"""Rounds whose cohort is too large for one worker: clients train on Ray actors.

Jobs are cut into groups of a fixed size, whatever the number of actors, and every group is
trained by itself. Which actor trains a group, and when, therefore changes no bit of the result;
the trained models come back in the order of the jobs and are aggregated in that order.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcohort.distribute.cluster import Pool, need_ray
from fedcohort.exceptions import ConfigError
from fedcohort.simulate.local import Data, Job, LocalTraining, Trainer, by_length

Array = NDArray[np.float32]


class ShardedTrainer(Trainer):
    """Trains cohorts on the actors of the cluster that this program is connected to.

    Give it to a simulation as ``trainer=partial(ShardedTrainer, workers=8)``. Signals and
    evaluation stay in this process.

    Parameters
    ----------
    model, local, options
        As in `Trainer`; `device` is this process's own.
    workers : int
        Actors. Each holds the architecture; the data set lies once on every node.
    group : int, default=16
        Clients that train side by side on an actor. The result depends on it, by rounding, and
        not on `workers`.
    cpus, gpus : float
        Of each actor, which trains on a GPU if it has a share of one.
    timeout : float, default=120
        Seconds to wait while no actor is working.
    """

    def __init__(
        self,
        model: nn.Module,
        local: LocalTraining | None = None,
        *,
        workers: int,
        group: int = 16,
        cpus: float = 1,
        gpus: float = 0,
        timeout: float = 120,
        **options: Any,
    ) -> None:
        if workers < 1 or group < 1:
            raise ConfigError(f"workers={workers} and group={group} must be at least 1")
        super().__init__(model, local, **options)
        self.workers, self.group, self.timeout = workers, group, timeout
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        own = options | {"device": "cuda" if gpus else "cpu"}
        self._recipe = (model, self.training, own, max(1, int(cpus)))
        self._data: Data | None = None
        self._pool: Pool | None = None

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float | None = None
    ) -> Tensor:
        """Train every job from its row of `params`; as `Trainer.train`, on the actors."""
        rows = self._rows(params, jobs)
        out = torch.empty(len(jobs), self.size)
        groups = self._groups(jobs)
        pool = self._pool_with(data)
        start = need_ray().put(rows.cpu().numpy())
        rate = self.training.lr if lr is None else lr

        def begin(actor: Any, number: int) -> Any:
            return actor.train.remote(start, [jobs[i] for i in groups[number]], rate)

        for group, trained in zip(groups, pool.run(len(groups), begin), strict=True):
            out[group] = torch.tensor(trained)
        return out.to(self.device)

    def close(self) -> None:
        """End the actors; the next round would start new ones."""
        if self._pool is not None:
            self._pool.close()
        self._pool = self._data = None

    def _groups(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Cut the jobs, those with most steps first, so that a group has little padding."""
        ranked = by_length(jobs)
        return [ranked[i : i + self.group] for i in range(0, len(ranked), self.group)]

    def _pool_with(self, data: Data) -> Pool:
        """Return the actors that hold these data; other data take other actors."""
        if self._pool is None or self._data is not data:
            self.close()
            ray = need_ray()
            stored = ray.put((data.x.cpu().numpy(), data.y.cpu().numpy()))
            kind = ray.remote(_Shard).options(**self._resources)
            self._pool = Pool(
                lambda: kind.remote(*self._recipe, stored), self.workers, self.timeout
            )
            self._data = data
        return self._pool


class _Shard:
    """An actor: a trainer and the data set."""

    def __init__(
        self,
        model: nn.Module,
        local: LocalTraining,
        options: dict[str, Any],
        threads: int,
        data: tuple[NDArray[Any], NDArray[Any]],
    ) -> None:
        torch.set_num_threads(threads)
        self.trainer = Trainer(model, local, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the arrays are shared and read-only; so is our use
            self.data = self.trainer.data(*data)

    def ready(self) -> None:
        """Return once the actor is running."""

    def train(self, params: Array, jobs: Sequence[Job], lr: float) -> Array:
        """Train a group of jobs."""
        rows = torch.tensor(params, device=self.trainer.device)
        trained: Array = self.trainer.train(rows, jobs, self.data, lr).cpu().numpy()
        return trained.copy()
