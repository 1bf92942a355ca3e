"""Compiled shuffles of many clients at once; imported when first needed.

They draw what `stream(...).permutation(n)` draws, number by number: NumPy's Philox generator, 4x64
bits and 10 rounds (Salmon et al., SC 2011), whose words are used in halves, low half first, and a
shuffle from the end that rejects what exceeds its bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from fedcohort.compiled import compiled

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_FIRST, _SECOND = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_STEP_ONE, _STEP_TWO = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_HALF = np.uint64(32)


def _high_bits(context: Any, a: Any, b: Any) -> Any:
    """Return the upper 64 bits of a product; Numba has no 128-bit integers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        a, b = (builder.zext(argument, wide) for argument in arguments)
        return builder.trunc(builder.lshr(builder.mul(a, b), wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


_high: Any = intrinsic(_high_bits)


@compiled(inline="always")
def _draw(key: Words, block: Any, halves: Any) -> None:
    """Write eight numbers of 32 bits: block `block`, counted from 0, of the stream of a key."""
    a, b, c, d = np.uint64(block + 1), np.uint64(0), np.uint64(0), np.uint64(0)
    one, two = key[0], key[1]
    for _ in range(10):
        low, high = _FIRST * a, _high(_FIRST, a)
        other_low, other_high = _SECOND * c, _high(_SECOND, c)
        a, b, c, d = other_high ^ b ^ one, other_low, high ^ d ^ two, low
        one += _STEP_ONE
        two += _STEP_TWO
    for place, word in enumerate((a, b, c, d)):
        halves[2 * place] = np.uint32(word)
        halves[2 * place + 1] = np.uint32(word >> _HALF)


@compiled()
def _shuffle(key: Words, used: Any, order: Any, halves: Any) -> Any:
    """Shuffle 0, 1, ... into `order` and return how many numbers have been used by then."""
    n = len(order)
    for i in range(n):
        order[i] = i
    mask = np.uint32(1)
    while mask < n - 1:
        mask = np.uint32(2) * mask + np.uint32(1)
    if used % 8:
        _draw(key, used // 8, halves)
    last: Any = n - 1
    while last > 0:
        least = np.int64(mask >> np.uint32(1))  # the mask serves all bounds above this one
        while last > least:
            if used % 8 == 0:
                _draw(key, used // 8, halves)
            at = np.int64(halves[used % 8] & mask)
            used += 1
            taken = at <= last  # a rejected number swaps an entry with itself: no branch to guess
            j = at if taken else last
            order[last], order[j] = order[j], order[last]
            last -= np.int64(taken)
        mask >>= np.uint32(1)
    return used


@compiled(nogil=True)
def fill(
    table: Any,
    shape: tuple[int, int],
    width: int,
    begin: Ints,
    positions: Ints,
    starts: Ints,
    keys: Words,
    shuffled: Any,
    order: Any,
    passes: Ints,
    drawn: Ints,
    used: Ints,
) -> None:
    """Write the samples of some steps to a flat table of (steps, *shape) entries.

    Client j holds ``positions[starts[j]:starts[j + 1]]``. Its step t takes the samples from
    ``begin[t, j]`` to ``begin[t + 1, j]`` of its passes over them, which are drawn when they are
    first needed and kept in `order` from ``passes[j]`` on. `drawn` and `used` count its samples and
    random numbers so far. Padding, up to `width`, repeats a real sample.
    """
    halves = np.empty(8, np.uint32)
    steps, clients = len(begin) - 1, len(starts) - 1
    for j in range(clients):
        own = positions[starts[j] : starts[j + 1]]
        n = len(own)
        mine = order[passes[j] : passes[j + 1]]
        while drawn[j] < begin[steps, j]:
            fresh = mine[drawn[j] : drawn[j] + n]
            if shuffled[j]:
                used[j] = _shuffle(keys[j], used[j], fresh, halves)
            else:
                for i in range(n):
                    fresh[i] = i
            drawn[j] += n
        for t in range(steps):
            low, count = begin[t, j], begin[t + 1, j] - begin[t, j]
            at = (t * shape[0] + j) * shape[1]
            for s in range(count):
                table[at + s] = own[mine[low + s]]
            padding = own[mine[0]] if count else own[0]
            for s in range(count, width):
                table[at + s] = padding
