"""Triton kernels of `convolution` and `recurrent`, in a file of their own: Triton has no types.

Images are (rows, channels, samples, height, width); a row is a client. Convolutions are matrix
products with a matrix of patches: its row index k counts (channel, kernel row, kernel column), its
column index p counts the pixels of all samples. `unfold` stores it, for products by cuBLAS;
`convolve` and `convolve_weight` read it from the images while they multiply. Offsets of rows are
64-bit numbers; divisions are by constants.
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
def _dot(a, b, total, PRECISION: tl.constexpr):
    """Add a @ b. "tf32x3" splits each factor in two and is as exact as float32."""
    if PRECISION == "bf16":
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def _convolve(
    x, w, out, row_stride, channel_stride, sample_stride, pixels,
    M: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[m, p] = sum over k of w[m, k] * patch[k, p]."""
    row = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    p = tl.program_id(0) * BN + tl.arange(0, BN)
    top = (p // OW) % OH * SH - TOP
    left = p % OW * SW - LEFT
    image = x + row * row_stride
    weight = w + row * (M * K)
    corner = (p // (OW * OH)) * sample_stride + top * W + left
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        i = (k // KW) % KH
        j = k % KW
        real = (p < pixels)[None, :]
        if K % BK != 0:
            real = real & (k < K)[:, None]
        if TOP + LEFT > 0 or (OH - 1) * SH + KH > H or (OW - 1) * SW + KW > W:
            h = i[:, None] + top[None, :]
            v = j[:, None] + left[None, :]
            real = real & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        tap = (k // (KH * KW)) * channel_stride + i * W + j
        patch = tl.load(image + (tap[:, None] + corner[None, :]), mask=real, other=0.0)
        inside = (m < M)[:, None] & (k < K)[None, :]
        factor = tl.load(weight + (m[:, None] * K + k[None, :]), mask=inside, other=0.0)
        total = _dot(factor, patch, total, PRECISION)
    place = out + row * M * pixels + m[:, None].to(tl.int64) * pixels + p[None, :]
    tl.store(place, total, mask=(m < M)[:, None] & (p < pixels)[None, :])


def convolve(x, w, out, kernel, stride, corner, precision):
    """Write the convolutions of images x with weights w (rows, outputs, k) to `out`.

    The pixels of an image must be contiguous; rows, channels and samples may lie anywhere.
    `corner` is the padding above and to the left.
    """
    rows, outputs, samples, oh, ow = out.shape
    bm = min(64, max(16, triton.next_power_of_2(outputs)))
    pixels = samples * oh * ow
    wide = precision != "ieee" and rows * triton.cdiv(pixels, 256) >= 264  # two per processor
    bn, warps = (256, 8) if wide else (64, 4)  # measured on an H200
    grid = (triton.cdiv(pixels, bn), triton.cdiv(outputs, bm), rows)
    _convolve[grid](
        x, w, out, x.stride(0), x.stride(1), x.stride(2), pixels, outputs, w.shape[2],
        *x.shape[3:], oh, ow, *kernel, *stride, *corner,
        BM=bm, BN=bn, BK=16, PRECISION=precision, num_warps=warps, num_stages=3,
    )  # fmt: skip


@triton.jit
def _convolve_input(
    grad, w, out, pixels, grad_pixels,
    C: tl.constexpr, M: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[c, p] = sum over (m, i, j) of w[m, c, i, j] * grad[m, pixel reached by (i, j)]."""
    row = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BM + tl.arange(0, BM)
    p = tl.program_id(0) * BN + tl.arange(0, BN)
    high = (p // W) % H + TOP
    wide = p % W + LEFT
    image = grad + row * M * grad_pixels + (p // (W * H)) * (OH * OW)
    weight = w + row * (M * C * KH * KW)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, M * KH * KW, BK):
        k = first + tl.arange(0, BK)
        tap = k % (KH * KW)
        h = high[None, :] - (tap // KW)[:, None]
        v = wide[None, :] - (tap % KW)[:, None]
        real = (k < M * KH * KW)[:, None] & (p < pixels)[None, :] & (h >= 0) & (v >= 0)
        if SH > 1 or SW > 1:
            real = real & (h % SH == 0) & (v % SW == 0)
            h = h // SH
            v = v // SW
        real = real & (h < OH) & (v < OW)
        at = image[None, :] + (k // (KH * KW)).to(tl.int64)[:, None] * grad_pixels + h * OW + v
        value = tl.load(at, mask=real, other=0.0)
        inside = (c < C)[:, None] & (k < M * KH * KW)[None, :]
        place = (k // (KH * KW))[None, :] * (C * KH * KW) + c[:, None] * (KH * KW) + tap[None, :]
        total = _dot(tl.load(weight + place, mask=inside, other=0.0), value, total, PRECISION)
    place = out + row * C * pixels + c[:, None].to(tl.int64) * pixels + p[None, :]
    tl.store(place, total, mask=(c < C)[:, None] & (p < pixels)[None, :])


@triton.jit
def _flip(w, out, M: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * (M * C * TAPS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < M * C * TAPS
    source = (at // TAPS % M * C + at // (TAPS * M)) * TAPS + TAPS - 1 - at % TAPS
    tl.store(out + row + at, tl.load(w + row + source, mask=inside, other=0.0), mask=inside)


def flip(w, out, taps):
    """Swap outputs and channels of weights and turn their kernels around.

    The gradient of the images is the convolution of the outputs' gradient with such weights.
    """
    rows, outputs, size = w.shape
    grid = (rows, triton.cdiv(outputs * size, 1024))
    _flip[grid](w, out, outputs, size // taps, taps, BLOCK=1024)


def convolve_input(grad, w, out, kernel, stride, corner, precision):
    """Write the gradient of the images to `out`, for any stride."""
    rows, channels, samples, high, wide = out.shape
    outputs, oh, ow = grad.shape[1], grad.shape[3], grad.shape[4]
    bm = min(64, max(16, triton.next_power_of_2(channels)))
    pixels = samples * high * wide
    grid = (triton.cdiv(pixels, 128), triton.cdiv(channels, bm), rows)
    _convolve_input[grid](
        grad, w, out, pixels, samples * oh * ow, channels, outputs, high, wide, oh, ow,
        *kernel, *stride, *corner,
        BM=bm, BN=128, BK=16, PRECISION=precision, num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _convolve_weight(
    x, grad, out, row_stride, channel_stride, sample_stride, pixels, chunk: tl.constexpr,
    M: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[part, m, k] = sum over the part's p of grad[m, p] * patch[k, p]."""
    place = tl.program_id(2)
    row = (place // PARTS).to(tl.int64)
    start = place % PARTS * chunk
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.program_id(0) * BN + tl.arange(0, BN)
    down = (k // KW) % KH - TOP
    right = k % KW - LEFT
    image = x + row * row_stride
    tap = (k // (KH * KW)) * channel_stride + down * W + right
    gradient = grad + row * M * pixels
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, chunk, BK):
        p = start + first + tl.arange(0, BK)
        in_part = (p < pixels) & (p < start + chunk)
        high = (p // OW) % OH * SH
        wide = p % OW * SW
        real = (k < K)[:, None] & in_part[None, :]
        if TOP + LEFT > 0 or (OH - 1) * SH + KH > H or (OW - 1) * SW + KW > W:
            h = high[None, :] + down[:, None]
            v = wide[None, :] + right[:, None]
            real = real & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        corner = (p // (OW * OH)) * sample_stride + high * W + wide
        patch = tl.load(image + (tap[:, None] + corner[None, :]), mask=real, other=0.0)
        inside = (m < M)[:, None] & in_part[None, :]
        value = tl.load(gradient + (m[:, None] * pixels + p[None, :]), mask=inside, other=0.0)
        total = _dot(value, tl.trans(patch), total, PRECISION)
    into = out + place.to(tl.int64) * (M * K) + m[:, None] * K + k[None, :]
    tl.store(into, total, mask=(m < M)[:, None] & (k < K)[None, :])


def weight_parts(rows, outputs, size, pixels):
    """Return how many sums to cut a weight's gradient into, so that all of a GPU is busy."""
    tiles = rows * triton.cdiv(size, 64) * triton.cdiv(outputs, 64)
    return max(1, min(1024 // tiles, pixels // 512))


def convolve_weight(x, grad, out, kernel, stride, corner, precision):
    """Write the gradients of the weights to `out` (rows, parts, outputs, k), one sum per part."""
    rows, parts, outputs, size = out.shape
    samples, oh, ow = grad.shape[2:]
    bm = min(64, max(16, triton.next_power_of_2(outputs)))
    bn = min(64, max(16, triton.next_power_of_2(size)))
    pixels = samples * oh * ow
    grid = (triton.cdiv(size, bn), triton.cdiv(outputs, bm), rows * parts)
    _convolve_weight[grid](
        x, grad, out, x.stride(0), x.stride(1), x.stride(2), pixels, triton.cdiv(pixels, parts),
        outputs, size, *x.shape[3:], oh, ow, *kernel, *stride, *corner, parts,
        BM=bm, BN=bn, BK=32, PRECISION=precision, num_warps=4, num_stages=3,
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
