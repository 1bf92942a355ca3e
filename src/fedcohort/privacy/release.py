"""Differentially private sketches: what was promised, the noise that keeps it, the size that fits.

What is protected is one record of the data: whoever sees the noisy counts can hardly tell whether
it was there. Not protected: facts about the client as a whole, records that belong together (ten
photographs of one person), and, with n="public", the number of records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import IncompatibleSketches
from fedcohort.options import Count, NonNegative, Positive, Range, ShareBelowOne, check_fields
from fedcohort.privacy.noise import (
    Neighbors,
    check_budget,
    discrete_gaussian,
    discrete_laplace,
    gaussian_scale,
    laplace_moments,
    laplace_scale,
    noise_variance,
    sensitivity,
    words,
)

if TYPE_CHECKING:
    from fedcohort.sketch.race import RaceSketch

Mechanism = Literal["laplace", "gaussian", "mixed", "exponential"]
Size = Literal["public", "private"]
ALIKE, UNLIKE, SHARE = 0.68, 0.48, 0.09
ROWS = (1, 2, 3, 4, 5, 7, 10, 14, 20, 30, 50, 70, 100, 140, 200, 300, 500, 700, 1000)
BITS = range(2, 9)
MAX_VARIANCE = 2.0**126  # of what fits counts of 64 bits


@dataclass(frozen=True)
class Release:
    """How a sketch, or a number of constants, was made private.

    The mechanism is noise on every count, mixed after a merge of both kinds, or that of
    `privacy.quantiles`. A merged sketch has the guarantee of its weakest part, if no record is in
    two of them.
    """

    mechanism: Mechanism
    epsilon: Positive
    delta: ShareBelowOne
    neighbors: Neighbors  # what may happen to the one record that is protected
    n: Size  # whether the number of records was published as it is
    variance: Annotated[float, Range(0, MAX_VARIANCE)]  # of the noise on each count
    fourth: Annotated[float, Range(0, MAX_VARIANCE**2)]  # cumulant of that noise
    rho: NonNegative  # the same guarantee in zero-concentrated terms, for composing many releases
    parts: Count = 1

    def __post_init__(self) -> None:
        check_fields(self, "release")

    def join(self, other: Release) -> Release:
        """Return the release of a merged sketch: noise adds up, the weakest part guarantees."""
        if self.neighbors != other.neighbors:
            raise IncompatibleSketches(
                f"private for neighbors={self.neighbors!r} and {other.neighbors!r}: "
                "a merged sketch could promise neither"
            )
        weakest = {k: max(getattr(self, k), getattr(other, k)) for k in ("epsilon", "delta", "rho")}
        added = ("variance", "fourth", "parts")
        return replace(
            self,
            mechanism=self.mechanism if self.mechanism == other.mechanism else "mixed",
            n="private" if "private" in (self.n, other.n) else "public",
            **weakest,
            **{k: getattr(self, k) + getattr(other, k) for k in added},
        )

    def budget(self) -> str:
        """Epsilon, and delta where there is one, in words."""
        return f"epsilon={self.epsilon:g}" + (f", delta={self.delta:g}" if self.delta else "")

    def claim(self, noise: str = "") -> str:
        """Say in one line what is protected and what is public, by `noise` if not one mechanism."""
        what, public = "replacing one record", "the exact number of records"
        if self.neighbors == "add-remove":
            what = "adding or removing one record"
            if self.n == "public":
                what += ", in the counts alone"
                public += " (so in all: twice the epsilon, for replacing one record)"
        public = public if self.n == "public" else "nothing else"
        merged = f", {self.parts} sketches merged" if self.parts > 1 else ""
        noise = noise or f"{self.mechanism} noise"
        return f"{self.budget()} for {what}; public: {public}; {noise}{merged}"


def noise_for(rows: int, epsilon: float, delta: float, neighbors: Neighbors) -> Release:
    """Choose the mechanism with less noise and calibrate it."""
    check_budget(epsilon, delta)
    cells = sensitivity(rows, neighbors)
    t, s = laplace_scale(cells, epsilon)
    moments = laplace_moments(t / s)
    laplace = Release("laplace", epsilon, 0.0, neighbors, "public", *moments, epsilon**2 / 2)
    if delta == 0:
        return laplace
    u, s = gaussian_scale(cells, epsilon, delta)
    wide, rho = (u / s) ** 2, cells * (s / u) ** 2 / 2
    gaussian = Release("gaussian", epsilon, delta, neighbors, "public", wide, 0.0, rho)
    return min(laplace, gaussian, key=lambda one: one.variance)


def release(
    counts: NDArray[np.int64],
    epsilon: float,
    delta: float = 0.0,
    neighbors: Neighbors = "add-remove",
    n: Size = "public",
    rng: np.random.Generator | None = None,
) -> tuple[NDArray[np.int64], Release]:
    """Return noisy counts (rows, buckets) and how they were made.

    Parameters
    ----------
    epsilon, delta : float
        The budget. With delta = 0 Laplace noise; else Laplace or Gaussian, whichever is less.
    neighbors : {"add-remove", "replace"}
        Data sets that must look alike: one record more or less, or one exchanged.
    n : {"public", "private"}
        Whether the number of records is published as it is. Under "add-remove" that number is
        itself a secret, and publishing it leaves only (2 epsilon)-protection against exchanging
        a record. If private, n is taken from the noisy counts, at no further cost.
    rng : Generator, optional
        A seeded source, for tests and simulations only. Default: the operating system's.
    """
    noise = replace(noise_for(len(counts), epsilon, delta, neighbors), n=n)
    cells, source = sensitivity(len(counts), neighbors), words(rng)
    if noise.mechanism == "laplace":
        drawn = discrete_laplace(source, counts.size, *laplace_scale(cells, epsilon))
    else:
        drawn = discrete_gaussian(source, counts.size, *gaussian_scale(cells, epsilon, delta))
    return counts + drawn.reshape(counts.shape), noise


class SketchSize(NamedTuple):
    """A recommended size, and what to expect of it."""

    rows: int
    bits: int
    signal_to_noise: float  # squared distance of typically unlike clients over its noise's error
    error: float  # the expected relative error of that square


def sketch_size(
    n: float,
    epsilon: float,
    delta: float = 0.0,
    dim: int | None = None,
    neighbors: Neighbors = "add-remove",
) -> SketchSize:
    """Recommend rows and bits for clients of n records of `dim` columns and a privacy budget.

    Noise grows with the rows and is in every bucket; few rows estimate a distance roughly. The size
    minimizes the expected relative error of a squared distance, spread(bits)^2 / rows + (error by
    noise / (rows * signal(bits)))^2, with a signal fitted to images and Gaussian clusters, divided
    by Dirichlet(0.5): a bit is equal with probability 0.68 in like classes and 0.48 in unlike ones,
    and about 9% of the mass differs. It is a rough guide for other hashes than `srp`.
    """
    if not n >= 2:
        raise ValueError(f"sketch_size: n={n} records are too few to be measured")
    limit = max(2, min(BITS[-1], dim or BITS[-1]))
    noises = {rows: noise_for(rows, epsilon, delta, neighbors) for rows in ROWS}
    sizes = [_expect(n, r, bits, noises[r]) for r in ROWS for bits in BITS if bits <= limit]
    return min(sizes, key=lambda size: size.error)


def signal_to_noise(sketch: RaceSketch) -> float:
    """Typical squared distance over its standard error by noise; infinite for an exact sketch."""
    if sketch.release is None:
        return math.inf
    bits = math.log2(sketch.buckets)
    return _expect(max(float(sketch.n), 1.0), sketch.rows, bits, sketch.release).signal_to_noise


def _expect(n: float, rows: int, bits: float, noise: Release) -> SketchSize:
    buckets = 2**bits
    square = rows * SHARE * (ALIKE**bits - UNLIKE**bits)  # squared MMD of all rows
    cell = 2 * noise.variance / n**2  # of the gap between two sketches
    variance = noise_variance(square + 2 * rows / n, rows * buckets, cell, 2 * noise.fourth / n**4)
    ratio = square / math.sqrt(variance) if variance > 0 else math.inf
    error = math.sqrt((0.3 + 1 / bits) ** 2 / rows + 1 / ratio**2)
    return SketchSize(rows, round(bits), ratio, error)
