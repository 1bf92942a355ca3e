"""Noise for counts: exact samples, and how much of it a privacy budget asks for.

Floating-point samplers leak through the gaps between numbers. These compare integers of 64 bits,
as algorithms 1 to 3 of Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy
(2020).

One record changes exactly one count in each row: adding or removing it moves `rows` counts by
one, replacing it moves at most 2 * rows. That is the L1 sensitivity of Laplace noise, whose scale
is at least sensitivity / epsilon; the L2 sensitivity of Gaussian noise is its root.

Gaussian: sigma starts from the analytic calibration of Balle and Wang (2018), which is exact for
the continuous Gaussian, and is raised in steps of 1/16 until the discrete one meets delta. With
c counts moved by one each, the privacy loss depends on the sum of c discrete Gaussians alone. For
sigma >= 2 that sum's probabilities equal those of one discrete Gaussian of variance c sigma^2 up
to a factor within 1 +- 4 c exp(-(pi sigma)^2), and its delta is summed term by term. Fewer moved
counts are a function of more, so c = the sensitivity is the worst case.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.options import Positive, ShareBelowOne, typed

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = Callable[[int], NDArray[np.uint64]]
Neighbors = Literal["add-remove", "replace"]
FINE = 16  # sigma is a multiple of 1 / FINE
MIN_SIGMA = 2.0
MAX_TERMS = 1 << 21
LAPLACE = 3.0  # fourth cumulant of Laplace noise over its squared variance; of Gaussian noise 0
MAX_SCALE = 1 << 50  # of a Laplace scale's numerator
MAX_SIGMA = 1 << 24  # of a standard deviation's numerator: its square fits 64 bits


def words(rng: np.random.Generator | None = None) -> Words:
    """Return a source of random 64-bit words: the operating system's, or a seeded one."""
    if rng is None:
        return lambda count: np.frombuffer(os.urandom(8 * count), np.uint64)
    return lambda count: rng.integers(0, 2**64 - 1, count, np.uint64, endpoint=True)


def uniform_below(source: Words, bound: Ints) -> Ints:
    """Whole numbers from 0 to bound - 1, each as likely as the others."""
    limit = bound.astype(np.uint64)
    surplus = (np.uint64(0) - limit) % limit  # 2^64 mod bound: that many words are too many
    drawn = source(len(limit)).copy()
    while len(again := np.flatnonzero(drawn < surplus)):
        drawn[again] = source(len(again))
    return (drawn % limit).astype(np.int64)


def bernoulli_exp(source: Words, num: Ints, den: Ints) -> Bools:
    """Return True with probability exp(-num / den), for quotients of at least 0."""
    whole, alive = num // den, np.ones(len(num), bool)
    while len(left := np.flatnonzero(alive & (whole > 0))):
        alive[left] = _one_over_e(source, len(left))
        whole[left] -= 1
    rest = np.flatnonzero(alive)
    alive[rest] = _bernoulli_exp_fraction(source, num[rest] % den[rest], den[rest])
    return alive


def _bernoulli_exp_fraction(source: Words, num: Ints, den: Ints) -> Bools:
    """Return True with probability exp(-num / den), for quotients of at most 1."""
    steps, alive = np.ones(len(num), np.int64), np.arange(len(num))
    while len(alive):
        alive = alive[uniform_below(source, den[alive] * steps[alive]) < num[alive]]
        steps[alive] += 1
    return np.asarray(steps % 2 == 1)


def _one_over_e(source: Words, count: int) -> Bools:
    ones = np.ones(count, np.int64)
    return _bernoulli_exp_fraction(source, ones, ones)


def discrete_laplace(source: Words, size: int, t: int, s: int = 1) -> Ints:
    """Integers x with probability proportional to exp(-|x| s / t)."""

    def tries(count: int) -> Ints:
        scale = np.full(count, t, np.int64)
        offset = uniform_below(source, scale)
        kept = bernoulli_exp(source, offset, scale)
        repeats, alive = np.zeros(count, np.int64), np.arange(count)
        while len(alive := alive[_one_over_e(source, len(alive))]):
            repeats[alive] += 1
        size_of = (offset + t * repeats) // s
        negative = (source(count) & np.uint64(1)).astype(bool)
        kept &= ~(negative & (size_of == 0))  # zero once, not twice
        return np.where(negative, -size_of, size_of)[kept]

    return _gather(tries, size)


