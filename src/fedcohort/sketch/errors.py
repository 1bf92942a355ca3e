"""Standard errors of debiased distances, and estimates of the total variation.

With the gap u = q_a - q_b, the debiased squared distance D is |u|^2 less both error variances.
Two sources move it:

- Noise, exactly. If every cell of u carries independent noise of variance s and fourth cumulant
  f, and u_0 is the gap without noise, Var D = 4 s |u_0|^2 + cells (2 s^2 + f). If n was estimated
  from noisy counts with relative variance v, that side adds 4 v (q . u)^2.
- Sampling, as an upper bound. One row contributes 4 u'Cu + 2 tr(C^2), with C the covariance of
  the row's gap. All rows hash the same samples, and a sketch does not show how they move together;
  the standard error of their sum is at most sqrt(rows * the sum of their variances).

Total variation between the distributions behind two sketches (paper 0, sections 3.2.2 and C.1),
from strong assumptions to none:

- `plug_in` puts the kernel densities of the sketches into the integral, by Monte Carlo. The kernel
  blurs both distributions, so the estimate is too low. It converges as the kernel narrows (more
  bits of sign projections) and the data grow. The p-stable kernel with one projection per row falls
  only like 1 / distance, so from two dimensions on no width makes it narrow.
- `path_sum` is the paper's estimate over all paths through the buckets, with its bounds.
- `bounds` gives what holds for the two data sets at hand, whatever the hash functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.sketch.distances import Floats, distance

if TYPE_CHECKING:
    from fedcohort.sketch.race import RaceSketch

BLOCK = 1 << 16  # counts compared at a time, so that they stay in a processor's cache


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
    >>> from fedcohort.sketch.race import RaceSketch
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
    error = float(squared_errors(a, [b])[0])
    if kind == "mmd":
        return Estimate(square / a.rows, error / a.rows)
    value = math.sqrt(max(square, 0.0))
    return Estimate(value, math.sqrt(max(square, 0.0) + error) - value)


def squared_errors(a: RaceSketch, others: Sequence[RaceSketch]) -> Floats:
    """Return the standard error of the debiased squared Frobenius distance to each other sketch."""
    step = max(1, BLOCK // a.counts.size)
    blocks = [others[lo : lo + step] for lo in range(0, len(others), step)]
    found = [np.sqrt(sum(variances(a, block))) for block in blocks]
    return np.concatenate(found) if found else np.empty(0)


def variances(a: RaceSketch, others: Sequence[RaceSketch]) -> tuple[Floats, Floats]:
    """Return the variance of each debiased squared distance, over noise and over sampling."""
    sides = _Side([a]), _Side(others)
    gap = sides[0].q - sides[1].q
    spread = sides[0].noise / sides[0].n ** 2 + sides[1].noise / sides[1].n ** 2
    return _noise_variance(sides, gap, spread), _sampling_variance(sides, gap, spread)


def noise_variance(a: RaceSketch, b: RaceSketch) -> float:
    """Variance of the debiased squared Frobenius distance over the noise of both sketches."""
    return float(variances(a, [b])[0][0])


def sampling_variance(a: RaceSketch, b: RaceSketch) -> float:
    """Upper bound of the same variance over the draw of both data sets."""
    return float(variances(a, [b])[1][0])


class _Side:
    """The sketches on one side of distances, stacked: N or 1 of them."""

    def __init__(self, sketches: Sequence[RaceSketch]) -> None:
        releases = [s.release for s in sketches]
        self.q = np.array([s.normalized() for s in sketches])  # (N, rows, buckets)
        self.n = np.array([s.n for s in sketches], float)
        self.noise = np.array([s.noise for s in sketches], float)
        self.fourth = np.array([0.0 if r is None else r.fourth for r in releases])
        self.estimated = np.array([r is not None and r.n == "private" for r in releases])

    def share(self) -> Floats:
        return np.asarray((1 / self.n)[:, None, None])


def _noise_variance(sides: tuple[_Side, _Side], gap: Floats, spread: Floats) -> Floats:
    rows, buckets = gap.shape[1:]
    fourth = sum(side.fourth / side.n**4 for side in sides)
    clean = np.maximum(_total(gap**2) - rows * buckets * spread, 0.0)
    total = 4 * spread * clean + rows * buckets * (2 * spread**2 + fourth)
    for side in sides:
        if side.estimated.any():
            relative = side.estimated * side.noise * buckets / rows / side.n**2
            total = total + 4 * relative * _total(side.q * gap) ** 2
    return np.asarray(total)


def _sampling_variance(sides: tuple[_Side, _Side], gap: Floats, spread: Floats) -> Floats:
    pairs = [(side.q, side.share()) for side in sides]
    diagonal = sum(w * q for q, w in pairs)  # C = diag(diagonal) - sum of w q q'
    own = np.maximum(diagonal - sum(w * q**2 for q, w in pairs), 0)
    # gap holds noise and sampling error of its own: take their part out of its squares
    along = _total(diagonal * (gap**2 - spread[:, None, None] - own))
    squared = _total(diagonal**2)
    for q, w in pairs:
        weight = w[:, 0, 0]
        along = along - weight * (_dot(q, gap) ** 2 - spread[:, None] * _dot(q, q)).sum(axis=1)
        squared = squared - 2 * weight * _total(diagonal * q**2)
        for r, v in pairs:
            squared = squared + weight * v[:, 0, 0] * (_dot(q, r) ** 2).sum(axis=1)
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
    counts = np.sum([s.counts for s in sketches], axis=0)
    n = float(sum(s.n for s in sketches))
    variance = sum(s.noise for s in sketches)
    fourth = sum(0.0 if s.release is None else s.release.fourth for s in sketches)
    kept = next((s.release for s in sketches if s.release is not None), None)
    trace = _trace(sketches)
    rest, errors = sketches[0].empty_like(), np.empty(len(sketches))
    for i, s in enumerate(sketches):
        own = 0.0 if s.release is None else s.release.fourth
        rest.counts, rest.n = counts - s.counts, n - s.n
        if kept is not None:
            left = max(variance - s.noise, 0.0), max(fourth - own, 0.0)
            rest.release = replace(kept, variance=left[0], fourth=left[1])
        usual = 2 * trace * (s.rows * (1 / s.n + 1 / rest.n)) ** 2
        noise, sampling = variances(s, [rest])
        squared = noise[0] + max(sampling[0], usual)
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
    inverse = _sums(1 / n)
    noise = _sums(np.array([s.noise for s in sketches]) / n**2)
    fourth = _sums(
        np.array([0 if s.release is None else s.release.fourth for s in sketches]) / n**4
    )
    noisy = 4 * noise * rows * inverse + rows * buckets * (2 * noise**2 + fourth)
    errors: Floats = np.sqrt(2 * _trace(sketches) * inverse**2 + noisy / rows**2)
    return errors


def _trace(sketches: Sequence[RaceSketch]) -> float:
    """Return the mean over rows of trace((diag(p) - pp')^2)."""
    p = np.maximum(np.sum([s.counts for s in sketches], axis=0), 0).astype(float)
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1)
    second, third = (p**2).sum(axis=1), (p**3).sum(axis=1)
    return float((second - 2 * third + second**2).mean())


def _sums(values: Floats) -> Floats:
    sums: Floats = values[:, None] + values
    return sums


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


def plug_in(a: RaceSketch, b: RaceSketch, points: Any, proposal: ArrayLike | None = None) -> float:
    """Monte-Carlo estimate with kernel densities in place of the true ones.

    Parameters
    ----------
    a, b : RaceSketch
        Alike sketches.
    points : as in `RaceSketch.add`
        Where the densities are compared.
    proposal : array (n,), optional
        The points' density, up to a factor, if they were drawn from a known distribution (1 for
        uniform points). Default: as many points of a's distribution as of b's, whose own mixture
        is the proposal; the unknown integral of the kernel then cancels.
    """
    a.check_alike(b)
    p, q = a.density(points), b.density(points)
    if proposal is None:
        both = p + q
        return float(np.mean(np.abs(p - q)[both > 0] / both[both > 0]))
    weight = 1 / np.asarray(proposal, float)
    return float(np.sum(weight * np.abs(p / (p @ weight) - q / (q @ weight))) / 2)


class Bounds(NamedTuple):
    """What two sketches prove about the total variation of the two data sets."""

    lower: float
    lower_mean: float
    upper: float


def bounds(a: RaceSketch, b: RaceSketch) -> Bounds:
    """Bounds from the cells: each row is a partition, and no partition shows more than the data.

    `lower` is that of the best row, `lower_mean` the mean over rows (kind "tvd-lower"). The upper
    bound is always 1, because different data may fall into the same buckets.
    """
    if a.private or b.private:
        raise ValueError("noise breaks the bounds; use distance(..., kind='mmd')")
    halves = np.abs(_gap(a, b)).sum(axis=1) / 2
    return Bounds(float(halves.max()), float(halves.mean()), 1.0)


class PathSum(NamedTuple):
    """The paper's estimate, and what bounds and approximates it."""

    value: float
    by_frobenius: float
    upper_l1: float
    upper_frobenius: float


def path_sum(
    a: RaceSketch, b: RaceSketch, paths: int = 10_000, rng: np.random.Generator | None = None
) -> PathSum:
    """Mean over paths through the sketch of |the sum of bucket differences on the path|.

    The paper replaces the sum over all buckets ** rows paths by the Frobenius norm and calls that
    an upper bound. The upper bounds are the summed absolute differences / buckets, and
    sqrt(rows / buckets) times the norm. A path is a sum of independent draws of mean zero, one per
    row. By the central limit theorem the mean is about sqrt(2 / (pi buckets)) times the norm,
    `by_frobenius`, so the norm is a good substitute.

    Parameters
    ----------
    a, b : RaceSketch
        Alike sketches.
    paths : int
        How many paths to draw; all are enumerated if there are at most that many.
    rng : Generator, optional
        Needed when paths are drawn.
    """
    gap = _gap(a, b)
    rows, buckets = gap.shape
    if rows * math.log(buckets) <= math.log(paths):
        sums = np.zeros(1)
        for row in gap:
            sums = np.add.outer(sums, row).ravel()
    elif rng is None:
        raise ValueError(f"{buckets} ** {rows} paths are too many: give rng to draw {paths}")
    else:
        sums = sum((rng.choice(row, paths) for row in gap), np.zeros(paths))
    norm = float(np.sqrt((gap**2).sum()))
    return PathSum(
        float(np.abs(sums).mean()),
        math.sqrt(2 / (math.pi * buckets)) * norm,
        float(np.abs(gap).sum() / buckets),
        math.sqrt(rows / buckets) * norm,
    )


def _gap(a: RaceSketch, b: RaceSketch) -> Floats:
    a.check_alike(b)
    return a.normalized() - b.normalized()


def gaussian_tvd(mean_a: ArrayLike, mean_b: ArrayLike, covariance: ArrayLike) -> float:
    """Total variation between two Gaussians of equal covariance: 2 Phi(D / 2) - 1.

    D is the Mahalanobis distance of the means. (The paper prints the formula without the half.)

    Examples
    --------
    >>> round(gaussian_tvd([0.0], [2.0], [[1.0]]), 6)              # 2 Phi(1) - 1
    0.682689
    """
    gap = np.subtract(mean_a, mean_b)
    squared = float(gap @ np.linalg.solve(np.asarray(covariance, float), gap))
    return math.erf(math.sqrt(squared) / 2 / math.sqrt(2))


class Simulated(NamedTuple):
    """One pair of Gaussians: the exact total variation, and what their sketches say."""

    exact: float
    plug_in: float
    frobenius: float
    tvd_lower: float


def simulate_gaussians(
    pairs: int,
    rng: np.random.Generator,
    dim: int = 16,
    samples: int = 1000,
    spread: float = 2.0,
    rows: int = 200,
    bits: int = 10,
) -> list[Simulated]:
    """Compare sketches with the truth for pairs of Gaussians (appendix C.1).

    Unit covariance. The difference of the means has a random direction and a length that is uniform
    from 0 to `spread`. A constant column lets hyperplanes miss the origin.
    """
    from fedcohort.sketch.race import RaceSketch, distance

    out = []
    for seed in range(pairs):
        shift = rng.standard_normal(dim)
        shift *= rng.uniform(0, spread) / np.linalg.norm(shift)
        draws = rng.standard_normal((2, 2, samples, dim + 1))  # sketched and fresh, of a and b
        draws[:, 1, :, :dim] += shift
        draws[..., dim] = 2.0
        a = RaceSketch.srp(dim + 1, rows=rows, bits=bits, seed=seed)
        b = a.empty_like()
        a.add(draws[0, 0])
        b.add(draws[0, 1])
        exact = gaussian_tvd(np.zeros(dim), shift, np.eye(dim))
        estimate = plug_in(a, b, draws[1].reshape(-1, dim + 1))
        norm = distance(a, b, debias=True)
        out.append(Simulated(exact, estimate, norm, bounds(a, b).lower_mean))
    return out
