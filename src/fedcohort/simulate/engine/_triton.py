"""Triton kernels of `convolution.Conv`, `convolution.MaxPool` and `recurrent`.

They are in a file of their own because Triton has no types. Images are (rows, channels, samples,
height, width); a row is a client. `unfold` copies the patches of images to a matrix for products by
cuBLAS. `lstm_cell` is all of an LSTM's step but the product with the recurrent weights.
Offsets of rows are 64-bit numbers; divisions are by constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


def _grid(rows, pixels):
    block = min(1024, triton.next_power_of_2(pixels))
    return (rows, triton.cdiv(pixels, block)), block


@triton.jit
def _unfold(
    x, patches, row_stride, channel_stride, sample_stride, channels, pixels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    j = (place % KW).to(tl.int32)
    i = ((place // KW) % KH).to(tl.int32)
    channel = (place // (KW * KH)) % channels
    row = place // (KW * KH * channels)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = (n // OW) % OH * SH + i - TOP
    w = n % OW * SW + j - LEFT
    inside = n < pixels
    real = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    start = x + row * row_stride + channel * channel_stride
    value = tl.load(start + n // (OW * OH) * sample_stride + h * W + w, mask=real, other=0.0)
    tl.store(patches + place * pixels + n, value, mask=inside)


def unfold(x, patches, stride, corner):
    """Copy the patches under every position of the kernel; `corner` is the padding above and left.

    The pixels of an image must be contiguous; rows, channels and samples may lie anywhere.
    """
    rows, channels, kh, kw, samples, oh, ow = patches.shape
    grid, block = _grid(rows * channels * kh * kw, samples * oh * ow)
    _unfold[grid](
        x, patches, x.stride(0), x.stride(1), x.stride(2), channels, samples * oh * ow,
        *x.shape[3:], oh, ow, kh, kw, *stride, *corner, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _fold(
    patches, out, pixels, patch_pixels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = m < pixels
    sample = m // (W * H) * (OW * OH)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            h = (m // W) % H + TOP - i
            w = m % W + LEFT - j
            real = inside & (h >= 0) & (w >= 0) & (h < OH * SH) & (w < OW * SW)
            real = real & (h % SH == 0) & (w % SW == 0)
            start = patches + (image * (KH * KW) + i * KW + j) * patch_pixels
            total += tl.load(start + sample + h // SH * OW + w // SW, mask=real, other=0.0)
    tl.store(out + image * pixels + m, total, mask=inside)


def fold(patches, out, stride, corner):
    """Add to each pixel all that was copied from it: the transpose of `unfold`."""
    rows, channels, kh, kw, samples, oh, ow = patches.shape
    high, wide = out.shape[3:]
    grid, block = _grid(rows * channels, samples * high * wide)
    _fold[grid](
        patches, out, samples * high * wide, samples * oh * ow,
        high, wide, oh, ow, kh, kw, *stride, *corner, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _pool(
    x, out, chosen, pixels, x_pixels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < pixels
    at = n // (OW * OH) * (W * H) + (n // OW) % OH * (KH * W) + n % OW * KW
    best = tl.load(x + image * x_pixels + at, mask=inside, other=0.0)
    where = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            value = tl.load(x + image * x_pixels + at + i * W + j, mask=inside, other=0.0)
            higher = (value > best) | (value != value)
            best = tl.where(higher, value, best)
            where = tl.where(higher, i * KW + j, where)
    tl.store(out + image * pixels + n, best, mask=inside)
    tl.store(chosen + image * pixels + n, where.to(tl.uint8), mask=inside)


def pool(x, out, chosen, kernel):
    """Take the maximum of each tile and note where in the tile it was first found."""
    rows, channels, samples, oh, ow = out.shape
    high, wide = x.shape[3:]
    grid, block = _grid(rows * channels, samples * oh * ow)
    _pool[grid](
        x, out, chosen, samples * oh * ow, samples * high * wide,
        high, wide, oh, ow, *kernel, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _unpool(
    grad, chosen, out, pixels, grad_pixels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = m < pixels
    h = (m // W) % H
    w = m % W
    tiled = inside & (h < OH * KH) & (w < OW * KW)
    at = image * grad_pixels + m // (W * H) * (OW * OH) + h // KH * OW + w // KW
    where = tl.load(chosen + at, mask=tiled, other=255).to(tl.int32)
    mine = tiled & (where == h % KH * KW + w % KW)
    tl.store(out + image * pixels + m, tl.load(grad + at, mask=mine, other=0.0), mask=inside)


def unpool(grad, chosen, out, kernel):
    """Give each maximum's gradient to the pixel that it was; the others get zero."""
    rows, channels, samples, oh, ow = grad.shape
    high, wide = out.shape[3:]
    grid, block = _grid(rows * channels, samples * high * wide)
    _unpool[grid](
        grad, chosen, out, samples * high * wide, samples * oh * ow,
        high, wide, oh, ow, *kernel, BLOCK=block,
    )  # fmt: skip


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def _lstm_cell(
    gates, before, h, c, tanh_c, samples, gate_stride, state_stride, tanh_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    client = (place // samples).to(tl.int64)
    sample = place % samples
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < HIDDEN
    gate = gates + client * gate_stride + sample * (4 * HIDDEN) + unit
    state = client * state_stride + sample * HIDDEN + unit
    i = tl.sigmoid(tl.load(gate, mask=inside, other=0.0))
    f = tl.sigmoid(tl.load(gate + HIDDEN, mask=inside, other=0.0))
    g = _tanh(tl.load(gate + 2 * HIDDEN, mask=inside, other=0.0))
    o = tl.sigmoid(tl.load(gate + 3 * HIDDEN, mask=inside, other=0.0))
    cell = f * tl.load(before + state, mask=inside, other=0.0) + i * g
    squashed = _tanh(cell)
    tl.store(gate, i, mask=inside)
    tl.store(gate + HIDDEN, f, mask=inside)
    tl.store(gate + 2 * HIDDEN, g, mask=inside)
    tl.store(gate + 3 * HIDDEN, o, mask=inside)
    tl.store(c + state, cell, mask=inside)
    tl.store(h + state, o * squashed, mask=inside)
    tl.store(tanh_c + client * tanh_stride + sample * HIDDEN + unit, squashed, mask=inside)


def lstm_cell(gates, before, h, c, tanh_c):
    """Turn sums into activations in `gates`; write the new state, its tanh and the output.

    All are (clients, samples, ...), contiguous but for the clients.
    """
    clients, samples, hidden = h.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _lstm_cell[(clients * samples, triton.cdiv(hidden, block))](
        gates, before, h, c, tanh_c, samples, gates.stride(0), h.stride(0), tanh_c.stride(0),
        hidden, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip


@triton.jit
def _lstm_cell_backward(
    gates, before, tanh_c, grad_h, grad_c, samples, gate_stride, state_stride, tanh_stride,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    client = (place // samples).to(tl.int64)
    sample = place % samples
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < HIDDEN
    gate = gates + client * gate_stride + sample * (4 * HIDDEN) + unit
    i = tl.load(gate, mask=inside, other=0.0)
    f = tl.load(gate + HIDDEN, mask=inside, other=0.0)
    g = tl.load(gate + 2 * HIDDEN, mask=inside, other=0.0)
    o = tl.load(gate + 3 * HIDDEN, mask=inside, other=0.0)
    state = before + client * state_stride + sample * HIDDEN + unit
    squashed = tl.load(
        tanh_c + client * tanh_stride + sample * HIDDEN + unit, mask=inside, other=0.0
    )
    at = place.to(tl.int64) * HIDDEN + unit
    dh = tl.load(grad_h + at, mask=inside, other=0.0)
    dc = tl.load(grad_c + at, mask=inside, other=0.0) + dh * o * (1 - squashed * squashed)
    tl.store(gate, dc * g * i * (1 - i), mask=inside)
    tl.store(gate + HIDDEN, dc * tl.load(state, mask=inside, other=0.0) * f * (1 - f), mask=inside)
    tl.store(gate + 2 * HIDDEN, dc * i * (1 - g * g), mask=inside)
    tl.store(gate + 3 * HIDDEN, dh * squashed * o * (1 - o), mask=inside)
    tl.store(grad_c + at, dc * f, mask=inside)


def lstm_cell_backward(gates, before, tanh_c, grad_h, grad_c):
    """Turn activations into gradients in `gates`, and the gradient of the state into the next."""
    clients, samples, hidden = grad_h.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _lstm_cell_backward[(clients * samples, triton.cdiv(hidden, block))](
        gates, before, tanh_c, grad_h, grad_c, samples,
        gates.stride(0), before.stride(0), tanh_c.stride(0),
        hidden, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
