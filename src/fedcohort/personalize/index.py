"""The sketches of many clients stacked, and an index that finds the nearest without reading all.

Clients are ranked by

    D2 + ENERGY_SHARE * e,

where D2 is the squared Frobenius distance without the part e of it that sampling and noise of the
client's sketch add (its energy, see `sketch.distances`). D2 alone is unbiased, but the smallest of
many unbiased numbers is most likely one with a large error: a small client that was lucky. D2 + e,
the plain distance, prefers large clients instead. Half of the energy retrieved the most similar
clients, or nearly so, in all settings tried (benchmarks/registry.py).

The index holds one point per client, such that squared distances of points rank clients in the
same way: the sketch, compressed by a seeded projection if it is longer than DIMENSION, and one
more coordinate, which is 0 for a query and sqrt(c - s) for a client, with s the part of the energy
that is taken off and c the largest one. Then |query - client|^2 is the ranking plus c. The points
are searched by an inverted file of faiss: benchmarks/registry.py measures it against the graphs of
faiss and usearch. It is built several times faster and finds the nearest more often, because
compression is noisy, about a thousand candidates are needed, and lists yield those sooner.

An index is a folder of .npy files and ``index.json``, which states their sizes and SHA-256 and
names the folder by its own hash. Sizes and numbers are checked before use. Nothing is lost with an
index: it only proposes candidates, and is built again from the sketches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort import storage
from fedcohort.exceptions import DataError
from fedcohort.rounds import stream
from fedcohort.signals.forms import sketch_dtype
from fedcohort.signals.projection import Projection
from fedcohort.sketch.distances import Stack
from fedcohort.sketch.race import RaceSketch

ENERGY_SHARE = 0.5
ENERGY_QUANTILE = 0.99  # energies above this quantile count as that quantile
CELLS = 1 << 22  # counts compared at a time
DIMENSION = 256
CANDIDATES = 1000
PROBES = 128  # lists searched, or one in 16 if that is more
BLOCK = 8192

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Points = NDArray[np.float32]


@dataclass(eq=False)
class SketchTable:
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

    def vectors(self, part: slice | Ints) -> Points:
        """Return counts / n of some clients, flat."""
        raw = np.asarray(self.counts[part]).reshape(-1, self.cells)
        flat: Points = np.multiply(
            raw, (1 / self.n[part])[:, None], dtype=np.float32, casting="unsafe"
        )
        return flat

    def scores(self, query: Points, positions: Ints | None = None) -> Floats:
        """Return what ranks clients, without the query's own energy, which is the same for all."""
        where = np.arange(len(self)) if positions is None else positions
        step = max(1, CELLS // self.cells)
        out = np.empty(len(where))
        for lo in range(0, len(where), step):
            part = where[lo : lo + step]
            gap = self.vectors(part)
            gap -= query
            out[lo : lo + step] = np.einsum("ij,ij->i", gap, gap)
        return out - (1 - ENERGY_SHARE) * self.energy[where]

    def best(self, query: Points, k: int, positions: Ints | None = None) -> Ints:
        """Return the positions of the k best clients, the best first."""
        scores = self.scores(query, positions)
        k = min(k, len(scores))
        first = np.argpartition(scores, k - 1)[:k] if k else np.empty(0, np.int64)
        first = first[np.argsort(scores[first], kind="stable")]
        chosen: Ints = first if positions is None else positions[first]
        return chosen


def query_vector(sketch: RaceSketch) -> Points:
    """Return a sketch in the form that `SketchTable.scores` takes."""
    return sketch.normalized().reshape(-1).astype(np.float32)


def concatenated(*tables: SketchTable | None) -> SketchTable | None:
    """Return several tables as one."""
    some = [table for table in tables if table is not None]
    if len(some) < 2:
        return some[0] if some else None
    return SketchTable(
        np.concatenate([table.counts for table in some]),
        np.concatenate([table.n for table in some]),
        np.concatenate([table.energy for table in some]),
        np.concatenate([table.numbers for table in some]),
    )


class SketchTableWriter:
    """Collects sketches in blocks, in memory or in a file, with the smallest integers that fit.

    Examples
    --------
    >>> sketch = RaceSketch.srp(dim=2, rows=4, bits=2)
    >>> sketch.add([[1.0, 0.0], [0.0, 1.0]])
    >>> writer = SketchTableWriter(2, sketch)
    >>> writer.add([(7, sketch), (9, sketch)])
    >>> table = writer.done()
    >>> table.counts.shape, table.counts.dtype, table.numbers.tolist()
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
        tables = np.zeros(len(pairs), sketch_dtype(*self.shape[1:], "i8"))
        for i, (_, sketch) in enumerate(pairs):
            tables[i]["n"], tables[i]["noise"], tables[i]["counts"] = (
                sketch.n,
                sketch.noise,
                sketch.counts,
            )
        self._widen(tables["counts"])
        self.counts[rows] = tables["counts"]
        self.n[rows], self.energy[rows] = tables["n"], Stack(tables).error_variance()
        self.numbers[rows] = [number for number, _ in pairs]
        self.filled += len(pairs)

    def _widen(self, counts: NDArray[np.int64]) -> None:
        """Change to larger integers if the new counts need them."""
        low, high = int(counts.min()), int(counts.max())
        while not (
            np.iinfo(self.counts.dtype).min <= low <= high <= np.iinfo(self.counts.dtype).max
        ):
            old, self.counts = self.counts, self._allocate(f"i{2 * self.counts.itemsize}")
            self.counts[: self.filled] = old[: self.filled]
            if self.folder is not None:
                (self.folder / f"counts.i{old.itemsize}.npy").unlink()

    def done(self) -> SketchTable:
        """Return the table."""
        used = slice(self.filled)
        return SketchTable(self.counts[used], self.n[used], self.energy[used], self.numbers[used])


@dataclass(frozen=True)
class Compressor:
    """Turns sketches into points; see the top of this file.

    Parameters
    ----------
    cells : int
        Counts of a sketch.
    ceiling : float
        The largest energy that is told from others. It is a quantile, not the maximum: a few tiny
        clients must not move all others away from the query.
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
            out[:, -1] = np.sqrt((1 - ENERGY_SHARE) * np.maximum(self.ceiling - energy, 0))
        return out

    def _projection(self) -> Projection:
        return Projection(self.cells, DIMENSION, "sparse", self.seed)  # as good as dense, faster


class Scan:
    """Compares a query with every point; for systems without faiss."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.squares = np.einsum("ij,ij->i", points, points)

    def nearest(self, point: Points, count: int) -> Ints:
        """Return the positions of the nearest points, in no particular order."""
        scores = self.squares - 2 * (self.points @ point)
        count = min(count, len(scores))
        found: Ints = np.argpartition(scores, count - 1)[:count].astype(np.int64)
        return found


class InvertedFile:
    """faiss' IndexIVFFlat: points in about 2 sqrt(N) lists around centers, few of them searched.

    Parameters
    ----------
    points : float array (N, dimension)
    centers : float array (lists, dimension)
    lists : int array (N,)
        The list of each point.
    """

    def __init__(self, points: Points, centers: Points, lists: NDArray[np.int32]) -> None:
        import faiss

        dimension = points.shape[1]
        self.index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dimension), dimension, len(centers))
        self.index.quantizer.add(np.ascontiguousarray(centers))
        self.index.is_trained = True
        for lo in range(0, len(points), BLOCK):
            part = np.ascontiguousarray(points[lo : lo + BLOCK])
            own = lists[lo : lo + BLOCK].astype(np.int64)
            self.index.add_core(len(part), faiss.swig_ptr(part), None, faiss.swig_ptr(own))
        self.index.nprobe = min(len(centers), max(PROBES, len(centers) // 16))

    @staticmethod
    def cluster(points: Points, seed: int = 0) -> tuple[Points, NDArray[np.int32]]:
        """Find the centers from a sample of the points, and the list of each point."""
        import faiss

        count, dimension = points.shape
        lists = min(count, max(1, int(2 * count**0.5)))  # no more lists than points
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dimension), dimension, lists)
        index.cp.niter, index.cp.seed = 10, 1 + seed
        index.cp.min_points_per_centroid = 1  # no warning about small registries
        rng = stream(seed, "index")
        drawn = np.sort(rng.choice(count, min(count, 64 * lists), replace=False))
        index.train(np.ascontiguousarray(points[drawn]))
        own = np.empty(count, np.int32)
        for lo in range(0, count, BLOCK):
            part = np.ascontiguousarray(points[lo : lo + BLOCK])
            own[lo : lo + BLOCK] = index.quantizer.search(part, 1)[1][:, 0]
        return index.quantizer.reconstruct_n(0, lists), own

    def nearest(self, point: Points, count: int) -> Ints:
        """Return the positions of near points, the nearest first."""
        found: Ints = self.index.search(point[None], count)[1][0]
        return found[found >= 0]


@dataclass(frozen=True, eq=False)
class Index:
    """A table of sketches that can be searched without comparing all of them."""

    table: SketchTable
    compressor: Compressor
    engine: Scan | InvertedFile

    def best(self, query: Points, k: int) -> Ints:
        """Return the positions of the k best candidates, compared by their full sketches."""
        point = self.compressor.points(query[None])[0]
        near = np.sort(self.engine.nearest(point, max(CANDIDATES, k)))
        return self.table.best(query, k, near)

    @staticmethod
    def build(table: SketchTable, spec: Mapping[str, Any], folder: Path) -> str:
        """Write an index into `folder`, where `SketchTableWriter` left the counts.

        Returns
        -------
        str
            The name that the folder must get for `load`.
        """
        compressor = Compressor(table.cells, float(np.quantile(table.energy, ENERGY_QUANTILE)))
        shape = (len(table), compressor.dimension + 1)
        points = np.lib.format.open_memmap(folder / "points.npy", "w+", "<f4", shape)
        for lo in range(0, len(table), BLOCK):
            part = slice(lo, lo + BLOCK)
            points[part] = compressor.points(table.vectors(part), table.energy[part])
        arrays: dict[str, NDArray[Any]] = {
            "n": table.n,
            "energy": table.energy,
            "numbers": table.numbers,
        }
        lists = 0
        try:
            arrays["centers"], arrays["lists"] = InvertedFile.cluster(points)
            lists = len(arrays["centers"])
        except ImportError:
            pass  # without faiss, `load` scans the points
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        points.flush()
        if isinstance(table.counts, np.memmap):
            table.counts.flush()
        stated = {
            "clients": len(table),
            "capacity": len(_base(table.counts)),
            "sketch": list(table.counts.shape[1:]),
            "kind": table.counts.dtype.str[1:],
            "ceiling": compressor.ceiling,
            "lists": lists,
            "spec": _digest(json.dumps(spec, sort_keys=True).encode()),
            "files": {path.name: _digest(path) for path in sorted(folder.glob("*.npy"))},
        }
        content = json.dumps(stated, indent=1).encode()
        (folder / "index.json").write_bytes(content)
        return _digest(content)[:16]

    @classmethod
    def load(cls, folder: Path, spec: Mapping[str, Any]) -> Index:
        """Open what `build` wrote for sketches of these settings; DataError if it is damaged.

        Counts stay on disk until they are needed.
        """
        try:
            return cls._load(folder, spec)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"the index {folder} is damaged ({error}); build it again with "
                "`fedcohort registry index`"
            ) from error

    @classmethod
    def _load(cls, folder: Path, spec: Mapping[str, Any]) -> Index:
        stated = _stated(folder, spec)
        size = stated["clients"], stated["capacity"], *stated["sketch"], stated["lists"]
        if any(type(x) is not int or x < 0 for x in size) or not 0 < size[0] <= size[1]:
            raise ValueError(f"sizes {str(size)[:200]}")
        count, capacity, rows, buckets, lists = size
        if stated["kind"] not in ("i2", "i4", "i8") or not math.isfinite(stated["ceiling"]):
            raise ValueError(f"counts of {stated['kind']!r:.80}")
        counts = _mapped(
            folder, f"counts.{stated['kind']}", stated["kind"], capacity, rows, buckets
        )
        n, energy = (_read(folder, name, "f8", count) for name in ("n", "energy"))
        numbers = _read(folder, "numbers", "i8", count)
        if not (np.isfinite(energy).all() and (n >= 2).all() and np.isfinite(n).all()):
            raise ValueError("sizes of clients that are not numbers")
        if numbers[0] < 1 or (np.diff(numbers) < 1).any():
            raise ValueError("numbers of clients that do not rise")
        table = SketchTable(counts[:count], n, energy, numbers)
        compressor = Compressor(table.cells, float(stated["ceiling"]))
        points = _mapped(folder, "points", "f4", count, compressor.dimension + 1)
        return cls(table, compressor, _engine(folder, points, lists))


def verify(folder: Path) -> None:
    """Raise DataError unless all files of an index have the content that was written."""
    try:
        files = json.loads((folder / "index.json").read_bytes())["files"].items()
        damaged = [name for name, digest in files if _digest(folder / Path(name).name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"the index {folder} is damaged ({error})") from None
    if damaged:
        raise DataError(f"the index {folder} is damaged: {', '.join(damaged)}")


def _engine(folder: Path, points: Points, lists: int) -> Scan | InvertedFile:
    if not lists:
        return Scan(points)
    centers = _read(folder, "centers", "f4", lists, points.shape[1])
    own = _read(folder, "lists", "i4", len(points))
    if own.min() < 0 or own.max() >= lists:
        raise ValueError("points in lists that do not exist")
    try:
        return InvertedFile(points, centers, own)
    except ImportError:
        return Scan(points)


def _stated(folder: Path, spec: Mapping[str, Any]) -> dict[str, Any]:
    content = (folder / "index.json").read_bytes()
    if _digest(content)[:16] != folder.name:
        raise ValueError("index.json was changed")
    stated: dict[str, Any] = json.loads(content)
    if stated["spec"] != _digest(json.dumps(spec, sort_keys=True).encode()):
        raise ValueError("it was built for other sketches")
    return stated


def _mapped(folder: Path, name: str, kind: str, *shape: int) -> NDArray[Any]:
    """Map an array whose type, shape and size on disk are as expected."""
    with (folder / f"{name}.npy").open("rb") as file:
        start = _checked_start(file, kind, shape)
        return np.memmap(file, kind, "r", start, shape)


def _read(folder: Path, name: str, kind: str, *shape: int) -> NDArray[Any]:
    """Read an array whose type, shape and size on disk are as expected."""
    with (folder / f"{name}.npy").open("rb") as file:
        _checked_start(file, kind, shape)
        return np.fromfile(file, kind).reshape(shape)


def _checked_start(file: BufferedReader, kind: str, shape: tuple[int, ...]) -> int:
    """Read a header; return where the values begin if the file holds exactly what is expected."""
    header = storage.read_npy_header(file)
    expected = header.dtype == np.dtype(kind) and header.shape == shape and not header.fortran
    if not expected or os.fstat(file.fileno()).st_size != header.start + header.size:
        raise ValueError(f"{Path(file.name).name} does not hold {kind} of shape {shape}")
    return header.start


def _base(counts: NDArray[Any]) -> NDArray[Any]:
    """Return the array of the file that `counts` are the first rows of."""
    return counts.base if isinstance(counts.base, np.memmap) else counts


def _digest(content: bytes | Path) -> str:
    if isinstance(content, Path):
        with content.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(content).hexdigest()
