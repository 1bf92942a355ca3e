"""What a client trains on: single jobs, jobs that take their steps together, changed images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from modelstack.training import BatchPlan, Ints, Training, Unsupported, cuts

Floats = NDArray[np.float32]
Indices = NDArray[np.int32] | NDArray[np.int64]


class Data(NamedTuple):
    """Samples and labels on the training device."""

    x: Tensor
    y: Tensor


class Job(NamedTuple):
    """One client's work under one seed's model.

    It starts from a `row` of the global models and uses the samples at these `positions` of the
    data set. Training needs a `plan` of batches. `seed` is that of the dropout masks; `augment`
    returns a new generator of the augmentation.
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


def check_plans(jobs: Sequence[Job], training: Training) -> None:
    """Refuse plans of other batches than the training has, whose times stacked jobs share."""
    for i, job in enumerate(jobs):
        given = plan_of(job)[:4]
        passes = given[2] if training.steps is not None else training.epochs
        needed = (len(job.positions), training.batch_size, passes, training.steps)
        if given != needed:
            names = "n, batch_size, passes and steps"
            raise Unsupported(f"job {i}: {names} of its plan are {given}, of the training {needed}")


def by_length(jobs: Sequence[Job]) -> list[int]:
    """Return the numbers of the jobs, those with most steps first."""
    return sorted(range(len(jobs)), key=lambda i: -plan_of(jobs[i]).length)


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

    @property
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
        order: a pass is shuffled when it is first needed, so that a GPU can start early.
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
            passes = -(-(int(needed[j]) - len(self._drawn[j])) // len(job.positions))
            if passes > 0:
                drawn = [job.positions[self._draw[j]()] for _ in range(passes)]
                self._drawn[j] = np.concatenate([self._drawn[j], *drawn])


def _timetable(begin: Ints, count: Ints, scale: Any, rate: Any, eps: Any) -> Timetable:
    scale, rate, eps = (np.asarray(a, np.float32) for a in (scale, rate, eps))
    width, active = count.max(axis=1), (count > 0).sum(axis=1)
    same = (count == width[:, None]) & (scale == scale[:, :1])
    even = (same | (count == 0)).all(axis=1)
    lists = (values.tolist() for values in (active, width, even))
    return Timetable(begin, count, scale, rate, eps, *lists)


@lru_cache(maxsize=16)
def _training(sizes: tuple[int, ...], training: Training, lr: float, direct: bool) -> Timetable:
    begin, epochs = cuts(sizes, training.batch_size, training.epochs, training.steps)
    count = np.diff(begin, axis=0)
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
    begin, _ = cuts(sizes, batch, 1, None)
    count = np.diff(begin, axis=0)
    scale = np.where(count > 0, 1 / np.array(sizes), 0)
    return _timetable(begin, count, scale, np.zeros(count.shape), np.zeros(len(count)))


def lockstep(jobs: Sequence[Job], training: Training, lr: float, direct: bool) -> Lockstep:
    """Arrange the trainings of jobs; `direct` puts the learning rate into the samples' weights."""
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


SHIFT = 4  # pixels, at most, in each direction


class Augmented:
    """The transformed samples of a round's jobs, in memory that a CUDA graph can read.

    The memory is used again in the next round: a captured step goes on reading from it.
    """

    def __init__(self) -> None:
        self.held: Data | None = None

    def transform(self, jobs: Sequence[Job], data: Data) -> tuple[list[Job], Data]:
        """Return jobs that train on transformed copies of their samples, and these copies."""
        shape = tuple(data.x.shape[1:])
        if len(shape) < 2 or not data.x.is_floating_point():
            raise Unsupported(
                f"Training: augment='crop-flip' needs images, but a sample is {shape} "
                f"numbers of type {str(data.x.dtype).removeprefix('torch.')}"
            )
        ends = np.cumsum([len(job.positions) for job in jobs]).tolist()
        if self.held is None or len(self.held.x) < ends[-1]:
            self.held = Data(*(values.new_empty(ends[-1], *values.shape[1:]) for values in data))
        moved, held = [], self.held
        for job, last in zip(jobs, ends, strict=True):
            first = last - len(job.positions)
            at = torch.from_numpy(job.positions).to(data.x.device)
            if job.augment is None:
                raise Unsupported("a job without `augment` cannot be augmented: give it one")
            held.x[first:last] = crop_flip(data.x[at], job.augment())
            held.y[first:last] = data.y[at]
            moved.append(job._replace(positions=np.arange(first, last)))
        return moved, held


def crop_flip(x: Tensor, rng: Generator) -> Tensor:
    """Return images (..., height, width) shifted by up to four pixels, half of them mirrored.

    It is what cropping at random after padding by four pixels, and flipping at random, give.
    """
    count, height, width = len(x), *x.shape[-2:]
    drawn = rng.integers(0, [[2 * SHIFT + 1], [2 * SHIFT + 1], [2]], (3, count))
    down, right, mirrored = torch.from_numpy(drawn).to(x.device).unsqueeze(2)
    across = torch.arange(width, device=x.device)
    rows = torch.arange(height, device=x.device) + SHIFT - down
    columns = torch.where(mirrored == 1, width - 1 - across, across) + SHIFT - right
    inside = ((rows >= 0) & (rows < height)).unsqueeze(2)
    inside = inside & ((columns >= 0) & (columns < width)).unsqueeze(1)
    at = rows.clamp(0, height - 1).unsqueeze(2) * width + columns.clamp(0, width - 1).unsqueeze(1)
    pixels = x.reshape(count, -1, height * width)
    moved: Tensor = pixels.gather(2, at.view(count, 1, -1).expand(-1, pixels.shape[1], -1))
    return moved.mul_(inside.view(count, 1, -1)).view(x.shape)
