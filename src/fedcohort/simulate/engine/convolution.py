"""Convolutions and pooling of many models at once.

A client's batch may be cut into `split` parts, each with a copy of the client's weights, as if
there were more clients. That makes more and shorter products, which a GPU needs to be busy.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fedcohort.simulate.engine.layers import (
    Arena,
    Layer,
    Sink,
    Tape,
    Weighted,
    aten,
)

# ruff: noqa: D102 (`Layer` documents the methods)


# How our GPU kernels round: "tf32x3" is as exact as float32 and, for weights, faster.
ROUNDING = {"float32": ("ieee", "tf32x3"), "tf32": ("tf32", "tf32"), "bf16": ("bf16", "bf16")}


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None


def gpu_kernels(x: Tensor) -> Any:
    """Return our Triton kernels if they run on the tensor's device, else None."""
    if not (x.is_cuda and _triton_is_here()):
        return None
    from fedcohort.simulate.engine import _triton

    return _triton


class Bias(Weighted):
    """The bias of an `nn.Conv2d`, one number per channel."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        parts = self.parts(x)
        bias = self.sink.params[self.at[0]][: len(parts)]
        tape.append(partial(parts.add_, bias[:, None, :, None, None, None]))
        return x

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        self.gather_sum(tape, self.at[0], self.parts(grad).flatten(3), (1, 3))
        return grad


class Conv(Weighted):
    """`nn.Conv2d` without its bias, as one matrix product per client.

    If `stored`, patches of the images are copied and multiplied by PyTorch. Otherwise, on a GPU,
    Triton kernels read them while they multiply: that saves memory, and with reduced precision
    time. In float32, products with stored patches are faster.
    """

    def __init__(
        self, place: int, arena: Arena, sink: Sink, at: list[int], conv: nn.Conv2d, precision: str
    ) -> None:
        super().__init__(place, arena, sink, at)
        self.kernel, self.stride = conv.kernel_size, conv.stride
        self.pad = conv._reversed_padding_repeated_twice  # left, right, top, bottom
        self.rounding, self.weight_rounding = ROUNDING[precision]
        self.stored = precision == "float32"

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.x = x
        rows, channels, samples = x.shape[:3]
        self.output = (samples, *self._size(x))
        weight = self.weight(rows // self.split)
        out = self.memory("out", (rows, weight.shape[1], *self.output))
        self.kernels: Any = gpu_kernels(x)
        if self.kernels and not self.stored:
            tape.append(partial(self.kernels.convolve, x, weight, out, *self._geometry()))
            return out
        patches = self.memory("cols", (rows, channels, *self.kernel, *self.output))
        self._unfold(tape, x, patches)
        self.cols = patches.view(rows, -1, patches[0, 0, 0, 0].numel())
        # A copy, because backward needs it after `gather` may have changed the weight.
        self.copy = self.memory("weight", (rows, *weight.shape[1:]))
        tape.append(partial(self.parts(self.copy).copy_, weight.unsqueeze(1)))
        self.multiply(tape, self.copy, self.cols, out.flatten(2))
        return out

    def _geometry(self, rounding: str | None = None) -> tuple[Any, ...]:
        """Return what all kernels of a GPU need to know."""
        corner = (self.pad[2], self.pad[0])
        return self.kernel, self.stride, corner, rounding or self.rounding

    def _size(self, x: Tensor) -> tuple[int, int]:
        left, right, top, bottom = self.pad
        high = (x.shape[3] + top + bottom - self.kernel[0]) // self.stride[0] + 1
        wide = (x.shape[4] + left + right - self.kernel[1]) // self.stride[1] + 1
        return high, wide

    def _unfold(self, tape: Tape, x: Tensor, patches: Tensor) -> None:
        if self.kernels:
            corner = (self.pad[2], self.pad[0])
            tape.append(partial(self.kernels.unfold, x, patches, self.stride, corner))
            return
        x = self._padded(tape, x)
        windows = x.unfold(3, self.kernel[0], self.stride[0])
        windows = windows.unfold(4, self.kernel[1], self.stride[1])
        tape.append(partial(patches.copy_, windows.permute(0, 1, 5, 6, 2, 3, 4)))

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
        if self.kernels and not self.stored:
            return self._backward_from_images(tape, grad, wanted)
        flat = grad.flatten(2)
        if self.split == 1:
            self.gather(tape, self.at[0], flat, self.cols.mT)
        else:
            each = self.memory("each", self.copy.shape)
            self.multiply(tape, flat, self.cols.mT, each)
            self.gather_sum(tape, self.at[0], self.parts(each), 1)
        if not wanted:
            return grad
        self.multiply(tape, self.copy.mT, flat, self.cols)
        below = self.memory("below", self.x.shape)
        self._fold(tape, self.cols.view(*self.x.shape[:2], *self.kernel, *self.output), below)
        return below

    def _gather_on_gpu(self, tape: Tape, grad: Tensor) -> None:
        """Append the weight's gradient, read from the images."""
        shape = (len(grad), *self.weight(1).shape[1:])
        parts = self.kernels.weight_parts(*shape, grad[0, 0].numel())
        each = self.memory("each", (len(grad), parts, *shape[1:]))
        geometry = self._geometry(self.weight_rounding)
        tape.append(partial(self.kernels.convolve_weight, self.x, grad, each, *geometry))
        together = each.view(len(grad) // self.split, self.split * parts, -1)
        self.gather_sum(tape, self.at[0], together, 1)

    def _backward_from_images(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        weight, below = self.weight(len(grad)), grad
        if wanted:  # before the weight changes
            below = self.memory("below", self.x.shape)
            self._input_on_gpu(tape, grad, weight, below)
        self._gather_on_gpu(tape, grad)
        return below

    def _input_on_gpu(self, tape: Tape, grad: Tensor, weight: Tensor, below: Tensor) -> None:
        """Append the gradient of the images."""
        if self.stride != (1, 1):
            task = partial(self.kernels.convolve_input, grad, weight, below, *self._geometry())
            tape.append(task)
            return
        taps = self.kernel[0] * self.kernel[1]
        flipped = self.memory("flipped", (len(weight), self.x.shape[1], weight.shape[1] * taps))
        corner = (self.kernel[0] - 1 - self.pad[2], self.kernel[1] - 1 - self.pad[0])
        options = (self.kernel, self.stride, corner, self.rounding)
        tape.append(partial(self.kernels.flip, weight, flipped, taps))
        tape.append(partial(self.kernels.convolve, grad, flipped, below, *options))

    def _fold(self, tape: Tape, patches: Tensor, below: Tensor) -> None:
        """Append the sum of each patch's gradient into the pixels that it was copied from."""
        if self.kernels:
            corner = (self.pad[2], self.pad[0])
            tape.append(partial(self.kernels.fold, patches, below, self.stride, corner))
            return
        left, right, top, bottom = self.pad
        high, wide = below.shape[3:]
        shape = (*below.shape[:3], high + top + bottom, wide + left + right)
        padded = self.memory("unpadded", shape) if any(self.pad) else below
        tape.append(padded.zero_)
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                rows = slice(i, i + self.stride[0] * (self.output[1] - 1) + 1, self.stride[0])
                columns = slice(j, j + self.stride[1] * (self.output[2] - 1) + 1, self.stride[1])
                tape.append(partial(padded[..., rows, columns].add_, patches[:, :, i, j]))
        if any(self.pad):
            inner = padded[..., top : top + high, left : left + wide]
            tape.append(partial(below.copy_, inner))


class MaxPool(Layer):
    """`nn.MaxPool2d`."""

    def __init__(self, place: int, arena: Arena, pool: nn.MaxPool2d) -> None:
        super().__init__(place, arena)
        pairs = [_pair(v) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
        self.options: tuple[Any, ...] = (*pairs, pool.ceil_mode)
        self.tiles = pairs[1:] == [pairs[0], [0, 0], [1, 1]] and not pool.ceil_mode

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.x = x
        shape = torch.nn.functional.max_pool2d(x[0, :1], *self.options).shape[2:]
        out = self.memory("out", (*x.shape[:3], *shape))
        self.kernels = gpu_kernels(x) if self.tiles else None
        kind = torch.uint8 if self.kernels else torch.int64
        self.chosen = self.memory("chosen", out.shape, kind)
        if self.kernels:
            tape.append(partial(self.kernels.pool, x, out, self.chosen, self.options[0]))
        else:
            pool, flat = aten.max_pool2d_with_indices.out, (x.flatten(0, 1), *self.options)
            found = {"out": out.flatten(0, 1), "indices": self.chosen.flatten(0, 1)}
            tape.append(partial(pool, *flat, **found))
        return out

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        below = self.memory("below", self.x.shape)
        if self.kernels:
            tape.append(partial(self.kernels.unpool, grad, self.chosen, below, self.options[0]))
            return below
        unpool = aten.max_pool2d_with_indices_backward.grad_input
        given = (grad.flatten(0, 1), self.x.flatten(0, 1), *self.options)
        into = below.flatten(0, 1)
        tape.append(partial(unpool, *given, self.chosen.flatten(0, 1), grad_input=into))
        return below


def _pair(value: int | tuple[int, ...]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
