"""Convolutions of many models at once, each fused with the ReLU and the pooling after it.

They need a GPU with Triton. `FusedConv` holds images as (clients, samples, height, width,
channels) and reads patches from the images while it multiplies; bias, ReLU and pooling are part of
the convolution. What a convolution multiplies is stored as 16-bit numbers (`Halves`) by the kernel
that computes it; a layer then hands the first plane to the next layer, for its shape and its signs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelstack.layers import Arena, Layer, Sink, Tape, Weighted

# ruff: noqa: D102 (`Layer` documents the methods)


# The 16-bit numbers that add up to a factor of `FusedConv`; see `_triton_convolution`.
HALVES = {"float32": (2, torch.float16), "tf32": (1, torch.float16)}


class Halves(NamedTuple):
    """A factor as (planes, rows, ...) of 16-bit numbers, the largest and the unit of each row."""

    halves: Tensor
    peak: Tensor
    unit: Tensor


class Block(NamedTuple):
    """A convolution, and what follows it before the next one."""

    conv: nn.Conv2d
    relu: bool = False
    pool: nn.MaxPool2d | None = None


class DenseBlock(NamedTuple):
    """An `nn.Linear` and the ReLU after it."""

    linear: nn.Linear
    relu: bool = False


Part = Block | DenseBlock | nn.Module


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


def plain_pooling(pool: nn.MaxPool2d) -> bool:
    """Whether a pooling takes the maxima of tiles that do not overlap and fit in one program."""
    size, *rest = (pair(v) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
    tiles = rest == [size, (0, 0), (1, 1)] and math.prod(size) in (1, 2, 4, 8, 16)
    return tiles and not (pool.ceil_mode or pool.return_indices)


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return an option of `nn.MaxPool2d` for height and width; one number stands for both."""
    high, wide = (value, value) if isinstance(value, int) else value
    return high, wide


def few_channels(conv: nn.Conv2d) -> bool:
    """Whether a convolution has few inputs, so that its patches are copied before the product."""
    return conv.in_channels < 16 and conv.in_channels * math.prod(conv.kernel_size) <= 128


