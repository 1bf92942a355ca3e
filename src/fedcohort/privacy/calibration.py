"""How much noise a privacy budget asks for.

One record changes exactly one count in each row: adding or removing it moves `rows` counts by
one, replacing it moves at most 2 * rows. That is the L1 sensitivity of Laplace noise; the L2
sensitivity of Gaussian noise is its root.

Laplace: integers with scale >= sensitivity / epsilon give epsilon, exactly.

Gaussian: sigma starts from the analytic calibration of Balle and Wang (2018), which is exact for
the continuous Gaussian, and is raised in steps of 1/16 until the discrete one meets delta. With
c counts moved by one each, the privacy loss depends on the sum of c discrete Gaussians alone. For
sigma >= 2 that sum's probabilities equal those of one discrete Gaussian of variance c sigma^2 up
to a factor within 1 +- 4 c exp(-(pi sigma)^2), and its delta is summed term by term. Fewer moved
counts are a function of more, so c = the sensitivity is the worst case.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np

from fedcohort.privacy.noise import MAX_SCALE, MAX_SIGMA

Neighbors = Literal["add-remove", "replace"]
FINE = 16  # sigma is a multiple of 1 / FINE
MIN_SIGMA = 2.0
MAX_TERMS = 1 << 21


def sensitivity(rows: int, neighbors: Neighbors) -> int:
    """How many counts one record can change, by one each."""
    if neighbors not in ("add-remove", "replace"):
        raise ValueError(f"neighbors={neighbors!r} is neither 'add-remove' nor 'replace'")
    return rows if neighbors == "add-remove" else 2 * rows


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse what is not a privacy budget."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon={epsilon} must be a finite number above 0")
    if not 0 <= delta < 1:
        raise ValueError(f"delta={delta} must be at least 0 and below 1")


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
    sigma = max(MIN_SIGMA, _analytic_sigma(cells, epsilon, delta))
    s = FINE if FINE * sigma < MAX_SIGMA / 2 else 1
    u = math.ceil(s * sigma)
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


def _analytic_sigma(cells: int, epsilon: float, delta: float) -> float:
    """Smallest sigma with the wanted delta, by bisection on a logarithmic scale."""
    low, high = 1e-3, 1.0
    while analytic_delta(high, cells, epsilon) > delta:
        low, high = high, 2 * high
        if high > MAX_SIGMA:
            raise ValueError(f"epsilon={epsilon} is too small for {cells} counts per record")
    for _ in range(60):
        middle = math.sqrt(low * high)
        if analytic_delta(middle, cells, epsilon) > delta:
            low = middle
        else:
            high = middle
    return high
