"""The sketches of a registry stacked, ready to be compared with one query.

What ranks clients is

    D2 + CAUTION * e,

where D2 is the squared Frobenius distance without the part e of it that sampling and noise of the
client's sketch add (its energy, see `signals.stack`). D2 alone is unbiased, but the smallest of
many unbiased numbers is most likely one with a large error: the luckiest of the small clients,
not the nearest. D2 + e, the plain distance, prefers large clients in turn. Half of the energy
retrieved the most similar clients, or nearly so, in all settings tried (benchmarks/registry.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.signals.race import RaceSketch
from fedcohort.signals.stack import Stack, reading_dtype

CAUTION = 0.5
CELLS = 1 << 22  # counts compared at a time

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(eq=False)
class Pile:
    """Sketches of N clients.

    Parameters
    ----------
    counts : int array (N, rows, buckets)
        In memory, or mapped from a file.
    n, energy : float arrays (N,)
    numbers : int array (N,)
        The clients' numbers in the registry, rising.
    """

    counts: NDArray[Any]
    n: Floats
    energy: Floats
    numbers: Ints

    def __len__(self) -> int:
        return len(self.n)

    @property
    def cells(self) -> int:
        """Counts of one sketch."""
        return int(np.prod(self.counts.shape[1:]))

    def vectors(self, part: slice | Ints) -> NDArray[np.float32]:
        """Return counts / n of some clients, flat."""
        raw = np.asarray(self.counts[part]).reshape(-1, self.cells)
        flat: NDArray[np.float32] = np.multiply(
            raw, (1 / self.n[part])[:, None], dtype=np.float32, casting="unsafe"
        )
        return flat

    def scores(self, query: NDArray[np.float32], positions: Ints | None = None) -> Floats:
        """Return what ranks clients (above), less the query's own energy, which is all the same."""
        where = np.arange(len(self)) if positions is None else positions
        step = max(1, CELLS // self.cells)
        out = np.empty(len(where))
        for lo in range(0, len(where), step):
            part = where[lo : lo + step]
            gap = self.vectors(part)
            gap -= query
            out[lo : lo + step] = np.einsum("ij,ij->i", gap, gap)
        return out - (1 - CAUTION) * self.energy[where]

    def best(self, query: NDArray[np.float32], k: int, positions: Ints | None = None) -> Ints:
        """Return the positions of the k best, the best first."""
        scores = self.scores(query, positions)
        k = min(k, len(scores))
        first = np.argpartition(scores, k - 1)[:k] if k else np.empty(0, np.int64)
        first = first[np.argsort(scores[first], kind="stable")]
        chosen: Ints = first if positions is None else positions[first]
        return chosen


def vector(sketch: RaceSketch) -> NDArray[np.float32]:
    """Return a sketch as `Pile.scores` wants it."""
    return sketch.normalized().reshape(-1).astype(np.float32)


def joined(*piles: Pile | None) -> Pile | None:
    """Return several piles as one."""
    some = [pile for pile in piles if pile is not None]
    if len(some) < 2:
        return some[0] if some else None
    return Pile(
        np.concatenate([pile.counts for pile in some]),
        np.concatenate([pile.n for pile in some]),
        np.concatenate([pile.energy for pile in some]),
        np.concatenate([pile.numbers for pile in some]),
    )


class PileWriter:
    """Collects sketches block by block, in memory or in a file, in integers that fit.

    Examples
    --------
    >>> sketch = RaceSketch.srp(dim=2, rows=4, bits=2)
    >>> sketch.add([[1.0, 0.0], [0.0, 1.0]])
    >>> writer = PileWriter(2, sketch)
    >>> writer.add([(7, sketch), (9, sketch)])
    >>> pile = writer.done()
    >>> pile.counts.shape, pile.counts.dtype, pile.numbers.tolist()
    ((2, 4, 4), dtype('int16'), [7, 9])
    """

    def __init__(self, capacity: int, like: RaceSketch, folder: Path | None = None) -> None:
        self.folder, self.shape = folder, (capacity, like.rows, like.buckets)
        self.filled = 0
        self.counts = self._allocate("i2")
        self.n, self.energy = np.empty(capacity), np.empty(capacity)
        self.numbers = np.empty(capacity, np.int64)

    def _allocate(self, kind: str) -> NDArray[Any]:
        if self.folder is None:
            return np.empty(self.shape, kind)
        path = self.folder / f"counts.{kind}.npy"
        return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=self.shape)

    def add(self, block: Iterable[tuple[int, RaceSketch]]) -> None:
        """Append sketches with their numbers."""
        pairs = list(block)
        if not pairs:
            return
        rows = slice(self.filled, self.filled + len(pairs))
        tables = np.zeros(len(pairs), reading_dtype(*self.shape[1:], "i8"))
        for i, (_, sketch) in enumerate(pairs):
            tables[i]["n"], tables[i]["noise"], tables[i]["counts"] = (
                sketch.n,
                sketch.noise,
                sketch.counts,
            )
        self._widen(tables["counts"])
        self.counts[rows] = tables["counts"]
        self.n[rows], self.energy[rows] = tables["n"], Stack(tables).energy()
        self.numbers[rows] = [number for number, _ in pairs]
        self.filled += len(pairs)

    def _widen(self, counts: NDArray[np.int64]) -> None:
        """Go over to larger integers where the new counts need them."""
        low, high = int(counts.min()), int(counts.max())
        while not (
            np.iinfo(self.counts.dtype).min <= low <= high <= np.iinfo(self.counts.dtype).max
        ):
            old, self.counts = self.counts, self._allocate(f"i{2 * self.counts.itemsize}")
            self.counts[: self.filled] = old[: self.filled]

    def done(self) -> Pile:
        """Return the pile."""
        used = slice(self.filled)
        return Pile(self.counts[used], self.n[used], self.energy[used], self.numbers[used])
