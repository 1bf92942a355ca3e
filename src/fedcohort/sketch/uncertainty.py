"""Chance: standard errors of debiased squared distances, too few records, total variation.

With the gap u = q_a - q_b, the debiased squared distance D is |u|^2 less both error variances. Two
sources move it:

- Noise, exactly: see `privacy.noise.noise_variance`. If n was estimated from noisy counts with
  relative variance v, that side adds 4 v (q . u)^2.
- Sampling, as an upper bound. One row contributes 4 u'Cu + 2 tr(C^2), with C the covariance of
  the row's gap. All rows hash the same samples, and a sketch does not show how they move together;
  the standard error of their sum is at most sqrt(rows * the sum of their variances).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from fedcohort.privacy.noise import LAPLACE, noise_variance
from fedcohort.rounds import stream
from fedcohort.sketch.distances import Floats, Kind, Readings, Stack, distance

if TYPE_CHECKING:
    from fedcohort.sketch.race import RaceSketch

BLOCK = 1 << 16  # counts compared at a time, so that they stay in a processor's cache
MAX_ERROR = 0.5  # standard error of a squared distance, which is between 0 and 2
SPLITS = 16  # thinnings that are averaged
MIN_COUNT = 5  # records of a cell from which on its difference is taken as normal
WIDTH = 1.96  # standard deviations on either side: 95 %
STEEPEST = 1.7  # largest slope of the split estimate in d
GRID = np.linspace(0.0, 12.0, 2401)


def too_few(readings: Readings) -> NDArray[np.bool_]:
    """Say which clients have too few records, or too few for their noise, to be compared.

    The rule of profile, plan, explain and nearest, by sizes and noise alone: the standard error of
    the squared distance, from 0 to 2, may exceed a half. Without noise, that is below four records.
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
    error = float(squared_errors(a, [b])[0])
    if kind == "mmd":
        return square / a.rows, error / a.rows
    value = math.sqrt(max(square, 0.0))
    return value, math.sqrt(max(square, 0.0) + error) - value


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
        self.noise, self.fourth = noise_moments(sketches)
        releases = [s.release for s in sketches]
        self.estimated = np.array([r is not None and r.n == "private" for r in releases])


