"""The compiled loops of hashing and of random projections, and how all loops are compiled.

Import this module inside the function that needs it, because importing Numba takes a second. Numba
has no types, so the loops live alone here.

No `fastmath`: every sum is done in the order written, so that results are the same on every
machine, bit for bit. Threads are Python's; the loops release the interpreter lock.
"""

# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator, call-overload"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

LANES = 16  # samples that move through a rotation together: one cache line of float32
TILE = 1024  # entries whose butterflies are finished while they are in the cache


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function.

    Numba refuses to cache where neither the installation nor the user's home can be written; the
    function is then compiled anew in each process. It is never cached in a shared folder: Numba's
    cache files are pickles, and whoever can write them runs code.
    """

    def compile(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            return njit(**options)(function)

    return compile


_outer = compiled(nogil=True)
_inner = compiled(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_inner
def scramble(z):
    """The finalizer of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_inner
def _butterflies(a, start, stop, h, size):
    """Stages h, 2h, ... below `size`, two at a time, over a[start:stop]."""
    while 4 * h <= size:
        for i in range(start, stop, 4 * h):
            for j in range(i, i + h):
                for l in range(LANES):
                    t = a[j, l] + a[j + h, l]
                    u = a[j, l] - a[j + h, l]
                    v = a[j + 2 * h, l] + a[j + 3 * h, l]
                    w = a[j + 2 * h, l] - a[j + 3 * h, l]
                    a[j, l] = t + v
                    a[j + h, l] = u + w
                    a[j + 2 * h, l] = t - v
                    a[j + 3 * h, l] = u - w
        h *= 4
    if 2 * h <= size:
        for i in range(start, stop, 2 * h):
            for j in range(i, i + h):
                for l in range(LANES):
                    t = a[j, l] + a[j + h, l]
                    u = a[j, l] - a[j + h, l]
                    a[j, l] = t
                    a[j + h, l] = u


@_inner
def _hadamard(a):
    """Walsh-Hadamard transform along the first axis, in place."""
    h, size = 1, min(a.shape[0], TILE)
    while h < a.shape[0]:  # tile by tile, then across the tiles
        for start in range(0, a.shape[0], size):
            _butterflies(a, start, start + size, h, size)
        h, size = size, a.shape[0]


@_inner
def _spread(x, first, i0, width, out):
    """H D1 x of the samples i0 to i0 + width, one a lane; the other lanes are zero."""
    out[:] = 0
    for l in range(width):
        for j in range(x.shape[1]):
            out[j, l] = x[i0 + l, j] * first[j]
    _hadamard(out)


@_inner
def _rotate(spread, second, third, out):
    """H D3 H D2 of what `_spread` left."""
    flips, source = second, spread
    for _ in range(2):
        for j in range(out.shape[0]):
            for l in range(LANES):
                out[j, l] = source[j, l] * flips[j]
        _hadamard(out)
        flips, source = third, out


@_outer
def srp_codes(x, first, second, third, used, rows, bits, out):
    """Write the bucket of sample i in row r to out[r, i]; projection b * rows + r is its bit b."""
    n, m = x.shape[0], first.shape[0]
    spread = np.empty((m, LANES), x.dtype)
    turned = np.empty((m, LANES), x.dtype)
    codes = np.empty((rows, LANES), np.int32)
    for i0 in range(0, n, LANES):
        width = min(LANES, n - i0)
        _spread(x, first, i0, width, spread)
        codes[:] = 0
        r = b = 0
        for k in range(second.shape[0]):
            _rotate(spread, second[k], third[k], turned)
            for j in range(min(used, rows * bits - k * used)):
                for l in range(LANES):
                    codes[r, l] |= np.int32(turned[j, l] > 0) << b
                r += 1
                if r == rows:
                    r, b = 0, b + 1
        for r in range(rows):
            for l in range(width):
                out[r, i0 + l] = codes[r, l]


@_outer
def projections(x, first, second, third, used, rows, out):
    """Write the projection of sample i on direction r, unscaled, to out[r, i]."""
    n, m = x.shape[0], first.shape[0]
    spread = np.empty((m, LANES), x.dtype)
    turned = np.empty((m, LANES), x.dtype)
    for i0 in range(0, n, LANES):
        width = min(LANES, n - i0)
        _spread(x, first, i0, width, spread)
        for k in range(second.shape[0]):
            _rotate(spread, second[k], third[k], turned)
            for j in range(min(used, rows - k * used)):
                for l in range(width):
                    out[k * used + j, i0 + l] = turned[j, l]


@_outer
def set_minima(tokens, starts, factors, shifts, out):
    """Write the least factors[r] * t + shifts[r] (mod 2^64) over set i to out[r, i]."""
    rows = factors.shape[0]
    least = np.empty(rows, np.uint64)
    for i in range(starts.shape[0] - 1):
        least[:] = np.uint64(0xFFFFFFFFFFFFFFFF)
        for t in range(starts[i], starts[i + 1]):
            token = tokens[t]
            for r in range(rows):
                least[r] = min(least[r], factors[r] * token + shifts[r])
        for r in range(rows):
            out[r, i] = least[r]


@_outer
def fold_rows(values, keys, buckets, out):
    """Write the bucket of values[r, i], by the scramble that keys[r] chooses, to out[r, i]."""
    for r in range(values.shape[0]):
        for i in range(values.shape[1]):
            z = scramble(values[r, i] ^ keys[r])
            out[r, i] = np.int32(((z >> np.uint64(32)) * buckets) >> np.uint64(32))


@_outer
def count_codes(codes, counts):
    """Add one to counts[r, codes[r, i]] for every row and sample."""
    for r in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            counts[r, codes[r, i]] += 1


@_inner
def _uniform_column(key, column, out):
    """Write a column of the matrix; two entries come from one hash."""
    half = out.size // 2
    start = np.uint64(column) * np.uint64(half)
    for pair in range(half):
        word = scramble(key + (start + np.uint64(pair)) * np.uint64(0x9E3779B97F4A7C15))
        low = np.int64((word >> np.uint64(8)) & np.uint64(0xFFFFFF))
        high = np.int64(word >> np.uint64(40))
        out[pair] = (low + 0.5) * 2.0**-23 - 1.0
        out[half + pair] = (high + 0.5) * 2.0**-23 - 1.0


@_outer
def project_uniform(values, k, key):
    """Project (m, dim) values; four columns of the matrix exist at a time."""
    rows, dim = values.shape
    padded = k + k % 2
    total = np.zeros((rows, padded))
    columns = np.empty((4, padded))
    for first in range(0, dim, 4):
        count = min(4, dim - first)
        for j in range(count):
            _uniform_column(key, first + j, columns[j])
        columns[count:] = 0.0
        for i in range(rows):
            row = total[i]
            a = np.float64(values[i, first])
            b = np.float64(values[i, first + 1]) if count > 1 else 0.0
            c = np.float64(values[i, first + 2]) if count > 2 else 0.0
            d = np.float64(values[i, first + 3]) if count > 3 else 0.0
            for r in range(padded):
                partial = (row[r] + a * columns[0, r]) + b * columns[1, r]
                row[r] = (partial + c * columns[2, r]) + d * columns[3, r]
    return total[:, :k]
