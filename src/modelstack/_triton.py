"""Triton kernels of `convolution.Conv`, `convolution.MaxPool` and `recurrent`.

They are in a file of their own because Triton has no types. Images are (rows, channels, samples,
height, width); a row is a client. `unfold` copies the patches of images to a matrix for products by
cuBLAS. A step of an LSTM is one kernel: the product with the recurrent weights, then the gates.
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
def _lstm_step(
    gates, weight, h, c, next_h, next_c, tanh_c, gate_stride, state_stride, tanh_stride,
    SAMPLES: tl.constexpr, BS: tl.constexpr, HIDDEN: tl.constexpr, BU: tl.constexpr,
    BK: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """The four gates are the first axis, so that each of four warps multiplies for one gate."""
    client = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BU + tl.arange(0, BU)
    sample = tl.program_id(1) * BS + tl.arange(0, BS)
    gate = tl.arange(0, 4)[:, None, None]
    real = (sample < SAMPLES)[:, None] & (unit < HIDDEN)[None, :]
    into = weight + client * (4 * HIDDEN * HIDDEN) + gate * (HIDDEN * HIDDEN)
    into += unit[None, None, :] * HIDDEN
    from_h = h + client * state_stride + sample[:, None] * HIDDEN
    sums = tl.zeros((4, BS, BU), tl.float32)
    for turn in range(0, (HIDDEN + BK - 1) // BK):
        k = turn * BK + tl.arange(0, BK)
        live = (sample < SAMPLES)[:, None] & (k < HIDDEN)[None, :]
        fits = (k < HIDDEN)[None, :, None] & (unit < HIDDEN)[None, None, :] & (gate < 4)
        before = tl.load(from_h + k[None, :], mask=live, other=0.0)
        before = tl.broadcast_to(before[None, :, :], (4, BS, BK))
        w = tl.load(into + k[None, :, None], mask=fits, other=0.0)
        sums = tl.dot(before, w, sums, input_precision=ROUNDING)
    at = gates + client * gate_stride + gate * HIDDEN
    at += sample[None, :, None] * (4 * HIDDEN) + unit[None, None, :]
    sums += tl.load(at, mask=real[None, :, :], other=0.0)
    sums = tl.where(gate == 2, _tanh(sums), tl.sigmoid(sums))
    tl.store(at, sums, mask=real[None, :, :])
    i = tl.sum(tl.where(gate == 0, sums, 0.0), 0)
    f = tl.sum(tl.where(gate == 1, sums, 0.0), 0)
    g = tl.sum(tl.where(gate == 2, sums, 0.0), 0)
    o = tl.sum(tl.where(gate == 3, sums, 0.0), 0)
    state = client * state_stride + sample[:, None] * HIDDEN + unit[None, :]
    cell = f * tl.load(c + state, mask=real, other=0.0) + i * g
    squashed = _tanh(cell)
    tl.store(next_c + state, cell, mask=real)
    tl.store(next_h + state, o * squashed, mask=real)
    to = tanh_c + client * tanh_stride + sample[:, None] * HIDDEN + unit[None, :]
    tl.store(to, squashed, mask=real)


def _lstm_grid(clients, samples, hidden):
    bs = min(32, max(16, triton.next_power_of_2(samples)))  # 100 KiB of shared memory are enough
    return (triton.cdiv(hidden, 16), triton.cdiv(samples, bs), clients), bs


def lstm_step(gates, weight, h, c, next_h, next_c, tanh_c, rounding):
    """Add h times the weights to the sums in `gates`, then take the step.

    `gates` gets the activations; the new output, state and its tanh are written. All are (clients,
    samples, ...), contiguous but for the clients.
    """
    clients, samples, hidden = h.shape
    grid, bs = _lstm_grid(clients, samples, hidden)
    _lstm_step[grid](
        gates, weight, h, c, next_h, next_c, tanh_c, gates.stride(0), h.stride(0),
        tanh_c.stride(0), samples, bs, hidden, BU=16, BK=64, ROUNDING=rounding,
        num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _lstm_step_backward(
    later, grad_h, gates, weight, before, tanh_c, grad_c, gate_stride, state_stride, tanh_stride,
    LAST: tl.constexpr, SAMPLES: tl.constexpr, BS: tl.constexpr, HIDDEN: tl.constexpr,
    BU: tl.constexpr, BK: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    unit = tl.program_id(0) * BU + tl.arange(0, BU)
    sample = tl.program_id(1) * BS + tl.arange(0, BS)
    real = (sample < SAMPLES)[:, None] & (unit < HIDDEN)[None, :]
    at = (client * SAMPLES + sample[:, None]) * HIDDEN + unit[None, :]
    if LAST:
        dh = tl.load(grad_h + at, mask=real, other=0.0)
        dc = tl.zeros((BS, BU), tl.float32)
    else:
        dc = tl.load(grad_c + at, mask=real, other=0.0)
        of = tl.arange(0, 4)[:, None, None]
        into = weight + client * (4 * HIDDEN * HIDDEN) + of * (HIDDEN * HIDDEN)
        into += unit[None, None, :]
        above = later + client * gate_stride + of * HIDDEN + sample[None, :, None] * (4 * HIDDEN)
        each = tl.zeros((4, BS, BU), tl.float32)
        for turn in range(0, (HIDDEN + BK - 1) // BK):
            k = turn * BK + tl.arange(0, BK)
            live = (sample < SAMPLES)[None, :, None] & (k < HIDDEN)[None, None, :] & (of < 4)
            fits = (k < HIDDEN)[None, :, None] & (unit < HIDDEN)[None, None, :] & (of < 4)
            d = tl.load(above + k[None, None, :], mask=live, other=0.0)
            w = tl.load(into + k[None, :, None] * HIDDEN, mask=fits, other=0.0)
            each = tl.dot(d, w, each, input_precision=ROUNDING)
        dh = tl.sum(each, 0)
    gate = gates + client * gate_stride + sample[:, None] * (4 * HIDDEN) + unit[None, :]
    i = tl.load(gate, mask=real, other=0.0)
    f = tl.load(gate + HIDDEN, mask=real, other=0.0)
    g = tl.load(gate + 2 * HIDDEN, mask=real, other=0.0)
    o = tl.load(gate + 3 * HIDDEN, mask=real, other=0.0)
    of = tanh_c + client * tanh_stride + sample[:, None] * HIDDEN + unit[None, :]
    squashed = tl.load(of, mask=real, other=0.0)
    dc += dh * o * (1 - squashed * squashed)
    of = before + client * state_stride + sample[:, None] * HIDDEN + unit[None, :]
    tl.store(gate, dc * g * i * (1 - i), mask=real)
    tl.store(gate + HIDDEN, dc * tl.load(of, mask=real, other=0.0) * f * (1 - f), mask=real)
    tl.store(gate + 2 * HIDDEN, dc * i * (1 - g * g), mask=real)
    tl.store(gate + 3 * HIDDEN, dh * squashed * o * (1 - o), mask=real)
    tl.store(grad_c + at, dc * f, mask=real)


def lstm_step_backward(later, grad_h, gates, weight, before, tanh_c, grad_c, rounding):
    """Turn a step's activations in `gates` into gradients.

    `later` holds those gradients of the next step; it is None for the last step, where the output's
    gradient is `grad_h`. `before` is the state before the step. `grad_c` gets the gradient of the
    state before the step.
    """
    clients, samples, hidden = grad_c.shape
    grid, bs = _lstm_grid(clients, samples, hidden)
    _lstm_step_backward[grid](
        gates if later is None else later, grad_h, gates, weight, before, tanh_c, grad_c,
        gates.stride(0), before.stride(0), tanh_c.stride(0), later is None,
        samples, bs, hidden, BU=16, BK=64, ROUNDING=rounding, num_warps=4, num_stages=3,
    )  # fmt: skip
