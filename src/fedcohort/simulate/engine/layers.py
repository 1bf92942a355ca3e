"""Layers of many models at once, with their backward passes written out.

Activations carry the client first: (clients, samples, features) for dense layers and (clients,
channels, samples, height, width) for convolutions, so that each layer is one batched matrix product
and its output is already laid out for the next. Doing without autograd lets a weight's gradient be
added to the weight itself inside the matrix product.

A layer computes nothing when it is called: it appends operations on fixed memory to a tape. For
small models the cost of a step is that of calling PyTorch, and a tape has all its views made
beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

# ruff: noqa: D102 (what the methods do is said once, in `Layer`)


Tape = list[Callable[[], Any]]
aten = torch.ops.aten


class Sink(Protocol):
    """Where gradients go: target = beta * target + alpha * gradient."""

    params: list[Tensor]
    targets: list[Tensor]
    beta: float
    alpha: float


class Arena:
    """Memory for activations, shared by tapes of all sizes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: dict[object, Tensor] = {}

    def take(
        self, name: object, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return a tensor of zeros or of whatever was last written there under that name."""
        size = int(torch.Size(shape).numel())
        block = self.blocks.get(name)
        if block is None or block.numel() < size:
            block = self.blocks[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return block[:size].view(shape)


class Layer:
    """A layer at a place in the network, which names its memory."""

    def __init__(self, place: int, arena: Arena) -> None:
        self.place, self.arena = place, arena
        self.split = 1  # parts that each client's batch is cut into; see `convolution`

    def memory(self, use: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return this layer's memory for one use."""
        return self.arena.take((self.place, use), shape, dtype)

    def parts(self, rows: Tensor) -> Tensor:
        """View the rows of an image layer as (clients, parts of their batches)."""
        return rows.view(-1, self.split, *rows.shape[1:])

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Append the forward pass and return where its output will be."""
        raise NotImplementedError

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        """Append the backward pass and return where the input's gradient will be, if wanted."""
        raise NotImplementedError


class Weighted(Layer):
    """A layer with parameters, of which number `at` is the first."""

    def __init__(self, place: int, arena: Arena, sink: Sink, at: int) -> None:
        super().__init__(place, arena)
        self.sink, self.at = sink, at

    def weight(self, clients: int) -> Tensor:
        """Return the weights as matrices."""
        return self.sink.params[self.at][:clients].flatten(2)

    def gather(self, tape: Tape, left: Tensor, right: Tensor) -> None:
        """Append the weight's gradient, left @ right."""
        target = self.sink.targets[self.at][: len(left)].flatten(2)
        beta, alpha = self.sink.beta, self.sink.alpha
        tape.append(partial(target.baddbmm_, left, right, beta=beta, alpha=alpha))

    def gather_sum(self, tape: Tape, at: int, parts: Tensor, over: int | tuple[int, ...]) -> None:
        """Append the gradient of parameter `at`, the sum of `parts` over some axes."""
        gone = (over,) if isinstance(over, int) else over
        shape = [size for axis, size in enumerate(parts.shape) if axis not in gone]
        target = self.sink.targets[at][: len(parts)].view(shape)
        total = self.memory(f"sum {at}", shape)
        tape.append(partial(torch.sum, parts, over, out=total))
        if self.sink.beta != 1.0:
            tape.append(partial(target.mul_, self.sink.beta))
        tape.append(partial(target.add_, total, alpha=self.sink.alpha))


class Dense(Weighted):
    """`nn.Linear`."""

    def __init__(self, place: int, arena: Arena, sink: Sink, at: int, bias: bool) -> None:
        super().__init__(place, arena, sink, at)
        self.has_bias = bias

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.x = x
        weight = self.weight(len(x))
        out = self.memory("out", (*x.shape[:2], weight.shape[1]))
        if self.has_bias:
            bias = self.sink.params[self.at + 1][: len(x)].unsqueeze(1)
            tape.append(partial(torch.baddbmm, bias, x, weight.mT, out=out))
        else:
            tape.append(partial(torch.bmm, x, weight.mT, out=out))
        return out

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        below = grad
        if wanted:  # before the weight changes
            below = self.memory("below", self.x.shape)
            tape.append(partial(torch.bmm, grad, self.weight(len(grad)), out=below))
        self.gather(tape, grad.mT, self.x)
        if self.has_bias and grad.is_cuda:  # one kernel in place of two
            ones = self.memory("ones", (len(grad), 1, grad.shape[1])).fill_(1)
            target = self.sink.targets[self.at + 1][: len(grad)].unsqueeze(1)
            options = {"beta": self.sink.beta, "alpha": self.sink.alpha}
            tape.append(partial(target.baddbmm_, ones, grad, **options))
        elif self.has_bias:
            self.gather_sum(tape, self.at + 1, grad, 1)
        return below
