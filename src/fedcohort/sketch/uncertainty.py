"""Chance: standard errors of debiased squared distances, too few records, total variation.

With the gap u = q_a - q_b, the debiased squared distance D is |u|^2 less both error variances. Two
sources move it: noise, as `privacy.noise.noise_variance` says (and a side whose n was estimated
from noisy counts with relative variance v adds 4 v (q . u)^2); and sampling. One row contributes
4 u'Cu + 2 tr(C^2), with C the covariance of its gap. All rows hash the same samples, and a sketch
does not show how they move together: the variance of their sum is at most rows times the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from fedcohort.privacy.noise import LAPLACE, noise_variance
from fedcohort.rounds import stream
from fedcohort.sketch.distances import Floats, Kind, Readings, Stack, distance
from fedcohort.sketch.race import RaceSketch

MAX_ERROR = 0.5  # standard error of a squared distance, which is between 0 and 2
SPLITS = 16  # thinnings that are averaged
MIN_COUNT = 5  # records of a cell from which on its difference is taken as normal
WIDTH = 1.96  # standard deviations on either side: 95 %
STEEPEST = 1.7  # largest slope of the split estimate in d
ROOT = math.sqrt(2 * math.pi)
GRID = np.linspace(0.0, 12.0, 2401)  # means of normal numbers, and of the sizes of such numbers
FOLDED = 2 * np.exp(-(GRID**2) / 2) / ROOT + GRID * (1 - 2 * ndtr(-GRID))


def too_few(readings: Readings) -> NDArray[np.bool_]:
    """Say which clients have too few records, or too few for their noise, to be compared.

    By sizes and noise alone, the standard error of the squared distance, from 0 to 2, may exceed a
    half. Without noise, that is below four records.
    """
    stack = Stack(readings)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_noise = _error_by_noise(stack, stack.rows) / stack.rows
        error = np.hypot(math.sqrt(2) / (stack.n - 1), by_noise)
    enough: NDArray[np.bool_] = (stack.n >= 2) & (error <= MAX_ERROR)
    return ~enough


def _error_by_noise(stack: Stack, square: float) -> Floats:
    """Return the standard error of a squared distance by the noise of one side, as Laplace's."""
    noise = stack.noise / stack.n**2
    variance = noise_variance(square, stack.rows * stack.buckets, noise, LAPLACE * noise**2)
    return np.asarray(np.sqrt(variance))


def distance_with_error(
    a: RaceSketch, b: RaceSketch, kind: Kind = "frobenius"
) -> tuple[float, float]:
    """Debiased distance of two sketches with its standard error, for fixed hash functions.

    For "frobenius" the error is how much the distance would grow if its square were one standard
    error larger: the delta method far from zero, and finite at zero.
    """
    square = distance(a, b, "mmd") * a.rows
    error = squared_error(a, b)
    if kind == "mmd":
        return square / a.rows, error / a.rows
    value = math.sqrt(max(square, 0.0))
    return value, math.sqrt(max(square, 0.0) + error) - value


def squared_error(a: RaceSketch, b: RaceSketch) -> float:
    """Return the standard error of the debiased squared Frobenius distance."""
    return math.sqrt(sum(variances(a, b)))


def variances(a: RaceSketch, b: RaceSketch) -> tuple[float, float]:
    """Return the variance of the debiased squared distance, over noise and over sampling."""
    sides, gap = (a, b), a.normalized() - b.normalized()
    noise = sum(s.noise / s.n**2 for s in sides)
    return _over_noise(sides, gap, noise), _over_sampling(sides, gap, noise)


def _over_noise(sides: Sequence[RaceSketch], gap: Floats, noise: float) -> float:
    fourth = sum(s.fourth / s.n**4 for s in sides)
    clean = max(float((gap**2).sum()) - gap.size * noise, 0.0)
    total = float(noise_variance(clean, gap.size, noise, fourth))
    for s in sides:
        if s.release is not None and s.release.n == "private":
            relative = s.noise * s.buckets / s.rows / s.n**2
            total += 4 * relative * float((s.normalized() * gap).sum()) ** 2
    return total


def _over_sampling(sides: Sequence[RaceSketch], gap: Floats, noise: float) -> float:
    pairs = [(s.normalized(), 1 / s.n) for s in sides]
    diagonal = np.asarray(sum(w * q for q, w in pairs))  # C = diag(diagonal) - sum of w q q'
    part = np.maximum(diagonal - sum(w * q**2 for q, w in pairs), 0)
    # gap holds noise and sampling error itself: take their part out of its squares
    along = (diagonal * (gap**2 - noise - part)).sum()
    squared = (diagonal**2).sum()
    for q, w in pairs:
        along -= w * (_dot(q, gap) ** 2 - noise * _dot(q, q)).sum()
        squared -= 2 * w * (diagonal * q**2).sum()
        squared += sum(w * v * (_dot(q, r) ** 2).sum() for r, v in pairs)
    return float(len(gap) * (4 * max(along, 0) + 2 * max(squared, 0)))


