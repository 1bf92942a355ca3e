"""The engine that trains clients side by side, in groups that fit the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedcohort.simulate.graphs import GraphStepper
from fedcohort.simulate.jobs import Data, Job, Lockstep, lockstep, plan_of, sweep
from fedcohort.simulate.kernel import Kernel
from fedcohort.simulate.local import LocalTraining
from fedcohort.simulate.lockstep import Stepper
from fedcohort.simulate.losses import SampleLoss
from fedcohort.simulate.randomness import seeded


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
