"""Private centers and scales of columns, from quartiles within public bounds.

The range between public bounds is cut into equal cells; a value outside counts in the first or the
last. For the quantile a/b of n values, a cell with `below` values before it and `upto` values up to
its end misses the quantile by d = max(0, b * below - a * n, a * n - b * upto), which is 0 for the
cell that holds it. The exponential mechanism (McSherry and Talwar 2007) draws a cell with
probability proportional to exp(-epsilon d / (2 s)), where s is the most by which one record changes
any d. This protects one record with epsilon:

- add-remove: `below` and `upto` change by 0 or 1 and n by 1, so s = max(a, b - a);
- replace: n stays and `below` and `upto` change by at most 1, so s = b, which also holds where a
  value becomes missing, or the reverse.

The number of values is not published. Cells are drawn exactly, by rejection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from fedcohort.privacy import noise
from fedcohort.privacy.noise import Ints, Neighbors
from fedcohort.privacy.release import Release

CELLS = 1024
QUARTILES = (1, 4), (3, 4)
NORMAL_IQR = 1.349  # distance of the quartiles of a normal distribution, in standard deviations
FINE = 1 << 20  # the rate epsilon / (2 s) is rounded down to a multiple of 1 / FINE
MAX_MISS = 1 << 40  # a larger d counts as this; so d * rate fits 64 bits


class Constants(NamedTuple):
    """A typical value and a typical spread; no scale where the quartiles share a cell."""

    center: float
    scale: float | None


def quantile_misses(counts: Ints, a: int, b: int) -> Ints:
    """Return d of every cell for the quantile a/b: by how much it misses, times b."""
    upto = np.cumsum(counts)
    misses = np.maximum(b * (upto - counts) - a * upto[-1], a * upto[-1] - b * upto)
    return np.asarray(np.clip(misses, 0, MAX_MISS))


def miss_sensitivity(a: int, b: int, neighbors: Neighbors) -> int:
    """By how much one record can change any d of `quantile_misses`."""
    return max(a, b - a) if noise.sensitivity(1, neighbors) == 1 else b


def private_quantile(
    counts: Ints,
    a: int,
    b: int,
    epsilon: float,
    neighbors: Neighbors = "add-remove",
    rng: np.random.Generator | None = None,
) -> int:
    """Draw a cell that about holds the quantile a/b, with `epsilon` for this one draw.

    `counts` are the values per cell; `rng` is for tests only, instead of the operating system's.
    """
    noise.check_budget(epsilon, 0.0)
    top = math.floor(Fraction(epsilon) * FINE / (2 * miss_sensitivity(a, b, neighbors)))
    if not 0 < top < 1 << 22:
        raise ValueError(f"epsilon={epsilon} of a quantile must be from 0.00001 to 8")
    misses = quantile_misses(np.asarray(counts, np.int64), a, b)
    misses = (misses - misses.min()) * top
    source = noise.words(rng)
    while True:
        cells = noise.uniform_below(source, np.full(len(misses), len(misses), np.int64))
        kept = noise.bernoulli_exp(source, misses[cells], np.full(len(misses), FINE, np.int64))
        if kept.any():
            return int(cells[np.argmax(kept)])


def private_constants(
    counts: Ints,
    bounds: Sequence[tuple[float, float]],
    epsilon: float,
    rng: np.random.Generator | None = None,
) -> list[Constants]:
    """Estimate a center and a scale per column: the middle and the distance of its quartiles.

    `counts` are the values per cell of each column, (columns, cells), `bounds` its public range.
    Each quartile gets an equal part of epsilon, for a record that is added or removed.
    """
    part = epsilon / (len(QUARTILES) * len(counts))
    estimates = []
    for column, (low, high) in zip(counts, bounds, strict=True):
        first, third = sorted(private_quantile(column, *q, part, rng=rng) for q in QUARTILES)
        cell = (high - low) / len(column)
        center = low + cell * (first + third + 1) / 2
        spread = cell * (third - first) / NORMAL_IQR
        estimates.append(Constants(float(f"{center:.4g}"), float(f"{spread:.3g}") or None))
    return estimates


def constants_release(columns: int, epsilon: float) -> Release:
    """Return the cost of `private_constants`: its draws add up, each epsilon^2 / 2 in rho."""
    draws = len(QUARTILES) * columns
    rho = draws * (epsilon / draws) ** 2 / 2
    return Release("exponential", epsilon, 0.0, "add-remove", "private", 0.0, 0.0, rho)


def quartile_error(columns: int, epsilon: float) -> int:
    """Bound by how many records a quartile is off, for 95 of 100; a public number."""
    part = epsilon / (len(QUARTILES) * columns)
    a, b = QUARTILES[0]
    s = miss_sensitivity(a, b, "add-remove")
    return math.ceil(2 * s * math.log(CELLS / 0.05) / (part * b))
