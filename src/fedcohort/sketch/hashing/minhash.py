"""MinHash: hashes of token sets whose collisions tell the Jaccard similarity."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import stream
from fedcohort.sketch.hashing.base import (
    Codes,
    HashFamily,
    check_size,
    check_whole,
    fold,
    kernels,
    mix,
)

WHOLE = np.uint64(0x9E3779B97F4A7C15)  # sets integer tokens apart from hashed strings
REMEMBERED = 1 << 20  # strings whose hash is kept


class Sets(NamedTuple):
    """Token sets on end: set i is tokens[starts[i]:starts[i + 1]]."""

    tokens: NDArray[np.uint64]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class MinHash(HashFamily):
    """Min-wise hashing of sets (paper 0, definition A.2), folded to `buckets`.

    Two sets of Jaccard similarity J meet in a row with probability J + (1 - J) / buckets. Every
    token becomes 64 bits that are as good as random (BLAKE2b of a string's UTF-8 or of bytes, a
    scramble of an integer), row r orders them by a[r] * token + b[r] mod 2^64 with a[r] odd.
    The empty set is an item of its own: it always meets itself, and others by folding alone.

    Examples
    --------
    >>> hashes = MinHash(rows=3, buckets=8, seed=0)
    >>> same = hashes.codes(as_sets([{"a", "b"}, ["b", "a", "b"]]))
    >>> bool((same[:, 0] == same[:, 1]).all())
    True
    """

    name: ClassVar[str] = "minhash"
    rows: int = 200
    buckets: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_size("minhash", self.rows, self.buckets)
        check_whole("minhash", "seed", self.seed, 0, 2**63 - 1)

    def spec(self) -> dict[str, Any]:
        """Return what determines the functions."""
        return {
            "name": self.name,
            "rows": self.rows,
            "buckets": self.buckets,
            "seed": self.seed,
        }

    def codes(self, block: Sets) -> Codes:
        """Return the bucket of every set in every row, (rows, n)."""
        factors, shifts, keys = _draws(self.seed, self.rows)
        least = np.empty((self.rows, len(block.starts) - 1), np.uint64)
        compiled = kernels()
        if compiled is None:
            _set_minima(block, factors, shifts, least)
        else:
            compiled.set_minima(block.tokens, block.starts, factors, shifts, least)
        return fold(least, keys, self.buckets)


@lru_cache(maxsize=16)
def _draws(seed: int, rows: int) -> tuple[NDArray[np.uint64], ...]:
    raw = stream(seed, "minhash").bit_generator.random_raw((rows, 3))
    return raw[:, 0] | np.uint64(1), raw[:, 1].copy(), raw[:, 2].copy()


def _set_minima(
    sets: Sets, factors: NDArray[np.uint64], shifts: NDArray[np.uint64], out: NDArray[np.uint64]
) -> None:
    """Do what `_kernels.set_minima` does, in NumPy."""
    full = np.flatnonzero(np.diff(sets.starts))
    out[:] = np.iinfo(np.uint64).max
    for r in range(len(out)) if len(full) else ():
        ranks = factors[r] * sets.tokens + shifts[r]
        out[r, full] = np.minimum.reduceat(ranks, sets.starts[full])


def as_sets(sets: Iterable[Any]) -> Sets:
    """Hash the tokens of sets: iterables of strings, bytes or integers, or integer arrays.

    Examples
    --------
    >>> as_sets([[1, 2], [], ["one"]]).starts.tolist()
    [0, 2, 2, 3]
    """
    items = [_sized(item) for item in sets]
    starts = np.zeros(len(items) + 1, np.int64)
    np.cumsum([len(item) for item in items], out=starts[1:])
    arrays = [item for item in items if isinstance(item, np.ndarray)]
    if items and len(arrays) == len(items):
        return Sets(_whole(np.concatenate(arrays)), starts)
    return Sets(_hashed(list(chain.from_iterable(items))), starts)


def as_index_sets(indices: NDArray[Any], starts: NDArray[Any]) -> Sets:
    """Hash the rows of a sparse matrix (CSR), as the sets of their column numbers."""
    return Sets(_whole(indices), np.asarray(starts, np.int64))


def _sized(item: Any) -> Collection[Any]:
    if isinstance(item, (str, bytes)):
        raise ValueError(
            f"minhash: {item[:40]!r} is one string, not a set of tokens; "
            "split it, or give the sketch a Tokenizer"
        )
    if isinstance(item, np.ndarray):
        return item.ravel() if item.dtype.kind in "iu" else item.ravel().tolist()
    return item if isinstance(item, Collection) else list(item)


def _hashed(words: list[Any]) -> NDArray[np.uint64]:
    """Hash tokens on end; all strings or all integers, the common cases, at once."""
    kinds = set(map(type, words))
    if kinds <= {str}:
        return np.fromiter(map(_TEXTS.__getitem__, words), np.uint64, len(words))
    if kinds <= {int}:
        return _whole(_sixty_four_bits(words))
    return np.fromiter(map(_token, words), np.uint64, len(words))


def _sixty_four_bits(words: list[Any]) -> NDArray[np.int64]:
    try:
        return np.array(words, np.int64)
    except OverflowError:
        raise ValueError("minhash: an integer token needs more than 64 bits") from None


def _whole(numbers: NDArray[Any]) -> NDArray[np.uint64]:
    return mix(numbers.astype(np.int64).view(np.uint64) ^ WHOLE)


def _token(word: Any) -> int:
    if isinstance(word, str):
        return _TEXTS[str(word)]
    if isinstance(word, bytes):
        return _digest(word)
    if isinstance(word, (int, np.integer)):
        return int(_whole(_sixty_four_bits([word]))[0])
    raise ValueError(f"minhash: token {word!r} is neither a string, bytes nor an integer")


def _digest(word: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little")


class _Texts(dict[str, int]):
    """Hashes of strings, computed when first asked for; the first million are kept."""

    def __missing__(self, word: str) -> int:
        value = _digest(word.encode("utf-8", "surrogatepass"))
        if len(self) < REMEMBERED:
            self[word] = value
        return value


_TEXTS = _Texts()
