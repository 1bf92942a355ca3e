"""One model that takes one client's parameters at a time.

`Worker` holds the model and measures: accuracy, losses per client, features per client. `Loop`
trains clients one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from modelstack.jobs import Data, Job, plan_of
from modelstack.kernel import Optimizer, Setup, cross_entropy
from modelstack.switches import gradients_without_training, seeded
from modelstack.training import Training, Unsupported

Doubles = NDArray[np.float64]
Outputs = Callable[[Tensor], Tensor]  # samples -> (models, samples, outputs)


class Worker:
    """A private copy of the user's model that flat vectors are written to and read from.

    On a CPU, convolutions use the layout with channels last, which is about a third faster. A model
    that cannot run in that layout, for example because it calls `.view()` after a convolution, gets
    PyTorch's usual layout (see `probe`).
    """

    def __init__(self, setup: Setup) -> None:
        self.model = pool_first(copy.deepcopy(setup.model))
        self.model.to(device=setup.device, dtype=torch.float32)
        self.loss, self.device = setup.loss, setup.device
        self.images = any(isinstance(m, nn.Conv2d) for m in self.model.modules())
        self.last = self.images and self.device.type == "cpu" and not _skips_pixels(self.model)
        self._probed = not self.last
        if self.last:
            self._lay_out(torch.channels_last)
        self.params = list(self.model.parameters())

    def _lay_out(self, layout: torch.memory_format) -> None:
        to: Any = self.model.to  # its type hints leave memory_format out
        to(memory_format=layout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's outputs."""
        if self.last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return cast(Tensor, self.model(x))

    def probe(self, data: Data) -> None:
        """Try the layout with channels last once; without it if the model cannot take it."""
        if self._probed or not len(data.x):
            return
        self._probed = True
        with torch.no_grad(), seeded([0], self.device):
            try:
                self.forward(data.x[:2])
            except RuntimeError:  # an error that has another cause comes back in the usual layout
                self.last = False
                self._lay_out(torch.contiguous_format)

    def mean_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch, with its graph."""
        outputs = self.forward(x)
        if self.loss is cross_entropy:
            return nn.functional.cross_entropy(outputs, y)
        return self.loss(outputs, y).mean()

    def chunks(self, data: Data, positions: Tensor | None) -> Iterator[Data]:
        """Cut samples into batches small enough to reuse memory.

        On a CPU, large batches of a convolution spend half their time on new memory pages.
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

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        self.model.eval()
        with torch.no_grad():
            yield

    def scores(self, params: Tensor, data: Data, together: Outputs | None = None) -> Tensor:
        """Return accuracy and mean loss of every row of `params`: (rows, 2), on the device.

        `together` computes the outputs of all rows at once; by default one row follows the other.
        Accuracy is NaN if labels are not whole numbers. One output is a logit: class 1 above 0.
        """
        totals = torch.zeros(len(params), 2, dtype=torch.float64, device=self.device)
        with self._measuring():
            for row, total in enumerate(torch.split(totals, len(totals) if together else 1)):
                if together is None:
                    write(params[row], self.params)
                for x, y in self.chunks(data, None):
                    outputs = together(x) if together else self.forward(x)[None]
                    losses = self.loss(outputs.flatten(0, 1), torch.cat([y] * len(outputs)))
                    whole = not y.is_floating_point()
                    total[:, 0] += correct(outputs, y).flatten(1).sum(1) if whole else torch.nan
                    total[:, 1] += losses.view(len(outputs), -1).sum(dim=1, dtype=torch.float64)
        return totals / len(data.y)

    def embeddings(self, row: Tensor, positions: Tensor, data: Data) -> Tensor:
        """Return the first dense layer's output at each position, under the parameters `row`."""
        with self._measuring(), first_dense(self.model, self.forward) as feature:
            write(row, self.params)
            return torch.cat([feature(x).flatten(1) for x, _ in self.chunks(data, positions)])

    def mean_features(self, params: Tensor, jobs: Sequence[Job], data: Data) -> Doubles:
        """Return the mean output, before the activation, of the first dense layer that runs."""
        with first_dense(self.model, self.forward) as feature:
            return self._means(params, jobs, data, lambda x, y: feature(x))

    def mean_losses(
        self, params: Tensor, jobs: Sequence[Job], data: Data, power: float = 1.0
    ) -> Doubles:
        """Return the mean of loss ** power over each job's samples, under its row of `params`."""

        def measure(x: Tensor, y: Tensor) -> Tensor:
            losses = self.loss(self.forward(x), y)
            return losses if power == 1.0 else losses.double().pow(power)

        return self._means(params, jobs, data, measure)

    def _means(
        self,
        params: Tensor,
        jobs: Sequence[Job],
        data: Data,
        measure: Callable[[Tensor, Tensor], Tensor],
    ) -> Doubles:
        """Average what `measure` returns for each sample over the samples of each job.

        The jobs of one row are measured together, in chunks that may hold samples of several jobs.
        """
        result: list[Doubles] = [np.empty(0)] * len(jobs)
        with self._measuring():
            for row in sorted({job.row for job in jobs}):
                mine = [i for i, job in enumerate(jobs) if job.row == row]
                write(params[row], self.params)
                sizes = np.array([len(jobs[i].positions) for i in mine])
                at = torch.from_numpy(np.concatenate([jobs[i].positions for i in mine]))
                chunks = self.chunks(data, at.to(self.device))
                each = torch.cat([measure(x, y).double() for x, y in chunks]).cpu().numpy()
                sums = np.add.reduceat(each, np.cumsum(sizes) - sizes)
                for i, total, size in zip(mine, sums, sizes, strict=True):
                    result[i] = total / size
        return np.array(result)


