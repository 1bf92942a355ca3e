"""Convolutions and pooling of many models at once.

There are two forms. `Conv`, `Bias` and `MaxPool` run everywhere. They hold images as (clients,
channels, samples, height, width), copy all patches of the images and multiply them by PyTorch. A
client's batch may be cut into `split` parts, each with a copy of the client's weights, as if there
were more clients. That makes more and shorter products, which a GPU needs to be busy.

`FusedConv` and `FusedPool` run on a GPU with Triton. They hold images as (clients, samples, height,
width, channels) and read patches from the images while they multiply; bias and ReLU are part of the
convolution. `fused_blocks` says which models they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedcohort.simulate.engine import switches
from fedcohort.simulate.engine.layers import (
    Arena,
    Layer,
    Sink,
    Tape,
    Weighted,
    aten,
)

# ruff: noqa: D102 (`Layer` documents the methods)


# How the products of `FusedConv` are rounded; see `_triton_convolution`.
ROUNDING = {"float32": "fp16x3", "tf32": "fp16", "bf16": "bf16"}


def gpu_kernels(x: Tensor) -> Any:
    """Return the Triton kernels of patches and LSTMs if the tensor is on a GPU, else None."""
    if not (x.is_cuda and switches.triton_is_here()):
        return None
    from fedcohort.simulate.engine import _triton

    return _triton


def geometry_of(
    image: Sequence[int], kernel: Sequence[int], stride: Sequence[int], pad: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size of a convolution's output, and the padding above and to the left.

    `pad` is (left, right, top, bottom), as `nn.Conv2d` keeps it.

    Examples
    --------
    >>> geometry_of((8, 6), (3, 3), (2, 1), (1, 1, 1, 1))
    ((4, 6), (1, 1))
    """
    left, right, top, bottom = pad
    high = (image[0] + top + bottom - kernel[0]) // stride[0] + 1
    wide = (image[1] + left + right - kernel[1]) // stride[1] + 1
    return (high, wide), (top, left)


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


def fused_blocks(flat: Sequence[nn.Module]) -> list[Part] | None:
    """Join each convolution and dense layer with the ReLU and the pooling that follow it.

    None if the layers of images are not all of these kinds: convolutions, each with at most one
    pooling by tiles; ReLU after a convolution or its pooling; dropout.

    Examples
    --------
    >>> flat = [nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2)]
    >>> [type(part).__name__ for part in fused_blocks(flat)]
    ['Block', 'Flatten', 'DenseBlock']
    >>> fused_blocks([nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten()]) is None
    True
    """
    found: list[Part] = []
    image = False
    for module in flat:
        last = found[-1] if found else None
        if isinstance(module, nn.Conv2d):
            found.append(Block(module))
            image = True
        elif isinstance(module, nn.Linear):
            found.append(DenseBlock(module))
        elif isinstance(module, nn.ReLU) and isinstance(last, (Block, DenseBlock)):
            found[-1] = last._replace(relu=True)
        elif isinstance(module, nn.MaxPool2d):
            if not (isinstance(last, Block) and last.pool is None and _tiles(module)):
                return None
            found[-1] = last._replace(pool=module)
        elif image and not isinstance(module, (nn.Flatten, nn.Dropout)):
            return None
        elif isinstance(module, nn.Flatten) and isinstance(last, nn.Dropout):
            found.insert(-1, module)  # the pooling can then write what `Flatten` returns
        elif not isinstance(module, nn.Identity):
            found.append(module)
        image = image and not isinstance(module, nn.Flatten)
    return found


def fused(flat: Sequence[nn.Module], device: torch.device) -> list[Part] | None:
    """Return `fused_blocks` if the device runs the Triton kernels, else None."""
    return fused_blocks(flat) if switches.runs_triton(device) else None


def _tiles(pool: nn.MaxPool2d) -> bool:
    """Whether a pooling takes the maxima of tiles that do not overlap."""
    size, *rest = (_pair(v) for v in (pool.kernel_size, pool.stride, pool.padding, pool.dilation))
    return rest == [size, [0, 0], [1, 1]] and not pool.ceil_mode


