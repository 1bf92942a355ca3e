"""Differentially private sketches: what was promised, and the noise that keeps it.

What is protected is one record of the data: whoever sees the noisy counts can hardly tell whether
it was there. Not protected: facts about the client as a whole (its distribution is what the
sketch is for), records that belong together (ten photographs of one person are ten records),
and, with n="public", the number of records.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import IncompatibleSketches
from fedcohort.privacy.calibration import (
    Neighbors,
    check_budget,
    gaussian_scale,
    laplace_scale,
    sensitivity,
)
from fedcohort.privacy.noise import discrete_gaussian, discrete_laplace, laplace_moments, words

Mechanism = Literal["laplace", "gaussian", "mixed", "exponential"]
Size = Literal["public", "private"]
MAX_MOMENTS = {"variance": 2.0**126, "fourth": 2.0**252}  # of what fits counts of 64 bits


@dataclass(frozen=True)
class Release:
    """How a sketch, or a number of constants, was made private.

    The mechanism is discrete noise on every count, mixed after a merge of both kinds, or the
    exponential mechanism of `privacy.quantiles`. Where several private sketches were merged, the
    guarantee is that of the weakest part, provided that no record is in two of them.
    """

    mechanism: Mechanism
    epsilon: float
    delta: float
    neighbors: Neighbors  # what may happen to the one record that is protected
    n: Size  # whether the number of records was published as it is
    variance: float  # of the noise on each count, and its fourth cumulant
    fourth: float
    rho: float  # the same guarantee in zero-concentrated terms, for composing many releases
    parts: int = 1

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta", "variance", "fourth", "rho"):
            value = getattr(self, name)
            limit = MAX_MOMENTS.get(name, sys.float_info.max)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value <= limit:
                raise ValueError(f"release: {name}={str(value)[:80]} must be from 0 to {limit:g}")
        check_budget(self.epsilon, self.delta)
        sensitivity(1, self.neighbors)
        if self.mechanism not in get_args(Mechanism) or self.n not in get_args(Size):
            raise ValueError(f"release: unknown mechanism={self.mechanism!r} or n={self.n!r}")
        if type(self.parts) is not int or self.parts < 1:
            raise ValueError(f"release: parts={self.parts!r} must be a whole number above 0")

    def joined(self, other: Release) -> Release:
        """Return the release of a merged sketch: noise adds up, the weakest part guarantees."""
        if self.neighbors != other.neighbors:
            raise IncompatibleSketches(
                f"private for neighbors={self.neighbors!r} and {other.neighbors!r}: "
                "a merged sketch could promise neither"
            )
        return Release(
            self.mechanism if self.mechanism == other.mechanism else "mixed",
            max(self.epsilon, other.epsilon),
            max(self.delta, other.delta),
            self.neighbors,
            "private" if "private" in (self.n, other.n) else "public",
            self.variance + other.variance,
            self.fourth + other.fourth,
            max(self.rho, other.rho),
            self.parts + other.parts,
        )

    def without(self, part: Release) -> Release | None:
        """Return the release of what is left when a part of a merged sketch is subtracted.

        The part takes its noise with it. None when nothing is left.
        """
        left = self.variance - part.variance
        if self.parts == part.parts and left == 0:
            return None
        if self.parts <= part.parts or left <= 0:
            raise ValueError("cannot subtract: the second sketch is not a part of the first")
        fourth = max(0.0, self.fourth - part.fourth)
        return replace(self, variance=left, fourth=fourth, parts=self.parts - part.parts)

    def budget(self) -> str:
        """Epsilon, and delta where there is one, in words."""
        return f"epsilon={self.epsilon:g}" + (f", delta={self.delta:g}" if self.delta else "")

    def claim(self, noise: str = "") -> str:
        """Say in one line what is protected and what is public, by `noise` if not one mechanism.

        Examples
        --------
        >>> noise_for(10, 1.0, 0.0, "replace").claim()
        'epsilon=1 for replacing one record; public: the exact number of records; laplace noise'
        """
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

    def spec(self) -> dict[str, Any]:
        """Return the release as plain values for a header."""
        return asdict(self)

    @classmethod
    def from_spec(cls, spec: Any) -> Release:
        """Rebuild from `spec`; ValueError for anything else."""
        names = {f.name for f in fields(cls)}
        if not isinstance(spec, dict) or set(spec) != names:
            raise ValueError("a release must state " + ", ".join(sorted(names)))
        return cls(**spec)


def noise_for(rows: int, epsilon: float, delta: float, neighbors: Neighbors) -> Release:
    """Choose the mechanism with less noise and calibrate it.

    Examples
    --------
    >>> few = noise_for(10, 1.0, 0.0, "add-remove")
    >>> few.mechanism, round(few.variance)
    ('laplace', 200)
    >>> many = noise_for(1000, 1.0, 1e-6, "add-remove")
    >>> many.mechanism, round(many.variance), round(noise_for(1000, 1.0, 0, "replace").variance)
    ('gaussian', 17856, 8000000)
    """
    check_budget(epsilon, delta)
    cells = sensitivity(rows, neighbors)
    t, s = laplace_scale(cells, epsilon)
    variance, fourth = laplace_moments(t / s)
    rho = epsilon**2 / 2
    laplace = Release("laplace", epsilon, 0.0, neighbors, "public", variance, fourth, rho)
    if delta == 0:
        return laplace
    u, s = gaussian_scale(cells, epsilon, delta)
    rho = cells * (s / u) ** 2 / 2
    wide = (u / s) ** 2
    gaussian = Release("gaussian", epsilon, delta, neighbors, "public", wide, 0.0, rho)
    return min(laplace, gaussian, key=lambda made: made.variance)


def release(
    counts: NDArray[np.int64],
    epsilon: float,
    delta: float = 0.0,
    neighbors: Neighbors = "add-remove",
    n: Size = "public",
    rng: np.random.Generator | None = None,
) -> tuple[NDArray[np.int64], Release]:
    """Return noisy counts and how they were made.

    Parameters
    ----------
    counts : int array (rows, buckets)
        Exact counts.
    epsilon, delta : float
        The budget. With delta = 0 Laplace noise; else whichever of Laplace and Gaussian noise is
        less, which for many rows is the Gaussian.
    neighbors : {"add-remove", "replace"}
        Data sets that must look alike: one record more or less, or one exchanged.
    n : {"public", "private"}
        Whether the number of records is published as it is. Under "add-remove" that number is
        itself a secret, and publishing it leaves only (2 epsilon)-protection against exchanging
        a record. If private, n is taken from the noisy counts, at no further cost.
    rng : Generator, optional
        A seeded source, for tests and simulations only. Default: the operating system's.
    """
    if n not in get_args(Size):
        raise ValueError(f"n={n!r} is neither 'public' nor 'private'")
    made = noise_for(len(counts), epsilon, delta, neighbors)
    cells, source = sensitivity(len(counts), neighbors), words(rng)
    if made.mechanism == "laplace":
        drawn = discrete_laplace(source, counts.size, *laplace_scale(cells, epsilon))
    else:
        drawn = discrete_gaussian(source, counts.size, *gaussian_scale(cells, epsilon, delta))
    return counts + drawn.reshape(counts.shape), replace(made, n=n)
