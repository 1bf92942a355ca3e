"""Total variation between the distributions that two sketches were drawn from, calibrated.

Half the summed absolute differences of a row, averaged over rows, is the total variation of two
*data sets* as the buckets see them (kind "tvd-lower"). As an estimate of the distributions' it is
too high: two samples of 50 from one distribution are about 0.5 apart. Write d for the difference of
a cell, m for its expectation and s for its standard deviation. The wanted number is
T = sum |m| / 2, averaged over rows; it never exceeds the true total variation. Two estimates lie on
either side of it.

- Low, by splitting: half of the records say which side has more in a cell, the other half by how
  much. The expectation is at most |m|, and 0 where there is no difference. Exact counts are split
  by thinning; for noisy counts, the average over all splits is that of a normal d.
- High: E|d| >= |m|, and for normal d it is s h(m / s) with a convex h. By Jensen's inequality,
  the sum of |d| is in expectation at least S h(2 T / S), S being the sum of s, which is solved for
  T. Cells of fewer than five records are not normal; their |d| counts in full.

One record changes the average of |d| by at most 2 / n, so its variance is at most
(1 / n_a + 1 / n_b) / 4 for T by the Efron-Stein inequality, whatever the rows share; noise adds
its own. The interval reaches 1.96 standard deviations beyond both estimates, and the value lies in
their middle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from fedcohort.rounds import stream
from fedcohort.sketch.distances import Floats

if TYPE_CHECKING:
    from fedcohort.sketch.race import RaceSketch

SPLITS = 16  # thinnings that are averaged
MIN_COUNT = 5  # records of a cell from which on its difference is taken as normal
WIDTH = 1.96  # standard deviations on either side: 95 %
STEEPEST = 1.7  # largest slope of the split estimate in d
GRID = np.linspace(0.0, 12.0, 2401)


class Variation(NamedTuple):
    """An estimate of the total variation that the buckets see, and its 95 % interval."""

    value: float
    low: float
    high: float


def total_variation(
    a: RaceSketch, b: RaceSketch, rng: np.random.Generator | None = None
) -> Variation:
    """Estimate the total variation between what two sketches were drawn from.

    Parameters
    ----------
    a, b : RaceSketch
        Alike sketches, exact or private.
    rng : Generator, optional
        Splits the records of exact sketches; by default the same splits for the same sketches.

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
    high = _unfolded(np.abs(d), s, normal)
    error = math.sqrt((1 / a.n + 1 / b.n) / 4 + cells * noise / (4 * a.rows**2))
    ends = low - STEEPEST * WIDTH * error, _unfolded(np.abs(d), s, normal, 2 * WIDTH * error)
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


def _unfolded(size: Floats, s: Floats, normal: NDArray[np.bool_], more: float = 0.0) -> float:
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
