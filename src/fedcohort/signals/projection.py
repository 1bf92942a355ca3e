"""Seeded random projections of a flattened model, without a stored matrix.

Entry (row, column) of the projection is a hash of the seed and its place (SplitMix64 used as a
counter-based generator), so that clients and server agree on the matrix by a seed alone, on every
machine, and nobody holds the 212 MB that 100 x 555,178 numbers take.

References
----------
Kollias, Salonidis, Wang. Sketch to Skip and Select: Communication Efficient Federated Learning
using Locality Sensitive Hashing. 2022.
Charikar, Chen, Farach-Colton. Finding Frequent Items in Data Streams. ICALP 2002 (kind "sparse").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.rounds import stream

Array = NDArray[np.float64]
Words = NDArray[np.uint64]
Kind = Literal["uniform", "gaussian", "sparse"]

_KINDS = ("uniform", "gaussian", "sparse")
_LARGEST_MATRIX = 50_000_000
_BLOCK = 4096  # columns at a time where Numba is not installed


@dataclass(frozen=True)
class Projection:
    """A random k x dim matrix P, known by its seed.

    Parameters
    ----------
    dim
        Length of the vectors.
    k
        Length of their projections.
    kind
        "uniform": entries from (-1, 1), the paper's; "gaussian": standard normal entries;
        "sparse": one entry of +1 or -1 a column (CountSketch), the fastest by far for its
        cost does not depend on k.
    seed
        Equal seeds give equal matrices.

    Examples
    --------
    >>> sketch = Projection(dim=1000, k=10, seed=7)
    >>> model = np.linspace(-1, 1, 1000)
    >>> h = sketch.apply(model)
    >>> h.shape, bool(np.allclose(h, sketch.matrix() @ model))
    ((10,), True)
    """

    dim: int
    k: int
    kind: Kind = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dim < 1 or self.k < 1:
            raise ValueError(f"Projection: dim={self.dim} and k={self.k} must be at least 1")
        if self.k >= 2**31:
            raise ValueError(f"Projection: k={self.k} must be below 2^31")
        if self.kind not in _KINDS:
            raise ValueError(f"Projection: kind={self.kind!r} is none of {', '.join(_KINDS)}")

    @property
    def norm_factor(self) -> float:
        """E ||P v||^2 over ||v||^2: k/3 for uniform, k for gaussian, 1 for sparse entries."""
        return {"uniform": self.k / 3, "gaussian": float(self.k), "sparse": 1.0}[self.kind]

    def apply(self, values: ArrayLike) -> Array:
        """Project one vector, or each row of an (m, dim) array at little more than the cost of one.

        Returns
        -------
        ndarray
            float64, of shape (k,) or (m, k).
        """
        array = np.asarray(values)
        if array.ndim not in (1, 2) or array.shape[-1] != self.dim:
            raise ValueError(
                f"Projection: values of shape {array.shape} do not end in dim={self.dim}"
            )
        if array.dtype not in (np.float32, np.float64):
            array = array.astype(np.float64)
        rows = np.ascontiguousarray(np.atleast_2d(array))
        result = self._compiled(rows)
        return result if array.ndim == 2 else np.asarray(result[0])

    def matrix(self) -> Array:
        """Return P itself, of shape (k, dim); for small dim."""
        if self.k * self.dim > _LARGEST_MATRIX:
            raise ValueError(
                f"Projection: a matrix of {self.k} x {self.dim} entries is too large to form; "
                "use apply"
            )
        return self.columns(0, self.dim)

    @property
    def _key(self) -> np.uint64:
        rng = stream(self.seed, "projection", self.kind)
        return rng.integers(0, 2**64, dtype=np.uint64)

    def _compiled(self, rows: NDArray[Any]) -> Array:
        try:
            from fedcohort.signals import _projection_loops as loops
        except ImportError:
            return self._plain(rows)
        if self.kind == "sparse":
            return np.asarray(loops.sparse(rows, self.k, self._key))
        tables = _tables() if self.kind == "gaussian" else np.empty((3, 0))
        return np.asarray(loops.dense(rows, self.k, self._key, tables))

    def _plain(self, rows: NDArray[Any]) -> Array:
        """As the compiled loops, up to rounding, where Numba is not installed."""
        total = np.zeros((len(rows), self.k))
        for start in range(0, self.dim, _BLOCK):
            stop = min(start + _BLOCK, self.dim)
            total += rows[:, start:stop].astype(np.float64) @ self.columns(start, stop).T
        return total

    def columns(self, start: int, stop: int) -> Array:
        """Return columns start to stop of P, of shape (k, stop - start)."""
        columns = np.arange(start, stop, dtype=np.uint64)
        if self.kind == "sparse":
            words = _hash(self._key, columns)
            part = np.zeros((self.k, stop - start))
            rows = ((words >> np.uint64(32)) * np.uint64(self.k)) >> np.uint64(32)
            part[rows.astype(np.int64), np.arange(stop - start)] = np.where(words & 1, 1.0, -1.0)
            return part
        pairs = np.arange((self.k + 1) // 2, dtype=np.uint64)  # two entries from one hash
        words = _hash(self._key, columns * np.uint64(pairs.size) + pairs[:, None])
        return np.vstack(_uniform(words) if self.kind == "uniform" else _gaussian(words))[: self.k]


def _hash(key: np.uint64, counters: Words) -> Words:
    """Return the SplitMix64 words number `counters` of the stream that starts at `key`."""
    words = key + counters * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _uniform(words: Words) -> tuple[Array, Array]:
    """Two numbers of 24 bits a word, symmetric in (-1, 1)."""
    low, high = (words >> np.uint64(8)) & np.uint64(0xFFFFFF), words >> np.uint64(40)
    return (
        (low.astype(np.float64) + 0.5) * 2.0**-23 - 1.0,
        (high.astype(np.float64) + 0.5) * 2.0**-23 - 1.0,
    )


def _gaussian(words: Words) -> tuple[Array, Array]:
    """Two normal numbers a word (Box and Muller), rounded so that machines agree on the bits."""
    radius, cosine, sine = _tables()
    r = radius[words >> np.uint64(48)]
    angle = (words >> np.uint64(16)) & np.uint64(0xFFFF)
    first, second = r * cosine[angle], r * sine[angle]
    return first.astype(np.float32).astype(float), second.astype(np.float32).astype(float)


@lru_cache(maxsize=1)
def _tables() -> Array:
    """Radius, cosine and sine at 65,536 midpoints, with the mean square radius exactly 2."""
    grid = (np.arange(65536) + 0.5) / 65536
    radius = np.sqrt(-2 * np.log(grid))
    radius *= np.sqrt(2 / np.mean(radius**2))
    return np.stack([radius, np.cos(2 * np.pi * grid), np.sin(2 * np.pi * grid)])


class Vectors:
    """Model-sized vectors, one row per client, wherever they live; one vector is a single row.

    Engines whose models are not in main memory subclass it.

    Examples
    --------
    >>> Vectors(np.eye(3)).sketched({"k": 2, "kind": "sparse", "seed": 0}).shape
    (3, 2)
    """

    def __init__(self, rows: Any) -> None:
        self.rows: Any = rows if rows.ndim == 2 else rows[None]

    @property
    def dim(self) -> int:
        """Numbers per vector."""
        return int(self.rows.shape[1])

    def numpy(self) -> NDArray[Any]:
        """Return the vectors in main memory."""
        return np.asarray(self.rows)

    def project(self, projection: Projection) -> Array:
        """Return the projection of each row, (clients, k)."""
        return projection.apply(self.rows)

    def sketched(self, options: Mapping[str, Any]) -> NDArray[np.float32]:
        """Project by the options of a signal (k, kind, seed), as readings of four bytes."""
        return self.project(Projection(self.dim, **options)).astype(np.float32)