def _dot(q: Floats, r: Floats) -> Floats:
    """Inner product of each row."""
    return np.asarray((q * r).sum(axis=1))


def errors_to_global(sketches: Sequence[RaceSketch]) -> Floats:
    """Return the standard error of each client's squared distance to all data together, (N,).

    A client is a part w of the whole, so its distance to the whole is (1 - w) times that to the
    rest. Its scatter is estimated from the client and, where that is more, from all data together.
    """
    counts, n = np.sum([s.counts for s in sketches], axis=0), float(sum(s.n for s in sketches))
    noise, fourth = np.array([(s.noise, s.fourth) for s in sketches]).T
    some = next((s.release for s in sketches if s.release is not None), None)
    trace = _trace(counts)
    rest, errors = sketches[0].empty_like(), np.empty(len(sketches))
    for i, s in enumerate(sketches):
        rest.counts, rest.n = counts - s.counts, n - s.n
        if some is not None:
            left = [max(float(m.sum() - m[i]), 0.0) for m in (noise, fourth)]
            rest.release = replace(some, variance=left[0], fourth=left[1])
        usual = 2 * trace * (s.rows * (1 / s.n + 1 / rest.n)) ** 2
        by_noise, by_sampling = variances(s, rest)
        errors[i] = (1 - s.n / n) ** 2 * math.sqrt(by_noise + max(by_sampling, usual)) / s.rows
    return errors


def pair_errors(sketches: Sequence[RaceSketch]) -> Floats:
    """Return the standard error of every squared distance if there were no difference, (N, N).

    With the bucket probabilities p of all data together, a row of the gap between two clients has
    covariance C = (1 / n_i + 1 / n_j) (diag(p) - pp'), and its square the standard error
    sqrt(2 tr(C^2)); the mean over rows scatters at most as much. The noise of each cell adds to it.
    """
    n = np.array([s.n for s in sketches], float)
    rows, buckets = sketches[0].counts.shape
    one, two = np.array([(s.noise, s.fourth) for s in sketches]).T
    inverse, noise, fourth = (np.add.outer(v, v) for v in (1 / n, one / n**2, two / n**4))
    noisy = noise_variance(rows * inverse, rows * buckets, noise, fourth)
    trace = _trace(np.sum([s.counts for s in sketches], axis=0))
    errors: Floats = np.sqrt(2 * trace * inverse**2 + noisy / rows**2)
    return errors


def possible_luck(counts: NDArray[Any], candidates: int) -> tuple[float, float]:
    """How far below its truth the luckiest debiased square of many can be, with probability 95%.

    Returns (a, b): it is a / n + b * noise / n**2 for a client of n records, a normal quantile
    times the standard error that its own records and noise would add if it were a twin. Rows count
    as independent, noise as Laplace's. `counts` (clients, rows, buckets) show how data scatter.
    """
    rows, buckets = counts.shape[1:]
    quantile = float(ndtri(0.95 ** (1 / max(candidates, 1))))
    trace = _trace(counts.sum(axis=0)) * rows
    return quantile * (2 * trace) ** 0.5, quantile * ((2 + LAPLACE) * rows * buckets) ** 0.5


def _trace(counts: NDArray[Any]) -> float:
    """Return the mean over rows of trace((diag(p) - pp')^2), p from counts of all data."""
    p = np.maximum(counts, 0).astype(float)
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1)
    second, third = (p**2).sum(axis=1), (p**3).sum(axis=1)
    return float((second - 2 * third + second**2).mean())


def cap_by_observed(squares: Floats, errors: Floats) -> Floats:
    """Return the errors of exact sketches, no larger than the federation itself shows.

    `pair_errors` lets rows move together fully, which overstates the scatter for most data. Squared
    distances are below zero by chance alone: twice their root mean square, in units of `errors`, is
    at least one standard deviation of chance, be it symmetric or as skewed as a squared Gaussian.
    Fewer than ten such pairs change nothing.
    """
    pairs = np.triu_indices(len(squares), 1)
    below = squares[pairs] < 0  # never with an error of 0
    units = squares[pairs][below] / errors[pairs][below]
    if len(units) < 10:
        return errors
    return errors * min(1.0, 2 * float(np.sqrt((units**2).mean())))


def error_at_center(stack: Stack) -> Floats:
    """Standard error of each client's debiased squared distance if the client were at the center.

    The sampling part is at most sqrt(2) times its mean, as for one squared Gaussian: rows see the
    same records, so their number does not help. Noise counts as Laplace noise.
    """
    noise = stack.rows * stack.buckets * stack.noise / stack.n**2
    sampling = np.maximum(stack.error_variance() - noise, 0.0)
    return np.asarray(np.sqrt(2) * sampling + _error_by_noise(stack, 0.0))


