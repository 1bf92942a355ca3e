"""Stacked layers without parameters: activations, norms, dropout and changes of shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedcohort.simulate.engine.layers import Arena, Layer, Tape, aten

# ruff: noqa: D102 (what the methods do is said once, in `Layer`)


class Activation(Layer):
    """An elementwise function whose gradient follows from its output.

    It overwrites its input, unless the layer below still needs it.
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


class ResponseNorm(Layer):
    """`nn.LocalResponseNorm`: x / (k + alpha * mean of the squares of nearby channels) ^ beta.

    The sum over nearby channels is a product with a band matrix, its transpose on the way back.
    """

    def __init__(self, place: int, arena: Arena, norm: nn.LocalResponseNorm) -> None:
        super().__init__(place, arena)
        self.norm = norm

    def _band(self, channels: int) -> Tensor:
        """Entry (c, d) is alpha / size if channel d is among the neighbors of c, else 0."""
        at = torch.arange(channels, device=self.arena.device)
        offset = at - at[:, None]
        near = (offset >= -(self.norm.size // 2)) & (offset <= (self.norm.size - 1) // 2)
        return near * (self.norm.alpha / self.norm.size)

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.x = x
        self.band = self._band(x.shape[1]).expand(len(x), -1, -1)
        self.base, self.spare = (self.memory(name, x.shape) for name in ("base", "spare"))
        self.factor, self.y = (self.memory(name, x.shape) for name in ("factor", "out"))
        tape += [
            partial(torch.mul, x, x, out=self.spare),
            partial(torch.bmm, self.band, self.spare.flatten(2), out=self.base.flatten(2)),
            partial(self.base.add_, self.norm.k),
            partial(torch.pow, self.base, -self.norm.beta, out=self.factor),
            partial(torch.mul, x, self.factor, out=self.y),
        ]
        return self.y

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        around = self.memory("around", grad.shape)
        tape += [
            partial(torch.mul, grad, self.y, out=self.spare),
            partial(self.spare.div_, self.base),
            partial(torch.bmm, self.band.mT, self.spare.flatten(2), out=around.flatten(2)),
            partial(grad.mul_, self.factor),
            partial(grad.addcmul_, self.x, around, value=-2 * self.norm.beta),
        ]
        return grad


class Dropout(Layer):
    """`nn.Dropout`, with masks from the current generator."""

    def __init__(self, place: int, arena: Arena, p: float) -> None:
        super().__init__(place, arena)
        self.keep = 1.0 - p

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.mask, out = self.memory("mask", x.shape), self.memory("out", x.shape)
        tape.append(partial(self.mask.bernoulli_, self.keep))
        tape.append(partial(self.mask.div_, max(self.keep, 1e-30)))  # keep=0 leaves zeros
        tape.append(partial(torch.mul, x, self.mask, out=out))
        return out

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        tape.append(partial(grad.mul_, self.mask))
        return grad


class Split(Layer):
    """`nn.Unflatten` of the input's first axis."""

    def __init__(self, place: int, arena: Arena, shape: Sequence[int]) -> None:
        super().__init__(place, arena)
        self.shape = shape

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], *self.shape, *x.shape[3:])


class ChannelsFirst(Layer):
    """From (clients, samples, channels, ...) to (clients * split, channels, samples / split, ...).

    A view is enough for a convolution, which copies patches anyway.
    """

    def __init__(self, place: int, arena: Arena, copy: bool) -> None:
        super().__init__(place, arena)
        self.copy = copy

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        view = x.view(len(x) * self.split, -1, *x.shape[2:]).transpose(1, 2)
        if not self.copy:
            return view
        out = self.memory("out", view.shape)
        tape.append(partial(out.copy_, view))
        return out


class Flatten(Layer):
    """`nn.Flatten`, from (clients, samples, ...) or from a convolution's layout."""

    def __init__(self, place: int, arena: Arena, image: bool) -> None:
        super().__init__(place, arena)
        self.image = image

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self.shape = x.shape
        if not self.image:
            return x.flatten(2)
        clients, channels, samples, *rest = x.shape
        out = self.memory("out", (clients, samples, channels, *rest))
        tape.append(partial(out.copy_, x.transpose(1, 2)))
        return out.view(clients // self.split, samples * self.split, -1)

    def backward(self, tape: Tape, grad: Tensor, wanted: bool) -> Tensor:
        if not self.image:
            return grad.view(self.shape)
        clients, channels, samples, *rest = self.shape
        below = self.memory("below", self.shape)
        split = grad.view(clients, samples, channels, *rest).transpose(1, 2)
        tape.append(partial(below.copy_, split))
        return below
