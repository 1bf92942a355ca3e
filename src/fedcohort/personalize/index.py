"""The sketches of a registry stacked, ready to be compared with one query.

What ranks clients is

    D2 + CAUTION * e,

where D2 is the squared Frobenius distance without the part e of it that sampling and noise of the
client's sketch add (its energy, see `signals.stack`). D2 alone is unbiased, but the smallest of
many unbiased numbers is most likely one with a large error: the luckiest of the small clients,
not the nearest. D2 + e, the plain distance, prefers large clients in turn. Half of the energy
retrieved the most similar clients, or nearly so, in all settings tried (benchmarks/registry.py).

Search among many: compressed sketches in an inverted file (faiss), kept in the registry.

Squared distances alone would not rank as `pile` does, which takes a share of each client's energy
off. With one more coordinate they do: the query gets 0 there, a client sqrt(c - s) with s the
share and c the largest one, so that |query - client|^2 = ranking + c. The rest of a point is the
sketch, compressed by a seeded projection where it is longer than DIMENSION.

Why an inverted file of faiss: benchmarks/registry.py measures it beside the graphs of faiss and
usearch. It is built several times faster, and it finds the nearest more often: compression is
noisy, so about a thousand candidates are wanted, and lists hand those over sooner than graphs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import DataError
from fedcohort.rounds import stream
from fedcohort.signals.projection import Projection
from fedcohort.sketch.distances import Stack, reading_dtype
from fedcohort.sketch.race import RaceSketch

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


DIMENSION = 256
CANDIDATES = 1000
PROBES = 128  # lists searched, or one in 16 if that is more
CROWDED = 0.99  # energies above this quantile count as that quantile
BLOCK = 8192

Points = NDArray[np.float32]


@dataclass(frozen=True)
class Compressor:
    """Turns sketches into points (above).

    Parameters
    ----------
    cells : int
        Counts of a sketch.
    ceiling : float
        The largest energy that is told from others. Few tiny clients must not push everybody
        away from the query, so it is a quantile, not the maximum.
    seed : int
        Of the projection.

    Examples
    --------
    >>> points = Compressor(4, ceiling=1.0).points(np.eye(4)[:2], np.array([1.0, 0.0]))
    >>> points.shape, float(points[0, -1])
    ((2, 5), 0.0)
    """

    cells: int
    ceiling: float
    seed: int = 0

    @property
    def dimension(self) -> int:
        """Length of a compressed sketch."""
        return min(DIMENSION, self.cells)

    def points(self, vectors: NDArray[Any], energy: Floats | None = None) -> Points:
        """Return the points of clients, or of queries, which have no energy."""
        out = np.zeros((len(vectors), self.dimension + 1), np.float32)
        short = self.cells <= DIMENSION
        out[:, :-1] = vectors if short else self._projection().apply(vectors)
        if energy is not None:
            out[:, -1] = np.sqrt((1 - CAUTION) * np.maximum(self.ceiling - energy, 0))
        return out

    def _projection(self) -> Projection:
        return Projection(self.cells, DIMENSION, "sparse", self.seed)  # as good as dense, faster


class Engine(Protocol):
    """What finds the points nearest to one."""

    def nearest(self, point: Points, count: int) -> Ints:
        """Return positions, roughly the nearest first."""

    def save(self, folder: Path) -> None:
        """Write all that `load` needs."""


class Scan:
    """Looks at every point; for systems without faiss."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.squares = np.einsum("ij,ij->i", points, points)

    def nearest(self, point: Points, count: int) -> Ints:
        """Return the positions of the nearest points, in no order."""
        scores = self.squares - 2 * (self.points @ point)
        count = min(count, len(scores))
        found: Ints = np.argpartition(scores, count - 1)[:count].astype(np.int64)
        return found

    def save(self, folder: Path) -> None:
        """Write the points."""
        np.save(folder / "points.npy", self.points)


