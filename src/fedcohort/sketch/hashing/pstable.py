"""Hashes by shifted steps along Gaussian projections: collisions tell the Euclidean distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.rounds import stream
from fedcohort.sketch.hashing.base import (
    MAX_DIM,
    Codes,
    HashFamily,
    check_size,
    check_whole,
    fold,
    kernels,
    project,
    rotations,
)


@dataclass(frozen=True)
class PStable(HashFamily):
    """floor((a.x + b) / width), folded to `buckets` (Datar, Immorlica, Indyk, Mirrokni 2004).

    Directions a are those of `rotation.py` in float64, b is uniform on [0, width). Two points at
    distance c take the same step with probability `collision(c, width)`; folding adds
    (1 - that) / buckets.

    Parameters
    ----------
    dim : int
        Columns of the vectors.
    rows : int
        Hash functions.
    width : float
        Length of a step: about the distance at which points should begin to count as different.
    buckets : int
        Buckets of a row.
    seed : int
        Equal seeds give equal functions.

    Examples
    --------
    >>> hashes = PStable(dim=2, rows=3, width=2.0, buckets=64, seed=0)
    >>> hashes.codes(np.array([[1.0, 2.0], [1.0, 2.0]])).shape
    (3, 2)
    """

    name: ClassVar[str] = "pstable"
    dim: int
    rows: int = 200
    width: float = 2.0
    buckets: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("pstable", "dim", self.dim, 1, MAX_DIM)
        check_whole("pstable", "seed", self.seed, 0, 2**63 - 1)
        check_size("pstable", self.rows, self.buckets)
        if not (math.isfinite(self.width) and self.width > 0):
            raise ValueError(f"pstable: width={self.width} must be a finite number above 0")

    def spec(self) -> dict[str, Any]:
        """Return what determines the functions."""
        return {
            "name": self.name,
            "dim": self.dim,
            "rows": self.rows,
            "width": float(self.width),
            "buckets": self.buckets,
            "seed": self.seed,
        }

    def codes(self, block: NDArray[Any]) -> Codes:
        """Return the bucket of every vector in every row, (rows, n)."""
        x = np.ascontiguousarray(block, np.float64)
        self._check_reach(x)
        turns = rotations(self.seed, self.name, self.dim, self.rows, 1, "f8")
        compiled = kernels()
        if compiled is None:
            along = project(x, turns, self.rows)
        else:
            along = np.empty((self.rows, len(x)))
            flips = turns.first, turns.second, turns.third
            compiled.projections(x, *flips, turns.used, self.rows, along)
        offsets, keys = _draws(self.seed, self.rows)
        steps = np.floor(along / (turns.size * self.width) + offsets[:, None])
        return fold(steps.astype(np.int64).view(np.uint64), keys, self.buckets)

    def _check_reach(self, x: NDArray[np.float64]) -> None:
        reach = 2.0**50 * self.width / self.dim
        far = np.flatnonzero((np.abs(x) > reach).any(axis=1))
        if len(far):
            raise ValueError(
                f"pstable: a vector reaches {np.abs(x[far[0]]).max():.3g}, too far for "
                f"width={self.width}; standardize the columns or widen the steps"
            )


@lru_cache(maxsize=16)
def _draws(seed: int, rows: int) -> tuple[NDArray[np.float64], NDArray[np.uint64]]:
    """Offsets as a part of the width, and the keys of folding."""
    raw = stream(seed, "pstable", "rows").bit_generator.random_raw((rows, 2))
    return (raw[:, 0] >> np.uint64(11)).astype(np.float64) * 2.0**-53, raw[:, 1].copy()


def collision(distance: ArrayLike, width: float) -> NDArray[np.float64]:
    """Probability that two points at that Euclidean distance take the same step (Datar et al.).

    Examples
    --------
    >>> collision([0.0, 1.0], width=2.0).round(4).tolist()
    [1.0, 0.6095]
    """
    from scipy.special import ndtr

    c = np.asarray(distance, float)
    ratio = np.minimum(width / np.where(c > 0, c, 1.0), 1e100)
    gap = 2 / (math.sqrt(2 * math.pi) * ratio) * -np.expm1(-(ratio**2) / 2)
    return np.where(c > 0, 1 - 2 * ndtr(-ratio) - gap, 1.0)
