"""Hash and count: locality-sensitive families, equal on every machine and in every process.

`SRP` meets by angle, `PStable` by Euclidean distance, `MinHash` by overlap of token sets.

Directions of `SRP` and `PStable` come from rotations x -> H D3 H D2 H D1 x: D are random signs, H
the Walsh-Hadamard transform of the input padded with zeros to a power of two, m. Each yields m
orthogonal directions for 3 log2(m) additions each, in a fixed order: the bucket of a record depends
on that record alone, as privacy requires.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.options import Positive, Range, check_fields
from fedcohort.registry import lookup
from fedcohort.rounds import stream
from fedcohort.sketch.transforms import Tokenizer, Transform

Codes = NDArray[np.int32]
MAX_CELLS = 1 << 24  # rows * buckets: 128 MB of counts
MAX_BITS = 20  # of a sign projection, wherever a sketch is asked for
MAX_DIM = 1 << 20
MIN_PADDED = 256  # below, few-valued inputs (one-hot vectors) feel the lattice of the signs
PACKED = 1024  # from here on the directions of one rotation are as good as independent
WHOLE = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step; sets whole tokens apart from strings
Block = Callable[[], Any]  # gives what a family hashes; called in a hashing thread
SETS_AT_A_TIME = 512
MAX_REMEMBERED = 1 << 20  # tokens whose hash is kept

Rows = Annotated[int, Range(1, MAX_CELLS)]
Buckets = Annotated[int, Range(2, MAX_CELLS)]
Dim = Annotated[int, Range(1, MAX_DIM)]
Seed = Annotated[int, Range(0, 2**63, below=True)]


class HashFamily(ABC):
    """`rows` hash functions, drawn by a seed, from items to `buckets` buckets."""

    name: ClassVar[str]
    rows: int
    buckets: int

    def __post_init__(self) -> None:
        check_fields(self, self.name)
        if (cells := self.rows * self.buckets) > MAX_CELLS:
            raise ValueError(
                f"{self.name}: rows * buckets = {cells} is more than {MAX_CELLS}; use fewer rows"
            )

    @abstractmethod
    def codes(self, block: Any) -> Codes:
        """Return the bucket of every item of a block in every row, (rows, n)."""

    def spec(self) -> dict[str, Any]:
        """Return what determines the functions, as plain values for a file's header."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class SRP(HashFamily):
    """Signed random projections (paper 0, definition A.1), `bits` of them to a row.

    Two vectors at angle theta meet in a row with probability (1 - theta / pi) ** bits. Only the
    angle counts: x and 3x always meet. The zero vector falls into bucket 0 of every row.
    """

    name: ClassVar[str] = "srp"
    dim: Dim
    rows: Rows = 1000
    bits: Annotated[int, Range(1, MAX_BITS)] = 6
    seed: Seed = 0
    family: Literal["fast"] = "fast"  # files name the kind of projections too

    @property
    def buckets(self) -> int:  # type: ignore[override]
        """Buckets per row."""
        return int(2**self.bits)

    def codes(self, block: NDArray[Any]) -> Codes:
        """Return the bucket of every vector in every row, (rows, n)."""
        from fedcohort import loops

        x = within_float32(block)
        turns = rotations(self.seed, self.name, self.dim, self.rows, self.bits, "f4")
        out = np.empty((self.rows, len(x)), np.int32)
        loops.srp_codes(x, *turns, self.rows, self.bits, out)
        return out


def within_float32(x: NDArray[Any]) -> NDArray[np.float32]:
    """Return vectors as float32; where sums could overflow, scaled by a power of two.

    That changes no angle and no rounding, and depends on the vector alone.
    """
    if x.dtype.kind in "fiu" and x.dtype.itemsize > 2:
        peak = np.maximum(x.max(axis=1, initial=0), -x.min(axis=1, initial=0).astype(float))
        far = (peak > 2.0**40) | ((peak < 2.0**-40) & (peak > 0))
        if far.any():
            _, exponent = np.frexp(np.where(far, peak, 0.5))
            x = np.ldexp(x.astype(np.float64), -exponent[:, None])
    return np.ascontiguousarray(x, np.float32)


