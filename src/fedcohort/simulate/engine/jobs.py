"""What a client trains on, as arrays: single jobs, and jobs that take their steps together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcohort.exceptions import ConfigError
from fedcohort.simulate.local import BatchPlan, Ints, LocalTraining, rates

Floats = NDArray[np.float32]


class Data(NamedTuple):
    """Samples and labels on the training device."""

    x: Tensor
    y: Tensor


class Job(NamedTuple):
    """One client's work under one seed's model.

    Parameters
    ----------
    row : int
        The row of the stacked global models that it starts from.
    positions : int array
        The client's samples, as indices into the data set.
    plan : BatchPlan, optional
        Its batches; needed for training only.
    seed : int
        Seed of the dropout masks.
    """

    row: int
    positions: Ints
    plan: BatchPlan | None = None
    seed: int = 0


def plan_of(job: Job) -> BatchPlan:
    """Return the job's plan; ConfigError if it has none."""
    if job.plan is None:
        raise ConfigError("a job without a plan cannot train: make it with Trainer.job(...)")
    return job.plan


@dataclass(frozen=True, eq=False)
class Lockstep:
    """Jobs that take their steps together, sorted by their number of steps, largest first.

    Step t trains the first `active[t]` jobs on at most `width[t]` samples each. Job j has
    `count[t, j]` samples, each with weight `scale[t, j]`. `rate[t, j]` and `eps[t]` belong to the
    optimizer. Weights and rates are zero after a job has finished. Job j is number `order[j]` of
    the jobs that were given.
    """

    order: list[int]
    jobs: list[Job]
    plans: list[BatchPlan]
    count: Ints
    scale: Floats
    rate: Floats
    eps: Floats
    active: list[int]
    width: list[int]

    @cached_property
    def batch(self) -> int:
        """The largest width."""
        return max(self.width)

    @cached_property
    def _sources(self) -> list[Ints]:
        return [_source(plan.bounds.tobytes(), self.batch) for plan in self.plans]

    def index(self, first: int, last: int) -> Ints:
        """Return the samples of steps first to last - 1: indices into the data set.

        Shape (jobs, steps, batch). After the first `count`, a real sample is repeated as padding.
        """
        table = np.empty((len(self.jobs), (last - first) * self.batch), np.int64)
        for row, job, plan, source in zip(table, self.jobs, self.plans, self._sources, strict=True):
            stop = min(last, len(plan.epochs))
            part = source[first * self.batch : stop * self.batch]
            if len(part):
                chosen = plan.head(int(plan.bounds[stop])).take(part)
                job.positions.take(chosen, out=row[: len(part)], mode="clip")
            row[len(part) :] = job.positions[0]
        return table.reshape(len(self.jobs), last - first, self.batch)


@lru_cache(maxsize=4096)
def _counts(bounds: bytes) -> Ints:
    """Return the sizes of a plan's batches."""
    edges = np.frombuffer(bounds, np.int64)
    counts: Ints = edges[1:] - edges[:-1]
    return counts


@lru_cache(maxsize=4096)
def _source(bounds: bytes, batch: int) -> Ints:
    """Return which sample of a plan goes to each place of its (steps x batch) table.

    Padding repeats the plan's first sample, with weight zero.
    """
    counts = _counts(bounds)
    slots = np.arange(batch)
    first = np.cumsum(counts) - counts
    table: Ints = np.where(slots < counts[:, None], first[:, None] + slots, 0).ravel()
    return table


def _arrange(jobs: Sequence[Job], plans: Sequence[BatchPlan]) -> Lockstep:
    """Sort jobs so that those which finish first come last."""
    order = sorted(range(len(jobs)), key=lambda i: -len(plans[i].epochs))
    longest = len(plans[order[0]].epochs)
    count = np.zeros((longest, len(jobs)), np.int64)
    for j, i in enumerate(order):
        count[: len(plans[i].epochs), j] = _counts(plans[i].bounds.tobytes())
    scale = np.where(count > 0, 1 / np.maximum(count, 1), 0).astype(np.float32)
    return Lockstep(
        order,
        [jobs[i] for i in order],
        [plans[i] for i in order],
        count,
        scale,
        np.zeros(count.shape, np.float32),
        np.zeros(longest, np.float32),
        (count > 0).sum(axis=1).tolist(),
        count.max(axis=1).tolist(),
    )


def lockstep(jobs: Sequence[Job], local: LocalTraining, lr: float, direct: bool) -> Lockstep:
    """Arrange the trainings of jobs; `direct` puts the learning rate into the samples' weights.

    Examples
    --------
    >>> from fedcohort.simulate.local import batch_plan
    >>> local = LocalTraining(batch_size=2)
    >>> jobs = [Job(0, np.arange(n), batch_plan(0, 0, str(n), n, local)) for n in (1, 5)]
    >>> together = lockstep(jobs, local, 0.1, direct=False)
    >>> together.order, together.active, together.width, together.count.tolist()
    ([1, 0], [2, 1, 1], [2, 2, 1], [[2, 1], [2, 0], [1, 0]])
    """
    together = _arrange(jobs, [plan_of(job) for job in jobs])
    factor, eps = np.array([rates(local, step) for step in range(len(together.eps))]).T
    together.eps[:] = eps
    together.rate[:] = np.where(together.count > 0, lr * factor[:, None], 0)
    if local.epoch_decay != 1.0:
        for j, plan in enumerate(together.plans):
            together.rate[: len(plan.epochs), j] *= local.epoch_decay**plan.epochs
    if direct:
        np.multiply(together.scale, together.rate, out=together.scale)
    return together


def sweep(jobs: Sequence[Job], batch: int) -> Lockstep:
    """Arrange one pass of jobs over all their samples, each with weight 1 / (number of samples)."""
    plans = []
    for job in jobs:
        n = len(job.positions)
        bounds = np.append(np.arange(0, n, batch), n)
        plans.append(BatchPlan(n, bounds, np.zeros(len(bounds) - 1, np.int64)))
    together = _arrange(jobs, plans)
    sizes = np.array([plan.n for plan in together.plans])
    together.scale[:] = np.where(together.count > 0, 1 / sizes, 0)
    return together
