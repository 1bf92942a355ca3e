"""Triton kernels for the convolutions of many models, with channels last.

Images are (rows, samples, height, width, channels); a row is a client. A convolution is a matrix
product: its row index p counts the pixels of all samples, and its inner index k counts (kernel row,
kernel column, channel). The kernels read the patches from the images while they multiply. Channels
lie next to each other, so a patch is read in pieces of 16 bytes. Images of few channels are the
exception: `patches` copies their patches, and the product is that of a kernel of one pixel.

Tensor cores multiply 16-bit numbers. Factors are stored as "halves": (planes, rows, ...) of 16-bit
numbers that add up to the float32 number divided by the row's `unit`, a power of two. Two planes of
float16 hold 22 bits and a sign each, and three products of them are added in float32: the error is
that of float32 arithmetic. One plane of float16 has the 11 bits of TF32. One plane of bfloat16 has
no unit.

16-bit numbers have a short range, so a row's unit brings a bound of its numbers to 2 ** 14. The
bound is the largest number ("peak") where that is known before the numbers are written. The outputs
of a product are bounded by the number of its terms times the peaks of both factors. That is some
hundred times too large, but two planes have room for it: their smallest step is 2 ** -38 of the
bound, and float32 sums err by 2 ** -24 of their largest term. Peaks are collected by the kernels
that write the numbers; the largest of many is the same in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def _unit(bound, like):
    """Return the power of two that brings `bound` to 2 ** 14 or a little more, and its inverse."""
    if like.dtype.element_ty == tl.bfloat16:
        scale = 1.0
        unit = 1.0
    else:
        exponent = (bound.to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.minimum(tl.maximum(268 - exponent, 1), 253)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, unit


@triton.jit
def _store(to, value, plane, fits, PLANES: tl.constexpr):
    """Write scaled numbers as halves."""
    high = value.to(to.dtype.element_ty)
    tl.store(to, high, mask=fits)
    if PLANES == 2:
        tl.store(to + plane, (value - high.to(tl.float32)).to(to.dtype.element_ty), mask=fits)


@triton.jit
def _largest(x, peak, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * SIZE + at, mask=at < SIZE, other=0.0)
    tl.atomic_max(peak + row, tl.max(tl.abs(value)))


@triton.jit
def _pack(
    w, packed, flipped, peak, unit, plane, flipped_plane, FLIP: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr,
    PLANES: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    fits = (c < C)[:, None] & (m < M)[None, :]
    scale, one = _unit(tl.load(peak + row), packed)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(unit + row, one)
    w += row * (M * C * TAPS)
    packed += row * (SIZE * M)
    for tap in range(0, TAPS):
        at = (m[None, :] * C + c[:, None]) * TAPS + tap
        value = tl.load(w + at, mask=fits, other=0.0) * scale
        _store(packed + (tap * C + c)[:, None] * M + m[None, :], value, plane, fits, PLANES)
        if FLIP:
            to = flipped + row * (TAPS * M * C) + (TAPS - 1 - tap) * (M * C)
            _store(to + m[None, :] * C + c[:, None], value, flipped_plane, fits, PLANES)
    if SIZE > C * TAPS:  # noqa: SIM102 (Triton knows SIZE when it compiles)
        if tl.program_id(1) == 0:
            nothing = tl.zeros((BM,), tl.float32)
            for k in range(C * TAPS, SIZE):
                _store(packed + k * M + m, nothing, plane, m < M, PLANES)


def pack(w, packed, flipped, taps):
    """Write weights (rows, outputs, channels, taps) as halves (rows, taps * channels, outputs).

    Rows beyond taps * channels are filled with zeros. `flipped` gets (rows, taps backward,
    outputs, channels), unless it is None: the gradient of the images is the convolution of the
    outputs' gradient with these. The peak of `packed` must be zero; it is written, and so is the
    unit. Both factors share them.
    """
    planes, rows, size, outputs = packed.halves.shape
    channels = w[0, 0].numel() // taps
    numbers = outputs * channels * taps
    _largest[(rows, triton.cdiv(numbers, 2048))](w, packed.peak, numbers, BLOCK=2048)
    bm, bc = (min(32, triton.next_power_of_2(count)) for count in (outputs, channels))
    grid = (triton.cdiv(outputs, bm), triton.cdiv(channels, bc), rows)
    flip = flipped is not None
    _pack[grid](
        w, packed.halves, flipped, packed.peak, packed.unit, packed.halves.stride(0),
        flipped.stride(0) if flip else 0, flip, outputs, channels, taps, size, planes,
        BM=bm, BC=bc,
    )  # fmt: skip


@triton.jit
def _patches(
    x, out, peak, unit, row_stride, plane, pixels,
    SN: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr, XC: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, SIZE: tl.constexpr, PLANES: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    scale, one = _unit(tl.load(peak + row), out)
    if tl.program_id(0) == 0:
        tl.store(unit + row, one)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    k = tl.arange(0, BK)
    tap = k // C
    h = ((p // OW) % OH * SH - TOP)[:, None] + (tap // KW)[None, :]
    v = (p % OW * SW - LEFT)[:, None] + (tap % KW)[None, :]
    keep = (p < pixels)[:, None] & (k < KH * KW * C)[None, :]
    keep = keep & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    at = (p // (OW * OH) * SN)[:, None] + h * XH + v * XW + (k % C * XC)[None, :]
    value = tl.load(x + row * row_stride + at, mask=keep, other=0.0) * scale
    to = out + row * pixels * SIZE + p[:, None] * SIZE + k[None, :]
    _store(to, value, plane, (p < pixels)[:, None] & (k < SIZE)[None, :], PLANES)


def patches(x, out, kernel, stride, corner):
    """Copy the patches of images (rows, samples, height, width, channels), which may lie anywhere.

    `out` has the shape of the convolution's output, with the numbers of a patch, and zeros after
    them, as its channels. Its peak is known, its unit is written.
    """
    planes, rows, samples, oh, ow, size = out.halves.shape
    row_stride, *strides = x.stride()
    high, wide, channels = x.shape[2:]
    pixels = samples * oh * ow
    bk = triton.next_power_of_2(size)
    bp = max(16, 4096 // bk)
    _patches[(triton.cdiv(pixels, bp), rows)](
        x, out.halves, out.peak, out.unit, row_stride, out.halves.stride(0), pixels, *strides,
        channels, high, wide, oh, ow, *kernel, *stride, *corner, size, planes, BP=bp, BK=bk,
    )  # fmt: skip


SPLIT_PIXELS = 64


@triton.jit
def _split(
    x, y, out, sums, peak, unit, row_stride, plane, pixels,
    SN: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr, XC: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, RELU: tl.constexpr, SUMS: tl.constexpr,
    PLANES: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    scale, one = _unit(tl.load(peak + row), out)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(unit + row, one)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    fits = (p < pixels)[:, None] & (c < C)[None, :]
    at = p // (W * H) * SN + (p // W) % H * XH + p % W * XW
    value = tl.load(x + row * row_stride + at[:, None] + c[None, :] * XC, mask=fits, other=0.0)
    spot = row * pixels * C + p[:, None] * C + c[None, :]
    if RELU:
        value = tl.where(tl.load(y + spot, mask=fits, other=0.0) > 0, value, 0.0)
    if SUMS:
        each = sums + (row * tl.num_programs(0) + tl.program_id(0)) * C
        tl.store(each + c, tl.sum(value, 0), mask=c < C)
    _store(out + spot, value * scale, plane, fits, PLANES)


def split(x, out, sums=None, y=None):
    """Write images or gradients `x`, which may lie anywhere, as halves.

    With `y`, which is contiguous, only where it is positive. `sums` gets the sums over
    `SPLIT_PIXELS` pixels each. The peak of `out` is known, its unit is written.
    """
    planes, rows, samples, high, wide, channels = out.halves.shape
    row_stride, *strides = x.stride()
    pixels = samples * high * wide
    bc = min(64, triton.next_power_of_2(channels))
    grid = (triton.cdiv(pixels, SPLIT_PIXELS), triton.cdiv(channels, bc), rows)
    _split[grid](
        x, y, out.halves, sums, out.peak, out.unit, row_stride, out.halves.stride(0), pixels,
        *strides, channels, high, wide, y is not None, sums is not None, planes,
        BP=SPLIT_PIXELS, BC=bc,
    )  # fmt: skip


@triton.jit
def _dot(a, a_low, b, b_low, total, PLANES: tl.constexpr):
    """Add a @ b."""
    if PLANES == 2:
        part = tl.dot(a_low, b)
        part = tl.dot(a, b_low, part)
        total += tl.dot(a, b, part)  # tensor cores add long sums less exactly
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _greater(a, b):
    """Return the greater number, or NaN if one of them is."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _convolve(
    x, w, extra, out, chosen, sums, x_unit, w_unit, out_unit, x_peak, w_peak, out_peak,
    row_stride, x_plane, w_plane, out_plane, out_row, pixels,
    SN: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr, ON: tl.constexpr, YH: tl.constexpr,
    YW: tl.constexpr, YC: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    EXTRA: tl.constexpr, PEAK: tl.constexpr, SUMS: tl.constexpr, HALVES: tl.constexpr,
    PLANES: tl.constexpr,
    BP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """out[p, m] = sum over k of patch[p, k] * w[k, m], then the maxima of tiles of PH x PW pixels.

    The pixels of a tile are neighbors in p. OH x OW is the number of tiles.
    """
    N: tl.constexpr = PH * PW
    row = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BP + tl.arange(0, BP)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    q = p // N
    top = ((q // OW) % OH * PH + p % N // PW) * SH - TOP
    left = (q % OW * PW + p % PW) * SW - LEFT
    image = (q // (OW * OH)) * SN
    K: tl.constexpr = KH * KW * C
    x += row * row_stride  # offsets inside a row are 32-bit numbers
    w += row * (K * M)
    low_x = x + x_plane
    low_w = w + w_plane
    INSIDE: tl.constexpr = (
        TOP <= 0
        and LEFT <= 0
        and (OH * PH - 1) * SH + KH - TOP <= H
        and (OW * PW - 1) * SW + KW - LEFT <= W
    )
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
            place = start[:, None] + (turn % (C // BK) * BK + tl.arange(0, BK))[None, :]
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
            place = image[:, None] + (h // DH) * XH + (v // DW) * XW + (k % C)[None, :]
        where = k[:, None] * M + m[None, :]
        a = tl.load(x + place, mask=keep, other=0.0)
        if M % BM == 0 and K % BK == 0:
            b = tl.load(w + where)
        else:
            b = tl.load(w + where, mask=(k < K)[:, None] & (m < M)[None, :], other=0.0)
        a_low = a
        b_low = b
        if PLANES == 2:
            a_low = tl.load(low_x + place, mask=keep, other=0.0)
            if M % BM == 0 and K % BK == 0:
                b_low = tl.load(low_w + where)
            else:
                b_low = tl.load(low_w + where, mask=(k < K)[:, None] & (m < M)[None, :], other=0.0)
        total = _dot(a, a_low, b, b_low, total, PLANES)
    total = total * tl.load(x_unit + row) * tl.load(w_unit + row)
    if EXTRA == "bias" or EXTRA == "bias, relu":
        total += tl.load(extra + row * M + m, mask=m < M, other=0.0)[None, :]
    if EXTRA == "relu" or EXTRA == "bias, relu":
        total = tl.where(total < 0, 0.0, total)  # keeps NaN
    if N > 1:
        q = tl.program_id(0) * (BP // N) + tl.arange(0, BP // N)
        tile = tl.reshape(total, (BP // N, N, BM))
        total = tl.reduce(tile, 1, _greater)
        same = (tile == total[:, None, :]) | (tile != tile)
        where = tl.min(tl.where(same, tl.arange(0, N)[None, :, None], N), 1)
    fits = (q < pixels // N)[:, None] & (m < M)[None, :]
    spot = q[:, None] * M + m[None, :]
    total = tl.where(fits, total, 0.0)
    if N > 1:
        tl.store(chosen + row * M * (pixels // N) + spot, where.to(tl.uint8), mask=fits)
    if EXTRA == "mask":
        kept = tl.load(extra + row * M * pixels + spot, mask=fits, other=0.0) > 0
        total = tl.where(kept, total, 0.0)
    if PEAK:
        tl.atomic_max(out_peak + row, tl.max(tl.abs(total)))
    if SUMS:
        each = sums + (row * tl.num_programs(0) + tl.program_id(0)) * M
        tl.store(each + m, tl.sum(total, 0), mask=m < M)
    to = (q // (OW * OH) * ON + (q // OW) % OH * YH + q % OW * YW)[:, None] + m[None, :] * YC
    out += row * out_row
    if HALVES:
        bound = tl.load(x_peak + row) * tl.load(w_peak + row) * K
        if EXTRA == "bias" or EXTRA == "bias, relu":
            every = tl.arange(0, ALL)
            bias = tl.load(extra + row * M + every, mask=every < M, other=0.0)
            bound += tl.max(tl.abs(bias))
        scale, one = _unit(bound, out)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(out_unit + row, one)
        _store(out + spot, total * scale, out_plane, fits, PLANES)
    elif YC == 1:
        tl.store(out + spot, total, mask=fits)
    else:
        tl.store(out + to, total, mask=fits)


def convolve_tile(rows, pixels, outputs, channels, planes, narrow=False):
    """Return a program's pixels, outputs and step in k, its warps and the stages of its loads.

    `narrow` programs have fewer pixels: they take maxima after few products, and other programs
    multiply meanwhile. Measured on an H200.
    """
    bm = min(64, max(16, triton.next_power_of_2(outputs)))
    bk = next((b for b in (32, 16) if channels % b == 0), 32)
    if channels % 64 == 0 and bm == 64:
        return 64, bm, 64, 4, 3
    many = rows * triton.cdiv(pixels, 128) >= 264  # two programs per processor
    bp = 128 if many and not narrow else 64
    return bp, bm, bk, 4, 5 - planes


def convolve(
    x, w, out, kernel, stride, spread, corner, extra="", values=None, peak=None, sums=None,
    tile=(1, 1), chosen=None,
):  # fmt: skip
    """Write convolutions of images `x` with packed weights `w` to `out`.

    The factors are halves; `out` gets float32 numbers, or halves if it has a unit. Samples of `x`
    may lie anywhere, their channels next to each other. `corner` is the padding above and to the
    left. `spread` is the distance between the pixels of `x`, with zeros in between. `extra` says
    what is done to the results: "bias", "relu", "bias, relu", or "mask", which keeps them where
    `values` is positive. Then the maxima of tiles are taken, and `chosen` gets where in the tile
    each was first found; the pixels of a tile must be a power of two. `peak` gets the largest
    results, `sums` their sums over the pixels of each program (see `convolve_tile`), unless they
    are None. Where `out` gets float32 numbers, it may lie anywhere.
    """
    halves = hasattr(out, "unit")
    to = out.halves if halves else out
    rows, samples, oh, ow, outputs = to.shape[-5:]
    plane, row_stride, *strides, _ = x.halves.stride()
    planes = len(x.halves)
    high, wide, channels = x.halves.shape[3:]
    pixels = samples * oh * ow * tile[0] * tile[1]
    narrow = chosen is not None and (planes == 2 or kernel[0] * kernel[1] == 1)
    sizes = (rows, pixels, outputs, channels, planes, narrow)
    bp, bm, bk, warps, stages = convolve_tile(*sizes)
    grid = (triton.cdiv(pixels, bp), triton.cdiv(outputs, bm), rows)
    out_row, *out_strides = to.stride()[-5:]
    _convolve[grid](
        x.halves, w.halves, values, to, chosen, sums, x.unit, w.unit, out.unit if halves else None,
        x.peak, w.peak, peak, row_stride, plane, w.halves.stride(0), to.stride(0) if halves else 0,
        out_row, pixels, *strides, *out_strides, outputs, channels, high, wide, oh, ow, *kernel,
        *stride, *spread, *corner, *tile, extra, peak is not None, sums is not None, halves, planes,
        BP=bp, BM=bm, BK=bk, ALL=triton.next_power_of_2(outputs), num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


@triton.jit
def _weight(
    x, grad, out, x_unit, grad_unit, row_stride, x_plane, grad_plane, pixels, CHUNK: tl.constexpr,
    SN: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    PARTS: tl.constexpr, PLANES: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """out[part, k, m] = sum over the part's p of patch[p, k] * grad[p, m]."""
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
    low_x = x + x_plane
    low_grad = grad + grad_plane
    shift = down * XH + right * XW + k % C
    total = tl.zeros((BK, BM), tl.float32)
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
        at = at[:, None] + shift[None, :]
        fits = (p < pixels)[:, None]
        if M % BM != 0:
            fits = fits & (m < M)[None, :]
        of = p[:, None] * M + m[None, :]
        a = tl.trans(tl.load(x + at, mask=keep, other=0.0))
        b = tl.load(grad + of, mask=fits, other=0.0)
        a_low = a
        b_low = b
        if PLANES == 2:
            a_low = tl.trans(tl.load(low_x + at, mask=keep, other=0.0))
            b_low = tl.load(low_grad + of, mask=fits, other=0.0)
        total = _dot(a, a_low, b, b_low, total, PLANES)
    total = total * tl.load(x_unit + row) * tl.load(grad_unit + row)
    to = out + place.to(tl.int64) * (K * M)
    tl.store(to + k[:, None] * M + m[None, :], total, mask=(k < K)[:, None] & (m < M)[None, :])


def weight_parts(rows, outputs, size, pixels):
    """Return how many sums to cut a weight's gradient into, so that all of a GPU is busy."""
    tiles = rows * triton.cdiv(size, 64) * triton.cdiv(outputs, 64)
    parts = max(1, min(1024 // tiles, pixels // 256))
    return 1 << (parts.bit_length() - 1)  # few kernels to compile


def weight_tile(size, outputs, planes):
    """Return a program's inputs, outputs and step in pixels, its warps and its loads' stages."""
    bk = min(64, max(16, triton.next_power_of_2(size)))
    bm = min(64, max(16, triton.next_power_of_2(outputs)))
    if planes == 2 and bk == 64:
        return bk, bm, 32, 4, 4
    return bk, bm, 64, 4, 3


def convolve_weight(x, grad, out, kernel, stride, corner):
    """Write the gradients of packed weights to `out` (rows, parts, size, outputs).

    There is one sum per part of the pixels. The factors are halves; those of `grad` are contiguous.
    """
    rows, parts, size, outputs = out.shape
    samples, oh, ow = grad.halves.shape[2:5]
    plane, row_stride, *strides, _ = x.halves.stride()
    pixels = samples * oh * ow
    bk, bm, bp, warps, stages = weight_tile(size, outputs, len(x.halves))
    chunk = triton.cdiv(triton.cdiv(pixels, parts), bp) * bp
    high, wide, channels = x.halves.shape[3:]
    grid = (triton.cdiv(size, bk), triton.cdiv(outputs, bm), rows * parts)
    _weight[grid](
        x.halves, grad.halves, out, x.unit, grad.unit, row_stride, plane, grad.halves.stride(0),
        pixels, chunk, *strides, outputs, channels, high, wide, oh, ow, *kernel, *stride, *corner,
        parts, len(x.halves), BP=bp, BM=bm, BK=bk, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _gather(
    each, sums, weight, bias, alpha, beta, SUMS: tl.constexpr, PARTS: tl.constexpr,
    BIASES: tl.constexpr, M: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr,
    EACH: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The first programs of a row add the sums of the bias, the others those of the weight.

    The taps of a weight are neighbors in memory, so one program writes them all, unless there would
    be too few programs.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if BIASES > 0:  # noqa: SIM102 (Triton knows BIASES when it compiles)
        if block < BIASES:
            m = block * BM + tl.arange(0, BM)
            found = tl.zeros((BS, BM), tl.float32)
            for first in range(0, SUMS, BS):
                part = first + tl.arange(0, BS)
                at = (row * SUMS + part)[:, None] * M + m[None, :]
                real = (part < SUMS)[:, None] & (m < M)[None, :]
                found += tl.load(sums + at, mask=real, other=0.0)
            to = bias + row * M + m
            old = beta * tl.load(to, mask=m < M, other=0.0)
            tl.store(to, old + alpha * tl.sum(found, 0), mask=m < M)
    if block >= BIASES:
        first = (block - BIASES) % (TAPS // EACH) * EACH
        tile = (block - BIASES) // (TAPS // EACH)
        m = tile % ((M + BM - 1) // BM) * BM + tl.arange(0, BM)
        c = tile // ((M + BM - 1) // BM) * BC + tl.arange(0, BC)
        inside = (c < C)[:, None] & (m < M)[None, :]
        weight += row * (C * TAPS * M)
        for turn in range(0, EACH):
            tap = first + turn
            at = (tap * C + c)[:, None] * M + m[None, :]
            total = tl.zeros((BC, BM), tl.float32)
            for part in range(0, PARTS):
                start = each + (row * PARTS + part) * (SIZE * M)
                total += tl.load(start + at, mask=inside, other=0.0)
            to = weight + (m[None, :] * C + c[:, None]) * TAPS + tap
            tl.store(to, beta * tl.load(to, mask=inside, other=0.0) + alpha * total, mask=inside)


def gather(each, sums, weight, bias, alpha, beta, taps):
    """Add the gradients of weight and bias to targets: target = beta * target + alpha * gradient.

    `each` are the sums of `convolve_weight`; `sums` (rows, parts, outputs) those of the gradients
    of the outputs, which `bias` needs, unless it is None.
    """
    rows, parts, size, outputs = each.shape
    channels = weight[0, 0].numel() // taps
    bm, bc = min(32, triton.next_power_of_2(outputs)), min(16, triton.next_power_of_2(channels))
    across = triton.cdiv(outputs, bm)
    biases = 0 if bias is None else across
    tiles = across * triton.cdiv(channels, bc)
    each_taps = taps if rows * tiles >= 264 else 1
    grid = (rows, tiles * (taps // each_taps) + biases)
    _gather[grid](
        each, sums, weight, bias, alpha, beta, 0 if bias is None else sums.shape[1], parts,
        biases, outputs, channels, taps, size, each_taps, BM=bm, BC=bc, BS=64,
    )  # fmt: skip


UNPOOL_TILES = 32


@triton.jit
def _unpool(
    grad, chosen, y, below, sums, peak, unit, tiles, samples, ROW, Y_ROW, plane,
    SN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, SC: tl.constexpr, YN: tl.constexpr,
    YH: tl.constexpr, YW: tl.constexpr, YC: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    TH: tl.constexpr, TW: tl.constexpr, RELU: tl.constexpr, SUMS: tl.constexpr,
    PLANES: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
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
    scale, one = _unit(tl.load(peak + row), below)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(unit + row, one)
    spot = (((n * OH + h) * OW + w) * C)[:, None] + c[None, :]
    where = tl.load(chosen + spot, mask=pooled, other=255).to(tl.int32)
    of = (n * SN + h * SH + w * SW)[:, None] + c[None, :] * SC
    value = tl.load(grad + row * ROW + of, mask=pooled, other=0.0)
    if RELU:
        of = (n * YN + h * YH + w * YW)[:, None] + c[None, :] * YC
        value = tl.where(tl.load(y + row * Y_ROW + of, mask=pooled, other=0.0) > 0, value, 0.0)
    if SUMS:
        each = sums + (row * tl.num_programs(0) + tl.program_id(0)) * C
        tl.store(each + c, tl.sum(value, 0), mask=c < C)
    value = value * scale
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            down = h * KH + i
            right = w * KW + j
            to = (((n * H + down) * W + right) * C)[:, None] + c[None, :]
            real = inside & ((down < H) & (right < W))[:, None]
            here = tl.where(where == i * KW + j, value, 0.0)
            _store(below + to, here, plane, real, PLANES)


def unpool_tiles(shape, kernel):
    """Return the number of tiles of images (..., samples, height, width, channels), down, across.

    The tiles that the pooling leaves out at the edges are counted.
    """
    samples, high, wide = shape[-4:-1]
    down, across = triton.cdiv(high, kernel[0]), triton.cdiv(wide, kernel[1])
    return samples * down * across, down, across


def unpool(grad, chosen, y, below, sums, kernel, relu):
    """Give each maximum's gradient to the pixel that it was; the others get zero.

    With `relu`, only where the maximum `y` is positive. `below` are halves; its peak is that of
    `grad`. `sums` gets the sums over `UNPOOL_TILES` tiles each, unless it is None.
    """
    rows, samples, oh, ow, channels = grad.shape
    row_stride, *strides = grad.stride()
    y_row, *y_strides = y.stride()
    planes = len(below.halves)
    high, wide = below.halves.shape[3:5]
    tiles, th, tw = unpool_tiles(below.halves.shape, kernel)
    bc = min(64, triton.next_power_of_2(channels))
    grid = (triton.cdiv(tiles, UNPOOL_TILES), triton.cdiv(channels, bc), rows)
    _unpool[grid](
        grad, chosen, y, below.halves, sums, below.peak, below.unit, tiles, samples, row_stride,
        y_row, below.halves.stride(0), *strides, *y_strides, channels, high, wide, oh, ow, *kernel,
        th, tw, relu, sums is not None, planes, BP=UNPOOL_TILES, BC=bc,
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
