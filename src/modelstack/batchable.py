"""Convolutions and group norms that `torch.func.vmap` runs as one kernel for all clients.

`torch.func` would turn the convolutions of many models into a grouped convolution, which cuDNN runs
several times slower than one model's. These layers hold images with channels last and use the
Triton kernels of `fused_convolution.FusedConv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelstack.fused_convolution import (
    HALVES,
    Halves,
    few_channels,
    geometry_of,
    largest,
    plain_convolution,
)


def _kernels() -> Any:
    from modelstack import _triton_convolution

    return _triton_convolution


def _stack(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
    """Bring the clients of each tensor to the front; a tensor without them is repeated."""
    dims = zip(tensors, in_dims, strict=False)
    return [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in dims
    ]


def _last(images: Tensor) -> Tensor:
    """View (clients, samples, channels, ...) with channels last."""
    return images.permute(0, 1, 3, 4, 2)


def _first(images: Tensor) -> Tensor:
    return images.permute(0, 1, 4, 2, 3)


class _Together(torch.autograd.Function):
    """`run(*tensors, options)` of stacked clients: for one client, and under `vmap` for all.

    The first output is differentiable, by `back(x, weight, the other outputs, gradient, options)`,
    which returns the gradients of `tensors` and has no gradient itself.
    """

    @staticmethod
    def forward(run: Any, back: Any, options: tuple[Any, ...], *tensors: Tensor) -> Any:
        return tuple(t[0] for t in run(*(t[None] for t in tensors), options))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.back, ctx.options, *tensors = inputs
        if ctx.back is not None:
            ctx.mark_non_differentiable(*output[1:])
            ctx.save_for_backward(*tensors[:2], *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        given = (ctx.back, None, ctx.options, *ctx.saved_tensors, grad)
        return None, None, None, *_together(*given)

    @staticmethod
    def vmap(info: Any, in_dims: Any, run: Any, back: Any, options: Any, *tensors: Tensor) -> Any:
        outputs = run(*_stack(info, in_dims[3:], *tensors), options)
        return outputs, (0,) * len(outputs)


def _together(*given: Any) -> Any:
    return _Together.apply(*given)  # type: ignore[no-untyped-call]


def _halves(shape: Sequence[int], peak: Tensor, kind: tuple[int, torch.dtype]) -> Halves:
    planes, dtype = kind
    numbers = torch.empty(planes, *shape, dtype=dtype, device=peak.device)
    return Halves(numbers, peak, torch.empty_like(peak))


def _pack(weight: Tensor, taps: int, size: int, flip: bool, kind: Any) -> tuple[Halves, Any]:
    """Return stacked weights as factors of both passes."""
    weight = weight.contiguous()
    clients, outputs, channels = weight.shape[:3]
    peak = weight.new_zeros(clients)
    packed = _halves((clients, size, outputs), peak, kind)
    flipped = None
    if flip:
        numbers = _halves((clients, taps * outputs, channels), peak, kind).halves
        flipped = packed._replace(halves=numbers)
    _kernels().pack(weight, packed, None if flipped is None else flipped.halves, taps)
    return packed, flipped


def _factor(x: Tensor, peak: Tensor, few: bool, geometry: Any, kind: Any) -> tuple[Halves, Any]:
    """Return images with channels last as a factor, or their patches, and how to read them."""
    kernel, stride, size, corner = geometry
    if not few:
        factor = _halves(x.shape, peak, kind)
        _kernels().split(x, factor)
        return factor, (kernel, stride, corner)
    inputs = -(-kernel[0] * kernel[1] * x.shape[4] // 16) * 16
    factor = _halves((*x.shape[:2], *size, inputs), peak, kind)
    _kernels().patches(x, factor, kernel, stride, corner)
    return factor, ((1, 1), (1, 1), (0, 0))


def _convolve(x: Tensor, weight: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Convolve stacked images (clients, samples, channels, ...) with stacked weights.

    Also returns the largest number of each client's images, which the backward pass needs.
    """
    kernel, stride, pad, few, kind = options
    x = _last(x)
    clients, samples, high, wide, channels = x.shape
    outputs, taps = weight.shape[1], kernel[0] * kernel[1]
    size, corner = geometry_of((high, wide), kernel, stride, pad)
    peak = x.new_empty(clients)
    largest(x, peak)
    factor, (kernel, stride, corner) = _factor(x, peak, few, (kernel, stride, size, corner), kind)
    inputs = factor.halves.shape[-1] if few else taps * channels
    packed, _ = _pack(weight, taps, inputs, False, kind)
    out = x.new_empty(clients, samples, *size, outputs)
    _kernels().convolve(factor, packed, out, kernel, stride, (1, 1), corner)
    return _first(out), peak


