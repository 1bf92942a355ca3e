"""Random directions by sign flips and fast Hadamard transforms.

A rotation is x -> H D3 H D2 H D1 x: D are random signs, H the Walsh-Hadamard transform of the
input padded with zeros to a power of two, m. It yields m directions, orthogonal to each other, at
the price of 3 log2(m) additions each; D1 is shared by all rotations, so that H D1 x is computed
once a sample. Compared with a Gaussian matrix the cost of a direction falls from dim to log(dim).
(Where dim exceeds the number of directions, one rotation gives more than is needed, and a sample
costs dim log(dim): no less, since every entry counts.)

The transform only adds and subtracts, in a fixed order: NumPy, the compiled loops and a GPU get
the same floating-point numbers, so that hashes are equal on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import stream

SMALLEST = 256  # below, few-valued inputs (one-hot vectors) feel the lattice of the signs
PACKED = 1024  # from here on the directions of one rotation are as good as independent


def padded(dim: int) -> int:
    """Return the power of two that inputs of `dim` columns are padded to.

    Examples
    --------
    >>> padded(3), padded(784), padded(1024)
    (256, 1024, 1024)
    """
    return max(SMALLEST, 1 << (dim - 1).bit_length())


def signs(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Random signs from the generator's raw bits, whose order no NumPy release changes."""
    count = int(np.prod(shape))
    raw = rng.bit_generator.random_raw(-(-count // 64)).astype("<u8")
    bits = np.unpackbits(raw.view(np.uint8), count=count, bitorder="little")
    return (1 - 2 * bits.astype(np.float32)).reshape(shape)


@dataclass(frozen=True)
class Rotations:
    """As many rotations as give the wanted number of directions.

    Direction i is coordinate i % used of rotation i // used.
    """

    first: NDArray[Any]
    second: NDArray[Any]
    third: NDArray[Any]
    used: int

    @property
    def size(self) -> int:
        """The padded length, m; a projection is m times one on a Gaussian direction."""
        return len(self.first)


@lru_cache(maxsize=16)
def rotations(seed: int, name: str, dim: int, rows: int, planes: int, kind: str) -> Rotations:
    """Draw the rotations for rows * planes directions; direction b * rows + r serves row r.

    Small rotations serve each row at most once, so that the planes of one row stay independent.
    """
    m = padded(dim)
    used = m if m >= PACKED else min(m, rows)
    count = -(-rows * planes // used)
    rng = stream(seed, name, m)
    first, second, third = signs(rng, m), signs(rng, count, m), signs(rng, count, m)
    return Rotations(first.astype(kind), second.astype(kind), third.astype(kind), used)


def hadamard(a: NDArray[Any]) -> NDArray[Any]:
    """Walsh-Hadamard transform along the last axis, unscaled: the order of `_kernels._hadamard`.

    Examples
    --------
    >>> hadamard(np.array([1.0, 0.0, 0.0, 2.0])).tolist()
    [3.0, -1.0, -1.0, 3.0]
    """
    m, h = a.shape[-1], 1
    while h < m:
        pairs = a.reshape(*a.shape[:-1], m // (2 * h), 2, h)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        a = np.stack([low + high, low - high], axis=-2).reshape(a.shape)
        h *= 2
    return a


def project(x: NDArray[Any], turns: Rotations, wanted: int) -> NDArray[Any]:
    """Projections of every sample on the first `wanted` directions, (wanted, n); plain NumPy."""
    wide = np.zeros((len(x), turns.size), x.dtype)
    wide[:, : x.shape[1]] = x
    spread = hadamard(wide * turns.first)
    out = np.empty((len(turns.second), turns.used, len(x)), x.dtype)
    for k, (second, third) in enumerate(zip(turns.second, turns.third, strict=True)):
        out[k] = hadamard(hadamard(spread * second) * third)[:, : turns.used].T
    return out.reshape(-1, len(x))[:wanted]
