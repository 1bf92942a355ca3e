"""Layers of many models at once, with their backward passes written out.

An activation is (clients, samples, features). Each layer is one batched matrix product. Without
autograd, the gradient of a weight can be added to the weight inside the matrix product.

A layer computes nothing when it is called. It appends operations on fixed memory to a tape, with
all views made beforehand, because the time of a small model's step is that of calling PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from modelstack.dropout import MaskKeys, fill_mask

# ruff: noqa: D102 (`Layer` documents the methods)


Tape = list[Callable[[], Any]]
aten = torch.ops.aten


class Sink(Protocol):
    """Where gradients go: target = beta * target + alpha * gradient."""

    params: list[Tensor]
    targets: list[Tensor]
    beta: float
    alpha: float


class Arena:
    """Memory for activations, shared by tapes of all sizes; `masks` is what dropout depends on."""

    def __init__(self, device: torch.device, masks: MaskKeys) -> None:
        self.device, self.masks = device, masks
        self.peaks = 1  # the number of `fused_convolution.FusedConv` layers
        self.blocks: dict[object, Tensor] = {}

    def take(
        self, name: object, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the tensor of that name: zeros at first, later what was last written to it."""
        size = int(torch.Size(shape).numel())
        block = self.blocks.get(name)
        if block is None or block.numel() < size:
            block = self.blocks[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return block[:size].view(shape)


class Layer:
    """A layer at a place in the network, which names its memory."""

    def __init__(self, place: int, arena: Arena) -> None:
        self.place, self.arena = place, arena

    def memory(self, use: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return this layer's memory for one use."""
        return self.arena.take((self.place, use), shape, dtype)

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append the forward pass and return where its output will be."""
        raise NotImplementedError

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        """Append the backward pass and return where the input's gradient will be, if wanted."""
        raise NotImplementedError


class Weighted(Layer):
    """A layer with parameters; `at` are their numbers in the model."""

    def __init__(self, place: int, arena: Arena, sink: Sink, at: list[int]) -> None:
        super().__init__(place, arena)
        self.sink, self.at = sink, at

    def weight(self, clients: int) -> Tensor:
        """Return the weights as matrices."""
        return self.sink.params[self.at[0]][:clients].flatten(2)

    def multiply(self, tape: Tape, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Append out = left @ right."""
        tape.append(partial(torch.bmm, left, right, out=out))

    def gather(self, tape: Tape, at: int, left: Tensor, right: Tensor) -> None:
        """Append the gradient of weight `at`, left @ right."""
        target = self.sink.targets[at][: len(left)].flatten(2)
        options = {"beta": self.sink.beta, "alpha": self.sink.alpha}
        tape.append(partial(target.baddbmm_, left, right, **options))

    def gather_sum(self, tape: Tape, at: int, grad: Tensor) -> None:
        """Append the gradient of bias `at`, the sum of `grad` over the samples."""
        target = self.sink.targets[at][: len(grad)]
        total = self.memory(f"sum {at}", target.shape)
        tape.append(partial(torch.sum, grad, 1, out=total))
        if self.sink.beta != 1.0:
            tape.append(partial(target.mul_, self.sink.beta))
        tape.append(partial(target.add_, total, alpha=self.sink.alpha))


class Dense(Weighted):
    """`nn.Linear`."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.x = x
        weight = self.weight(len(x))
        out = self.memory("out", (*x.shape[:2], weight.shape[1]))
        if len(self.at) > 1:
            bias = self.sink.params[self.at[1]][: len(x)].unsqueeze(1)
            tape.append(partial(torch.baddbmm, bias, x, weight.mT, out=out))
        else:
            self.multiply(tape, x, weight.mT, out)
        return out

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        below = grad
        if wanted:  # before the weight changes
            below = self.memory("below", self.x.shape)
            self.multiply(tape, grad, self.weight(len(grad)), below)
        self.gather(tape, self.at[0], grad.mT, self.x)
        if len(self.at) > 1:
            self.gather_sum(tape, self.at[1], grad)
        return below


# How fused dense layers and LSTM steps round their factors: "tf32x3" is as exact as float32.
ROUNDING = {"float32": "tf32x3", "tf32": "tf32"}


class FusedDense(Weighted):
    """`nn.Linear`, with the ReLU after it, in one Triton kernel for each pass."""

    MAX_SAMPLES = 128

    def __init__(
        self, place: int, arena: Arena, sink: Sink, at: list[int], relu: bool, rounding: str
    ) -> None:
        super().__init__(place, arena, sink, at)
        self.relu, self.rounding = relu, rounding

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        from modelstack import _triton_dense

        self.kernels: Any = _triton_dense
        if not x.is_contiguous():  # the last step of an LSTM
            view, x = x, self.memory("in", x.shape)
            tape.append(partial(x.copy_, view))
        self.x, clients = x, len(x)
        weight = self.weight(clients)
        bias = self.sink.params[self.at[1]][:clients] if len(self.at) > 1 else None
        self.y = self.memory("out", (*x.shape[:2], weight.shape[1]))
        given = (self.x, weight, bias, self.y, self.relu, self.rounding)
        tape.append(partial(self.kernels.dense, *given))
        return self.y

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        clients = len(grad)
        below = self.memory("below", self.x.shape) if wanted else None
        targets = [self.sink.targets[at][:clients] for at in self.at]
        target, bias = targets if len(targets) > 1 else (targets[0], None)
        given = (self.x, self.y, grad, self.weight(clients), target, bias, below)
        options = (self.sink.alpha, self.sink.beta, self.relu, self.rounding)
        tape.append(partial(self.kernels.dense_backward, *given, *options))
        return grad if below is None else below


class Activation(Layer):
    """An elementwise function whose gradient can be computed from its output.

    It overwrites its input unless the layer below still needs it.
    """

    def __init__(self, place: int, arena: Arena, name: str, inplace: bool) -> None:
        super().__init__(place, arena)
        self.act, self.derive, self.extra = ACTIVATIONS[name]
        self.inplace = inplace

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.y = x if self.inplace else self.memory("out", x.shape)
        tape.append(partial(self.act, x, *self.extra, out=self.y))
        return self.y

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        tape.append(partial(self.derive, grad, self.y, *self.extra, grad_input=grad))
        return grad


ACTIVATIONS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "ReLU": (torch.clamp_min, aten.threshold_backward.grad_input, (0,)),
    "Tanh": (torch.tanh, aten.tanh_backward.grad_input, ()),
    "Sigmoid": (torch.sigmoid, aten.sigmoid_backward.grad_input, ()),
}


class Dropout(Layer):
    """`nn.Dropout`, with the masks of `dropout.fill_mask`."""

    def __init__(self, place: int, arena: Arena, p: float) -> None:
        super().__init__(place, arena)
        self.keep = 1.0 - p

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.mask, out = self.memory("mask", x.shape), self.memory("out", x.shape)
        given = (self.arena.masks, self.place, self.keep, self.mask.flatten(1))
        tape.append(partial(fill_mask, *given))
        tape.append(partial(torch.mul, x, self.mask, out=out))
        return out

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        tape.append(partial(grad.mul_, self.mask))
        return grad


class Unflatten(Layer):
    """`nn.Unflatten` of the input's first axis."""

    def __init__(self, place: int, arena: Arena, shape: Sequence[int]) -> None:
        super().__init__(place, arena)
        self.shape = shape

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], *self.shape, *x.shape[3:])


class Flatten(Layer):
    """`nn.Flatten`."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x.flatten(2)

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        return grad.view(self.shape)
