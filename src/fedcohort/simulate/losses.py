"""Losses, one number a sample, and their gradients at the model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcohort.exceptions import ConfigError
from fedcohort.simulate.layers import Arena, Tape

SampleLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, from logits and class numbers."""
    return F.cross_entropy(outputs, y, reduction="none")


def sample_loss(loss: str | SampleLoss) -> SampleLoss:
    """Return the loss named, or the callable given.

    Examples
    --------
    >>> sample_loss("cross-entropy")(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor([1.3863, 1.3863])
    """
    if callable(loss):
        return loss
    if loss != "cross-entropy":
        raise ConfigError(
            f"loss={loss!r} is unknown: use 'cross-entropy' or a callable of (outputs, y) that "
            "returns one loss a sample"
        )
    return cross_entropy


def record_gradient(
    tape: Tape, arena: Arena, loss: SampleLoss, outputs: Tensor, y: Tensor, weight: Tensor
) -> Tensor:
    """Append d(sum of weight * loss)/d(outputs) of stacked jobs to a tape.

    Parameters
    ----------
    outputs : Tensor
        (clients, samples, outputs); overwritten.
    y, weight : Tensor
        (clients, samples).
    """
    if loss is not cross_entropy:
        tape.append(partial(_by_autograd, loss, outputs, y, weight))
        return outputs
    each = weight.unsqueeze(-1)
    if outputs.is_cuda:  # the fewer kernels the better
        ones = torch.full_like(each, -1.0)
        tape += [
            partial(torch.ops.aten._softmax.out, outputs, 2, False, out=outputs),
            partial(outputs.scatter_add_, -1, y.unsqueeze(-1), ones),
            partial(outputs.mul_, each),
        ]
        return outputs
    top, minus = arena.take("top", each.shape), arena.take("minus", each.shape)
    tape += [  # six small operations beat torch.softmax, which is slow along a short last axis
        partial(torch.amax, outputs, -1, keepdim=True, out=top),
        partial(outputs.sub_, top),
        outputs.exp_,
        partial(torch.sum, outputs, -1, keepdim=True, out=top),
        partial(torch.div, each, top, out=top),
        partial(outputs.mul_, top),
        partial(torch.neg, each, out=minus),
        partial(outputs.scatter_add_, -1, y.unsqueeze(-1), minus),
    ]
    return outputs


def _by_autograd(loss: SampleLoss, outputs: Tensor, y: Tensor, weight: Tensor) -> None:
    leaf = outputs.detach().clone().requires_grad_()
    with torch.enable_grad():
        each = loss(leaf.flatten(0, 1), y.flatten(0, 1)).view(weight.shape)
        (grad,) = torch.autograd.grad((each * weight).sum(), leaf)
    outputs.copy_(grad)
