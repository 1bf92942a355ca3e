"""Rounds whose cohort is too large for one worker: clients train on Ray actors.

Jobs are cut into groups of a fixed size, whatever the number of actors, and every group is
trained by itself. Which actor trains a group, and when, therefore changes no bit of the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcohort.distribute import RETRIES, cluster_error, need_ray
from fedcohort.exceptions import ConfigError
from fedcohort.simulate.local import Data, Job, LocalTraining, Trainer, by_length

Array = NDArray[np.float32]
OTHERS_SECONDS = 10


class ShardedTrainer(Trainer):
    """Trains cohorts on the actors of the cluster that this program is connected to.

    Give it to a simulation as ``trainer=partial(ShardedTrainer, workers=8)``. Signals and
    evaluation stay in this process.

    Parameters
    ----------
    workers : int
        Actors. Each holds the architecture; the data set lies once on every node.
    group : int
        Clients side by side on an actor. The result depends on it, by rounding, not on `workers`.
    cpus, gpus : float
        Of each actor, which trains on a GPU if it has a share of one.
    timeout : float
        Seconds to wait for the first actor to start.
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
        actor_options = options | {"device": "cuda" if gpus else "cpu"}
        self._recipe = (model, self.training, actor_options, max(1, int(cpus)))
        self._data: Data | None = None
        self.actors: list[Any] = []

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float | None = None
    ) -> Tensor:
        """Train every job from its row of `params`; as `Trainer.train`, on the actors."""
        from ray.util import ActorPool

        ray, rows = need_ray(), self._rows(params, jobs)
        ranked = by_length(jobs)  # those with most steps first, so that a group has little padding
        groups = [ranked[i : i + self.group] for i in range(0, len(ranked), self.group)]
        actors = self._started(data)
        start = ray.put(rows.cpu().numpy())
        rate = self.training.lr if lr is None else lr

        def begin(actor: Any, group: list[int]) -> Any:
            return actor.train.remote(start, [jobs[i] for i in group], rate)

        out = torch.empty(len(jobs), self.size)
        try:
            trained = ActorPool(actors).map(begin, groups)
            for group, models in zip(groups, trained, strict=True):
                out[group] = torch.tensor(models)
        except ray.exceptions.RayError as error:
            self.close()
            raise cluster_error(error, "training") from None
        return out.to(self.device)

    def close(self) -> None:
        """End the actors; the next round would start new ones."""
        for actor in self.actors:
            need_ray().kill(actor)
        self.actors, self._data = [], None

    def _started(self, data: Data) -> list[Any]:
        """Return the actors that hold these data and found room on the cluster."""
        if self._data is data:
            return self.actors
        self.close()
        ray = need_ray()
        stored = ray.put((data.x.cpu().numpy(), data.y.cpu().numpy()))
        restarts = {"max_restarts": RETRIES, "max_task_retries": RETRIES}
        kind = ray.remote(_Shard).options(**self._resources, **restarts)
        actors = [kind.remote(*self._recipe, stored) for _ in range(self.workers)]
        starts = {actor.ready.remote(): actor for actor in actors}
        first, _ = ray.wait(list(starts), timeout=self.timeout)
        others = {"num_returns": len(starts), "timeout": OTHERS_SECONDS if first else 0}
        ready, missing = ray.wait(list(starts), **others)
        for start in missing:
            ray.kill(starts[start])
        if not ready:
            room = ray.available_resources()
            free = ", ".join(f"{room.get(key, 0):g} {key}" for key in ("CPU", "GPU"))
            raise ConfigError(
                f"no worker started within {self.timeout:g} s; the cluster has {free} free"
            )
        self.actors, self._data = [starts[start] for start in ready], data
        return self.actors


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
