"""Many stacked copies of a model that learn in one step: what the batched engines share.

A `Kernel` holds the copies and prepares steps. Gradients go to an `Optimizer`, which changes the
parameters, or to a `Gradient`, which sums them. Losses give one number per sample; their gradients
at the model's outputs are computed here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelstack.dropout import MaskKeys
from modelstack.layers import Arena, Tape
from modelstack.switches import runs_triton
from modelstack.training import Training, Unsupported

SampleLoss = Callable[[Tensor, Tensor], Tensor]


@lru_cache(maxsize=64)
def row_numbers(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor, which often are those of an earlier round: do not change it."""
    return torch.tensor(rows, device=device)


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, from logits and class numbers."""
    return F.cross_entropy(outputs, y, reduction="none")


def sample_loss(loss: str | SampleLoss) -> SampleLoss:
    """Return the loss named, or the callable given."""
    if callable(loss):
        return loss
    if loss != "cross-entropy":
        raise Unsupported(
            f"loss={loss!r} is unknown: use 'cross-entropy' or a callable of (outputs, y) that "
            "returns one loss per sample"
        )
    return cross_entropy


def record_gradient(
    tape: Tape, arena: Arena, loss: SampleLoss, outputs: Tensor, y: Tensor, weight: Tensor
) -> Tensor:
    """Append d(sum of weight * loss)/d(outputs) of stacked jobs to a tape.

    `outputs` is (clients, samples, outputs) and overwritten, `y` and `weight` (clients, samples).
    """
    if loss is not cross_entropy:
        tape.append(partial(_by_autograd, loss, outputs, y, weight))
        return outputs
    if runs_triton(outputs.device) and outputs.is_contiguous() and outputs.shape[-1] <= 1024:
        from modelstack import _triton_dense

        tape.append(partial(_triton_dense.loss_gradient, outputs, y, weight))
        return outputs
    each = weight.unsqueeze(-1)
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


class Gradient:
    """Sums gradients instead of changing parameters."""

    beta, alpha, direct, copies = 1.0, 1.0, False, 2

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self.targets = [torch.zeros_like(p) for p in params]

    def restart(self) -> None:
        """Begin a new sum."""
        torch._foreach_zero_(self.targets)

    def add(self, grads: Sequence[Tensor], scale: float = 1.0, active: int | None = None) -> None:
        """Add gradients of the first `active` clients."""
        for target, grad in zip(self.targets, grads, strict=True):
            target[:active].add_(grad, alpha=scale)

    def update(self, rate: Tensor | float, eps: Tensor | float, active: int | None = None) -> None:
        """Leave the parameters as they are."""


class Optimizer:
    """SGD or Adam for one client, or for stacked clients whose first axis is the client.

    It is written out because the first use of torch.optim takes a second of imports, and because
    each stacked client has its own learning rate.

    Gradients are collected in `targets`, which become `beta * target + alpha * gradient`. Then
    `update` moves the parameters. For plain SGD the targets are the parameters themselves: the
    caller multiplies the gradient by the learning rate, and `update` does nothing.
    """

    def __init__(self, training: Training, params: Sequence[Tensor]) -> None:
        self.training, self.params = training, list(params)
        self.adam = training.optimizer == "adam"
        self.direct = not (
            self.adam or training.momentum or training.weight_decay or training.prox_mu
        )
        empty = [] if self.direct else [torch.zeros_like(p) for p in self.params]
        self.targets = self.params if self.direct else empty
        self.first = [torch.zeros_like(p) for p in empty] if self.adam else []
        self.second = [torch.zeros_like(p) for p in empty] if self.adam else []
        self.start = [torch.empty_like(p) for p in empty] if training.prox_mu else []
        self.beta, self.alpha = (1.0, -1.0) if self.direct else (training.momentum, 1.0)
        #: The numbers stored per parameter.
        self.copies = 1 + sum(map(bool, (empty, self.first, self.second, self.start)))

    def restart(self) -> None:
        """Forget the last round; the current parameters are the global model."""
        for group in ([] if self.direct else self.targets), self.first, self.second:
            if group:
                torch._foreach_zero_(group)
        for anchor, param in zip(self.start, self.params, strict=False):
            anchor.copy_(param)

    def add(self, grads: Sequence[Tensor], scale: float = 1.0, active: int | None = None) -> None:
        """Add gradients that were computed elsewhere, times `scale`, to the targets."""
        targets = _heads(self.targets, active)
        if self.beta != 1.0:
            torch._foreach_mul_(targets, self.beta)
        torch._foreach_add_(targets, list(grads), alpha=self.alpha * scale)

    def update(self, rate: Tensor | float, eps: Tensor | float, active: int | None = None) -> None:
        """Move the first `active` clients by what `Training.rates` returned, times `lr`."""
        if self.direct:
            return
        params, grads = _heads(self.params, active), _heads(self.targets, active)
        if self.training.weight_decay:
            torch._foreach_add_(grads, params, alpha=self.training.weight_decay)
        if self.training.prox_mu:
            torch._foreach_add_(grads, params, alpha=self.training.prox_mu)
            torch._foreach_sub_(grads, _heads(self.start, active), alpha=self.training.prox_mu)
        if self.adam:
            grads = self._adam(grads, eps, active)
        for param, grad in zip(params, grads, strict=True):
            if isinstance(rate, float):
                param.sub_(grad, alpha=rate)
            else:
                param.addcmul_(grad, rate.view(-1, *[1] * (param.dim() - 1)), value=-1.0)

    def _adam(self, grads: list[Tensor], eps: Tensor | float, active: int | None) -> list[Tensor]:
        beta1, beta2 = self.training.betas
        first, second = _heads(self.first, active), _heads(self.second, active)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)
        return [m.div(v.sqrt().add_(eps)) for m, v in zip(first, second, strict=True)]


def _heads(tensors: list[Tensor], active: int | None) -> list[Tensor]:
    return tensors if active is None else [tensor[:active] for tensor in tensors]


@dataclass(frozen=True)
class Step:
    """One prepared step of `len(x)` clients: fill in the tensors, then run.

    `x` and `y` are (clients, samples, ...). `weight`, (clients, samples), is the factor of each
    sample's loss: 1 / (samples in the batch), or 0 for padding, times the learning rate if the sink
    is `direct`. `rate`, (clients,), and `eps` belong to the optimizer.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    rate: Tensor
    eps: Tensor
    run: Callable[[], None]