def discrete_gaussian(source: Words, size: int, u: int, s: int = 1) -> Ints:
    """Integers x with probability proportional to exp(-x^2 / (2 sigma^2)), sigma = u / s."""

    def tries(count: int) -> Ints:
        x, den = discrete_laplace(source, count, u, s), np.full(count, 2 * u * u, np.int64)
        return x[bernoulli_exp(source, (s * np.abs(x) - u) ** 2, den)]

    return _gather(tries, size)


def _gather(tries: Callable[[int], Ints], size: int) -> Ints:
    """Call `tries`, which keeps some of what it is asked for, until there are `size`."""
    kept = np.empty(0, np.int64)
    while (missing := size - len(kept)) > 0:
        kept = np.append(kept, tries(2 * missing + 16))
    return kept[:size]


def laplace_moments(scale: float) -> tuple[float, float]:
    """Variance and fourth cumulant of the discrete Laplace distribution exp(-|x| / scale)."""
    p, q = float(np.exp(-1 / scale)), float(-np.expm1(-1 / scale))
    return 2 * p / q**2, 2 * p * (1 + 4 * p + p * p) / q**4


def noise_variance(square: Any, cells: float, noise: Any, fourth: Any) -> Any:
    """Variance of a debiased squared distance over noise, from the square without noise.

    `noise` and `fourth` are the variance and the fourth cumulant of each cell's gap.
    """
    return 4 * noise * square + cells * (2 * noise**2 + fourth)


def sensitivity(rows: int, neighbors: Neighbors) -> int:
    """How many counts one record can change, by one each."""
    typed(Neighbors, neighbors, "neighbors")
    return rows if neighbors == "add-remove" else 2 * rows


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse what is not a privacy budget."""
    typed(Positive, epsilon, "epsilon")
    typed(ShareBelowOne, delta, "delta")


def laplace_scale(cells: int, epsilon: float) -> tuple[int, int]:
    """Return (t, s): noise of scale t / s >= cells / epsilon on each count gives epsilon."""
    for s in (1024, 1):
        t = math.ceil(Fraction(cells * s) / Fraction(epsilon))
        if t <= MAX_SCALE:
            return t, s
    raise ValueError(f"epsilon={epsilon} is too small for {cells} counts per record")


@lru_cache(maxsize=256)
def gaussian_scale(cells: int, epsilon: float, delta: float) -> tuple[int, int]:
    """Return (u, s): noise of sigma = u / s on each count gives (epsilon, delta)."""

    def reached(sigma: float) -> bool:
        return analytic_delta(sigma, cells, epsilon) <= delta

    s = FINE if reached(MAX_SIGMA / (2 * FINE)) else 1
    least = math.ceil(s * MIN_SIGMA)
    u = bisect_left(range(MAX_SIGMA + 1), True, least, key=lambda u: reached(u / s))
    while u <= MAX_SIGMA and discrete_delta(u / s, cells, epsilon) > delta:
        u += 1
    if u > MAX_SIGMA:
        raise ValueError(f"epsilon={epsilon} is too small for {cells} counts per record")
    return u, s


def analytic_delta(sigma: float, cells: int, epsilon: float) -> float:
    """Delta of continuous Gaussian noise (Balle and Wang 2018, theorem 8)."""
    from scipy.special import log_ndtr

    shift = math.sqrt(cells) / sigma
    left = float(log_ndtr(shift / 2 - epsilon / shift))
    right = epsilon + float(log_ndtr(-shift / 2 - epsilon / shift))
    return max(0.0, math.exp(left) * -math.expm1(right - left))


def discrete_delta(sigma: float, cells: int, epsilon: float) -> float:
    """Upper bound of delta for discrete Gaussian noise; tight but for rounding (see above)."""
    slack = 4 * cells * math.exp(-((math.pi * sigma) ** 2))
    epsilon -= 2 * slack
    variance = cells * sigma**2
    start = math.floor(epsilon * sigma**2 - cells / 2) + 1
    spread = math.sqrt(2 * math.pi * variance)
    terms = math.ceil(12 * math.sqrt(variance))
    if terms > MAX_TERMS:  # a sum of a function with one peak is its integral and one term more
        peak = math.exp(-(max(start, 0) ** 2) / (2 * variance)) / spread
        return (1 + slack) * (analytic_delta(sigma, cells, epsilon) + peak)
    k = np.arange(start, start + terms, dtype=float)
    gain = -np.expm1(epsilon - (2 * k + cells) / (2 * sigma**2))
    chance = np.exp(-(k**2) / (2 * variance)) / spread
    return float((1 + slack) * np.sum(chance * np.maximum(gain, 0)))
