"""Sign random projections: hashes whose collisions tell the angle between vectors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.rounds import stream
from fedcohort.sketch.hashing.base import (
    MAX_DIM,
    Codes,
    HashFamily,
    check_size,
    check_whole,
    kernels,
    project,
    rotations,
)

MAX_DENSE = 1 << 28  # numbers in a dense projection matrix: 1 GiB


@dataclass(frozen=True)
class SRP(HashFamily):
    """Signed random projections (paper 0, definition A.1), `bits` of them to a row.

    Two vectors at angle theta meet in a row with probability (1 - theta / pi) ** bits. Only the
    angle counts: x and 3x always meet. A projection of exactly zero counts as negative, so the
    zero vector falls into bucket 0 of every row.

    Parameters
    ----------
    dim : int
        Columns of the vectors.
    rows, bits : int
        Hash functions, and hyperplanes of each; 2 ** bits buckets.
    seed : int
        Equal seeds give equal functions.
    family : {"fast", "dense"}
        Structured rotations (see `hashing.base`), equal on every machine; or a Gaussian matrix.
        BLAS rounds the products of a matrix differently in blocks of different size, so with
        "dense" the bucket of a record may depend on its neighbors in the block. Such sketches
        cannot be made private.

    Examples
    --------
    >>> hashes = SRP(dim=3, rows=4, bits=2, seed=0)
    >>> hashes.codes(np.array([[1.0, 2.0, 3.0], [3.0, 6.0, 9.0], [0.0, 0.0, 0.0]])).shape
    (4, 3)
    """

    name: ClassVar[str] = "srp"
    dim: int
    rows: int = 1000
    bits: int = 6
    seed: int = 0
    family: Literal["fast", "dense"] = "fast"

    def __post_init__(self) -> None:
        check_whole("srp", "dim", self.dim, 1, MAX_DIM)
        check_whole("srp", "bits", self.bits, 1, 20)
        check_whole("srp", "seed", self.seed, 0, 2**63 - 1)
        check_size("srp", self.rows, 2**self.bits)
        if self.family not in ("fast", "dense"):
            raise ValueError(f"srp: family={self.family!r} is neither 'fast' nor 'dense'")
        if self.family == "dense" and self.dim * self.rows * self.bits > MAX_DENSE:
            raise ValueError(
                f"srp: a dense matrix of {self.dim} x {self.rows * self.bits} is too large; "
                "use family='fast'"
            )

    @property
    def buckets(self) -> int:  # type: ignore[override]
        """Buckets per row."""
        return int(2**self.bits)

    @property
    def independent(self) -> bool:
        """Whether the bucket of a record depends on that record alone."""
        return self.family == "fast"

    def spec(self) -> dict[str, Any]:
        """Return what determines the functions."""
        return {
            "name": self.name,
            "dim": self.dim,
            "rows": self.rows,
            "bits": self.bits,
            "seed": self.seed,
            "family": self.family,
        }

    def codes(self, block: NDArray[Any]) -> Codes:
        """Return the bucket of every vector in every row, (rows, n)."""
        x = within_float32(block)
        if self.family == "dense":
            return self._pack(_gaussians(self.seed, self.dim, self.rows * self.bits) @ x.T)
        turns = rotations(self.seed, self.name, self.dim, self.rows, self.bits, "f4")
        compiled = kernels()
        if compiled is None:
            return self._pack(project(x, turns, self.rows * self.bits))
        out = np.empty((self.rows, len(x)), np.int32)
        flips = turns.first, turns.second, turns.third
        compiled.srp_codes(x, *flips, turns.used, self.rows, self.bits, out)
        return out

    def _pack(self, projections: NDArray[Any]) -> Codes:
        """Turn projections (bits * rows, n), plane after plane, into buckets."""
        out = np.zeros((self.rows, projections.shape[1]), np.int32)
        for bit, plane in enumerate(projections.reshape(self.bits, self.rows, -1)):
            out |= (plane > 0).astype(np.int32) << bit
        return out


@lru_cache(maxsize=2)
def _gaussians(seed: int, dim: int, count: int) -> NDArray[np.float32]:
    return stream(seed, "srp", "dense", dim).standard_normal((count, dim), np.float32)


def within_float32(x: NDArray[Any]) -> NDArray[np.float32]:
    """Return vectors as float32, very large or small ones scaled by a power of two.

    Scaling changes no angle, and by a power of two no rounding either; it only keeps sums from
    overflowing. Whether a vector is scaled depends on that vector alone.
    """
    if x.dtype.kind in "fiu" and x.dtype.itemsize > 2:
        peak = np.maximum(x.max(axis=1, initial=0), -x.min(axis=1, initial=0).astype(float))
        far = (peak > 2.0**40) | ((peak < 2.0**-40) & (peak > 0))
        if far.any():
            _, exponent = np.frexp(np.where(far, peak, 0.5))
            x = np.ldexp(x.astype(np.float64), -exponent[:, None])
    return np.ascontiguousarray(x, np.float32)


def collision(cosine: ArrayLike, bits: int) -> NDArray[np.float64]:
    """Probability that two vectors of that cosine meet in a row.

    Examples
    --------
    >>> collision([1.0, 0.0, -1.0], bits=2).tolist()
    [1.0, 0.25, 0.0]
    """
    angle: NDArray[np.float64] = np.arccos(np.clip(np.asarray(cosine, float), -1, 1))
    return np.power(1 - angle / np.pi, bits)