def noise_moments(sketches: Sequence[Any]) -> tuple[Floats, Floats]:
    """Variance and fourth cumulant of the noise on a count, by sketch."""
    releases = [s.release for s in sketches]
    pairs = [(0.0, 0.0) if r is None else (r.variance, r.fourth) for r in releases]
    return tuple(np.array(pairs, float).T)


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
    rest. Its scatter is estimated from the client and, where that is more, from all data together.
    """
    counts, n = np.sum([s.counts for s in sketches], axis=0), float(sum(s.n for s in sketches))
    noise, fourth = noise_moments(sketches)
    some = next((s.release for s in sketches if s.release is not None), None)
    trace = _trace(counts)
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
    one, two = noise_moments(sketches)
    inverse, noise, fourth = (np.add.outer(v, v) for v in (1 / n, one / n**2, two / n**4))
    noisy = noise_variance(rows * inverse, rows * buckets, noise, fourth)
    trace = _trace(np.sum([s.counts for s in sketches], axis=0))
    errors: Floats = np.sqrt(2 * trace * inverse**2 + noisy / rows**2)
    return errors


def possible_luck(counts: NDArray[Any], candidates: int) -> tuple[float, float]:
    """How far below its truth the luckiest debiased square of many can be, with probability 95%.

    With the (a, b) that is returned, it is a / n + b * noise / n**2 for a client of n records and
    the given noise of a count: a normal quantile times the standard error that the client's own
    records and noise would add if it were a twin. Rows count as independent, and the noise as
    Laplace's. `counts` (clients, rows, buckets) of some clients show how the data scatter.
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
    distances are below zero by chance alone: twice their root mean square (in units of `errors`) is
    at least one standard deviation of chance, be it symmetric or as skewed as a squared Gaussian.
    With fewer than ten such pairs, the errors stay as they are.
    """
    pairs = np.triu_indices(len(squares), 1)
    below = squares[pairs] < 0
    units = squares[pairs][below] / errors[pairs][below]
    if len(units) < 10:
        return errors
    return errors * min(1.0, 2 * float(np.sqrt((units**2).mean())))


def error_at_center(stack: Stack) -> Floats:
    """Standard error of each client's debiased squared distance if the client were at the center.

    The sampling part is at most sqrt(2) times its mean, which one squared Gaussian has; rows see
    the same records, so their number does not help. Noise counts as Laplace noise.
    """
    noise = stack.rows * stack.buckets * stack.noise / stack.n**2
    sampling = np.maximum(stack.error_variance() - noise, 0.0)
    return np.asarray(np.sqrt(2) * sampling + _error_by_noise(stack, 0.0))


class Variation(NamedTuple):
    """An estimate of the total variation that the buckets see, and its 95 % interval."""

    value: float
    low: float
    high: float


def total_variation(
    a: RaceSketch, b: RaceSketch, rng: np.random.Generator | None = None
) -> Variation:
    """Estimate the total variation between what two sketches were drawn from.

    Half the summed absolute differences d of a row's cells is that of the *data sets*, and too
    high: two samples of 50 from one distribution are about 0.5 apart. With m and s, the expectation
    and standard deviation of d, T = sum |m| / 2, averaged over rows, is wanted, which never exceeds
    the true total variation. Two estimates enclose it, and the value lies in their middle:

    - Low: half of the records say which side has more in a cell, the other half by how much. Its
      expectation is at most |m|. Exact counts are split by thinning; for noisy counts, the average
      over all splits is that of a normal d.
    - High: for normal d, E|d| = s h(m / s) with a convex h. By Jensen's inequality, the expected
      sum of |d| is at least S h(2 T / S), S being the sum of s, which is solved for T. In cells of
      fewer than five records d is not normal, and |d| counts in full.

    One record changes the average of |d| by at most 2 / n, so the variance of T is at most
    (1 / n_a + 1 / n_b) / 4 (Efron-Stein), plus that of the noise. The interval reaches 1.96
    standard deviations beyond both estimates. `rng` splits the records; by default always alike.

    Examples
    --------
    >>> from fedcohort.sketch.race import RaceSketch
    >>> a = RaceSketch.srp(dim=2, rows=50, bits=4)
    >>> b = a.empty_like()
    >>> x = np.random.default_rng(0).standard_normal((2, 2000, 2))
    >>> a.add(x[0]); b.add(x[1])                                        # one distribution
    >>> value, low, high = total_variation(a, b)
    >>> low == 0.0, value < 0.05, high < 0.15
    (True, True, True)
    """
    a.check_alike(b)
    p, q = a.normalized(), b.normalized()
    d, cells = p - q, a.rows * a.buckets
    noise = sum(s.noise / s.n**2 for s in (a, b))
    drawn = [np.clip(r * (1 - r), 0, None) / s.n for r, s in ((p, a), (q, b))]
    s = np.sqrt(drawn[0] + drawn[1] + noise)
    if a.private or b.private:
        normal = np.ones(d.shape, bool)
        low = _split_normal(d, s)
    else:
        normal = a.counts + b.counts >= MIN_COUNT
        low = _split_counts(a, b, rng or stream(0, "total variation"))
    high = _unfold(np.abs(d), s, normal)
    error = math.sqrt((1 / a.n + 1 / b.n) / 4 + cells * noise / (4 * a.rows**2))
    ends = low - STEEPEST * WIDTH * error, _unfold(np.abs(d), s, normal, 2 * WIDTH * error)
    value, first, last = np.clip([(low + high) / 2, *ends], 0.0, 1.0).tolist()
    return Variation(value, first, last)


def total_variations(sketches: Sequence[RaceSketch]) -> list[list[Variation]]:
    """Return the estimate for every two sketches; nothing differs from itself."""
    same = Variation(0.0, 0.0, 0.0)
    out = [[same] * len(sketches) for _ in sketches]
    for j, b in enumerate(sketches):
        for i, a in enumerate(sketches[:j]):
            out[i][j] = out[j][i] = total_variation(a, b)
    return out


def _split_normal(d: Floats, s: Floats) -> float:
    """Average over all halves of a normal d: half tells the sign, half the size."""
    t = np.abs(d) / np.where(s > 0, s, np.inf)
    density = np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    sizes = np.abs(d) * (1 - 2 * ndtr(-t)) - 2 * s * density
    return float(sizes.sum()) / 2 / len(d)


def _split_counts(a: RaceSketch, b: RaceSketch, rng: np.random.Generator) -> float:
    total = 0.0
    for _ in range(SPLITS):
        halves = [rng.binomial(s.counts, 0.5) for s in (a, b)]
        first = halves[0] / a.n - halves[1] / b.n
        second = (a.counts - halves[0]) / a.n - (b.counts - halves[1]) / b.n
        total += float((2 * second * np.sign(first)).sum())
    return total / SPLITS / 2 / a.rows


def _unfold(size: Floats, s: Floats, normal: NDArray[np.bool_], more: float = 0.0) -> float:
    """Return T for which the sums of |d| are expected, where `more` is added to their mean."""
    rows = len(size)
    rest = float(size[~normal].sum()) / rows
    spread, seen = float(s[normal].sum()) / rows, float(size[normal].sum()) / rows + more
    if spread == 0:
        return (rest + seen) / 2
    folded = 2 * np.exp(-(GRID**2) / 2) / math.sqrt(2 * math.pi) + GRID * (1 - 2 * ndtr(-GRID))
    ratio = seen / spread
    solved = ratio if ratio >= folded[-1] else float(np.interp(ratio, folded, GRID))
    return (rest + spread * solved) / 2
