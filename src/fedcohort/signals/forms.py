"""The form of a reading: dtype, shape and range, checked before any policy sees the reading.

What arrives from a client is turned into one declared dtype, so that readings can be stacked and
arithmetic on them cannot overflow: no number exceeds `MAX_NUMBER`, whose square times a million
still fits float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Array = NDArray[Any]
Mask = NDArray[np.bool_]

MAX_NUMBER = 1e15
MAX_COUNT = 2**40  # examples of a client, and counts of a sketch
EXAMPLE_LENGTH = 64  # of made-up vectors whose length only the clients' models or users know


@dataclass(frozen=True)
class Numbers:
    """A number, or an array of numbers, within a range."""

    shape: tuple[int | None, ...] = ()  # None stands for any length
    dtype: str = "f8"  # what readings are turned into; whole numbers if it is an integer dtype
    low: float = -MAX_NUMBER
    high: float = MAX_NUMBER

    @property
    def max_bytes(self) -> int | None:
        """The largest reading, of eight bytes per number; None where only clients know it."""
        if None in self.shape:
            return None
        return 8 * math.prod(n for n in self.shape if n is not None)

    def fits(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        """Whether these are numbers of the declared shape."""
        if dtype.kind not in "iuf" or len(shape) != len(self.shape):
            return False
        return all(want in (None, have) for have, want in zip(shape, self.shape, strict=True))

    def checked_together(self, readings: Array) -> tuple[Mask, Array]:
        """Return which are finite, in the range and whole if need be, and those in the dtype."""
        with np.errstate(over="ignore", invalid="ignore"):  # a range may be wider than the dtype
            stored = readings.astype(self.dtype)
            sound = (readings >= self.low) & (readings <= self.high) & np.isfinite(stored)
            if stored.dtype.kind in "iu" and readings.dtype.kind == "f":
                sound &= readings % 1 == 0
        kept = sound.all(axis=tuple(range(1, sound.ndim)))
        return kept, stored[kept]

    def example(self, rng: Generator) -> Array:
        """Make up a small count, a positive number or a vector."""
        shape = tuple(EXAMPLE_LENGTH if n is None else n for n in self.shape)
        if np.dtype(self.dtype).kind in "iu":
            return np.asarray(rng.integers(1, 100, shape), self.dtype)
        values = rng.normal(size=shape) if shape else rng.gamma(2.0)
        return np.asarray(np.clip(values, self.low, self.high), self.dtype)


def smallest_width(counts: Array) -> int:
    """Return the bytes of the smallest signed integers that hold these."""
    low, high = int(counts.min(initial=0)), int(counts.max(initial=0))
    return np.min_scalar_type(min(low, -1 - high)).itemsize


def sketch_dtype(rows: int, buckets: int, kind: str) -> np.dtype[np.void]:
    """Return the dtype of a distribution sketch: n, noise variance of a count, the counts."""
    return np.dtype([("n", "f8"), ("noise", "f8"), ("counts", kind, (rows, buckets))])


@dataclass(frozen=True)
class Sketch:
    """A distribution sketch: number of examples, noise variance of a count, rows of counts.

    Without noise every row of counts sums to n. A size that is None fits any.
    """

    rows: int | None = None
    buckets: int | None = None

    @property
    def max_bytes(self) -> int | None:
        """The largest reading, with counts of eight bytes; None where only clients know it."""
        if self.rows is None or self.buckets is None:
            return None
        return 16 + 8 * self.rows * self.buckets

    def fits(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
        """Whether a dtype has the fields of a sketch, and the declared rows and buckets."""
        if shape or dtype.names != ("n", "noise", "counts"):
            return False
        n, noise, counts = (dtype[name] for name in dtype.names)
        return (
            n.kind in "iuf"
            and noise.kind in "iuf"
            and counts.base.kind in "iu"
            and len(counts.shape) == 2
            and self.rows in (None, counts.shape[0])
            and self.buckets in (None, counts.shape[1])
            and 0 not in counts.shape
        )

    def checked_together(self, readings: Array) -> tuple[Mask, Array]:
        """Return which readings are sketches, and those with counts as small as they can be."""
        n, noise, counts = (readings[name] for name in ("n", "noise", "counts"))
        most = np.float64(MAX_COUNT)  # not a Python number, which a narrow dtype cannot hold
        with np.errstate(invalid="ignore"):  # a signaling NaN: no comparison with it holds
            kept = (n >= -most) & (n <= most) & (noise >= 0) & (noise <= most)
            kept &= (noise > 0) | (counts.sum(axis=2) == n[:, None]).all(axis=1)
        kept &= (counts.min(axis=(1, 2)) >= -most) & (counts.max(axis=(1, 2)) <= most)
        n, noise, counts = n[kept], noise[kept], counts[kept]
        return kept, sketch_readings(np.where(n >= 1, n, 0), noise, counts)

    def example(self, rng: Generator) -> Array:
        """Make up the sketch of 5 to 50 examples."""
        rows, buckets = self.rows or 4, self.buckets or 8
        n = int(rng.integers(5, 50))
        return sketch_reading(n, 0.0, rng.multinomial(n, rng.dirichlet(np.ones(buckets)), rows))


Form = Numbers | Sketch  # what a reading must look like


def sketch_reading(n: float, noise: float, counts: Array) -> Array:
    """Return a sketch as a reading, its counts in the smallest integers that fit."""
    return sketch_readings(np.array([n]), np.array([noise]), counts[None]).reshape(())


def sketch_readings(n: Array, noise: Array, counts: Array) -> Array:
    """Return many sketches as readings of one dtype."""
    width = max(2, smallest_width(counts))
    out = np.zeros(len(counts), sketch_dtype(counts.shape[1], counts.shape[2], f"i{width}"))
    out["n"], out["noise"], out["counts"] = n, noise, counts
    return out