class FusedConv(Weighted):
    """`nn.Conv2d` with its bias and ReLU, by Triton kernels that read the images.

    `join` must follow the constructor.
    """

    x: Halves
    output: Halves  # what the convolution above multiplies
    sums: Tensor | None  # of the gradients of the outputs, in parts, for the bias

    def __init__(
        self, place: int, arena: Arena, sink: Sink, at: list[int], block: Block, precision: str
    ) -> None:
        super().__init__(place, arena, sink, at)
        conv = block.conv
        self.kernel, self.stride, self.relu = conv.kernel_size, conv.stride, block.relu
        self.pad = conv._reversed_padding_repeated_twice
        self.taps, self.few = math.prod(self.kernel), few_channels(conv)
        self.planes, self.dtype = HALVES[precision]
        self.pooled = block.pool is not None
        self.tile = (1, 1) if block.pool is None else pair(block.pool.kernel_size)

    def join(self, number: int, source: FusedConv | None, above: Part) -> None:
        """Tell the layer its number among the convolutions and its neighbors.

        `source` is the convolution whose output, perhaps pooled, is the input of this one; None for
        images, and for what dropout has scaled. `above` takes the output.
        """
        self.number, self.source = number, source
        self.flat = self.pooled and isinstance(above, nn.Flatten)
        self.feeds = isinstance(above, Block)  # the layer above then writes the gradient's peak
        self.feeds_halves = isinstance(above, Block) and not few_channels(above.conv)

    def halves(self, use: str, shape: Sequence[int], peak: Tensor) -> Halves:
        """Return this layer's memory for a factor whose first axis is the row."""
        numbers = self.memory(use, (self.planes, *shape), self.dtype)
        return Halves(numbers, peak, self.memory(f"{use} unit", shape[:1]))

    @property
    def grad(self) -> Halves:
        """The gradient of the outputs, before pooling and ReLU."""
        return self.halves("grad", self.shape, self.grad_peak)

    def partial_sums(self, parts: int) -> Tensor | None:
        """Return memory for the sums that the bias needs, None if there is none."""
        self.sums = None
        if len(self.at) > 1:
            self.sums = self.memory("sums", (self.clients, parts, self.shape[4]))
        return self.sums

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        from modelstack import _triton_convolution

        self.kernels: Any = _triton_convolution
        self.below, self.clients = x, len(x)
        weight = self.weight(self.clients)
        size, self.corner = geometry_of(x.shape[2:4], self.kernel, self.stride, self.pad)
        x_peak, w_peak, self.out_peak, self.grad_peak = self._peaks(tape, x)
        self.shape = (self.clients, x.shape[1], *size, weight.shape[1])
        self.x = self._factor(tape, x, x_peak, size)
        self._pack(tape, weight, w_peak)
        out = self._output()
        bias = self.sink.params[self.at[1]][: self.clients] if len(self.at) > 1 else None
        extra = ", ".join(["bias"] * (bias is not None) + ["relu"] * self.relu)
        kernel, stride, corner = self._geometry()
        geometry = (kernel, stride, (1, 1), corner)
        given = (self.x, self.packed, out, *geometry, extra, bias, self.out_peak, None)
        tape.append(partial(self.kernels.convolve, *given, self.tile, self.chosen))
        return self.y

    def _output(self) -> Halves | Tensor:
        """Return where the output goes; `y` is what the layer above sees of it."""
        clients, samples, high, wide, outputs = self.shape
        pooled = (high // self.tile[0], wide // self.tile[1])
        shape = (clients, samples, *pooled, outputs)
        self.chosen = self.memory("chosen", shape, torch.uint8) if self.pooled else None
        if self.feeds_halves:
            self.output = self.halves("out", shape, self.out_peak)
            self.y = self.output.halves[0]
            return self.output
        if self.flat:  # as `nn.Flatten` would put the numbers
            first = self.memory("out", (clients, samples, outputs, *pooled))
            self.y = first.permute(0, 1, 3, 4, 2)
        else:
            self.y = self.memory("out", shape)
        return self.y

    def _peaks(self, tape: Tape, x: Tensor) -> Sequence[Tensor]:
        """Return where the largest inputs, weights, outputs and gradients of each client go."""
        peaks = self.arena.take("peaks", (4 * self.arena.peaks, len(x)))
        if not self.number:
            tape.append(peaks.zero_)
        mine = peaks[4 * self.number : 4 * self.number + 4]
        if self.source is not None:
            return self.source.out_peak, *mine[1:]
        if x.stride(0):
            tape.append(partial(largest, x, mine[0]))
        else:  # all clients see the same images
            tape.append(partial(largest, x[:1], mine[0, :1]))
            tape.append(partial(mine[0, 1:].copy_, mine[0, :1].expand(len(x) - 1)))
        return tuple(mine)

    def _factor(self, tape: Tape, x: Tensor, peak: Tensor, size: Sequence[int]) -> Halves:
        """Return the images as a factor of products, or their patches."""
        if self.source is not None and not self.few:
            return self.source.output
        rows = x if x.stride(0) else x[:1]  # all clients see the same images
        if self.few:
            inputs = -(-self.taps * x.shape[4] // 16) * 16
            factor = self.halves("in", (len(rows), x.shape[1], *size, inputs), peak)
            given = (rows, factor, self.kernel, self.stride, self.corner)
            tape.append(partial(self.kernels.patches, *given))
        else:
            factor = self.halves("in", rows.shape, peak)
            tape.append(partial(self.kernels.split, rows, factor))
        if len(rows) == len(x):
            return factor
        unit = self.memory("units", (len(x),))
        tape.append(partial(unit.copy_, factor.unit.expand(len(x))))
        numbers = factor.halves.expand(-1, len(x), -1, -1, -1, -1)
        return Halves(numbers, peak, unit)

    def _geometry(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Return kernel, stride and corner of the product: patches are read by one pixel."""
        if self.few:
            return (1, 1), (1, 1), (0, 0)
        return self.kernel, self.stride, self.corner

    def _pack(self, tape: Tape, weight: Tensor, peak: Tensor) -> None:
        """Append the weights as factors, for both passes."""
        clients, outputs, inputs = weight.shape
        size = self.x.halves.shape[-1] if self.few else inputs
        self.packed = self.halves("packed", (clients, size, outputs), peak)
        self.flipped = None
        if self.number:
            shape = (clients, outputs * self.taps, inputs // self.taps)
            self.flipped = self.packed._replace(halves=self.halves("flipped", shape, peak).halves)
        flipped = None if self.flipped is None else self.flipped.halves
        tape.append(partial(self.kernels.pack, weight, self.packed, flipped, self.taps))

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        self._output_gradient(tape, grad)
        below = self._input(tape) if wanted else grad  # before the weight changes
        size, outputs = self.packed.halves.shape[2:]
        pixels = self.grad.halves[0, 0, ..., 0].numel()
        parts = self.kernels.weight_parts(self.clients, outputs, size, pixels)
        each = self.memory("each", (self.clients, parts, size, outputs))
        given = (self.x, self.grad, each, *self._geometry())
        tape.append(partial(self.kernels.convolve_weight, *given))
        targets = [self.sink.targets[at][: self.clients] for at in self.at]
        weight, bias = targets if len(targets) > 1 else (targets[0], None)
        options = (self.sink.alpha, self.sink.beta, self.taps)
        tape.append(partial(self.kernels.gather, each, self.sums, weight, bias, *options))
        return below

    def _output_gradient(self, tape: Tape, grad: Tensor) -> None:
        """Append `self.grad`, unless the layer above writes it."""
        if self.feeds and not self.pooled:
            return
        if not self.feeds:
            tape.append(partial(largest, grad, self.grad.peak))
        if self.pooled:
            tiles, *_ = self.kernels.unpool_tiles(self.grad.halves.shape, self.tile)
            sums = self.partial_sums(-(-tiles // self.kernels.UNPOOL_TILES))
            given = (grad, self.chosen, self.y, self.grad, sums, self.tile, self.relu)
            tape.append(partial(self.kernels.unpool, *given))
            return
        sums = self.partial_sums(-(-grad[0, ..., 0].numel() // self.kernels.SPLIT_PIXELS))
        y = self.y if self.relu else None
        tape.append(partial(self.kernels.split, grad, self.grad, sums, y))

    def _input(self, tape: Tape) -> Tensor:
        """Append the gradient of the images; if they come from a ReLU, that of its input."""
        corner = (self.kernel[0] - 1 - self.corner[0], self.kernel[1] - 1 - self.corner[1])
        geometry = (self.kernel, (1, 1), self.stride, corner)
        factors = (self.grad, self.flipped)
        source, shape = self.source, self.below.shape
        if source is None or source.pooled:
            below = self.memory("below", shape)
            peak = None if source is None else source.grad.peak
            tape.append(partial(self.kernels.convolve, *factors, below, *geometry, peak=peak))
            return below
        pixels, outputs = self.below[0, ..., 0].numel(), self.y.shape[4]
        sizes = (self.clients, pixels, shape[4], outputs, self.planes)
        tile = self.kernels.convolve_tile(*sizes)
        sums = source.partial_sums(-(-pixels // tile[0]))
        extra = "mask" if source.relu else ""
        given = (*factors, source.grad, *geometry, extra, self.below, source.grad.peak, sums)
        tape.append(partial(self.kernels.convolve, *given))
        return source.grad.halves[0]


def largest(x: Tensor, out: Tensor) -> None:
    """Write the largest absolute number of each row."""
    torch.linalg.vector_norm(x, float("inf"), tuple(range(1, x.dim())), out=out)


class ChannelsLast(Layer):
    """From images (clients, samples, channels, ...) to (clients, samples, ..., channels)."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        return x.permute(0, 1, 3, 4, 2)


class FusedFlatten(Layer):
    """`nn.Flatten` of images with channels last."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.shape = x.shape
        first = x.permute(0, 1, 4, 2, 3)
        self.copied = not first.is_contiguous()
        if self.copied:
            out = self.memory("out", first.shape)
            tape.append(partial(out.copy_, first))
            first = out
        return first.flatten(2)

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        clients, samples, high, wide, channels = self.shape
        last = grad.view(clients, samples, channels, high, wide).permute(0, 1, 3, 4, 2)
        if not self.copied:
            return last
        below = self.memory("below", self.shape)
        tape.append(partial(below.copy_, last))
        return below
