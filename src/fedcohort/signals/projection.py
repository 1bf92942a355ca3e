"""Seeded random projections of a flattened model, without a stored matrix.

An entry is a hash of the seed and its place (SplitMix64 used as a counter-based generator), so that
clients and server agree on the matrix by a seed alone, and nobody holds the 212 MB that
100 x 555,178 numbers take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.options import Count, Range, check_fields
from fedcohort.rounds import stream
from fedcohort.sketch.hashing import WHOLE, scramble

Array = NDArray[np.float64]
Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Projection:
    """A random k x dim matrix P, known by its seed.

    "uniform" has entries from (-1, 1), as in Kollias et al. (2022), so E ||P v||^2 = k/3 ||v||^2;
    "sparse" one entry of +1 or -1 per column, a CountSketch (Charikar et al., 2002), so E ||P v||^2
    = ||v||^2, at a cost without k.
    """

    dim: Count
    k: Annotated[int, Range(1, 2**31 - 1)]
    kind: Literal["uniform", "sparse"] = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "Projection")

    def apply(self, values: ArrayLike) -> Array:
        """Project one vector, or each row of an (m, dim) array."""
        array = np.asarray(values)
        if array.ndim not in (1, 2) or array.shape[-1] != self.dim:
            raise ValueError(
                f"Projection: values of shape {array.shape} do not end in dim={self.dim}"
            )
        if array.dtype not in (np.float32, np.float64):
            array = array.astype(np.float64)
        rows = np.ascontiguousarray(np.atleast_2d(array))
        if self.kind == "sparse":
            places, signs = self._places()
            result = np.empty((len(rows), self.k))
            for sums, row in zip(result, rows, strict=True):
                sums[:] = np.bincount(places, signs * row, minlength=self.k)
        else:
            from fedcohort.loops import project_uniform

            result = np.asarray(project_uniform(rows, self.k, self._key))
        return result if array.ndim == 2 else np.asarray(result[0])

    def matrix(self) -> Array:
        """Return P, of shape (k, dim)."""
        if self.kind == "sparse":
            places, signs = self._places()
            matrix = np.zeros((self.k, self.dim))
            matrix[places, np.arange(self.dim)] = signs
            return matrix
        columns = np.arange(self.dim, dtype=np.uint64)
        pairs = np.arange((self.k + 1) // 2, dtype=np.uint64)  # two entries from one hash
        words = self._words(columns * np.uint64(pairs.size) + pairs[:, None])
        halves = (words >> np.uint64(8)) & np.uint64(0xFFFFFF), words >> np.uint64(40)
        return np.vstack([(half + 0.5) * 2.0**-23 - 1.0 for half in halves])[: self.k]

    def _places(self) -> tuple[NDArray[np.int64], Array]:
        """Return the row and the sign of the one entry in each column of a sparse matrix."""
        words = self._words(np.arange(self.dim, dtype=np.uint64))
        rows = ((words >> np.uint64(32)) * np.uint64(self.k)) >> np.uint64(32)
        return rows.astype(np.int64), np.where(words & 1, 1.0, -1.0)

    @property
    def _key(self) -> np.uint64:
        rng = stream(self.seed, "projection", self.kind)
        return rng.integers(0, 2**64, dtype=np.uint64)

    def _words(self, counters: Words) -> Words:
        """Return the SplitMix64 words number `counters` of the stream that starts at the key."""
        return scramble(self._key + counters * WHOLE)


class Vectors:
    """Model-sized vectors, one row per client, wherever they live; one vector is a single row.

    Engines whose models are not in main memory subclass it.
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
