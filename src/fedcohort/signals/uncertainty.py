"""How far a debiased distance may be off: its standard error.

With gap u = q_a - q_b, D = |u|^2 less both energies. Two sources move it:

- Noise, exactly. If every cell of u carries independent noise of variance s and fourth cumulant
  f, and u_0 is the gap without noise, Var D = 4 s |u_0|^2 + cells (2 s^2 + f). If n was read off
  noisy counts, of relative variance v, a side adds 4 v (q . u)^2.
- Sampling, as an upper bound. One row contributes 4 u'Cu + 2 tr(C^2), with C the covariance of
  the row's gap. Rows see the same samples, and a sketch does not hold how they move together; the
  standard error of their sum is at most sqrt(rows * the sum of their variances).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedcohort.signals.distances import distance
from fedcohort.signals.stack import Floats

if TYPE_CHECKING:
    from fedcohort.signals.race import RaceSketch


class Estimate(NamedTuple):
    """A distance and its standard error."""

    value: float
    error: float


def distance_with_error(
    a: RaceSketch, b: RaceSketch, kind: Literal["frobenius", "mmd"] = "frobenius"
) -> Estimate:
    """Debiased distance of two sketches with its standard error, for fixed hash functions.

    For "frobenius" the error is how much the distance would grow if its square were one standard
    error larger: the delta method far from zero, and finite at zero.

    Examples
    --------
    >>> from fedcohort.signals.race import RaceSketch
    >>> a = RaceSketch.srp(dim=2, rows=10, bits=3)
    >>> b = a.empty_like()
    >>> rng = np.random.default_rng(0)
    >>> a.add(rng.standard_normal((2000, 2))); b.add(rng.standard_normal((2000, 2)) + [1.0, 0.0])
    >>> private = [s.privatize(1.0, rng=rng) for s in (a, b)]
    >>> value, error = distance_with_error(*private)
    >>> abs(value - distance(a, b, debias=True)) < 3 * error < 0.2
    True
    """
    if kind not in ("frobenius", "mmd"):
        raise ValueError(f"no standard error for kind {kind!r}; use 'frobenius' or 'mmd'")
    square = distance(a, b, "mmd") * a.rows
    error = math.sqrt(noise_variance(a, b) + sampling_variance(a, b))
    if kind == "mmd":
        return Estimate(square / a.rows, error / a.rows)
    value = math.sqrt(max(square, 0.0))
    return Estimate(value, math.sqrt(max(square, 0.0) + error) - value)


def noise_variance(a: RaceSketch, b: RaceSketch) -> float:
    """Variance of the debiased squared Frobenius distance over the noise of both sketches."""
    cells = a.counts.size
    spread = sum(s.noise / s.n**2 for s in (a, b))
    fourth = sum(s.release.fourth / s.n**4 for s in (a, b) if s.release is not None)
    gap = a.normalized() - b.normalized()
    clean = max(float((gap**2).sum()) - cells * spread, 0.0)
    total = 4 * spread * clean + cells * (2 * spread**2 + fourth)
    for sketch in (a, b):
        if sketch.release is not None and sketch.release.n == "private":
            relative = sketch.noise * sketch.buckets / sketch.rows / sketch.n**2
            lean = float((sketch.normalized() * gap).sum())
            total += 4 * relative * lean**2
    return total


def sampling_variance(a: RaceSketch, b: RaceSketch) -> float:
    """Upper bound of the same variance over the draw of both data sets."""
    sides = [(s.normalized(), 1 / s.n) for s in (a, b)]
    diagonal = sum(w * q for q, w in sides)  # C = diag(diagonal) - sum of w q q'
    gap = sides[0][0] - sides[1][0]
    spread = a.noise / a.n**2 + b.noise / b.n**2
    own = np.maximum(diagonal - sum(w * q**2 for q, w in sides), 0)
    # gap holds noise and sampling error of its own: take their part out of its squares
    along = np.sum(diagonal * (gap**2 - spread - own))
    for q, w in sides:
        along -= w * np.sum(_dot(q, gap) ** 2 - spread * _dot(q, q))
    squared = np.sum(diagonal**2)
    for q, w in sides:
        squared -= 2 * w * np.sum(diagonal * q**2)
        squared += sum(w * v * np.sum(_dot(q, r) ** 2) for r, v in sides)
    return float(a.rows * (4 * max(along, 0.0) + 2 * max(squared, 0.0)))


def _dot(q: Floats, r: Floats) -> Floats:
    """Inner product of each row."""
    return np.asarray((q * r).sum(axis=1))
