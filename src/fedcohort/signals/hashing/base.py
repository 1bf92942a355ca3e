"""What every hash family offers, and what the families share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

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
    """Refuse what is no whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{family}: {name}={value!r} must be a whole number of at least {least}")
    if value > most:
        raise ValueError(f"{family}: {name}={value} is more than {most}")


@cache
def kernels() -> ModuleType | None:
    """Return the compiled loops, None where Numba cannot be imported."""
    try:
        from fedcohort.signals.hashing import _kernels
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
