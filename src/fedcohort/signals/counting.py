"""Count the hashes of a stream of blocks, on all cores, at constant memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcohort.signals.hashing import HashFamily
from fedcohort.signals.hashing.base import count, threads

Counts = NDArray[np.int64]
Block = TypeVar("Block")


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
    family: HashFamily, blocks: Iterable[Block], prepare: Callable[[Block], Any]
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

    def work(block: Block) -> int:
        codes = family.codes(prepare(block))
        buffer = spare.get()
        count(codes, buffer)
        spare.put(buffer)
        return int(codes.shape[1])

    done = _in_order(work, chain(ahead, waiting), workers)
    n = sum(done)
    return sum(buffers[1:], buffers[0]), n


def _in_order(work: Callable[[Block], int], blocks: Iterator[Block], workers: int) -> Iterator[int]:
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
