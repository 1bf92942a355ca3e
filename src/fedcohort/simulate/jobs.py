"""Clients' trainings as arrays: jobs, and jobs that step together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedcohort.exceptions import ConfigError
from fedcohort.simulate.local import Ints, LocalTraining, Plan
from fedcohort.simulate.optimizers import rates

Floats = NDArray[np.float32]


class Data(NamedTuple):
    """Samples and labels on the training device."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class Job:
    """One client's work under one seed's model.

    Parameters
    ----------
    row : int
        Which row of the stacked global models it starts from.
    positions : int array
        The client's samples, as indices into the data set.
    plan : Plan, optional
        Its batches; only training needs them.
    seed : int
        Of dropout's masks; nothing else reads it.
    """

    row: int
    positions: Ints
    plan: Plan | None = None
    seed: int = 0


def plan_of(job: Job) -> Plan:
    """Return the job's plan, or say what is missing."""
    if job.plan is None:
        raise ConfigError("a job without a plan cannot train: make it with Trainer.job(...)")
    return job.plan


@dataclass(frozen=True, eq=False)
class Lockstep:
    """Jobs that take their steps together, those with most steps first.

    Step t trains the first `active[t]` jobs on at most `width[t]` samples each:
    `index[t, j, i]` into the data set, of which the first `count[t, j]` are real and weigh
    `scale[t, j]`. `rate[t, j]` and `eps[t]` are the optimizer's; zero once a job has finished.
    """

    order: list[int]
    index: Ints
    count: Ints
    scale: Floats
    rate: Floats
    eps: Floats
    active: list[int]
    width: list[int]


@lru_cache(maxsize=4096)
def _slots(bounds: bytes, batch: int) -> Ints:
    """Return where each sample of a plan goes in its (steps x batch) table."""
    edges = np.frombuffer(bounds, np.int64)
    counts = edges[1:] - edges[:-1]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    slots: Ints = np.repeat(np.arange(len(counts)) * batch, counts) + within
    return slots


def _arrange(jobs: Sequence[Job], plans: Sequence[Plan]) -> Lockstep:
    """Sort jobs so that the finished ones are always the last, and pad their batches.

    Jobs of one size have the same bounds and are filled in together.
    """
    keys = [(-len(plan.epochs), plan.bounds.tobytes()) for plan in plans]
    order = sorted(range(len(jobs)), key=keys.__getitem__)
    longest = -keys[order[0]][0]
    batch = max(int(np.diff(np.frombuffer(bounds, np.int64)).max()) for _, bounds in set(keys))
    count = np.zeros((longest, len(jobs)), np.int64)
    index = np.empty((len(jobs), longest * batch), np.int64)
    index[:] = np.array([jobs[i].positions[0] for i in order])[:, None]  # padding: a real sample
    start = 0
    for key, same in groupby(order, key=keys.__getitem__):
        members = list(same)
        rows = slice(start, start + len(members))
        start = rows.stop
        count[: -key[0], rows] = np.diff(plans[members[0]].bounds)[:, None]
        samples = np.array([jobs[i].positions[plans[i].order] for i in members])
        index[rows, _slots(key[1], batch)] = samples
    table = index.reshape(len(jobs), longest, batch).transpose(1, 0, 2)
    scale = np.where(count > 0, 1 / np.maximum(count, 1), 0).astype(np.float32)
    rate, eps = np.zeros(count.shape, np.float32), np.zeros(longest, np.float32)
    active = (count > 0).sum(axis=1).tolist()
    return Lockstep(order, table, count, scale, rate, eps, active, count.max(axis=1).tolist())


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
    plans = [plan_of(job) for job in jobs]
    together = _arrange(jobs, plans)
    factor, eps = np.array([rates(local, step) for step in range(len(together.eps))]).T
    together.eps[:] = eps
    together.rate[:] = np.where(together.count > 0, lr * factor[:, None], 0)
    if local.epoch_decay != 1.0:
        for j, i in enumerate(together.order):
            epochs = plans[i].epochs
            together.rate[: len(epochs), j] *= local.epoch_decay**epochs
    if direct:
        np.multiply(together.scale, together.rate, out=together.scale)
    return together


def sweep(jobs: Sequence[Job], batch: int) -> Lockstep:
    """Arrange one pass of jobs over all their samples, each weighing 1 / (number of samples)."""
    plans = []
    for job in jobs:
        n = len(job.positions)
        bounds = np.append(np.arange(0, n, batch), n)
        plans.append(Plan(np.arange(n), bounds, np.zeros(len(bounds) - 1, np.int64)))
    together = _arrange(jobs, plans)
    sizes = np.array([len(jobs[i].positions) for i in together.order])
    together.scale[:] = np.where(together.count > 0, 1 / sizes, 0)
    return together
