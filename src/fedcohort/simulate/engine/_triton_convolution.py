"""Triton kernels for the convolutions of many models, with channels last.

Images are (rows, samples, height, width, channels); a row is a client. A convolution is a matrix
product: its row index p counts the pixels of all samples, and its inner index k counts (kernel row,
kernel column, channel). The kernels read the patches from the images while they multiply. Channels
lie next to each other, so a patch is read in pieces of 16 bytes.

Tensor cores multiply 16-bit numbers. "fp16x3" writes each float32 factor as the sum of two of them
and adds three products, in float32. The error is that of float32 arithmetic: two numbers of 11 bits
hold 22 bits and a sign each. "fp16" rounds each factor once, to the 11 bits of TF32. Both first
multiply a row's factors by the power of two that brings the largest to 2 ** 14, because 16-bit
numbers have a short range. These largest numbers ("peaks") are collected by the kernels that write
the factors.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def _power(peak):
    """Return the power of two that brings `peak` to 2 ** 14 or a little more, and its inverse."""
    exponent = (tl.load(peak).to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(268 - exponent, 1), 254)
    inverse = 254 - exponent
    return (exponent << 23).to(tl.float32, bitcast=True), (inverse << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _dot(a, b, total, ROUNDING: tl.constexpr):
    """Add a @ b."""
    if ROUNDING == "fp16x3":
        high_a = a.to(tl.float16)
        high_b = b.to(tl.float16)
        low_a = (a - high_a.to(tl.float32)).to(tl.float16)
        low_b = (b - high_b.to(tl.float32)).to(tl.float16)
        part = tl.dot(low_a, high_b)
        part = tl.dot(high_a, low_b, part)
        total += tl.dot(high_a, high_b, part)  # tensor cores add long sums less exactly
    elif ROUNDING == "fp16":
        total = tl.dot(a.to(tl.float16), b.to(tl.float16), total)
    else:
        total = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    return total


@triton.jit
def _pack(
    w, packed, flipped, peak, FLIP: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < M * C * TAPS
    value = tl.load(w + row * (M * C * TAPS) + at, mask=inside, other=0.0)
    tap = at % TAPS
    c = at // TAPS % C
    m = at // (TAPS * C)
    start = row * (M * C * TAPS)
    tl.store(packed + start + (tap * C + c) * M + m, value, mask=inside)
    if FLIP:
        tl.store(flipped + start + ((TAPS - 1 - tap) * M + m) * C + c, value, mask=inside)
    tl.atomic_max(peak + row, tl.max(tl.abs(value)))


def pack(w, packed, flipped, peak, taps):
    """Write weights (rows, outputs, channels, taps) as (rows, taps, channels, outputs).

    `flipped` gets them as (rows, taps backward, outputs, channels), unless it is None: the gradient
    of the images is the convolution of the outputs' gradient with these.
    """
    rows, outputs = w.shape[:2]
    channels = w[0, 0].numel() // taps
    grid = (rows, triton.cdiv(outputs * channels * taps, 1024))
    _pack[grid](w, packed, flipped, peak, flipped is not None, outputs, channels, taps, BLOCK=1024)


@triton.jit
def _convolve(
    x, w, extra, out, x_peak, w_peak, out_peak, row_stride, pixels,
    SN: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr, XC: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, EXTRA: tl.constexpr, PEAK: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """out[p, m] = sum over k of patch[p, k] * w[k, m]."""
    row = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    top = (p // OW) % OH * SH - TOP
    left = p % OW * SW - LEFT
    image = (p // (OW * OH)) * SN
    K: tl.constexpr = KH * KW * C
    x += row * row_stride  # offsets inside a row are 32-bit numbers
    w += row * (K * M)
    out += row * M * pixels
    INSIDE: tl.constexpr = (
        TOP <= 0 and LEFT <= 0 and (OH - 1) * SH + KH - TOP <= H and (OW - 1) * SW + KW - LEFT <= W
    )
    SCALED: tl.constexpr = ROUNDING != "bf16"
    if SCALED:
        x_scale, x_back = _power(x_peak + row)
        w_scale, w_back = _power(w_peak + row)
    total = tl.zeros((BP, BM), tl.float32)
    for turn in range(0, (K + BK - 1) // BK):
        k = turn * BK + tl.arange(0, BK)
        if C % BK == 0:  # one tap at a time: positions are vectors, not matrices
            tap = turn // (C // BK)
            h = top + tap // KW
            v = left + tap % KW
            real = p < pixels
            if DH > 1 or DW > 1:
                real = real & (h % DH == 0) & (v % DW == 0)
            if not INSIDE:
                real = real & (h >= 0) & (h < H * DH) & (v >= 0) & (v < W * DW)
            start = image + (h // DH) * XH + (v // DW) * XW
            place = start[:, None] + (turn % (C // BK) * BK + tl.arange(0, BK))[None, :] * XC
            keep = real[:, None]
        else:
            tap = k // C
            h = top[:, None] + (tap // KW)[None, :]
            v = left[:, None] + (tap % KW)[None, :]
            keep = (p < pixels)[:, None] & (k < K)[None, :]
            if DH > 1 or DW > 1:
                keep = keep & (h % DH == 0) & (v % DW == 0)
            if not INSIDE:
                keep = keep & (h >= 0) & (h < H * DH) & (v >= 0) & (v < W * DW)
            place = image[:, None] + (h // DH) * XH + (v // DW) * XW + (k % C)[None, :] * XC
        if XC == 1:
            a = tl.load(x + place, mask=keep, other=0.0)
        else:  # pixels lie next to each other, so neighboring threads read pixels
            a = tl.trans(tl.load(x + tl.trans(place), mask=tl.trans(keep), other=0.0))
        where = k[:, None] * M + m[None, :]
        if M % BM == 0 and K % BK == 0:
            b = tl.load(w + where)
        else:
            b = tl.load(w + where, mask=(k < K)[:, None] & (m < M)[None, :], other=0.0)
        if SCALED:
            a = a * x_scale
            b = b * w_scale
        total = _dot(a, b, total, ROUNDING)
    if SCALED:
        total = total * x_back * w_back
    to = p[:, None] * M + m[None, :]
    fits = (p < pixels)[:, None] & (m < M)[None, :]
    if EXTRA == "bias" or EXTRA == "bias, relu":
        total += tl.load(extra + row * M + m, mask=m < M, other=0.0)[None, :]
    if EXTRA == "relu" or EXTRA == "bias, relu":
        total = tl.where(total < 0, 0.0, total)  # keeps NaN
    if EXTRA == "mask":
        kept = tl.load(extra + row * M * pixels + to, mask=fits, other=0.0) > 0
        total = tl.where(kept, total, 0.0)
    if PEAK:
        tl.atomic_max(out_peak + row, tl.max(tl.where(fits, tl.abs(total), 0.0)))
    tl.store(out + to, total, mask=fits)


def convolve(x, w, out, peaks, kernel, stride, spread, corner, rounding, extra="", values=None):
    """Write convolutions of images `x` with packed weights `w` to `out`.

    Images may lie anywhere. `corner` is the padding above and to the left. `spread` is the distance
    between the pixels of `x`, with zeros in between. `peaks` are those of `x`, `w` and `out`, where
    None is not written. `extra` says what is done to the results: "bias", "relu", "bias, relu", or
    "mask", which keeps them where `values` is positive.
    """
    rows, samples, oh, ow, outputs = out.shape
    row_stride, *strides = x.stride()
    high, wide, channels = x.shape[2:]
    pixels = samples * oh * ow
    bm = min(64, max(16, triton.next_power_of_2(outputs)))
    bk = next((b for b in (32, 16) if channels % b == 0), 32)
    bp, warps = (128, 4) if rows * triton.cdiv(pixels, 128) >= 264 else (64, 4)  # two per processor
    grid = (triton.cdiv(pixels, bp), triton.cdiv(outputs, bm), rows)
    _convolve[grid](
        x, w, values, out, *peaks, row_stride, pixels, *strides, outputs, channels, high, wide,
        oh, ow, *kernel, *stride, *spread, *corner, extra, peaks[2] is not None,
        BP=bp, BM=bm, BK=bk, ROUNDING=rounding, num_warps=warps, num_stages=3,
    )  # fmt: skip


@triton.jit
def _weight(
    x, grad, out, x_peak, grad_peak, row_stride, pixels, CHUNK: tl.constexpr,
    SN: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr, XC: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    PARTS: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    ROUNDING: tl.constexpr,
):  # fmt: skip
    """out[part, k, m] = sum over the part's p of patch[p, k] * grad[p, m]; k = K is the bias."""
    place = tl.program_id(2)
    row = (place // PARTS).to(tl.int64)
    start = place % PARTS * CHUNK
    K: tl.constexpr = KH * KW * C
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    tap = k // C
    down = tap // KW - TOP
    right = tap % KW - LEFT
    INSIDE: tl.constexpr = (
        TOP <= 0 and LEFT <= 0 and (OH - 1) * SH + KH - TOP <= H and (OW - 1) * SW + KW - LEFT <= W
    )
    x += row * row_stride
    grad += row * M * pixels
    shift = down * XH + right * XW + (k % C) * XC
    SCALED: tl.constexpr = ROUNDING != "bf16"
    if SCALED:
        x_scale, x_back = _power(x_peak + row)
        g_scale, g_back = _power(grad_peak + row)
    total = tl.zeros((BK, BM), tl.float32)
    sums = tl.zeros((BP, BM), tl.float32)
    for first in range(0, CHUNK, BP):
        p = start + first + tl.arange(0, BP)
        high = (p // OW) % OH * SH
        wide = p % OW * SW
        keep = (p < pixels)[:, None]
        if K % BK != 0:
            keep = keep & (k < K)[None, :]
        if not INSIDE:
            h = high[:, None] + down[None, :]
            v = wide[:, None] + right[None, :]
            keep = keep & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        at = (p // (OW * OH)) * SN + high * XH + wide * XW
        if XC == 1:
            a = tl.trans(tl.load(x + at[:, None] + shift[None, :], mask=keep, other=0.0))
        else:  # pixels lie next to each other, so neighboring threads read pixels
            a = tl.load(x + shift[:, None] + at[None, :], mask=tl.trans(keep), other=0.0)
        fits = (p < pixels)[:, None]
        if M % BM != 0:
            fits = fits & (m < M)[None, :]
        of = p[:, None] * M + m[None, :]
        b = tl.load(grad + of, mask=fits, other=0.0)
        sums += b
        if SCALED:
            a = a * x_scale
            b = b * g_scale
        total = _dot(a, b, total, ROUNDING)
    if SCALED:
        total = total * x_back * g_back
    to = out + place.to(tl.int64) * ((K + 1) * M)
    tl.store(to + k[:, None] * M + m[None, :], total, mask=(k < K)[:, None] & (m < M)[None, :])
    if tl.program_id(0) == 0:
        tl.store(to + K * M + m, tl.sum(sums, 0), mask=m < M)


def weight_parts(rows, outputs, size, pixels):
    """Return how many sums to cut a weight's gradient into, so that all of a GPU is busy."""
    tiles = rows * triton.cdiv(size, 64) * triton.cdiv(outputs, 64)
    parts = max(1, min(512 // tiles, pixels // 256))
    return 1 << (parts.bit_length() - 1)  # few kernels to compile


def convolve_weight(x, grad, out, peaks, kernel, stride, corner, rounding):
    """Write the gradients of packed weights and biases to `out` (rows, parts, k + 1, outputs).

    There is one sum per part of the pixels; the last row is the bias. `peaks` are those of `x` and
    of `grad`, which is contiguous.
    """
    rows, parts, size, outputs = out.shape
    samples, oh, ow = grad.shape[1:4]
    row_stride, *strides = x.stride()
    pixels = samples * oh * ow
    bm = min(64, max(16, triton.next_power_of_2(outputs)))
    bk = min(64, max(16, triton.next_power_of_2(size - 1)))
    bp = 64
    chunk = triton.cdiv(triton.cdiv(pixels, parts), bp) * bp
    high, wide, channels = x.shape[2:]
    grid = (triton.cdiv(size - 1, bk), triton.cdiv(outputs, bm), rows * parts)
    _weight[grid](
        x, grad, out, *peaks, row_stride, pixels, chunk, *strides, outputs, channels, high, wide,
        oh, ow, *kernel, *stride, *corner, parts,
        BP=bp, BM=bm, BK=bk, ROUNDING=rounding, num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _gather(
    each, weight, bias, alpha, beta, PARTS: tl.constexpr, BIAS: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    SIZE: tl.constexpr = (C * TAPS + 1) * M
    inside = at < SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, PARTS):
        total += tl.load(each + (row * PARTS + part) * SIZE + at, mask=inside, other=0.0)
    m = at % M
    k = at // M
    real = k < C * TAPS
    to = weight + row * (C * TAPS * M) + (m * C + k % C) * TAPS + k // C
    tl.store(to, beta * tl.load(to, mask=real, other=0.0) + alpha * total, mask=real)
    if BIAS:
        last = inside & (k == C * TAPS)
        to = bias + row * M + m
        tl.store(to, beta * tl.load(to, mask=last, other=0.0) + alpha * total, mask=last)


def gather(each, weight, bias, alpha, beta, taps):
    """Add the sums of `convolve_weight` to targets: target = beta * target + alpha * gradient."""
    rows, parts, size, outputs = each.shape
    grid = (rows, triton.cdiv(size * outputs, 256))
    _gather[grid](
        each, weight, bias, alpha, beta, parts, bias is not None, outputs, (size - 1) // taps, taps,
        BLOCK=256,
    )  # fmt: skip


@triton.jit
def _pool(
    x, out, chosen, pixels, ROW, SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    SC: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr,
    OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    fits = (p < pixels)[:, None] & (c < C)[None, :]
    n = p // (OW * OH)
    h = (p // OW) % OH
    w = p % OW
    x += row * (pixels // (OW * OH)) * (H * W * C)
    out += row * ROW
    chosen += row * pixels * C
    at = ((n * H + h * KH) * W + w * KW)[:, None] * C + c[None, :]
    best = tl.load(x + at, mask=fits, other=0.0)
    where = tl.zeros((BP, BC), tl.int32)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            value = tl.load(x + at + (i * W + j) * C, mask=fits, other=0.0)
            higher = (value > best) | (value != value)
            best = tl.where(higher, value, best)
            where = tl.where(higher, i * KW + j, where)
    to = (n * SN + h * SH + w * SW)[:, None] + c[None, :] * SC
    tl.store(out + to, best, mask=fits)
    tl.store(chosen + p[:, None] * C + c[None, :], where.to(tl.uint8), mask=fits)


def pool(x, out, chosen, kernel):
    """Take the maximum of each tile and note where in the tile it was first found.

    `x` and `chosen` are contiguous; `out` may lie anywhere.
    """
    rows, samples, oh, ow, channels = out.shape
    row_stride, *strides = out.stride()
    pixels = samples * oh * ow
    bc = min(64, triton.next_power_of_2(channels))
    grid = (triton.cdiv(pixels, 32), triton.cdiv(channels, bc), rows)
    _pool[grid](
        x, out, chosen, pixels, row_stride, *strides, channels, *x.shape[2:4], oh, ow, *kernel,
        BP=32, BC=bc,
    )  # fmt: skip


@triton.jit
def _unpool(
    grad, chosen, y, below, peak, tiles, samples, ROW, SN: tl.constexpr, SH: tl.constexpr,
    SW: tl.constexpr, SC: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TH: tl.constexpr,
    TW: tl.constexpr, RELU: tl.constexpr, PEAK: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Tiles that the pooling left out, at the right and the bottom, get zeros."""
    row = tl.program_id(2).to(tl.int64)
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    n = q // (TW * TH)
    h = (q // TW) % TH
    w = q % TW
    inside = (q < tiles)[:, None] & (c < C)[None, :]
    pooled = inside & ((h < OH) & (w < OW))[:, None]
    chosen += row * samples * (OH * OW * C)
    below += row * samples * (H * W * C)
    spot = (((n * OH + h) * OW + w) * C)[:, None] + c[None, :]
    where = tl.load(chosen + spot, mask=pooled, other=255).to(tl.int32)
    of = (n * SN + h * SH + w * SW)[:, None] + c[None, :] * SC
    value = tl.load(grad + row * ROW + of, mask=pooled, other=0.0)
    if RELU:
        value = tl.where(tl.load(y + row * ROW + of, mask=pooled, other=0.0) > 0, value, 0.0)
    if PEAK:
        tl.atomic_max(peak + row, tl.max(tl.abs(value)))
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            down = h * KH + i
            right = w * KW + j
            to = (((n * H + down) * W + right) * C)[:, None] + c[None, :]
            real = inside & ((down < H) & (right < W))[:, None]
            tl.store(below + to, tl.where(where == i * KW + j, value, 0.0), mask=real)


def unpool(grad, chosen, y, below, peak, kernel, relu):
    """Give each maximum's gradient to the pixel that it was; the others get zero.

    With `relu`, only where the maximum `y` is positive. `grad` and `y` lie alike.
    """
    rows, samples, oh, ow, channels = grad.shape
    row_stride, *strides = grad.stride()
    high, wide = below.shape[2:4]
    th, tw = triton.cdiv(high, kernel[0]), triton.cdiv(wide, kernel[1])
    bc = min(64, triton.next_power_of_2(channels))
    grid = (triton.cdiv(samples * th * tw, 32), triton.cdiv(channels, bc), rows)
    _unpool[grid](
        grad, chosen, y, below, peak, samples * th * tw, samples, row_stride, *strides, channels,
        high, wide, oh, ow, *kernel, th, tw, relu, peak is not None, BP=32, BC=bc,
    )  # fmt: skip


@triton.jit
def _over_group(value, CPG: tl.constexpr, BC: tl.constexpr):
    """Replace each channel's number by the sum over its group of CPG channels."""
    total = tl.sum(tl.reshape(value, (BC // CPG, CPG)), 1)
    return tl.reshape(tl.broadcast_to(total[:, None], (BC // CPG, CPG)), (BC,))


@triton.jit
def _norm(
    x, weight, bias, out, mean, scale, samples, eps,
    C: tl.constexpr, CPG: tl.constexpr, HW: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    row = image // samples
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    x += image * (HW * C)
    out += image * (HW * C)
    total = tl.zeros((BH, BC), tl.float32)
    for first in range(0, HW, BH):
        p = first + tl.arange(0, BH)
        total += tl.load(x + p[:, None] * C + c[None, :], mask=(p < HW)[:, None], other=0.0)
    center = _over_group(tl.sum(total, 0), CPG, BC) / (HW * CPG)
    total = tl.zeros((BH, BC), tl.float32)
    for first in range(0, HW, BH):
        p = first + tl.arange(0, BH)
        real = (p < HW)[:, None]
        away = tl.load(x + p[:, None] * C + c[None, :], mask=real, other=0.0) - center[None, :]
        total += tl.where(real, away * away, 0.0)
    spread = _over_group(tl.sum(total, 0), CPG, BC) / (HW * CPG)
    factor = 1.0 / tl.sqrt(spread + eps)
    tl.store(mean + image * C + c, center)
    tl.store(scale + image * C + c, factor)
    factor = factor * tl.load(weight + row * C + c)
    shift = tl.load(bias + row * C + c) - center * factor
    for first in range(0, HW, BH):
        p = first + tl.arange(0, BH)
        at = p[:, None] * C + c[None, :]
        real = (p < HW)[:, None]
        value = tl.load(x + at, mask=real, other=0.0)
        tl.store(out + at, value * factor[None, :] + shift[None, :], mask=real)


def _norm_tiles(channels):
    bc = min(64, channels)
    return bc, max(16, 4096 // bc)


def norm(x, weight, bias, out, mean, scale, groups, eps):
    """Normalize each group of channels of each image, as `nn.GroupNorm` does.

    `x` is contiguous. `mean` and `scale` = 1 / deviation get one number per image and channel.
    """
    rows, samples, high, wide, channels = x.shape
    bc, bh = _norm_tiles(channels)
    _norm[(rows * samples, channels // bc)](
        x, weight, bias, out, mean, scale, samples, eps,
        channels, channels // groups, high * wide, BH=bh, BC=bc,
    )  # fmt: skip


@triton.jit
def _norm_backward(
    x, grad, weight, mean, scale, below, weight_each, bias_each, samples,
    C: tl.constexpr, CPG: tl.constexpr, HW: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(0).to(tl.int64)
    row = image // samples
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    x += image * (HW * C)
    grad += image * (HW * C)
    below += image * (HW * C)
    center = tl.load(mean + image * C + c)
    factor = tl.load(scale + image * C + c)
    gain = tl.load(weight + row * C + c)
    plain = tl.zeros((BH, BC), tl.float32)
    scaled = tl.zeros((BH, BC), tl.float32)
    for first in range(0, HW, BH):
        p = first + tl.arange(0, BH)
        at = p[:, None] * C + c[None, :]
        real = (p < HW)[:, None]
        slope = tl.load(grad + at, mask=real, other=0.0)
        value = tl.load(x + at, mask=real, other=0.0)
        plain += slope
        scaled += slope * (value - center[None, :])
    on_weight = tl.sum(scaled, 0) * factor
    on_bias = tl.sum(plain, 0)
    tl.store(weight_each + image * C + c, on_weight)
    tl.store(bias_each + image * C + c, on_bias)
    along = _over_group(on_weight * gain, CPG, BC) / (HW * CPG) * factor
    flat = _over_group(on_bias * gain, CPG, BC) / (HW * CPG)
    for first in range(0, HW, BH):
        p = first + tl.arange(0, BH)
        at = p[:, None] * C + c[None, :]
        real = (p < HW)[:, None]
        slope = tl.load(grad + at, mask=real, other=0.0) * gain[None, :] - flat[None, :]
        value = tl.load(x + at, mask=real, other=0.0) - center[None, :]
        tl.store(below + at, (slope - value * along[None, :]) * factor[None, :], mask=real)


def norm_backward(x, grad, weight, mean, scale, below, weight_each, bias_each, groups):
    """Write the gradient of `x` to `below`; those of weight and bias for each image."""
    rows, samples, high, wide, channels = x.shape
    bc, bh = _norm_tiles(channels)
    _norm_backward[(rows * samples, channels // bc)](
        x, grad, weight, mean, scale, below, weight_each, bias_each, samples,
        channels, channels // groups, high * wide, BH=bh, BC=bc,
    )  # fmt: skip