class Variation(NamedTuple):
    """An estimate of the total variation that the buckets see, and its 95 % interval."""

    value: float
    low: float
    high: float


def total_variation(a: RaceSketch, b: RaceSketch) -> Variation:
    """Estimate the total variation between what two sketches were drawn from.

    Half the summed absolute differences d of a row's cells is that of the *data sets*, and too
    high: two samples of 50 from one distribution are about 0.5 apart. With m and s, the expectation
    and standard deviation of d, T = sum |m| / 2, averaged over rows, is wanted, which never exceeds
    the true total variation. Two estimates enclose it, and the value lies in their middle:

    - Low: half of the records say which side has more in a cell, the other half by how much, which
      is at most |m| in expectation. Exact counts are split by thinning, always alike; for noisy
      counts, the average over all splits is that of a normal d.
    - High: for normal d, E|d| = s h(m / s) with a convex h. By Jensen's inequality, the expected
      sum of |d| is at least S h(2 T / S), S being the sum of s, which is solved for T.

    Cells with fewer than five records and little noise have no normal d, and |d| counts in full to
    the high estimate. One record changes the average of |d| by at most 2 / n, so the variance of T
    is at most (1 / n_a + 1 / n_b) / 4 (Efron-Stein), plus that of the noise. The interval reaches
    1.96 standard deviations beyond both estimates, and further up for Laplace noise, whose mean
    size is smaller than that of normal noise of the same variance. It covers T in at least 95 of
    100 pairs of samples, and mostly in all.
    """
    a.check_alike(b)
    p, q = a.normalized(), b.normalized()
    noise, fourth = np.sum([(s.noise / s.n**2, s.fourth / s.n**4) for s in (a, b)], axis=0)
    size, s = np.abs(p - q), np.sqrt(_drawn(p, a.n) + _drawn(q, b.n) + noise)
    normal = (a.counts + b.counts >= MIN_COUNT) | (a.noise + b.noise >= 1)
    noisy = a.private or b.private
    low = _split_normal(size[normal], s[normal]) / a.rows if noisy else _split_counts(a, b)
    high = min(_unfold(size, s, normal), 1.0)
    error = math.sqrt((1 / a.n + 1 / b.n + a.buckets / a.rows * noise) / 4)
    tails = 0.0
    if noise > 0:  # and whole numbers are smaller than normal ones, if little
        tails = 1 - (1 + fourth / noise**2 / 3) ** -0.5 + 1 / 12 / (a.noise + b.noise)
    more = 2 * WIDTH * error + FOLDED[0] * tails * a.buckets * math.sqrt(noise)
    ends = low - STEEPEST * WIDTH * error, _unfold(size, s, normal, more)
    value, first, last = np.clip([(low + high) / 2, *ends], 0.0, 1.0).tolist()
    return Variation(value, first, last)


def _drawn(q: Floats, n: float) -> Floats:
    """Variance of each cell by sampling; noise must not make that of a row more than 1 / n."""
    spread = np.clip(q * (1 - q), 0, None)
    return np.asarray(spread / np.maximum(spread.sum(axis=1, keepdims=True), 1) / n)


def total_variations(sketches: Sequence[RaceSketch]) -> list[list[Variation]]:
    """Return the estimate for every two sketches; nothing differs from itself."""
    out = [[Variation(0.0, 0.0, 0.0)] * len(sketches) for _ in sketches]
    for (i, a), (j, b) in combinations(enumerate(sketches), 2):
        out[i][j] = out[j][i] = total_variation(a, b)
    return out


def _split_normal(size: Floats, s: Floats) -> float:
    """Average over all halves of normal differences: half tells the sign, half the size."""
    t = size / np.where(s > 0, s, np.inf)
    told = size * (1 - 2 * ndtr(-t)) - 2 * s * np.exp(-(t**2) / 2) / ROOT
    return float(told.sum()) / 2


def _split_counts(a: RaceSketch, b: RaceSketch) -> float:
    total, rng = 0.0, stream(0, "total variation")
    for _ in range(SPLITS):
        halves = [rng.binomial(s.counts, 0.5) for s in (a, b)]
        first = halves[0] / a.n - halves[1] / b.n
        second = (a.counts - halves[0]) / a.n - (b.counts - halves[1]) / b.n
        total += float((2 * second * np.sign(first)).sum())
    return total / SPLITS / 2 / a.rows


def _unfold(size: Floats, s: Floats, normal: NDArray[np.bool_], more: float = 0.0) -> float:
    """Return T for which the sums of |d| are expected, where `more` is added to their mean."""
    rest, seen, spread = (
        float(x.sum()) / len(size) for x in (size[~normal], size[normal], s[normal])
    )
    if spread == 0:
        return (rest + seen + more) / 2
    ratio = (seen + more) / spread
    solved = ratio if ratio >= FOLDED[-1] else float(np.interp(ratio, FOLDED, GRID))
    return (rest + spread * solved) / 2
