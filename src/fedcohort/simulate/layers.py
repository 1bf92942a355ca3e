"""Layers of many models at once, with their backward passes written out.

Activations carry the client first: (clients, samples, features) for dense layers and (clients,
channels, samples, height, width) for convolutions, so that each layer is one batched matrix product
and its output is already laid out for the next. Doing without autograd lets a weight's gradient be
added to the weight itself inside the matrix product.

A layer computes nothing when it is called: it appends operations on fixed memory to a tape. For
small models the cost of a step is that of calling PyTorch, and a tape has all its views made
beforehand.
"""
# ruff: noqa: D102 (what the methods do is said once, in `Layer`)

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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

    def gather_sum(self, tape: Tape, at: int, grad: Tensor, over: int) -> None:
        """Append a bias's gradient, the sum of `grad` over an axis."""
        target = self.sink.targets[at][: len(grad)]
        total = self.memory("sum", target.shape)
        tape.append(partial(torch.sum, grad, over, out=total))
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
        if self.has_bias:
            self.gather_sum(tape, self.at + 1, grad, 1)
        return below


class Bias(Weighted):
    """The bias of an `nn.Conv2d`, one number a channel."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        bias = self.sink.params[self.at][: len(x)]
        tape.append(partial(x.add_, bias[:, :, None, None, None]))
        return x

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        self.gather_sum(tape, self.at, grad.flatten(2), 2)
        return grad


class Conv(Weighted):
    """`nn.Conv2d` without its bias, as one matrix product a client over unfolded patches."""

    def __init__(self, place: int, arena: Arena, sink: Sink, at: int, conv: nn.Conv2d) -> None:
        super().__init__(place, arena, sink, at)
        self.kernel, self.stride = conv.kernel_size, conv.stride
        self.pad = conv._reversed_padding_repeated_twice  # left, right, top, bottom

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        x = self._padded(tape, x)
        (kh, kw), (sh, sw) = self.kernel, self.stride
        windows = x.unfold(3, kh, sh).unfold(4, kw, sw)
        clients, channels, *self.output = windows.shape[:5]
        self.input = x.shape
        patches = self.memory("cols", (clients, channels, kh, kw, *self.output))
        tape.append(partial(patches.copy_, windows.permute(0, 1, 5, 6, 2, 3, 4)))
        self.cols = patches.view(clients, channels * kh * kw, -1)
        weight = self.weight(clients).flatten(2)
        out = self.memory("out", (clients, weight.shape[1], self.cols.shape[2]))
        tape.append(partial(torch.bmm, weight, self.cols, out=out))
        return out.view(clients, -1, *self.output)

    def _padded(self, tape: Tape, x: Tensor) -> Tensor:
        if not any(self.pad):
            return x
        left, right, top, bottom = self.pad
        high, wide = x.shape[3:]
        out = self.memory("padded", (*x.shape[:3], high + top + bottom, wide + left + right))
        tape.append(out.zero_)  # other sizes of batch lie differently in the same memory
        tape.append(partial(out[..., top : top + high, left : left + wide].copy_, x))
        return out

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        flat = grad.flatten(2)
        weight = self.weight(len(grad))
        if wanted:  # `gather` may change the weight, and needs the patches that `below` overwrites
            kept = self.memory("weight", weight.shape)
            tape.append(partial(kept.copy_, weight))
        self.gather(tape, flat, self.cols.mT)
        if not wanted:
            return grad
        tape.append(partial(torch.bmm, kept.mT, flat, out=self.cols))
        return self._fold(tape)

    def _fold(self, tape: Tape) -> Tensor:
        """Append the sum of each patch's gradient into the pixels that it was copied from."""
        (kh, kw), (sh, sw), (_, high, wide) = self.kernel, self.stride, self.output
        below = self.memory("below", self.input)
        patches = self.cols.view(*self.input[:2], kh, kw, *self.output)
        tape.append(below.zero_)
        for i in range(kh):
            for j in range(kw):
                rows = slice(i, i + sh * (high - 1) + 1, sh)
                columns = slice(j, j + sw * (wide - 1) + 1, sw)
                tape.append(partial(below[..., rows, columns].add_, patches[:, :, i, j]))
        if not any(self.pad):
            return below
        left, right, top, bottom = self.pad
        inner = below[..., top : below.shape[3] - bottom, left : below.shape[4] - right]
        out = self.memory("inner", inner.shape)
        tape.append(partial(out.copy_, inner))
        return out


class MaxPool(Layer):
    """`nn.MaxPool2d`."""

    def __init__(self, place: int, arena: Arena, pool: nn.MaxPool2d) -> None:
        super().__init__(place, arena)
        pairs = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
        self.options: tuple[Any, ...] = (*(_pair(value) for value in pairs), pool.ceil_mode)

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.x = x.flatten(0, 1)
        shape = torch.nn.functional.max_pool2d(self.x[:1], *self.options).shape[1:]
        out = self.memory("out", (len(self.x), *shape))
        self.chosen = self.memory("chosen", out.shape, torch.int64)
        pool = aten.max_pool2d_with_indices.out
        tape.append(partial(pool, self.x, *self.options, out=out, indices=self.chosen))
        return out.view(*x.shape[:3], *shape[1:])

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        below = self.memory("below", self.x.shape)
        unpool = aten.max_pool2d_with_indices_backward.grad_input
        given = grad.flatten(0, 1), self.x, *self.options, self.chosen
        tape.append(partial(unpool, *given, grad_input=below))
        return below.view(*grad.shape[:3], *below.shape[2:])


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
