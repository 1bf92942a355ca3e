"""Total variation between the distributions behind two sketches (paper 0, sections 3.2.2, C.1).

Three views, from strong assumptions to none:

- `plug_in` puts the sketches' kernel densities into the integral, by Monte Carlo. The kernel blurs
  both distributions, so it reads low; it converges as the kernel narrows (more bits of sign
  projections) and the data grow. The p-stable kernel of one projection a row falls only like
  1 / distance: from two dimensions on no width makes it narrow;
- `path_sum` is the paper's estimate over all ways through the buckets, with its bounds;
- `bounds` gives what holds for the two data sets at hand, whatever the hash functions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.signals.stack import Floats

if TYPE_CHECKING:
    from fedcohort.signals.race import RaceSketch


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
    """Bounds by cells: each row is a partition, and no partition sees more than all there is.

    `lower` is the best row's, `lower_mean` the rows' mean (kind "tvd-lower"). From above a sketch
    proves nothing but 1: data sets that differ may fall into the same buckets.
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
    """Mean over ways through the sketch of |the sum of bucket differences on the way|.

    The paper replaces the sum over all buckets ** rows ways by the Frobenius norm and calls that
    an upper bound. The upper bounds are the summed absolute differences / buckets, and
    sqrt(rows / buckets) times the norm. But a way is a sum of independent draws, one a row, of
    mean zero: by the central limit theorem the mean is sqrt(2 / (pi buckets)) times the norm,
    `by_frobenius`, which is why the norm serves.

    Parameters
    ----------
    a, b : RaceSketch
        Alike sketches.
    paths : int
        Ways drawn; all are enumerated if there are no more than that.
    rng : Generator, optional
        Needed when ways are drawn.
    """
    gap = _gap(a, b)
    rows, buckets = gap.shape
    if rows * math.log(buckets) <= math.log(paths):
        sums = np.zeros(1)
        for row in gap:
            sums = np.add.outer(sums, row).ravel()
    elif rng is None:
        raise ValueError(f"{buckets} ** {rows} ways are too many: give rng to draw {paths} of them")
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

    Unit covariance; mean differences point at random, their length uniform from 0 to `spread`.
    A constant column turns angles into positions: hyperplanes then need not meet the origin.
    """
    from fedcohort.signals.race import RaceSketch, distance

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