@dataclass(frozen=True)
class PStable(HashFamily):
    """floor((a.x + b) / width), folded to `buckets` (Datar, Immorlica, Indyk, Mirrokni 2004).

    Directions a are rotations in float64, b is uniform on [0, width). Folding adds
    (1 - p) / buckets to the probability p that two points take the same step. `width` is about the
    distance from which on points should count as different.
    """

    name: ClassVar[str] = "pstable"
    dim: Dim
    rows: Rows = 200
    width: Positive = 2.0
    buckets: Buckets = 64
    seed: Seed = 0

    def codes(self, block: NDArray[Any]) -> Codes:
        """Return the bucket of every vector in every row, (rows, n)."""
        from fedcohort import loops

        x = np.ascontiguousarray(block, np.float64)
        far = np.flatnonzero((np.abs(x) > 2.0**50 * self.width / self.dim).any(axis=1))
        if len(far):
            raise ValueError(
                f"pstable: a vector reaches {np.abs(x[far[0]]).max():.3g}, too far for "
                f"width={self.width}; standardize the columns or widen the steps"
            )
        turns = rotations(self.seed, self.name, self.dim, self.rows, 1, "f8")
        along = np.empty((self.rows, len(x)))
        loops.projections(x, *turns, self.rows, along)
        raw = stream(self.seed, "pstable", "rows").bit_generator.random_raw((self.rows, 2))
        offsets = (raw[:, 0] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        steps = np.floor(along / (len(turns[0]) * self.width) + offsets[:, None])
        return fold(steps.astype(np.int64).view(np.uint64), raw[:, 1].copy(), self.buckets)


class Sets(NamedTuple):
    """Token sets on end: set i is tokens[starts[i]:starts[i + 1]]."""

    tokens: NDArray[np.uint64]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class MinHash(HashFamily):
    """Min-wise hashing of sets (paper 0, definition A.2), folded to `buckets`.

    Two sets of Jaccard similarity J meet in a row with probability J + (1 - J) / buckets. A token
    becomes 64 bits (BLAKE2b of a string's UTF-8 or of bytes, a scramble of an integer), which row r
    orders by a[r] * token + b[r] mod 2^64 with a[r] odd. The empty set meets itself alone.
    """

    name: ClassVar[str] = "minhash"
    rows: Rows = 200
    buckets: Buckets = 64
    seed: Seed = 0

    def codes(self, block: Sets) -> Codes:
        """Return the bucket of every set in every row, (rows, n)."""
        from fedcohort import loops

        raw = stream(self.seed, "minhash").bit_generator.random_raw((self.rows, 3))
        factors, shifts, keys = raw[:, 0] | np.uint64(1), raw[:, 1].copy(), raw[:, 2].copy()
        minima = np.empty((self.rows, len(block.starts) - 1), np.uint64)
        loops.set_minima(block.tokens, block.starts, factors, shifts, minima)
        return fold(minima, keys, self.buckets)


FAMILIES: dict[str, type[SRP | MinHash | PStable]] = {f.name: f for f in (SRP, MinHash, PStable)}


def family_from(spec: Any) -> HashFamily:
    """Rebuild a family from its `spec`; ValueError or TypeError for anything else."""
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise ValueError("a hash family must be an object with a name")
    options = {key: value for key, value in spec.items() if key != "name"}
    return lookup("hash family", spec["name"], FAMILIES)(**options)


@lru_cache(maxsize=16)
def rotations(
    seed: int, name: str, dim: int, rows: int, planes: int, kind: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], int]:
    """Draw D1, D2, D3 for rows * planes directions, and how many coordinates of each are used.

    Direction i = b * rows + r is coordinate i % used of rotation i // used, and serves row r.
    Small rotations serve each row at most once, so that the planes of one row stay independent.
    All share D1, so that H D1 x is computed once per sample.
    """
    m = max(MIN_PADDED, 1 << (dim - 1).bit_length())
    used = m if m >= PACKED else min(m, rows)
    count = -(-rows * planes // used)
    rng = stream(seed, name, m)
    first, second, third = _signs(rng, m), _signs(rng, count, m), _signs(rng, count, m)
    return first.astype(kind), second.astype(kind), third.astype(kind), used


def _signs(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Random signs from the generator's raw bits, whose order no NumPy release changes."""
    count = int(np.prod(shape))
    raw = rng.bit_generator.random_raw(-(-count // 64)).astype("<u8")
    bits = np.unpackbits(raw.view(np.uint8), count=count, bitorder="little")
    return (1 - 2 * bits.astype(np.float32)).reshape(shape)


def fold(values: NDArray[np.uint64], keys: NDArray[np.uint64], buckets: int) -> Codes:
    """Map the values of row r, (rows, n), to buckets by a scramble that keys[r] chooses."""
    from fedcohort import loops

    out = np.empty(values.shape, np.int32)
    loops.fold_rows(values, keys, np.uint64(buckets), out)
    return out


def as_sets(sets: Iterable[Any]) -> Sets:
    """Hash the tokens of sets: iterables of strings, bytes or integers, or integer arrays."""
    items = [_collection(item) for item in sets]
    starts = np.zeros(len(items) + 1, np.int64)
    np.cumsum([len(item) for item in items], out=starts[1:])
    tokens = list(chain.from_iterable(items))
    kinds = set(map(type, tokens))
    strange = {k for k in kinds if k is bool or not issubclass(k, (str, bytes, int, np.integer))}
    if strange:
        token = next(token for token in tokens if type(token) in strange)
        raise ValueError(
            f"minhash: token {token!r} is neither a string, bytes nor an integer; "
            "give marks of columns as one 0/1 matrix"
        )
    if kinds == {int}:
        with suppress(OverflowError):  # named token by token below
            return Sets(_hash_integers(np.array(tokens, np.int64)), starts)
    return Sets(np.fromiter(map(_token, tokens), np.uint64, len(tokens)), starts)


def _collection(item: Any) -> Any:
    if isinstance(item, (str, bytes)):
        raise ValueError(
            f"minhash: {item[:40]!r} is one string, not a set of tokens; "
            "split it, or give the sketch a Tokenizer"
        )
    if isinstance(item, np.ndarray):
        return item.ravel().tolist()  # joined arrays of several types could become fractions
    if not isinstance(item, Iterable):
        raise ValueError(f"minhash: {item!r} is one token, not a set; give a list of sets")
    return item if isinstance(item, Collection) else list(item)


@lru_cache(MAX_REMEMBERED, typed=True)
def _token(word: Any) -> int:
    if isinstance(word, (str, bytes)):
        content = word.encode("utf-8", "surrogatepass") if isinstance(word, str) else word
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    if not -(2**63) <= word < 2**63:
        raise ValueError("minhash: an integer token needs more than 64 bits")
    return int(_hash_integers(np.array([word]))[0])


def _hash_integers(numbers: NDArray[Any]) -> NDArray[np.uint64]:
    return scramble(numbers.astype(np.int64).view(np.uint64) ^ WHOLE)


def scramble(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble words one to one (the finalizer of SplitMix64)."""
    from fedcohort import loops

    return np.asarray(loops.scramble.py_func(words))


def tally(
    family: HashFamily, transform: Transform | Tokenizer, x: Any, y: ArrayLike | None
) -> tuple[NDArray[np.int64], int]:
    """Return the counts of all samples, (rows, buckets), and how many samples there are."""
    from fedcohort import loops

    cut = _sets if isinstance(family, MinHash) else _vectors
    counts, n = np.zeros((family.rows, family.buckets), np.int64), 0
    for codes in _hash_blocks(family, cut(family, transform, x, y)):
        loops.count_codes(codes, counts)
        n += codes.shape[1]
    return counts, n


def _hash_blocks(family: HashFamily, blocks: Iterator[Block]) -> Iterator[Codes]:
    """Yield the buckets of each block; as many as OMP_NUM_THREADS, or cores, side by side."""

    def work(block: Block) -> Codes:
        return family.codes(block())

    wanted = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = (int(wanted) if wanted.isdigit() else 0) or cores or 1
    if workers == 1:
        yield from map(work, blocks)
        return
    with ThreadPoolExecutor(workers) as pool:
        while some := list(islice(blocks, 4 * workers)):  # no more are held in memory
            yield from pool.map(work, some) if len(some) > 1 else map(work, some)


def block_length(rows: int, dim: int) -> int:
    """How many samples to hash at a time: about a megabyte of input and four of hashes."""
    length = min((1 << 18) // dim, (1 << 20) // rows, 4096)
    return max(16, length // 16 * 16)


def _vectors(family: Any, transform: Any, x: Any, y: ArrayLike | None) -> Iterator[Block]:
    if isinstance(transform, Tokenizer):
        raise ValueError(f"{family.name} hashes vectors; it has no use for a Tokenizer")
    x = x.tocsr() if hasattr(x, "toarray") else np.asarray(x)
    if x.ndim < 2:
        raise ValueError(f"data of shape {x.shape} must be a table of vectors: (n, dim)")
    labels = None if y is None else np.asarray(y)
    if transform.classes and (labels is None or labels.shape != (x.shape[0],)):
        shape = None if labels is None else labels.shape
        raise ValueError(f"labels of shape {shape} for {x.shape[0]} samples: call add(X, y)")
    if labels is not None and not transform.classes:
        raise ValueError(
            "labels given, but the sketch has no Transform(classes=..., label_weight=...)"
        )
    dim, length = family.dim - transform.classes, block_length(family.rows, family.dim)
    for lo in range(0, x.shape[0], length):
        part = slice(lo, lo + length)
        some = None if labels is None else labels[part]
        yield partial(_prepare, x[part], some, lo, dim, transform)


def _prepare(
    x: Any, y: NDArray[Any] | None, first: int, dim: int, transform: Transform
) -> NDArray[Any]:
    """Return a block that begins at row `first`: dense, transformed, checked."""
    x = x.toarray() if hasattr(x, "toarray") else x
    x = x.reshape(len(x), -1)
    if x.shape[1] != dim:
        raise ValueError(f"data of {x.shape[1]} columns, but the sketch has dim={dim}")
    if x.dtype.kind not in "fiub":
        raise ValueError(f"data of dtype {x.dtype} cannot be hashed; give numbers")
    if x.dtype.itemsize > 8:  # rounded here, each alike: a far vector makes `within_float32` do it
        x = x.astype(np.float64)
    out = transform.apply(x, y)
    finite = np.isfinite(out).all(axis=1) if out.dtype.kind == "f" else np.ones(1, bool)
    if not finite.all():
        row = int(np.argmin(finite))
        large = np.isfinite(x[row]).all()
        problem = "is too large for the transform" if large else "holds a number that is not finite"
        raise ValueError(f"row {first + row} of the data {problem}")
    return out


def _sets(family: Any, transform: Any, x: Any, y: ArrayLike | None) -> Iterator[Block]:
    if y is not None:
        raise ValueError("minhash sketches take no labels; add the label to the tokens instead")
    x = np.asarray(x) if hasattr(x, "__array__") else x  # a data frame, a tensor
    dense = isinstance(x, np.ndarray) and x.ndim > 1 and x.dtype.kind in "biuf"
    if dense or hasattr(x, "tocsr"):
        x = x.reshape(len(x), -1) if dense else x.tocsr()
        for lo in range(0, x.shape[0], SETS_AT_A_TIME):
            yield partial(_sets_of_columns, x[lo : lo + SETS_AT_A_TIME])
        return
    if isinstance(x, (str, bytes)):
        raise ValueError("minhash: give a list of texts or token sets, not one string")
    items = iter(x)
    while block := list(islice(items, SETS_AT_A_TIME)):
        sets = transform.sets(block) if isinstance(transform, Tokenizer) else block
        yield partial(as_sets, sets)


def _sets_of_columns(rows: Any) -> Sets:
    """Return the columns that are not 0; refuse a dense matrix that could mean two things."""
    from scipy.sparse import csr_matrix

    if isinstance(rows, np.ndarray) and not ((rows == 0) | (rows == 1)).all():
        raise ValueError(
            "minhash: rows of a matrix that is not 0/1 could be tokens or weights; give token "
            "sets as list(x), a 0/1 matrix as x > 0, or use srp for vectors"
        )
    marks = csr_matrix(rows, copy=True)
    marks.eliminate_zeros()
    return Sets(_hash_integers(marks.indices), marks.indptr.astype(np.int64))
