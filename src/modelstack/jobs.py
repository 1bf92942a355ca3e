"""What a client trains on, as arrays: single jobs, and jobs that take their steps together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from modelstack.training import BatchPlan, Ints, Training, Unsupported

Floats = NDArray[np.float32]
Indices = NDArray[np.int32] | NDArray[np.int64]


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
    augment : callable, optional
        Returns a new generator of the augmentation; needed if the training augments.
    """

    row: int
    positions: Ints
    plan: BatchPlan | None = None
    seed: int = 0
    augment: Callable[[], Generator] | None = None


def plan_of(job: Job) -> BatchPlan:
    """Return the job's plan; Unsupported if it has none."""
    if job.plan is None:
        raise Unsupported("a job without a plan cannot train: give it a BatchPlan")
    return job.plan


def by_length(jobs: Sequence[Job]) -> list[int]:
    """Return the numbers of the jobs, those with most steps first."""
    lengths = [-plan_of(job).length for job in jobs]
    return sorted(range(len(jobs)), key=lengths.__getitem__)


@dataclass(frozen=True, eq=False)
class Timetable:
    """The steps of clients that train together, sorted by their number of steps, largest first.

    Step t trains the first `active[t]` clients on at most `width[t]` samples each. Client j has
    `count[t, j]` samples, each with weight `scale[t, j]`: from number `begin[t, j]` to number
    `begin[t + 1, j]` of its passes over its data. `even[t]` says whether all active clients have as
    many samples with the same weight. `rate[t, j]` and `eps[t]` belong to the optimizer. Weights
    and rates are zero after a client has finished.

    Equal sizes give the same object again, so that a GPU can keep its copy.
    """

    begin: Ints
    count: Ints
    scale: Floats
    rate: Floats
    eps: Floats
    active: list[int]
    width: list[int]
    even: list[bool]

    @cached_property
    def batch(self) -> int:
        """The largest width."""
        return max(self.width)


class Lockstep:
    """Jobs that take their steps together: job j is number `order[j]` of those that were given."""

    def __init__(self, order: list[int], jobs: list[Job], times: Timetable) -> None:
        self.order, self.jobs, self.times = order, jobs, times
        self._draw = [plan_of(job).drawing() for job in jobs]
        self._drawn: list[Ints] = [np.empty(0, np.int64)] * len(jobs)

    def write_index(self, first: int, table: Indices) -> None:
        """Write the samples of the steps from `first` on, as indices into the data set.

        `table` is (steps, at least as many clients, at least as many samples). After the first
        `count` samples, a real sample is repeated as padding. Steps must be asked for in their
        order: a pass over a client's samples is shuffled when it is first needed, so that a GPU can
        start before all passes are drawn.
        """
        steps, width = len(table), self.times.batch
        begin = self.times.begin[first : first + steps + 1]
        count = self.times.count[first : first + steps]
        self._draw_until(begin[-1])
        starts = np.cumsum([0, *map(len, self._drawn[:-1])])
        sample = np.arange(width)
        at = np.where(sample < count[:, :, None], begin[:-1, :, None] + sample, 0)
        at += starts[:, None]
        table[:, : len(self.jobs), :width] = np.concatenate(self._drawn)[at]

    def _draw_until(self, needed: Ints) -> None:
        """Draw passes until each client has as many samples as needed."""
        for j, job in enumerate(self.jobs):
            passes = []
            left = needed[j] - len(self._drawn[j])
            while left > 0:
                passes.append(job.positions[self._draw[j]()])
                left -= len(job.positions)
            if passes:
                self._drawn[j] = np.concatenate([self._drawn[j], *passes])


@lru_cache(maxsize=16)
def _layout(
    sizes: tuple[int, ...], batch: int, passes: int, steps: int | None
) -> tuple[Ints, Ints, Ints]:
    """Return `begin`, `count` and the pass of each step (steps, clients) of clients by size."""
    plans = [BatchPlan(n, batch, passes, steps) for n in sizes]
    longest = max(len(plan.epochs) for plan in plans)
    begin = np.empty((longest + 1, len(plans)), np.int64)
    epochs = np.zeros((longest, len(plans)), np.int64)
    for j, plan in enumerate(plans):
        bounds = plan.bounds
        begin[: len(bounds), j], begin[len(bounds) :, j] = bounds, bounds[-1]
        epochs[: len(bounds) - 1, j] = plan.epochs
    return begin, np.diff(begin, axis=0), epochs


def _timetable(begin: Ints, count: Ints, scale: Any, rate: Any, eps: Any) -> Timetable:
    scale, rate, eps = (np.asarray(a, np.float32) for a in (scale, rate, eps))
    width = count.max(axis=1)
    same = (count == width[:, None]) & (scale == scale[:, :1])
    return Timetable(
        begin,
        count,
        scale,
        rate,
        eps,
        (count > 0).sum(axis=1).tolist(),
        width.tolist(),
        (same | (count == 0)).all(axis=1).tolist(),
    )


@lru_cache(maxsize=16)
def _training(sizes: tuple[int, ...], training: Training, lr: float, direct: bool) -> Timetable:
    begin, count, epochs = _layout(sizes, training.batch_size, training.epochs, training.steps)
    scale = np.where(count > 0, 1 / np.maximum(count, 1), 0).astype(np.float32)
    factor, eps = np.array([training.rates(step) for step in range(len(count))]).T
    rate = np.where(count > 0, lr * factor[:, None], 0).astype(np.float32)
    if training.epoch_decay != 1.0:
        rate *= training.epoch_decay**epochs
    if direct:
        np.multiply(scale, rate, out=scale)
    return _timetable(begin, count, scale, rate, eps)


@lru_cache(maxsize=16)
def _sweeping(sizes: tuple[int, ...], batch: int) -> Timetable:
    begin, count, _ = _layout(sizes, batch, 1, None)
    scale = np.where(count > 0, 1 / np.array(sizes), 0)
    return _timetable(begin, count, scale, np.zeros(count.shape), np.zeros(len(count)))


def lockstep(jobs: Sequence[Job], training: Training, lr: float, direct: bool) -> Lockstep:
    """Arrange the trainings of jobs; `direct` puts the learning rate into the samples' weights.

    Examples
    --------
    >>> training = Training(batch_size=2)
    >>> jobs = [Job(0, np.arange(n), BatchPlan(n, batch_size=2)) for n in (1, 5)]
    >>> together = lockstep(jobs, training, 0.1, direct=False)
    >>> times = together.times
    >>> together.order, times.active, times.width, times.count.tolist()
    ([1, 0], [2, 1, 1], [2, 2, 1], [[2, 1], [2, 0], [1, 0]])
    """
    order = by_length(jobs)
    ranked = [jobs[i] for i in order]
    sizes = tuple([len(job.positions) for job in ranked])
    return Lockstep(order, ranked, _training(sizes, training, lr, direct))


def sweep(jobs: Sequence[Job], batch: int) -> Lockstep:
    """Arrange one pass of jobs over all their samples, each with weight 1 / (number of samples)."""
    order = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].positions) // batch)
    ranked = [jobs[i]._replace(plan=BatchPlan(len(jobs[i].positions), batch)) for i in order]
    sizes = tuple(len(job.positions) for job in ranked)
    return Lockstep(order, ranked, _sweeping(sizes, batch))
