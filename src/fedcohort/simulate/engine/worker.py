"""One model with one client's parameters in it: the plain loop, evaluation and features."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedcohort.simulate.engine.jobs import Data, Job, plan_of
from fedcohort.simulate.engine.kernel import SampleLoss, cross_entropy
from fedcohort.simulate.engine.switches import gradients_without_training, seeded
from fedcohort.simulate.local import LocalTraining, Optimizer, rates


class Worker:
    """A private copy of the user's model, and how flat vectors get in and out of it.

    On a CPU, convolutions are laid out with channels last, which is about a third faster.
    """

    def __init__(self, model: nn.Module, loss: SampleLoss, device: torch.device) -> None:
        self.model = copy.deepcopy(model).to(device=device, dtype=torch.float32)
        self.loss, self.device = loss, device
        self.images = any(isinstance(m, nn.Conv2d) for m in self.model.modules())
        self.last = self.images and device.type == "cpu"
        if self.last:
            to: Any = self.model.to  # its type hints leave memory_format out
            to(memory_format=torch.channels_last)
        self.params = list(self.model.parameters())

    def write(self, row: Tensor) -> None:
        """Set the parameters from a flat vector."""
        write(row, self.params)

    def read(self, row: Tensor) -> None:
        """Copy the parameters to a flat vector."""
        read(self.params, row)

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's outputs."""
        if self.last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return cast(Tensor, self.model(x))

    def mean_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, with its graph."""
        outputs = self.forward(x)
        if self.loss is cross_entropy:
            return nn.functional.cross_entropy(outputs, y)
        return self.loss(outputs, y).mean()

    def chunks(self, data: Data, positions: Tensor | None) -> Iterator[Data]:
        """Cut samples into batches small enough to stay in memory that is in use already.

        Large batches of a convolution on a CPU spend half their time on fresh pages.
        """
        on_cpu = self.device.type == "cpu"
        size = (64 if on_cpu else 2000) if self.images else (1000 if on_cpu else 10_000)
        total = len(data.y) if positions is None else len(positions)
        for start in range(0, total, size):
            if positions is None:
                yield Data(data.x[start : start + size], data.y[start : start + size])
            else:
                at = positions[start : start + size]
                yield Data(data.x.index_select(0, at), data.y.index_select(0, at))


class Loop:
    """The plain engine: one client after the other, by autograd."""

    def __init__(self, worker: Worker, local: LocalTraining) -> None:
        self.worker, self.local = worker, local
        self.trained = [p for p in worker.params if p.requires_grad]
        self.optimizer = Optimizer(local, [p.detach() for p in self.trained])

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float, out: Tensor
    ) -> None:
        """Write each job's trained parameters to its row of `out`."""
        self.worker.model.train()
        for job, row in zip(jobs, out, strict=True):
            self.worker.write(params[job.row])
            with seeded([job.seed], self.worker.device):
                self._train(job, data, lr)
            self.worker.read(row)

    def _train(self, job: Job, data: Data, lr: float) -> None:
        plan = plan_of(job)
        index = torch.from_numpy(job.positions[plan.order]).to(data.x.device)
        bounds, optimizer = plan.bounds.tolist(), self.optimizer
        optimizer.restart()
        for step, epoch in enumerate(plan.epochs.tolist()):
            batch = index[bounds[step] : bounds[step + 1]]
            loss = self.worker.mean_loss(
                data.x.index_select(0, batch), data.y.index_select(0, batch)
            )
            rate = lr * self.local.epoch_decay**epoch
            factor, eps = rates(self.local, step)
            with torch.no_grad():
                optimizer.add(_gradient(loss, self.trained), rate if optimizer.direct else 1.0)
                optimizer.update(rate * factor, eps)

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data, out: Tensor) -> None:
        """Write the gradient of each job's mean loss to its row of `out`."""
        with gradients_without_training(self.worker.model):
            for job, row in zip(jobs, out, strict=True):
                self.worker.write(params[job.row])
                total = [torch.zeros_like(p) for p in self.worker.params]
                positions = torch.from_numpy(job.positions).to(data.x.device)
                for x, y in self.worker.chunks(data, positions):
                    share = self.worker.mean_loss(x, y) * (len(y) / len(positions))
                    torch._foreach_add_(total, _gradient(share, self.worker.params))
                read(total, row)


def _gradient(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient, zero where a parameter is unused or frozen."""
    wanted = [p for p in params if p.requires_grad]
    grads = dict(
        zip(map(id, wanted), torch.autograd.grad(loss, wanted, allow_unused=True), strict=True)
    )
    found = (grads.get(id(p)) for p in params)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]


def _parts(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Cut a flat vector into views shaped like the tensors."""
    start = 0
    for tensor in like:
        yield flat[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


def write(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat vector into tensors."""
    with torch.no_grad():
        for tensor, part in zip(tensors, _parts(flat, tensors), strict=True):
            tensor.copy_(part)


def read(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy tensors into a flat vector."""
    with torch.no_grad():
        for tensor, part in zip(tensors, _parts(flat, tensors), strict=True):
            part.copy_(tensor)