class FusedConv(Weighted):
    """`nn.Conv2d` with its bias and ReLU, by Triton kernels that read the images.

    Parameters
    ----------
    block : Block
    number : int
        Counts the convolutions of the model from 0.
    source : FusedConv, optional
        The convolution whose output, perhaps pooled, is the input of this one: its largest output
        bounds the input. None for images, and for what dropout has scaled.
    """

    def __init__(
        self,
        place: int,
        arena: Arena,
        sink: Sink,
        at: list[int],
        block: Block,
        rounding: str,
        number: int,
        source: FusedConv | None,
    ) -> None:
        super().__init__(place, arena, sink, at)
        conv = block.conv
        self.kernel, self.stride, self.relu = conv.kernel_size, conv.stride, block.relu
        self.pad = conv._reversed_padding_repeated_twice
        self.taps = self.kernel[0] * self.kernel[1]
        self.rounding, self.number, self.source = rounding, number, source
        self.pooled = block.pool is not None
        self.told = self.pooled  # whether the layer above undoes the ReLU and writes `grad_peak`

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        from fedcohort.simulate.engine import _triton_convolution

        self.kernels: Any = _triton_convolution
        clients, samples, high, wide, channels = x.shape
        self.x, self.clients = x, clients
        weight = self.weight(clients)
        self.x_peak, self.w_peak, self.out_peak, self.grad_peak = self._peaks(tape, x)
        self.packed = self.memory("packed", (clients, self.taps * channels, weight.shape[1]))
        self.flipped = None
        if self.number:
            shape = (clients, self.taps * weight.shape[1], channels)
            self.flipped = self.memory("flipped", shape)
        pack = (weight, self.packed, self.flipped, self.w_peak, self.taps)
        tape.append(partial(self.kernels.pack, *pack))
        size, self.corner = geometry_of((high, wide), self.kernel, self.stride, self.pad)
        out = self.memory("out", (clients, samples, *size, weight.shape[1]))
        bias = self.sink.params[self.at[1]][:clients] if len(self.at) > 1 else None
        extra = ", ".join(["bias"] * (bias is not None) + ["relu"] * self.relu)
        peaks = (self.x_peak, self.w_peak, self.out_peak)
        geometry = (self.kernel, self.stride, (1, 1), self.corner, self.rounding)
        given = (x, self.packed, out, peaks, *geometry, extra, bias)
        tape.append(partial(self.kernels.convolve, *given))
        self.y = out
        return out

    def _peaks(self, tape: Tape, x: Tensor) -> Sequence[Tensor]:
        """Return where the largest inputs, weights, outputs and gradients of each client go."""
        peaks = self.arena.take("peaks", (4 * self.arena.peaks, len(x)))
        if not self.number:
            tape.append(peaks.zero_)
        mine = peaks[4 * self.number : 4 * self.number + 4]
        if self.source is not None:
            return self.source.out_peak, *mine[1:]
        tape.append(partial(largest, x, mine[0]))
        return tuple(mine)

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        below = grad
        if not self.told:
            if self.relu:
                derive = aten.threshold_backward.grad_input
                tape.append(partial(derive, grad, self.y, 0, grad_input=grad))
            tape.append(partial(largest, grad, self.grad_peak))
        if wanted:  # before the weight changes
            below = self.memory("below", self.x.shape)
            self._input(tape, grad, below)
        size, outputs = self.packed.shape[1:]
        parts = self.kernels.weight_parts(self.clients, outputs, size, grad[0, ..., 0].numel())
        each = self.memory("each", (self.clients, parts, size + 1, outputs))
        geometry = (self.kernel, self.stride, self.corner, self.rounding)
        peaks = (self.x_peak, self.grad_peak)
        tape.append(partial(self.kernels.convolve_weight, self.x, grad, each, peaks, *geometry))
        targets = [self.sink.targets[at][: self.clients] for at in self.at]
        weight, bias = targets if len(targets) > 1 else (targets[0], None)
        given = (each, weight, bias, self.sink.alpha, self.sink.beta, self.taps)
        tape.append(partial(self.kernels.gather, *given))
        return below

    def _input(self, tape: Tape, grad: Tensor, below: Tensor) -> None:
        """Append the gradient of the images; if they come from a ReLU, that of its input."""
        corner = (self.kernel[0] - 1 - self.corner[0], self.kernel[1] - 1 - self.corner[1])
        source, peak, extra = self.source, None, ""
        if source is not None and not source.pooled:
            source.told, peak = True, source.grad_peak
            extra = "mask" if source.relu else ""
        peaks = (self.grad_peak, self.w_peak, peak)
        geometry = (self.kernel, (1, 1), self.stride, corner, self.rounding)
        given = (grad, self.flipped, below, peaks, *geometry, extra, self.x)
        tape.append(partial(self.kernels.convolve, *given))


def largest(x: Tensor, out: Tensor) -> None:
    """Write the largest absolute number of each row of images."""
    torch.linalg.vector_norm(x, float("inf"), (1, 2, 3, 4), out=out)


class FusedPool(Layer):
    """`nn.MaxPool2d` by tiles, after a `FusedConv`; `flat` if a Flatten follows."""

    def __init__(
        self, place: int, arena: Arena, pool: nn.MaxPool2d, conv: FusedConv, flat: bool
    ) -> None:
        super().__init__(place, arena)
        self.kernel, self.conv, self.flat = _pair(pool.kernel_size), conv, flat

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.x, self.kernels = x, self.conv.kernels
        clients, samples, high, wide, channels = x.shape
        size = (high // self.kernel[0], wide // self.kernel[1])
        self.chosen = self.memory("chosen", (clients, samples, *size, channels), torch.uint8)
        if self.flat:  # as `nn.Flatten` would put the numbers
            shape = (clients, samples, channels, *size)
            self.y = self.memory("out", shape).permute(0, 1, 3, 4, 2)
        else:
            self.y = self.memory("out", self.chosen.shape)
        tape.append(partial(self.kernels.pool, x, self.y, self.chosen, self.kernel))
        return self.y

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        below = self.memory("below", self.x.shape)
        given = (grad, self.chosen, self.y, below, self.conv.grad_peak)
        tape.append(partial(self.kernels.unpool, *given, self.kernel, self.conv.relu))
        return below


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
