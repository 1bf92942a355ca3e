"""Chance: standard errors of debiased squared distances, and who has too few records.

With the gap u = q_a - q_b, the debiased squared distance D is |u|^2 less both error variances. Two
sources move it:

- Noise, exactly: see `noise_variance`. If n was estimated from noisy counts with relative variance
  v, that side adds 4 v (q . u)^2.
- Sampling, as an upper bound. One row contributes 4 u'Cu + 2 tr(C^2), with C the covariance of
  the row's gap. All rows hash the same samples, and a sketch does not show how they move together;
  the standard error of their sum is at most sqrt(rows * the sum of their variances).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.sketch.distances import Floats, Readings, Stack, distance

if TYPE_CHECKING:
    from fedcohort.sketch.race import RaceSketch

BLOCK = 1 << 16  # counts compared at a time, so that they stay in a processor's cache
MAX_ERROR = 0.5  # standard error of a squared distance, which is between 0 and 2
LAPLACE = 3.0  # fourth cumulant of Laplace noise over its squared variance; of Gaussian noise 0


def noise_variance(square: Any, cells: float, noise: Any, fourth: Any) -> Any:
    """Variance of a debiased squared distance over noise, from the square without noise.

    `noise` and `fourth` are the variance and the fourth cumulant of each cell's gap.
    """
    return 4 * noise * square + cells * (2 * noise**2 + fourth)


def too_few(readings: Readings) -> NDArray[np.bool_]:
    """Say which clients have too few records, or too few for their noise, to be compared.

    The rule of profile, plan, explain and nearest. It looks at sizes and noise alone, because a
    few records do not show how much they scatter: a client is left out where the standard error of
    its squared distance may exceed a half, so that it could lie anywhere from 0 to 2. Without noise
    these are clients of fewer than four records.

    Examples
    --------
    >>> from fedcohort.signals.forms import sketch_dtype
    >>> sizes = np.zeros(3, sketch_dtype(2, 8, "i2"))
    >>> sizes["n"], sizes["noise"] = [3, 4, 4], [0, 0, 8]
    >>> too_few(sizes).tolist()
    [True, False, True]
    """
    stack = Stack(readings)
    n, rows, cells = stack.n, stack.rows, stack.rows * stack.buckets
    noise = stack.noise / n**2
    noisy = np.sqrt(noise_variance(rows, cells, noise, LAPLACE * noise**2)) / rows
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.hypot(math.sqrt(2) / (n - 1), noisy)
    enough: NDArray[np.bool_] = (n >= 2) & (error <= MAX_ERROR)
    return ~enough


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
    """
    if kind not in ("frobenius", "mmd"):
        raise ValueError(f"no standard error for kind {kind!r}; use 'frobenius' or 'mmd'")
    square = distance(a, b, "mmd") * a.rows
    error = float(squared_errors(a, [b])[0])
    if kind == "mmd":
        return Estimate(square / a.rows, error / a.rows)
    value = math.sqrt(max(square, 0.0))
    return Estimate(value, math.sqrt(max(square, 0.0) + error) - value)