def pool_first(model: nn.Module) -> nn.Module:
    """Swap (in place) each ReLU of an `nn.Sequential` with the maximum that is taken after it.

    The result and all gradients stay the same to the bit, and a ReLU has fewer numbers to look at.
    """
    for chain in (m for m in model.modules() if type(m) is nn.Sequential):
        for i in range(1, len(chain)):
            relu, pool = chain[i - 1], chain[i]
            plain = type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d
            if plain and not (pool.return_indices or relu._forward_hooks or pool._forward_hooks):
                chain[i - 1], chain[i] = pool, relu
    return model


def _skips_pixels(model: nn.Module) -> bool:
    """Whether a convolution's stride exceeds its kernel, as in the shortcuts of a ResNet.

    With channels last, PyTorch 2.13 writes past its memory in the backward pass of such layers.
    """
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return any(s > k for c in convolutions for s, k in zip(c.stride, c.kernel_size, strict=True))


class Loop:
    """The plain engine: one client after the other, by autograd."""

    def __init__(self, worker: Worker, training: Training) -> None:
        self.worker, self.training = worker, training
        self.trained = [p for p in worker.params if p.requires_grad]
        self.optimizer: Optimizer | None = None  # made when the layout of the parameters is known

    def train(
        self, params: Tensor, jobs: Sequence[Job], data: Data, lr: float, out: Tensor
    ) -> None:
        """Write each job's trained parameters to its row of `out`."""
        self.worker.model.train()
        for job, row in zip(jobs, out, strict=True):
            write(params[job.row], self.worker.params)
            with seeded([job.seed], self.worker.device):
                self._train(job, data, lr)
            read(self.worker.params, row)

    def _train(self, job: Job, data: Data, lr: float) -> None:
        plan = plan_of(job)
        index = torch.from_numpy(job.positions[plan.order]).to(data.x.device)
        if self.optimizer is None:
            self.optimizer = Optimizer(self.training, [p.detach() for p in self.trained])
        bounds, optimizer = plan.bounds.tolist(), self.optimizer
        optimizer.restart()
        for step, epoch in enumerate(plan.epochs.tolist()):
            batch = index[bounds[step] : bounds[step + 1]]
            loss = self.worker.mean_loss(
                data.x.index_select(0, batch), data.y.index_select(0, batch)
            )
            rate = lr * self.training.epoch_decay**epoch
            factor, eps = self.training.rates(step)
            with torch.no_grad():
                optimizer.add(_gradient(loss, self.trained), rate if optimizer.direct else 1.0)
                optimizer.update(rate * factor, eps)

    def gradients(self, params: Tensor, jobs: Sequence[Job], data: Data, out: Tensor) -> None:
        """Write the gradient of each job's mean loss to its row of `out`."""
        with gradients_without_training(self.worker.model):
            for job, row in zip(jobs, out, strict=True):
                write(params[job.row], self.worker.params)
                total = [torch.zeros_like(p) for p in self.worker.params]
                positions = torch.from_numpy(job.positions).to(data.x.device)
                for x, y in self.worker.chunks(data, positions):
                    share = self.worker.mean_loss(x, y) * (len(y) / len(positions))
                    torch._foreach_add_(total, _gradient(share, self.worker.params))
                read(total, row)


def _gradient(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient, zero where a parameter is unused or frozen."""
    wanted = [p for p in params if p.requires_grad]
    grads = iter(torch.autograd.grad(loss, wanted, materialize_grads=True))
    return [next(grads) if p.requires_grad else torch.zeros_like(p) for p in params]


def write(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a flat vector into tensors."""
    with torch.no_grad():
        parts = torch.split(flat, [t.numel() for t in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def read(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy tensors into a flat vector."""
    with torch.no_grad():
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)


def correct(outputs: Tensor, y: Tensor) -> Tensor:
    """Return for each model and sample whether the model's class is the sample's label."""
    if outputs.dim() == 2 or outputs.shape[2] == 1:
        return (outputs.flatten(1) > 0) == y.flatten()
    return outputs.argmax(2) == y


@contextmanager
def first_dense(
    model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Give a function from samples to the output of the first `nn.Linear` in order of execution.

    A head may be defined first and run last, so the order of definition says nothing.
    """
    seen: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_hook(lambda m, i, out: seen.append(out)) for layer in layers]

    def output(x: Tensor) -> Tensor:
        (forward or model)(x)
        if not seen:
            raise Unsupported("a feature profile needs a dense layer: the model runs no nn.Linear")
        first = seen[0].clone()
        seen.clear()
        return first

    try:
        yield output
    finally:
        for hook in hooks:
            hook.remove()
