"""What every hash family offers, and the random directions that families share.

Directions come from sign flips and fast Hadamard transforms. A rotation is
x -> H D3 H D2 H D1 x: D are random signs, H the Walsh-Hadamard transform of the input padded with
zeros to a power of two, m. It yields m directions, orthogonal to each other, at the price of
3 log2(m) additions each; D1 is shared by all rotations, so H D1 x is computed once per sample.
Compared with a Gaussian matrix the cost of a direction falls from dim to log(dim). (Where dim
exceeds the number of directions, one rotation gives more than is needed, and a sample costs
dim log(dim): no less, since every entry counts.)

The transform only adds and subtracts, in a fixed order: NumPy, the compiled loops and a GPU get
the same floating-point numbers, so hashes are equal on every machine.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import stream

Codes = NDArray[np.int32]
MAX_CELLS = 1 << 24  # rows * buckets: 128 MB of counts
MAX_DIM = 1 << 20


class HashFamily(ABC):
    """`rows` hash functions, drawn by a seed, from items to `buckets` buckets.

    Two families are the same functions exactly when their `spec` is equal. A family is cheap to
    make: what it draws from its seed is drawn at the first use.
    """

    name: ClassVar[str]
    rows: int
    buckets: int

    @property
    def independent(self) -> bool:
        """Whether the bucket of an item depends on that item alone, as privacy requires."""
        return True

    @abstractmethod
    def codes(self, block: Any) -> Codes:
        """Return the bucket of every item of a block in every row, (rows, n)."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Return what determines the functions, as plain values for a file's header."""


def check_size(family: str, rows: int, buckets: int) -> None:
    """Refuse a sketch without cells, or with more than a file may hold.

    Examples
    --------
    >>> check_size("minhash", 0, 64)
    Traceback (most recent call last):
    ValueError: minhash: rows=0 must be a whole number of at least 1
    """
    for name, value, least in (("rows", rows, 1), ("buckets", buckets, 2)):
        check_whole(family, name, value, least, MAX_CELLS)
    if rows * buckets > MAX_CELLS:
        raise ValueError(
            f"{family}: rows * buckets = {rows * buckets} is more than {MAX_CELLS}; use fewer rows"
        )


def check_whole(family: str, name: str, value: object, least: int, most: int) -> None:
    """Refuse what is not a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{family}: {name}={value!r} must be a whole number of at least {least}")
    if value > most:
        raise ValueError(f"{family}: {name}={value} is more than {most}")


@cache
def kernels() -> ModuleType | None:
    """Return the compiled loops, None where Numba cannot be imported."""
    try:
        from fedcohort.sketch.hashing import _kernels
    except ImportError:
        return None
    return _kernels


def threads() -> int:
    """How many threads hash: OMP_NUM_THREADS where it is set, else the cores of this process."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers one to one (the finalizer of SplitMix64).

    Examples
    --------
    >>> [hex(v) for v in mix(np.array([0, 1], np.uint64)).tolist()]
    ['0x0', '0x5692161d100b05e5']
    """
    z: NDArray[np.uint64] = values ^ (values >> np.uint64(30))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def fold(values: NDArray[np.uint64], keys: NDArray[np.uint64], buckets: int) -> Codes:
    """Map the values of row r, (rows, n), to buckets by a scramble that keys[r] chooses."""
    compiled = kernels()
    if compiled is not None:
        out = np.empty(values.shape, np.int32)
        compiled.fold_rows(values, keys, np.uint64(buckets), out)
        return out
    high = mix(values ^ keys[:, None]) >> np.uint64(32)
    return ((high * np.uint64(buckets)) >> np.uint64(32)).astype(np.int32)


def count(codes: Codes, counts: NDArray[Any]) -> None:
    """Add one to counts[r, codes[r, i]] for every row and item."""
    compiled = kernels()
    if compiled is not None:
        compiled.count_codes(codes, counts)
        return
    rows, buckets = counts.shape
    cells = codes + np.arange(0, rows * buckets, buckets, dtype=np.int64)[:, None]
    counts += np.bincount(cells.ravel(), minlength=rows * buckets).reshape(rows, buckets)


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