def squared_errors(a: RaceSketch, others: Sequence[RaceSketch]) -> Floats:
    """Return the standard error of the debiased squared Frobenius distance to each other sketch."""
    step = max(1, BLOCK // a.counts.size)
    blocks = [others[lo : lo + step] for lo in range(0, len(others), step)]
    errors = [np.sqrt(sum(variances(a, block))) for block in blocks]
    return np.concatenate(errors) if errors else np.empty(0)


def variances(a: RaceSketch, others: Sequence[RaceSketch]) -> tuple[Floats, Floats]:
    """Return the variance of each debiased squared distance, over noise and over sampling."""
    sides = _Side([a]), _Side(others)
    gap = sides[0].q - sides[1].q
    noise = sum(side.noise / side.n**2 for side in sides)
    return _over_noise(sides, gap, noise), _over_sampling(sides, gap, noise)


class _Side:
    """The sketches on one side of distances, stacked: N or 1 of them."""

    def __init__(self, sketches: Sequence[RaceSketch]) -> None:
        self.q = np.array([s.normalized() for s in sketches])  # (N, rows, buckets)
        self.n = np.array([s.n for s in sketches], float)
        self.noise, self.fourth = _moments(sketches)
        releases = [s.release for s in sketches]
        self.estimated = np.array([r is not None and r.n == "private" for r in releases])


def _moments(sketches: Sequence[RaceSketch]) -> tuple[Floats, Floats]:
    """Variance and fourth cumulant of the noise on a count, by sketch."""
    releases = [s.release for s in sketches]
    pairs = [(0.0, 0.0) if r is None else (r.variance, r.fourth) for r in releases]
    noise, fourth = np.array(pairs).T
    return noise, fourth


def _over_noise(sides: tuple[_Side, _Side], gap: Floats, noise: Floats) -> Floats:
    rows, buckets = gap.shape[1:]
    fourth = sum(side.fourth / side.n**4 for side in sides)
    clean = np.maximum(_total(gap**2) - rows * buckets * noise, 0.0)
    total = noise_variance(clean, rows * buckets, noise, fourth)
    for side in sides:
        if side.estimated.any():
            relative = side.estimated * side.noise * buckets / rows / side.n**2
            total = total + 4 * relative * _total(side.q * gap) ** 2
    return np.asarray(total)


def _over_sampling(sides: tuple[_Side, _Side], gap: Floats, noise: Floats) -> Floats:
    pairs = [(side.q, 1 / side.n) for side in sides]
    diagonal = sum(w[:, None, None] * q for q, w in pairs)  # C = diag(diagonal) - sum of w q q'
    part = np.maximum(diagonal - sum(w[:, None, None] * q**2 for q, w in pairs), 0)
    # gap holds noise and sampling error itself: take their part out of its squares
    along = _total(diagonal * (gap**2 - noise[:, None, None] - part))
    squared = _total(diagonal**2)
    for q, w in pairs:
        along = along - w * (_dot(q, gap) ** 2 - noise[:, None] * _dot(q, q)).sum(axis=1)
        squared = squared - 2 * w * _total(diagonal * q**2)
        for r, v in pairs:
            squared = squared + w * v * (_dot(q, r) ** 2).sum(axis=1)
    return np.asarray(gap.shape[1] * (4 * np.maximum(along, 0) + 2 * np.maximum(squared, 0)))


def _dot(q: Floats, r: Floats) -> Floats:
    """Inner product of each row, (N, rows)."""
    return np.asarray((q * r).sum(axis=2))


def _total(values: Any) -> Floats:
    """Sum over the cells of each sketch, (N,)."""
    return np.asarray(values.reshape(len(values), -1).sum(axis=1))


def errors_to_global(sketches: Sequence[RaceSketch]) -> Floats:
    """Return the standard error of each client's squared distance to all data together, (N,).

    A client is a part w of the whole, so its distance to the whole is (1 - w) times that to the
    rest, with which it shares nothing. The scatter of a client's records is estimated from the
    client and, where that is more, from all data together: three equal records show none.
    """
    counts, n = np.sum([s.counts for s in sketches], axis=0), float(sum(s.n for s in sketches))
    noise, fourth = _moments(sketches)
    some = next((s.release for s in sketches if s.release is not None), None)
    trace = _trace(sketches)
    rest, errors = sketches[0].empty_like(), np.empty(len(sketches))
    for i, s in enumerate(sketches):
        rest.counts, rest.n = counts - s.counts, n - s.n
        if some is not None:
            left = [max(float(m.sum() - m[i]), 0.0) for m in (noise, fourth)]
            rest.release = replace(some, variance=left[0], fourth=left[1])
        usual = 2 * trace * (s.rows * (1 / s.n + 1 / rest.n)) ** 2
        by_noise, by_sampling = variances(s, [rest])
        squared = by_noise[0] + max(by_sampling[0], usual)
        errors[i] = (1 - s.n / n) ** 2 * np.sqrt(squared) / s.rows
    return errors


def pair_errors(sketches: Sequence[RaceSketch]) -> Floats:
    """Return the standard error of every squared distance if there were no difference, (N, N).

    Sampling: with the bucket probabilities p of all data together, a row of the gap between two
    clients has covariance (1 / n_i + 1 / n_j) (diag(p) - pp'), and its square's standard error is
    sqrt(2 trace) of the square of that; the mean over rows scatters at most as much. The noise of
    each cell adds to it.
    """
    n = np.array([s.n for s in sketches], float)
    rows, buckets = sketches[0].counts.shape
    one, two = _moments(sketches)
    inverse, noise, fourth = (np.add.outer(v, v) for v in (1 / n, one / n**2, two / n**4))
    noisy = noise_variance(rows * inverse, rows * buckets, noise, fourth)
    errors: Floats = np.sqrt(2 * _trace(sketches) * inverse**2 + noisy / rows**2)
    return errors


def _trace(sketches: Sequence[RaceSketch]) -> float:
    """Return the mean over rows of trace((diag(p) - pp')^2)."""
    p = np.maximum(np.sum([s.counts for s in sketches], axis=0), 0).astype(float)
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1)
    second, third = (p**2).sum(axis=1), (p**3).sum(axis=1)
    return float((second - 2 * third + second**2).mean())


def cap_by_observed(squares: Floats, errors: Floats) -> Floats:
    """Return the errors of exact sketches, no larger than the federation itself shows.

    `pair_errors` lets rows move together fully, which overstates the scatter several times for
    most data. A squared distance is below zero by chance alone, so twice the root mean square of
    those below zero (in units of `errors`) is at least one standard deviation of chance, be it
    symmetric or as skewed as a single squared Gaussian. With fewer than ten such pairs, the
    errors stay as they are.
    """
    pairs = np.triu_indices(len(squares), 1)
    units = squares[pairs] / errors[pairs]
    below = units[units < 0]
    if len(below) < 10:
        return errors
    return errors * min(1.0, 2 * float(np.sqrt((below**2).mean())))


def error_at_center(stack: Stack) -> Floats:
    """Standard error of each client's debiased squared distance if the client were at the center.

    The sampling part is at most sqrt(2) times its mean, which one squared Gaussian has; rows see
    the same records, so their number does not help. Noise counts as Laplace noise.
    """
    cells = stack.rows * stack.buckets
    noise = stack.noise / stack.n**2
    sampling = np.maximum(stack.error_variance() - cells * noise, 0.0)
    noisy = np.sqrt(noise_variance(0.0, cells, noise, LAPLACE * noise**2))
    return np.asarray(np.sqrt(2) * sampling + noisy)
