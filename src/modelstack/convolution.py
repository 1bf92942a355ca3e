"""Convolutions and pooling of many models at once, on any device.

`Conv`, `Bias` and `MaxPool` hold images as (clients, channels, samples, height, width), copy all
patches of the images and multiply them with PyTorch. A client's batch may be cut into `split`
parts, each with a copy of the client's weights, as if there were more clients. That makes more and
shorter products, which a GPU needs to be busy. `fused_convolution` is the form for GPUs with
Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelstack import switches
from modelstack.layers import Arena, Layer, Sink, Tape, Weighted, aten

# ruff: noqa: D102 (`Layer` documents the methods)


def gpu_kernels(x: Tensor) -> Any:
    """Return the Triton kernels of patches and LSTMs if the tensor is on a GPU, else None."""
    if not (x.is_cuda and switches.TRITON_IS_HERE):
        return None
    from modelstack import _triton

    return _triton


def geometry_of(
    image: Sequence[int], kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size of a convolution's output, and the padding above and to the left.

    `pad` is (left, right, top, bottom), as `nn.Conv2d` keeps it.
    """
    left, right, top, bottom = pad
    high = (image[0] + top + bottom - kernel[0]) // stride[0] + 1
    wide = (image[1] + left + right - kernel[1]) // stride[1] + 1
    return (high, wide), (top, left)


def plain_convolution(conv: nn.Conv2d) -> bool:
    """Whether a convolution has neither groups nor dilation, and pads with zeros if at all."""
    return conv.groups == 1 and set(conv.dilation) == {1} and conv.padding_mode == "zeros"


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
    """`nn.Conv2d` without its bias, as one matrix product per client with copied patches."""

    def __init__(
        self, place: int, arena: Arena, sink: Sink, at: list[int], conv: nn.Conv2d
    ) -> None:
        super().__init__(place, arena, sink, at)
        self.kernel, self.stride = conv.kernel_size, conv.stride
        self.pad = conv._reversed_padding_repeated_twice  # left, right, top, bottom

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.x = x
        rows, channels, samples = x.shape[:3]
        size, _ = geometry_of(x.shape[3:], self.kernel, self.stride, self.pad)
        self.output = (samples, *size)
        weight = self.weight(rows // self.split)
        out = self.memory("out", (rows, weight.shape[1], *self.output))
        self.kernels: Any = gpu_kernels(x)
        patches = self.memory("cols", (rows, channels, *self.kernel, *self.output))
        self._unfold(tape, x, patches)
        self.cols = patches.view(rows, -1, patches[0, 0, 0, 0].numel())
        # A copy, because backward needs it after `gather` may have changed the weight.
        self.copy = self.memory("weight", (rows, *weight.shape[1:]))
        tape.append(partial(self.parts(self.copy).copy_, weight.unsqueeze(1)))
        self.multiply(tape, self.copy, self.cols, out.flatten(2))
        return out

    def _unfold(self, tape: Tape, x: Tensor, patches: Tensor) -> None:
        if self.kernels:
            corner = (self.pad[2], self.pad[0])
            tape.append(partial(self.kernels.unfold, x, patches, self.stride, corner))
            return
        if any(self.pad):
            inside, (x, inner) = x, self._padded(tape, "padded", x.shape)
            tape.append(partial(inner.copy_, inside))
        windows = x.unfold(3, self.kernel[0], self.stride[0])
        windows = windows.unfold(4, self.kernel[1], self.stride[1])
        tape.append(partial(patches.copy_, windows.permute(0, 1, 5, 6, 2, 3, 4)))

    def _padded(self, tape: Tape, use: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return zeros for images of this shape with padding, and the images inside."""
        left, right, top, bottom = self.pad
        high, wide = shape[3:]
        out = self.memory(use, (*shape[:3], high + top + bottom, wide + left + right))
        tape.append(out.zero_)  # other sizes of batch lie differently in the same memory
        return out, out[..., top : top + high, left : left + wide]

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
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

    def _fold(self, tape: Tape, patches: Tensor, below: Tensor) -> None:
        """Append the sum of each patch's gradient into the pixels that it was copied from."""
        if self.kernels:
            corner = (self.pad[2], self.pad[0])
            tape.append(partial(self.kernels.fold, patches, below, self.stride, corner))
            return
        padded = inner = below
        if any(self.pad):
            padded, inner = self._padded(tape, "unpadded", below.shape)
        else:
            tape.append(below.zero_)
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                rows = slice(i, i + self.stride[0] * (self.output[1] - 1) + 1, self.stride[0])
                columns = slice(j, j + self.stride[1] * (self.output[2] - 1) + 1, self.stride[1])
                tape.append(partial(padded[..., rows, columns].add_, patches[:, :, i, j]))
        if any(self.pad):
            tape.append(partial(below.copy_, inner))


class MaxPool(Layer):
    """`nn.MaxPool2d`."""

    def __init__(self, place: int, arena: Arena, pool: nn.MaxPool2d) -> None:
        super().__init__(place, arena)
        pairs = [pair(v) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)]
        self.options: tuple[Any, ...] = (*pairs, pool.ceil_mode)
        self.tiles = takes_tiles(pool)

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
            results = {"out": out.flatten(0, 1), "indices": self.chosen.flatten(0, 1)}
            tape.append(partial(pool, *flat, **results))
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


def pair(value: int | tuple[int, ...]) -> list[int]:
    """Return an option of `nn.MaxPool2d` for height and width; one number stands for both."""
    return [value, value] if isinstance(value, int) else list(value)


def takes_tiles(pool: nn.MaxPool2d) -> bool:
    """Whether a pooling takes the maxima of tiles that do not overlap."""
    size, *rest = (pair(v) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
    return rest == [size, [0, 0], [1, 1]] and not pool.ceil_mode
