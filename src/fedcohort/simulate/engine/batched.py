"""Driving a kernel through the steps of a cohort on a CPU.

The engine that trains clients side by side, in groups that fit the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedcohort.simulate.engine.graphs import GraphStepper
from fedcohort.simulate.engine.jobs import (
    Data,
    Job,
    Lockstep,
    lockstep,
    plan_of,
    sweep,
)
from fedcohort.simulate.engine.kernel import Kernel, SampleLoss
from fedcohort.simulate.engine.switches import seeded
from fedcohort.simulate.local import LocalTraining


class Stepper:
    """Feeds a kernel its batches, gathered into memory that is used again and again."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.x, self.y = data.x.numpy(), data.y.numpy()

    def prepare(self, kernel: Kernel, together: Lockstep) -> None:
        """Do nothing: steps are made when they are first taken."""

    def run(self, kernel: Kernel, together: Lockstep) -> None:
        """Take all steps; finished clients are left alone."""
        even = _even(together)
        table = together.index(0, len(together.active))
        for t, (clients, samples) in enumerate(zip(together.active, together.width, strict=True)):
            # Few sizes, so that each step's preparation is used often.
            width = samples if even[t] else together.batch
            step = kernel.step(clients, width, self.data)
            index = table[:clients, t, :width].ravel()
            # The default mode copies twice.
            np.take(self.x, index, axis=0, out=step.x.flatten(0, 1).numpy(), mode="clip")
            np.take(self.y, index, axis=0, out=step.y.flatten(0, 1).numpy(), mode="clip")
            scale = together.scale[t, :clients]
            if even[t]:
                step.weight.fill_(float(scale[0]))
            else:
                real = np.arange(width) < together.count[t, :clients, None]
                np.multiply(scale[:, None], real, out=step.weight.numpy())
            step.rate.numpy()[:] = together.rate[t, :clients]
            step.eps.fill_(float(together.eps[t]))
            step.run()


def _even(together: Lockstep) -> list[bool]:
    """Whether the active clients of a step have batches of one size and one weight."""
    width = np.array(together.width)[:, None]
    same = (together.count == width) & (together.scale == together.scale[:, :1])
    even: list[bool] = (same | (together.count == 0)).all(axis=1).tolist()
    return even


class Batched:
    """Stacks the models of a cohort and steps them together.

    Parameters
    ----------
    kind : type of Kernel
        `Stacked` or `Vmapped`.
    model, local, loss, device
        As in `Trainer`.
    memory : int
        Bytes for the stacked models and their activations.
    """

    def __init__(
        self,
        kind: type[Kernel],
        model: nn.Module,
        local: LocalTraining,
        loss: SampleLoss,
        device: torch.device,
        memory: int,
    ) -> None:
        self.kind, self.model, self.local, self.loss = kind, model, local, loss
        self.device, self.memory = device, memory
        self.kernels: dict[bool, Kernel] = {}
        self.stepper: Stepper | GraphStepper | None = None
        self.graphs = device.type == "cuda"
        self.client_bytes = 0

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float, out: Tensor
    ) -> None:
        """Write each job's trained parameters to its row of `out`."""
        ranked = sorted(range(len(jobs)), key=lambda i: -len(plan_of(jobs[i]).epochs))
        for rows in self._groups(ranked, data):
            group = [jobs[i] for i in rows]
            kernel = self._kernel(len(rows), self.local)
            together = lockstep(group, self.local, lr, kernel.sink.direct)
            with seeded([job.seed for job in group], self.device, kernel.random):
                self._run(kernel, together, params, group, data)
            self._store(kernel, together, rows, out)

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data, out: Tensor) -> None:
        """Write the gradient of each job's mean loss to its row of `out`."""
        ranked = sorted(range(len(jobs)), key=lambda i: -len(jobs[i].positions))
        for rows in self._groups(ranked, data):
            group = [jobs[i] for i in rows]
            kernel = self._kernel(len(rows), None)
            together = sweep(group, 64)
            self._run(kernel, together, params, group, data)
            self._store(kernel, together, rows, out)

    def _run(
        self, kernel: Kernel, together: Lockstep, params: Tensor, group: Sequence[Job], data: Data
    ) -> None:
        if self.stepper is None or self.stepper.data is not data:
            self.stepper = GraphStepper(data) if self.graphs else Stepper(data)
        self.stepper.prepare(kernel, together)
        start = torch.tensor([group[i].row for i in together.order], device=self.device)
        kernel.load(params, start)
        self.stepper.run(kernel, together)

    def _store(self, kernel: Kernel, together: Lockstep, rows: list[int], out: Tensor) -> None:
        kernel.store(out, [rows[i] for i in together.order])

    def _kernel(self, clients: int, local: LocalTraining | None) -> Kernel:
        """Return the kernel used before, if it is large enough."""
        key = local is None
        if key not in self.kernels or self.kernels[key].clients < clients:
            self.kernels[key] = self.kind(self.model, local, self.loss, clients, self.device)
            self.stepper = None  # it may hold graphs of the old one
        return self.kernels[key]

    def _groups(self, ranked: list[int], data: Data) -> Iterator[list[int]]:
        """Cut the jobs, sorted by length, into groups that fit the memory."""
        if not self.client_bytes:
            one = self.kind(self.model, self.local, self.loss, 1, self.device)
            self.client_bytes = one.footprint(self.local.batch_size, data)
        most = max(1, self.memory // self.client_bytes)
        size = -(-len(ranked) // -(-len(ranked) // most))  # groups of one size
        for start in range(0, len(ranked), size):
            yield ranked[start : start + size]