class InvertedFile:
    """faiss' IndexIVFFlat: points in about 2 sqrt(N) lists around centers, few of them searched."""

    def __init__(self, index: Any) -> None:
        self.index = index
        self.index.nprobe = min(self.index.nlist, max(PROBES, self.index.nlist // 16))

    @classmethod
    def build(cls, pile: Pile, compressor: Compressor, seed: int = 0) -> InvertedFile:
        """Train the centers on a sample, then add everybody, a block at a time."""
        import faiss

        lists = max(1, int(2 * len(pile) ** 0.5))
        dimension = compressor.dimension + 1
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dimension), dimension, lists)
        index.cp.niter, index.cp.seed = 10, 1 + seed
        rng = stream(seed, "index")
        drawn = np.sort(rng.choice(len(pile), min(len(pile), 64 * lists), replace=False))
        index.train(compressor.points(pile.vectors(drawn), pile.energy[drawn]))
        for lo in range(0, len(pile), BLOCK):
            part = slice(lo, min(lo + BLOCK, len(pile)))
            index.add(compressor.points(pile.vectors(part), pile.energy[part]))
        return cls(index)

    def nearest(self, point: Points, count: int) -> Ints:
        """Return the positions of points near by, the nearest first."""
        found: Ints = self.index.search(point[None], count)[1][0]
        return found[found >= 0]

    def save(self, folder: Path) -> None:
        """Write faiss' own format."""
        import faiss

        faiss.write_index(self.index, str(folder / "lists.faiss"))


@dataclass(frozen=True, eq=False)
class Index:
    """A pile of sketches that can be searched without looking at every one."""

    pile: Pile
    compressor: Compressor
    engine: Engine

    @classmethod
    def build(cls, pile: Pile) -> Index:
        """Compress and sort into lists; a scan takes the place of lists where faiss is missing."""
        ceiling = float(np.quantile(pile.energy, CROWDED))
        compressor = Compressor(pile.cells, ceiling)
        try:
            return cls(pile, compressor, InvertedFile.build(pile, compressor))
        except ImportError:
            blocks = (slice(lo, lo + BLOCK) for lo in range(0, len(pile), BLOCK))
            points = [compressor.points(pile.vectors(b), pile.energy[b]) for b in blocks]
            return cls(pile, compressor, Scan(np.concatenate(points)))

    def best(self, query: Points, k: int) -> Ints:
        """Return the positions of the k best among the candidates, compared as they are."""
        point = self.compressor.points(query[None])[0]
        near = np.sort(self.engine.nearest(point, max(CANDIDATES, k)))
        return self.pile.best(query, k, near)

    def save(self, folder: Path) -> None:
        """Write everything but the counts, which `PileWriter` left there."""
        pile = self.pile
        np.savez(folder / "sizes.npz", n=pile.n, energy=pile.energy, numbers=pile.numbers)
        self.engine.save(folder)
        stated = {"kind": pile.counts.dtype.str[1:], **asdict(self.compressor)}
        (folder / "index.json").write_text(json.dumps(stated))

    @classmethod
    def load(cls, folder: Path) -> Index:
        """Read what `save` wrote; counts stay on disk until they are needed."""
        try:
            stated = json.loads((folder / "index.json").read_text())
            counts = np.load(folder / f"counts.{stated.pop('kind')}.npy", mmap_mode="r")
            with np.load(folder / "sizes.npz") as sizes:
                known = sizes["n"], sizes["energy"], sizes["numbers"]
            pile = Pile(counts[: len(known[0])], *known)
            return cls(pile, Compressor(**stated), _load_engine(folder))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder} is no whole index ({error}); build it anew") from error


def _load_engine(folder: Path) -> Engine:
    path = folder / "lists.faiss"
    if not path.exists():
        return Scan(np.load(folder / "points.npy"))
    try:
        import faiss
    except ImportError:
        raise DataError(
            f"{folder} was made with faiss: install fedcohort[search], or build it anew"
        ) from None
    try:
        return InvertedFile(faiss.read_index(str(path)))
    except RuntimeError as error:
        raise DataError(f"{path} is no whole index ({error}); build it anew") from None
