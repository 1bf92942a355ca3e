"""Cut the data of a sketch into blocks, hash them on all cores and count, at constant memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.sketch.hashing import Codes, HashFamily, MinHash, as_index_sets, as_sets
from fedcohort.sketch.transforms import Tokenizer, Transform

Block = Callable[[], Any]  # gives what the family hashes; called in a hashing thread
SETS_AT_A_TIME = 512


def tally(
    family: HashFamily, transform: Transform | Tokenizer, x: Any, y: ArrayLike | None
) -> tuple[NDArray[np.int64], int]:
    """Return the counts of all samples, (rows, buckets), and how many samples there are."""
    from fedcohort.sketch import kernels

    cut = _sets if isinstance(family, MinHash) else _vectors
    counts, n = np.zeros((family.rows, family.buckets), np.int64), 0
    for codes in _hashed(family, cut(family, transform, x, y)):
        kernels.count_codes(codes, counts)
        n += codes.shape[1]
    return counts, n


def _hashed(family: HashFamily, blocks: Iterator[Block]) -> Iterator[Codes]:
    """Yield the buckets of each block; several are hashed side by side."""

    def work(block: Block) -> Codes:
        return family.codes(block())

    ahead = list(islice(blocks, 2))
    workers = _threads() if len(ahead) > 1 else 1
    if workers == 1:
        yield from map(work, chain(ahead, blocks))
        return
    with ThreadPoolExecutor(workers) as pool:
        flying: deque[Future[Codes]] = deque()
        for block in chain(ahead, blocks):
            flying.append(pool.submit(work, block))
            if len(flying) > 2 * workers:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()


def _threads() -> int:
    """How many threads hash: OMP_NUM_THREADS where it is set, else the cores of this process."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
        yield partial(_prepared, x[part], some, lo, dim, transform)


def _prepared(
    x: Any, y: NDArray[Any] | None, first: int, dim: int, transform: Transform
) -> NDArray[Any]:
    """Return a block that begins at row `first`: dense, transformed, checked."""
    x = x.toarray() if hasattr(x, "toarray") else x
    x = x.reshape(len(x), -1)
    if x.shape[1] != dim:
        raise ValueError(f"data of {x.shape[1]} columns, but the sketch has dim={dim}")
    if x.dtype.kind not in "fiub":
        raise ValueError(f"data of dtype {x.dtype} cannot be hashed; give numbers")
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
    dense = isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype.kind in "biuf"
    if dense or hasattr(x, "tocsr"):
        x = x if dense else x.tocsr()
        for lo in range(0, x.shape[0], SETS_AT_A_TIME):
            part = x[lo : lo + SETS_AT_A_TIME]
            part = _membership(part) if dense else part.copy()
            part.eliminate_zeros()
            yield partial(as_index_sets, part.indices, part.indptr)
        return
    if isinstance(x, (str, bytes)):
        raise ValueError("minhash: give a list of texts or token sets, not one string")
    items = iter(x)
    while block := list(islice(items, SETS_AT_A_TIME)):
        sets = transform.sets(block) if isinstance(transform, Tokenizer) else block
        yield partial(as_sets, sets)


def _membership(x: NDArray[Any]) -> Any:
    """Return a 0/1 matrix, sparse; refuse any other dense one, which could mean two things."""
    from scipy.sparse import csr_matrix

    if not ((x == 0) | (x == 1)).all():
        raise ValueError(
            "minhash: rows of a matrix that is not 0/1 could be tokens or weights; give token "
            "sets as list(x), a 0/1 matrix as x > 0, or use srp for vectors"
        )
    return csr_matrix(x)
