"""Cut the data of a sketch into blocks, hash them on all cores and count, at constant memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.sketch.hashing import (
    SRP,
    Codes,
    HashFamily,
    PStable,
    Sets,
    as_index_sets,
    as_sets,
)
from fedcohort.sketch.transforms import Tokenizer, Transform

Counts = NDArray[np.int64]
SETS_AT_A_TIME = 512


class VectorBlock(NamedTuple):
    """Embedded vectors with their labels, from row `first` on."""

    x: Any
    y: NDArray[Any] | None
    first: int
    dim: int
    transform: Transform


Block = VectorBlock | Sets


def tally(
    family: HashFamily, transform: Transform | Tokenizer, x: Any, y: ArrayLike | None
) -> tuple[Counts, int]:
    """Return the counts of all samples, (rows, buckets), and how many samples there are."""
    from fedcohort.sketch import kernels

    waiting = blocks_of(family, transform, x, y)
    ahead = list(islice(waiting, 2))
    workers = _threads() if len(ahead) > 1 else 1
    spare: SimpleQueue[Counts] = SimpleQueue()
    buffers = [np.zeros((family.rows, family.buckets), np.int64) for _ in range(workers)]
    for buffer in buffers:
        spare.put(buffer)

    def work(block: Block) -> int:
        codes = family.codes(prepared(block))
        buffer = spare.get()
        kernels.count_codes(codes, buffer)
        spare.put(buffer)
        return int(codes.shape[1])

    n, blocks = 0, chain(ahead, waiting)
    if workers == 1:
        n = sum(map(work, blocks))
    else:
        with ThreadPoolExecutor(workers) as pool:
            flying: deque[Future[int]] = deque()  # few blocks are in memory at a time
            for block in blocks:
                flying.append(pool.submit(work, block))
                if len(flying) > 2 * workers:
                    n += flying.popleft().result()
            n += sum(one.result() for one in flying)
    return sum(buffers[1:], buffers[0]), n


def codes_of(
    family: HashFamily, transform: Transform | Tokenizer, x: Any, y: ArrayLike | None
) -> Iterator[Codes]:
    """Yield the buckets of all samples, a block (rows, n) at a time."""
    return (family.codes(prepared(block)) for block in blocks_of(family, transform, x, y))


def _threads() -> int:
    """How many threads hash: OMP_NUM_THREADS where it is set, else the cores of this process."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def blocks_of(
    family: HashFamily, transform: Transform | Tokenizer, x: Any, y: ArrayLike | None
) -> Iterator[Block]:
    """Yield blocks of whatever the family hashes."""
    if isinstance(family, (SRP, PStable)):
        if not isinstance(transform, Transform):
            raise ValueError(f"{family.name} hashes vectors; it has no use for a Tokenizer")
        return _vectors(family, transform, x, y)
    if y is not None:
        raise ValueError("minhash sketches take no labels; add the label to the tokens instead")
    return _sets(transform, x)


def prepared(block: Block) -> Any:
    """Finish a block: dense, transformed, checked. Runs in the hashing thread."""
    if isinstance(block, Sets):
        return block
    x = block.x.toarray() if hasattr(block.x, "toarray") else block.x
    x = x.reshape(len(x), -1)
    if x.shape[1] != block.dim:
        raise ValueError(f"data of {x.shape[1]} columns, but the sketch has dim={block.dim}")
    if x.dtype.kind not in "fiub":
        raise ValueError(f"data of dtype {x.dtype} cannot be hashed; give numbers")
    out = block.transform.apply(x, block.y)
    finite = np.isfinite(out).all(axis=1) if out.dtype.kind == "f" else np.ones(1, bool)
    if not finite.all():
        row = int(np.argmin(finite))
        large = np.isfinite(x[row]).all()
        problem = "is too large for the transform" if large else "holds a number that is not finite"
        raise ValueError(f"row {block.first + row} of the data {problem}")
    return out


def block_length(rows: int, dim: int) -> int:
    """How many samples to hash at a time: about a megabyte of input and four of hashes."""
    length = min((1 << 18) // dim, (1 << 20) // rows, 4096)
    return max(16, length // 16 * 16)


def _vectors(
    family: SRP | PStable, transform: Transform, x: Any, y: ArrayLike | None
) -> Iterator[VectorBlock]:
    x = x.tocsr() if hasattr(x, "toarray") else np.asarray(x)
    if x.ndim < 2 and transform.embedding is None:
        raise ValueError(f"data of shape {x.shape} must be a table of vectors: (n, dim)")
    labels = None if y is None else np.asarray(y)
    if transform.classes and (labels is None or labels.shape != (x.shape[0],)):
        shape = None if labels is None else labels.shape
        raise ValueError(f"labels of shape {shape} for {x.shape[0]} samples: call add(X, y)")
    if labels is not None and not transform.classes:
        raise ValueError(
            "labels given, but the sketch has no Transform(classes=..., label_weight=...)"
        )
    dim = family.dim - transform.classes
    length = block_length(family.rows, family.dim)
    for lo in range(0, x.shape[0], length):
        part = slice(lo, lo + length)
        yield VectorBlock(
            transform.embed(x[part]), None if labels is None else labels[part], lo, dim, transform
        )


def _sets(transform: Transform | Tokenizer, x: Any) -> Iterator[Sets]:
    dense = isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype.kind in "biuf"
    if dense or hasattr(x, "tocsr"):
        x = x if dense else x.tocsr()
        for lo in range(0, x.shape[0], SETS_AT_A_TIME):
            part = x[lo : lo + SETS_AT_A_TIME]
            part = _membership(part) if dense else part.copy()
            part.eliminate_zeros()
            yield as_index_sets(part.indices, part.indptr)
        return
    if isinstance(x, (str, bytes)):
        raise ValueError("minhash: give a list of texts or token sets, not one string")
    items = iter(x)
    while block := list(islice(items, SETS_AT_A_TIME)):
        yield as_sets(transform.sets(block) if isinstance(transform, Tokenizer) else block)


def _membership(x: NDArray[Any]) -> Any:
    """Return a 0/1 matrix, sparse; refuse any other dense one, which could mean two things."""
    from scipy.sparse import csr_matrix

    if not ((x == 0) | (x == 1)).all():
        raise ValueError(
            "minhash: rows of a matrix that is not 0/1 could be tokens or weights; give token "
            "sets as list(x), a 0/1 matrix as x > 0, or use srp for vectors"
        )
    return csr_matrix(x)
