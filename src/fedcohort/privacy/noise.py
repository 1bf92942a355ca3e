"""Exact samples of discrete noise, by comparing whole random numbers only.

Floating-point samplers of Laplace or Gaussian noise leak through the gaps between floating-point
numbers. These follow Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy
(2020), algorithms 1 to 3, for many cells at once: every decision compares integers of 64 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = Callable[[int], NDArray[np.uint64]]
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
        going = uniform_below(source, den[alive] * steps[alive]) < num[alive]
        alive = alive[going]
        steps[alive] += 1
    odd: Bools = steps % 2 == 1
    return odd


def _one_over_e(source: Words, count: int) -> Bools:
    ones = np.ones(count, np.int64)
    return _bernoulli_exp_fraction(source, ones, ones)


def _repeats(source: Words, count: int) -> Ints:
    """How often an event of probability 1/e happens in a row."""
    out, alive = np.zeros(count, np.int64), np.arange(count)
    while len(alive := alive[_one_over_e(source, len(alive))]):
        out[alive] += 1
    return out


def discrete_laplace(source: Words, size: int, t: int, s: int = 1) -> Ints:
    """Integers x with probability proportional to exp(-|x| s / t).

    Examples
    --------
    >>> x = discrete_laplace(words(np.random.default_rng(0)), 10_000, t=3)
    >>> abs(float(x.var()) - laplace_moments(3.0)[0]) < 1.5
    True
    """

    def tries(count: int) -> Ints:
        scale = np.full(count, t, np.int64)
        offset = uniform_below(source, scale)
        kept = bernoulli_exp(source, offset, scale)
        size_of = (offset + t * _repeats(source, count)) // s
        negative = (source(count) & np.uint64(1)).astype(bool)
        kept &= ~(negative & (size_of == 0))  # zero once, not twice
        return np.where(negative, -size_of, size_of)[kept]

    return _gather(tries, size)


def discrete_gaussian(source: Words, size: int, u: int, s: int = 1) -> Ints:
    """Integers x with probability proportional to exp(-x^2 / (2 sigma^2)), sigma = u / s."""

    def tries(count: int) -> Ints:
        x = discrete_laplace(source, count, u, s)
        return x[
            bernoulli_exp(source, (s * np.abs(x) - u) ** 2, np.full(count, 2 * u * u, np.int64))
        ]

    return _gather(tries, size)


def _gather(tries: Callable[[int], Ints], size: int) -> Ints:
    """Call `tries`, which keeps some of what it is asked for, until there are `size`."""
    kept = [np.empty(0, np.int64)]
    missing = size
    while missing > 0:
        kept.append(tries(2 * missing + 16))
        missing -= len(kept[-1])
    return np.concatenate(kept)[:size]


def laplace_moments(scale: float) -> tuple[float, float]:
    """Variance and fourth cumulant of the discrete Laplace distribution exp(-|x| / scale).

    Examples
    --------
    >>> variance, fourth = laplace_moments(100.0)      # close to the continuous 2 b^2 and 12 b^4
    >>> round(variance), round(fourth / 100**4, 3)
    (20000, 12.0)
    """
    p = float(np.exp(-1 / scale))
    q = float(-np.expm1(-1 / scale))
    return 2 * p / q**2, 2 * p * (1 + 4 * p + p * p) / q**4
