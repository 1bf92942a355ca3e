"""Cut the data of a sketch into blocks, hash them on all cores and count, at constant memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.sketch.hashing import SRP, HashFamily, PStable
from fedcohort.sketch.hashing.base import count, threads
from fedcohort.sketch.hashing.minhash import Sets, as_index_sets, as_sets
from fedcohort.sketch.transforms import Tokenizer, Transform

Counts = NDArray[np.int64]
Item = TypeVar("Item")


def block_length(rows: int, dim: int) -> int:
    """How many samples to hash at a time: about a megabyte of input and four of hashes.

    Examples
    --------
    >>> block_length(rows=1000, dim=784), block_length(rows=10, dim=100_000)
    (320, 16)
    """
    length = min((1 << 18) // dim, (1 << 20) // rows, 4096)
    return max(16, length // 16 * 16)


def tally(
    family: HashFamily, blocks: Iterable[Item], prepare: Callable[[Item], Any]
) -> tuple[Counts, int]:
    """Return the counts of all blocks and the number of items.

    Parameters
    ----------
    family : HashFamily
        The hash functions.
    blocks : iterable
        Made in the calling thread, at most a few ahead of the hashing.
    prepare : callable
        Turns a block into what the family hashes, in the hashing thread.
    """
    waiting = iter(blocks)
    ahead = list(islice(waiting, 2))
    workers = threads() if len(ahead) > 1 else 1
    spare: SimpleQueue[Counts] = SimpleQueue()
    buffers = [np.zeros((family.rows, family.buckets), np.int64) for _ in range(workers)]
    for buffer in buffers:
        spare.put(buffer)

    def work(block: Item) -> int:
        codes = family.codes(prepare(block))
        buffer = spare.get()
        count(codes, buffer)
        spare.put(buffer)
        return int(codes.shape[1])

    done = _in_order(work, chain(ahead, waiting), workers)
    n = sum(done)
    return sum(buffers[1:], buffers[0]), n


def _in_order(work: Callable[[Item], int], blocks: Iterator[Item], workers: int) -> Iterator[int]:
    """Map `work` over blocks with few of them in flight."""
    if workers == 1:
        yield from map(work, blocks)
        return
    with ThreadPoolExecutor(workers) as pool:
        flying: deque[Future[int]] = deque()
        for block in blocks:
            flying.append(pool.submit(work, block))
            if len(flying) > 2 * workers:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()


SETS = 512  # token sets per block


class VectorBlock(NamedTuple):
    """A block of embedded vectors, the number of its first row, and its labels."""

    x: Any
    y: NDArray[Any] | None
    first: int
    dim: int
    transform: Transform


def blocks_of(
    family: HashFamily, transform: Transform | Tokenizer, x: Any, y: ArrayLike | None
) -> Iterator[VectorBlock | Sets]:
    """Yield blocks of whatever the family hashes."""
    if isinstance(family, (SRP, PStable)):
        if not isinstance(transform, Transform):
            raise ValueError(f"{family.name} hashes vectors; it has no use for a Tokenizer")
        return _vectors(family, transform, x, y)
    if y is not None:
        raise ValueError("minhash sketches take no labels; add the label to the tokens instead")
    return _sets(transform, x)


def prepare(block: VectorBlock | Sets) -> Any:
    """Finish a block: dense, transformed, checked. Runs in the hashing thread."""
    if isinstance(block, Sets):
        return block
    x = block.x.toarray() if hasattr(block.x, "toarray") else block.x
    x = x.reshape(len(x), -1)
    if x.shape[1] != block.dim:
        raise ValueError(f"data of {x.shape[1]} columns, but the sketch has dim={block.dim}")
    if x.dtype.kind not in "fiub":
        raise ValueError(f"data of dtype {x.dtype} cannot be hashed; give numbers")
    made = block.transform.apply(x, block.y)
    finite = np.isfinite(made).all(axis=1) if made.dtype.kind == "f" else np.ones(1, bool)
    if not finite.all():
        row = int(np.argmin(finite))
        known = np.isfinite(x[row]).all()
        problem = "is too large for the transform" if known else "holds a number that is not finite"
        raise ValueError(f"row {block.first + row} of the data {problem}")
    return made


def _vectors(
    family: SRP | PStable, transform: Transform, x: Any, y: ArrayLike | None
) -> Iterator[VectorBlock]:
    sparse = hasattr(x, "toarray")
    x = x.tocsr() if sparse else np.asarray(x) if not isinstance(x, np.ndarray) else x
    if x.ndim < 2 and transform.embedding is None:
        raise ValueError(f"data of shape {x.shape} must be a table of vectors: (n, dim)")
    labels = None if y is None else np.asarray(y)
    if transform.classes and (labels is None or labels.shape != (x.shape[0],)):
        given = None if labels is None else labels.shape
        raise ValueError(f"labels of shape {given} for {x.shape[0]} samples: call add(X, y)")
    if labels is not None and not transform.classes:
        raise ValueError(
            "labels given, but the sketch has no Transform(classes=..., label_weight=...)"
        )
    dim = family.dim - transform.classes
    length = block_length(family.rows, family.dim)
    for lo in range(0, x.shape[0], length):
        part = slice(lo, lo + length)
        own = None if labels is None else labels[part]
        yield VectorBlock(transform.embed(x[part]), own, lo, dim, transform)


def _sets(transform: Transform | Tokenizer, x: Any) -> Iterator[Sets]:
    if hasattr(x, "tocsr"):
        yield from _sparse_sets(x.tocsr())
        return
    if isinstance(x, (str, bytes)):
        raise ValueError("minhash: give a list of texts or token sets, not one string")
    items: Iterable[Any] = iter(x)
    while block := list(islice(items, SETS)):
        yield as_sets(transform.sets(block) if isinstance(transform, Tokenizer) else block)


def _sparse_sets(x: Any) -> Iterator[Sets]:
    for lo in range(0, x.shape[0], SETS):
        part = x[lo : lo + SETS].copy()
        part.eliminate_zeros()
        yield as_index_sets(part.indices, part.indptr)
