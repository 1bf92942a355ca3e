"""What one client measures of its data under one model, in plain PyTorch.

Flower clients answer with these functions, and the engines that measure many clients at once must
agree with them. A model is measured as it evaluates: without dropout, and with the running
statistics that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcohort.simulate.local import config_errors, first_dense

SampleLoss = Callable[[Tensor, Tensor], Tensor]
Batches = Iterable[tuple[Tensor, Tensor]]
Floats = NDArray[np.float32]
BATCH = 256


def batches_of(
    x: NDArray[Any], y: NDArray[Any], device: str | torch.device = "cpu", size: int = BATCH
) -> list[tuple[Tensor, Tensor]]:
    """Return arrays as batches of tensors: labels and tokens are int64, other numbers float32."""

    def tensors(values: NDArray[Any]) -> tuple[Tensor, ...]:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        kind = torch.float32 if tensor.is_floating_point() else torch.int64
        return torch.split(tensor.to(device, kind), size)

    return list(zip(tensors(x), tensors(y), strict=True))


def mean_loss(
    model: nn.Module, batches: Batches, loss: SampleLoss | None = None, power: float = 1.0
) -> float:
    """Return the mean of loss^power over all samples; `loss` is by default `usual_loss`'s.

    Examples
    --------
    >>> data = batches_of(np.zeros((3, 2), np.float32), np.array([0, 1, 1]))
    >>> round(mean_loss(nn.Linear(2, 2, bias=False), data), 4)
    0.6931
    """
    total, n = 0.0, 0
    model.eval()
    with torch.no_grad():
        for x, y in batches:
            outputs = model(x)
            loss = loss or usual_loss(model, outputs)
            total += float((loss(outputs, y).double() ** power).sum())
            n += len(y)
    return total / n


def mean_profile(model: nn.Module, batches: Batches) -> Floats:
    """Return the mean output, before the activation, of the first dense layer that runs."""
    sums, n = [], 0
    model.eval()
    with torch.no_grad(), config_errors(), first_dense(model) as output:
        for x, _ in batches:
            sums.append(output(x).double().flatten(1).sum(0))
            n += len(x)
    return np.asarray(torch.stack(sums).sum(0).cpu().numpy() / n, np.float32)


def full_gradient(model: nn.Module, batches: Batches, loss: SampleLoss | None = None) -> Floats:
    """Return the gradient of the mean loss; parameters that are not used have gradient 0."""
    parameters, n = list(model.parameters()), 0
    model.eval()
    for parameter in parameters:
        parameter.grad = None
    for x, y in batches:
        outputs = model(x)
        loss = loss or usual_loss(model, outputs)
        loss(outputs, y).sum().backward()  # type: ignore[no-untyped-call]
        n += len(y)
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return (torch.cat([part.ravel() for part in parts]) / n).cpu().numpy()


def usual_loss(model: nn.Module, outputs: Tensor) -> SampleLoss:
    """Return the loss of each sample for a classifier: cross-entropy, binary for a single output.

    The softmax of one output is always 1, so its cross-entropy would be 0. An output that went
    through a sigmoid is a probability; any other one is a logit.
    """
    function = nn.functional
    if outputs.ndim > 1 and outputs.shape[-1] != 1:
        return lambda outputs, y: function.cross_entropy(outputs, y, reduction="none")
    is_probability = any(isinstance(m, nn.Sigmoid) for m in model.modules()) or bool(
        ((outputs > 0) & (outputs < 1)).all()
    )
    entropy = function.binary_cross_entropy
    if not is_probability:
        entropy = function.binary_cross_entropy_with_logits

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        flat = outputs.squeeze(-1) if outputs.ndim > y.ndim else outputs
        return entropy(flat, y.to(flat.dtype), reduction="none")

    return loss