def _convolve_backward(
    x: Tensor, weight: Tensor, peak: Tensor, grad: Tensor, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    kernel, stride, pad, few, kind = options
    kernels, x = _kernels(), _last(x)
    grad = _last(grad)
    clients, channels = len(x), x.shape[4]
    outputs, taps = weight.shape[1], kernel[0] * kernel[1]
    size, corner = geometry_of(x.shape[2:4], kernel, stride, pad)
    given = (kernel, stride, size, corner)
    factor, (read, step, start) = _factor(x, peak.contiguous(), few, given, kind)
    grad_peak = x.new_empty(clients)
    largest(grad, grad_peak)
    slope = _halves(grad.shape, grad_peak, kind)
    kernels.split(grad, slope)
    inputs = factor.halves.shape[-1] if few else taps * channels
    _, flipped = _pack(weight, taps, inputs, True, kind)
    below = torch.empty(x.shape, device=x.device)
    around = (kernel[0] - 1 - corner[0], kernel[1] - 1 - corner[1])
    kernels.convolve(slope, flipped, below, kernel, (1, 1), stride, around)
    parts = kernels.weight_parts(clients, outputs, inputs, grad[0, ..., 0].numel())
    each = x.new_empty(clients, parts, inputs, outputs)
    kernels.convolve_weight(factor, slope, each, read, step, start)
    on_weight = x.new_zeros(weight.shape)
    kernels.gather(each, None, on_weight, None, 1.0, 0.0, taps)
    return _first(below), on_weight


class BatchableConv2d(nn.Module):
    """`nn.Conv2d` with the same parameters and names."""

    def __init__(self, conv: nn.Conv2d, precision: str) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        pad = tuple(conv._reversed_padding_repeated_twice)
        few = few_channels(conv)
        self.options = (conv.kernel_size, conv.stride, pad, few, HALVES[precision])

    def forward(self, x: Tensor) -> Tensor:
        """Return (samples, outputs, height, width)."""
        given = (_convolve, _convolve_backward, self.options)
        out: Tensor = _together(*given, x, self.weight)[0]
        return out if self.bias is None else out + self.bias[:, None, None]


class BatchableLinear(nn.Module):
    """`nn.Linear` as a convolution with a kernel of one pixel, with the same names."""

    def __init__(self, linear: nn.Linear, precision: str) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.options = ((1, 1), (1, 1), (0, 0, 0, 0), False, HALVES[precision])

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., outputs)."""
        pixels = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)
        kernel = self.weight[:, :, None, None]
        given = (_convolve, _convolve_backward, self.options)
        out: Tensor = _together(*given, pixels, kernel)[0]
        out = out.permute(0, 2, 3, 1).reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


def _normalize(
    x: Tensor, weight: Tensor, bias: Tensor, options: tuple[int, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, and the means and scales that the backward pass needs."""
    x = x.permute(0, 1, 3, 4, 2).contiguous()
    out = torch.empty_like(x)
    mean, scale = (x.new_empty(*x.shape[:2], x.shape[4]) for _ in range(2))
    _kernels().norm(x, weight.contiguous(), bias.contiguous(), out, mean, scale, *options)
    return _first(out), mean, scale


def _normalize_backward(
    x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, grad: Tensor, options: tuple[int, float]
) -> tuple[Tensor, Tensor, Tensor]:
    x, grad = (t.permute(0, 1, 3, 4, 2).contiguous() for t in (x, grad))
    below = torch.empty_like(x)
    on_weight, on_bias = torch.empty_like(mean), torch.empty_like(mean)
    given = (x, grad, weight.contiguous(), mean.contiguous(), scale.contiguous())
    _kernels().norm_backward(*given, below, on_weight, on_bias, options[0])
    return _first(below), on_weight.sum(1), on_bias.sum(1)


class BatchableGroupNorm(nn.Module):
    """`nn.GroupNorm` of images with the same parameters and names."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.options = (norm.num_groups, norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return normalized images; anything else goes to PyTorch."""
        if x.dim() != 4:
            groups, eps = self.options
            return nn.functional.group_norm(x, groups, self.weight, self.bias, eps)
        given = (_normalize, _normalize_backward, self.options)
        out: Tensor = _together(*given, x, self.weight, self.bias)[0]
        return out


def batchable(module: nn.Module, precision: str) -> nn.Module | None:
    """Return a layer that does the same for many clients at once, None if there is none."""
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        return None
    if type(module) is nn.Conv2d:
        return BatchableConv2d(module, precision) if plain_convolution(module) else None
    if type(module) is nn.Linear:
        wide = module.in_features % 16 == 0 and module.out_features % 16 == 0
        return BatchableLinear(module, precision) if wide else None
    if type(module) is nn.GroupNorm and module.affine:
        channels, each = module.num_channels, module.num_channels // module.num_groups
        powers = channels & (channels - 1) == 0 and each & (each - 1) == 0
        return BatchableGroupNorm(module) if powers and channels >= 16 and each <= 64 else None
    return None