class Setup(NamedTuple):
    """What all engines are made from; `precision` is how products round (`switches.precision`)."""

    model: nn.Module
    training: Training
    loss: SampleLoss
    device: torch.device
    precision: str = "float32"


class Kernel:
    """Up to `clients` copies of a model side by side.

    They learn, or (`learns=False`) sum their gradients and change no parameter.
    """

    drops = True  # whether there may be dropout
    random = True  # whether training may draw from PyTorch's generator
    sink: Optimizer | Gradient

    def __init__(self, setup: Setup, clients: int, learns: bool = True) -> None:
        self.setup, self.clients, device = setup, clients, setup.device
        shapes = [p.shape for p in setup.model.parameters()]
        self.params = [torch.zeros(clients, *shape, device=device) for shape in shapes]
        self.masks = MaskKeys(clients, device)
        self.arena = Arena(device, self.masks)
        self.trained = [p.requires_grad for p in setup.model.parameters()]
        moving = [p for p, on in zip(self.params, self.trained, strict=True) if on]
        self.sink = Optimizer(setup.training, moving) if learns else Gradient(moving)
        ends = torch.tensor([0, *(shape.numel() for shape in shapes)]).cumsum(0).tolist()
        self.spans = [slice(a, b) for a, b in pairwise(ends)]
        self.steps: dict[tuple[int, int], Step] = {}

    def load(self, params: Tensor, rows: Tensor) -> None:
        """Give client j a copy of params[rows[j]] and restart the optimizer."""
        for stack, span in zip(self.params, self.spans, strict=True):
            block = stack.view(self.clients, -1)[: len(rows)]
            if len(params) == 1:
                block.copy_(params[:, span])
            else:
                torch.index_select(params[:, span], 0, rows, out=block)
        self.sink.restart()

    def store(self, out: Tensor, order: list[int]) -> None:
        """Write client j's parameters, or gradient, to out[order[j]]."""
        kept: list[Tensor] = self.params
        if isinstance(self.sink, Gradient):
            targets = iter(self.sink.targets)
            both = zip(self.params, self.trained, strict=True)
            kept = [next(targets) if on else torch.zeros_like(p) for p, on in both]
        in_order = order == list(range(order[0], order[0] + len(order)))
        rows = None if in_order else row_numbers(tuple(order), out.device)
        for stack, span in zip(kept, self.spans, strict=True):
            block = stack.view(self.clients, -1)[: len(order)]
            if rows is None:
                out[order[0] : order[-1] + 1, span] = block
            else:
                out[:, span].index_copy_(0, rows, block)

    def step(self, clients: int, samples: int, like: tuple[Tensor, Tensor]) -> Step:
        """Return the step of the first `clients` clients on `samples` samples each.

        `like` holds the x and y of the data set.
        """
        key, take = (clients, samples), self.arena.take
        if key not in self.steps:
            x, y = (
                take(name, (*key, *t.shape[1:]), t.dtype)
                for name, t in zip("xy", like, strict=True)
            )
            given = (x, y, take("weight", key), take("rate", (clients,)), take("eps", ()))
            self.steps[key] = Step(*given, self.prepare(*given))
        return self.steps[key]

    def footprint(self, samples: int, like: tuple[Tensor, Tensor]) -> int:
        """Return the bytes in use after a step on `samples` samples has been prepared."""
        self.step(self.clients, samples, like)
        blocks = self.arena.blocks.values()
        return 4 * self.sink.copies * sum(p.numel() for p in self.params) + sum(
            b.nbytes for b in blocks
        )

    def prepare(
        self, x: Tensor, y: Tensor, weight: Tensor, rate: Tensor, eps: Tensor
    ) -> Callable[[], None]:
        """Return a function that takes one step with the values that the tensors then hold."""
        raise NotImplementedError
