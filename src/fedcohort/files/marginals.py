"""One small public histogram per column, to tell which columns of two sites differ.

Each record falls into exactly one of 16 public bins per column, so that it changes one count per
column: a number is cut at fixed multiples of its scale around its center, a category has a bin per
level, and bin 0 counts missing values.

Histograms are compared by contrasts, weighted sums of the differences of their shares: single bins,
location and spread of numbers and ordered levels, pairs of bins of a few values. The chance of a
contrast as large as the one seen, where both sides draw from their pooled histogram, is bounded by
Chernoff's method: exp(K(t) - t * contrast) for the best t, where K adds up the logarithms of moment
generating functions of the drawn records and of the noise, -k log(1 - t^2 w^2 v / (2 k)) per bin
for the sum of k Laplace variables of variance v in all. Without noise, a bin's chance is that of
Fisher's exact test.

A column is marked if this chance, times the columns and sites that are looked at, is below 1%, the
chance of even one false mark (Bonferroni; in a column, half is for single bins).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import hypergeom, norm

from fedcohort.files.columns import FACTORS, PERIODS, Column, columns_of
from fedcohort.sketch.race import BINS, ColumnCounts, RaceSketch

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
EDGES = np.array([-3, -2, -1.5, -1, -0.65, -0.35, -0.1, 0.1, 0.35, 0.65, 1, 1.5, 2, 3])
MIDDLES = np.concatenate([[-3.5], (EDGES[1:] + EDGES[:-1]) / 2, [3.5]])
FALSE_MARKS = 0.01
MIN_BUCKETS = 12  # in use, of which all counts cannot be multiples by chance
GROUP = "group"  # of values that have no public name
END_SHARE = 0.5  # of a site's values in an end bin: beyond, the column cannot be judged
CUT_SHARE = 0.05  # of them in an end bin: beyond, a shift may be larger than the bins show
MAX_PAIRED = 8  # values of a column of which all pairs are compared
FARTHEST = 1.5  # scales from the center beyond which a number counts no more for the location
USUAL_SPREAD = 0.8  # mean distance from the center, in scales, of normal numbers
TILTS = np.geomspace(0.5, 16, 20)  # values of t that are tried, times the standard error
NEAR_LIMIT = 1 - np.geomspace(0.5, 0.02, 8)  # and, for Laplace noise, shares of the largest t


def _is_line(column: Column) -> bool:
    return column.kind == "number" or column.since is not None


def bins_of(columns: Sequence[Column], parts: Sequence[Any]) -> NDArray[np.int64]:
    """Return the bin of every record in every column, (n, columns), from the encoded columns."""
    pairs = zip(columns, parts, strict=True)
    bins = [_bins(column, part.order) * ~part.missing for column, part in pairs]
    return np.stack(bins, axis=1).astype(np.int64)


def _bins(column: Column, order: Floats) -> NDArray[np.int64]:
    if _is_line(column):
        return 1 + np.searchsorted(EDGES, order)
    values = np.maximum(order, 0).astype(np.int64)
    if column.slots:
        return 1 + values % (BINS - 1)
    kinds = PERIODS[column.parts[0]] if column.parts else len(column.levels) + 1
    return 1 + (values if kinds < BINS else values * (BINS - 1) // kinds)


def _possible(column: Column) -> Bools:
    return np.array([label != "" for label in bin_labels(column)])


class ColumnGap(NamedTuple):
    """How two sites differ in one column.

    `chance` is how likely chance alone explains the difference; `what` says in words what differs.
    Where an unmarked column cannot be judged, `unknown` says what to state. `hint` names a cause
    that would explain a marked one: another unit, or an exchanged column.
    """

    column: str
    chance: float
    marked: bool
    what: str
    unknown: str = ""
    hint: str = ""

    @property
    def answer(self) -> str:
        """Whether the column differs: yes, no, or cannot tell."""
        return "yes" if self.marked else "cannot tell" if self.unknown else "no"


class _Side(NamedTuple):
    """Histograms (clients, bins); of each the records, and variance and cumulant of the noise."""

    counts: Floats
    n: Floats
    noise: Floats
    fourth: Floats

    @property
    def q(self) -> Floats:
        """The normalized histograms."""
        return np.asarray(self.counts / self.n)

    def without(self, other: _Side) -> _Side:
        """Return what is left of this side; noise is never negative."""
        parts = [mine - theirs for mine, theirs in zip(self, other, strict=True)]
        return _Side(parts[0], parts[1], np.maximum(parts[2], 0), np.maximum(parts[3], 0))


def _sides(marginals: Sequence[ColumnCounts]) -> list[_Side]:
    """Return each column of all clients, (clients, bins) and (clients, 1)."""
    n, noise, fourth = np.array([(m.n, m.noise, m.fourth) for m in marginals], float).T[:, :, None]
    columns = np.stack([m.counts for m in marginals], axis=1).astype(float)
    return [_Side(counts, n, noise, fourth) for counts in columns]


def column_gaps(sketches: Sequence[RaceSketch]) -> list[list[ColumnGap]]:
    """Compare every site, sketched with `explain`, with the others, column by column.

    In each column the sites that stand out are taken out of "the others", the farthest first and
    at most half of them: one strange site must not make all others differ from the rest.
    """
    columns = columns_of(sketches[0])
    tests = _tests(sketches, columns)
    sites: list[list[tuple[ColumnGap, Floats, Floats]]] = [[] for _ in sketches]
    for column, mine in zip(columns, _sides(_held(sketches)), strict=True):
        rest, chances = _usual(mine, column, tests)
        shares = (np.where(_possible(column), side.q, 0.0) for side in (mine, rest))
        for site, own, others, chance in zip(sites, *shares, chances, strict=True):
            marked = bool(chance * tests < FALSE_MARKS)
            unknown = "" if marked else _unknown(column, own, others)
            words = _words(column, own, others)
            gap = ColumnGap(column.name, float(chance), marked, words, unknown)
            site.append((gap, own, others))
    return [_hinted(columns, site) for site in sites]


def _tests(sketches: Sequence[RaceSketch], columns: Sequence[Column]) -> int:
    """Return how many comparisons are made; that of two sites is one."""
    return len(columns) * (1 if len(sketches) == 2 else len(sketches))


def copies(sketch: RaceSketch) -> int:
    """Return how often every record seems to be there: all exact counts are multiples of that."""
    if sketch.private or int((sketch.counts > 0).sum(axis=1).max()) < MIN_BUCKETS:
        return 1
    return int(np.gcd.reduce(sketch.counts, axis=None))


def _held(sketches: Sequence[RaceSketch]) -> list[ColumnCounts]:
    """Return the histograms; copies of records are no further evidence."""
    for sketch in sketches[1:]:
        sketches[0].check_alike(sketch)
    counts = [
        replace(s.marginals, counts=s.marginals.counts // times, n=s.marginals.n // times)
        if (times := copies(s)) > 1
        else s.marginals
        for s in sketches
        if s.marginals is not None
    ]
    if len(counts) != len(sketches) or len(counts) < 2:
        raise ValueError(
            "these sketches hold no single columns: make them with explain, such as 0.5"
        )
    if min(m.n for m in counts) < 2:
        raise ValueError("sites of fewer than two records cannot be compared")
    return counts


def visible_shares(sketches: Sequence[RaceSketch]) -> Floats:
    """Return about which share of each site's records must differ in a column to be marked.

    For one bin of middling size, by the normal approximation; 1 means that nothing would be.
    """
    sites = _sides(_held(sketches))[0]
    n, noise = sites.n[:, 0], sites.noise[:, 0]
    elsewhere, noise_elsewhere = n.sum() - n, noise.sum() - noise
    tests = _tests(sketches, columns_of(sketches[0]))
    variance = (1 / n + 1 / elsewhere) / 4 + noise / n**2 + noise_elsewhere / elsewhere**2
    return np.asarray(
        np.minimum(norm.isf(FALSE_MARKS / tests / (4 * BINS)) * np.sqrt(variance), 1.0)
    )


def _usual(sites: _Side, column: Column, tests: int) -> tuple[_Side, Floats]:
    """Return whom each client is compared with in a column, others that are alike; and chances."""
    clients = len(sites.n)
    inside = np.ones(clients, bool)
    while True:
        total = _Side(*(part[inside].sum(axis=0, keepdims=True) for part in sites))
        member = _Side(*(part * inside[:, None] for part in sites))
        rest = total.without(member)
        chances = _chances(sites, rest, column)
        left = np.where(inside, chances, 1.0)
        worst = int(left.argmin())
        if left[worst] * tests >= FALSE_MARKS or inside.sum() - 1 < max(2, clients / 2):
            return rest, chances
        inside[worst] = False


class _Numbers(NamedTuple):
    """A marked column of numbers: its name, where its values lie here and elsewhere, in its unit.

    `end` is -1 or 1 if most values here lie in that end bin, so that `here` is but a bound.
    """

    column: Column
    here: float
    elsewhere: float
    end: int

    def may_be(self, value: float) -> bool:
        """Whether the values here could be those around `value`, rather than those elsewhere."""
        if self.end:
            return self.end * (value - self.column.center) > 3 * self.column.scale
        return abs(self.here - value) < 0.25 * abs(self.here - self.elsewhere)


def _hinted(
    columns: Sequence[Column], site: Sequence[tuple[ColumnGap, Floats, Floats]]
) -> list[ColumnGap]:
    """Add to a site's gaps what may explain them."""
    gaps = [gap for gap, _, _ in site]
    marked = {
        j: _Numbers(column, _location(column, mine), _location(column, rest), _end(mine))
        for j, (column, (gap, mine, rest)) in enumerate(zip(columns, site, strict=True))
        if gap.marked and column.kind == "number"
    }
    for j, one in marked.items():
        others = [
            other.column.name
            for other in marked.values()
            if one.may_be(other.elsewhere) and other.may_be(one.elsewhere)
        ]
        hint = f"exchanged with {others[0]}?" if len(others) == 1 else _unit(one)
        gaps[j] = gaps[j]._replace(hint=hint)
    return gaps


def _location(column: Column, shares: Floats) -> float:
    positive = np.maximum(shares[1:], 0)
    return float(column.center + column.scale * (MIDDLES @ positive) / max(positive.sum(), 1e-9))


def _end(shares: Floats) -> int:
    limit = END_SHARE * shares[1:].sum()
    return int(shares[-1] > limit) - int(shares[1] > limit)


def _unit(one: _Numbers) -> str:
    """Name the factors between usual units that would explain where the values lie."""
    fitting = [factor for factor in FACTORS if one.may_be(factor * one.elsewhere)]
    if not one.end:
        fitting = sorted(fitting, key=lambda f: abs(f * one.elsewhere - one.here))[:1]
    named = [f for f in fitting if one.column.name.lower() in FACTORS[f].lower().split()]
    if not named and len(fitting) > 2:
        return "another unit?"
    words = [
        f"{f'times {f:.4g}' if f > 1 else f'divided by {1 / f:.4g}'}: {FACTORS[f]}?"
        for f in named or fitting
    ]
    return " or ".join(words)


def _chances(a: _Side, b: _Side, column: Column) -> Floats:
    """How likely chance alone gives at least the differences seen in one column, per client."""
    bins = np.flatnonzero(_possible(column))
    exact = not (a.noise.any() or b.noise.any())
    if exact:  # what no record of anybody falls into cannot differ
        bins = bins[(a.counts + b.counts)[:, bins].any(axis=0)]
    if exact and len(bins) <= 2:
        return np.asarray(_fisher(a, b)[:, bins].min(axis=1))
    shapes = _shapes(column)
    each = 0.5 / len(bins) if len(shapes) else 1 / len(bins)
    singles = _fisher(a, b)[:, bins] if exact else _chernoff(a, b, np.eye(BINS)[bins])
    least: Floats = singles.min(axis=1) / each
    if len(shapes):
        least = np.minimum(least, _chernoff(a, b, shapes).min(axis=1) * 2 * len(shapes))
    return np.minimum(least, 1.0)


def _fisher(a: _Side, b: _Side) -> Floats:
    """Return the chance of each bin's count by Fisher's exact test, (clients, bins)."""
    total, size = a.counts + b.counts, a.n + b.n
    expected = total * a.n / size
    variance = expected * (1 - total / size) * (b.n / size)
    chances = np.ones_like(total)
    rows, bins = np.nonzero((a.counts - expected) ** 2 > 4 * variance)
    x, table = a.counts[rows, bins], (size[rows, 0], total[rows, bins], a.n[rows, 0])
    tails = hypergeom.sf(x - 1, *table), hypergeom.cdf(x, *table)
    chances[rows, bins] = np.minimum(2 * np.minimum(*tails), 1.0)
    return chances


def _chernoff(a: _Side, b: _Side, contrasts: Floats) -> Floats:
    """Bound the chances of contrasts (contrasts, bins), (clients, contrasts)."""
    difference = (a.q - b.q) @ contrasts.T
    pooled = np.maximum(a.counts + b.counts, 0)
    pooled = pooled / np.maximum(pooled.sum(axis=1, keepdims=True), 1e-300)
    mean = pooled @ contrasts.T
    variance = np.maximum(pooled @ (contrasts**2).T - mean**2, 0)
    squares, largest = (contrasts**2).sum(axis=1), (contrasts**2).max(axis=1)
    noise = a.noise / a.n**2 + b.noise / b.n**2
    spread = np.sqrt(variance * (1 / a.n + 1 / b.n) + squares * noise)
    limit = np.minimum(_largest_tilt(a), _largest_tilt(b)) / np.sqrt(largest)
    limit = np.where(np.isfinite(limit), limit, 0.0)
    t = TILTS[:, None, None] / np.where(spread > 0, spread, np.inf)
    t = np.concatenate([t, NEAR_LIMIT[:, None, None] * limit])  # (tilts, clients, contrasts)
    bound = -t * np.abs(difference)
    for side, sign in ((a, np.sign(difference)), (b, -np.sign(difference))):
        for k, contrast in enumerate(contrasts):
            tilt = (sign * t / side.n)[:, :, k]
            bound[:, :, k] += side.n[:, 0] * _log_moment(tilt, pooled, contrast)
        bound += squares / largest * _noise(t**2 * largest, side)
    logs = np.where(spread > 0, np.fmin.reduce(bound, axis=0), -np.inf)
    logs = np.where(np.abs(difference) > 1e-12, np.minimum(logs + np.log(2), 0), 0.0)
    return np.exp(logs)


def _log_moment(tilt: Floats, shares: Floats, contrast: Floats) -> Floats:
    weights, inverse = np.unique(contrast, return_inverse=True)
    of_weight = shares @ np.eye(len(weights))[inverse]  # (clients, weights)
    centered = weights - (of_weight @ weights)[:, None]
    powers = np.exp(np.minimum(tilt[:, :, None] * centered, 700))
    return np.asarray(np.log((of_weight * powers).sum(axis=2)))


def _laplace_parts(side: _Side) -> Floats:
    """Return of how many Laplace variables the noise is the sum; 0 for Gaussian noise."""
    return np.asarray(3 * side.noise**2 / np.where(side.fourth > 0, side.fourth, np.inf))


def _noise(squares: Floats, side: _Side) -> Floats:
    """Return log E exp(t * noise) of one bin's share, for t^2 = `squares`."""
    parts, half = _laplace_parts(side), squares * side.noise / side.n**2 / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(parts > 0, half / parts, 0.0)
        laplace = np.where(ratio < 1, -parts * np.log1p(-ratio), np.inf)
    return np.where(parts > 0, laplace, half)


def _largest_tilt(side: _Side) -> Floats:
    parts, variance = _laplace_parts(side), side.noise / side.n**2
    return np.where(parts > 0, np.sqrt(2 * parts / np.where(parts > 0, variance, 1.0)), np.inf)


@lru_cache(maxsize=256)
def _shapes(column: Column) -> Floats:
    """Return the contrasts of several bins, (contrasts, bins)."""
    if _is_line(column):
        place = np.concatenate([[0.0], np.clip(MIDDLES, -FARTHEST, FARTHEST)])
        spread = np.minimum(np.abs(MIDDLES), 2 * FARTHEST) - USUAL_SPREAD
        return np.array([place, np.concatenate([[0.0], spread])])
    if column.kind == "ordered":
        level = np.arange(BINS) - 1
        inside = (level >= 0) & (level < len(column.levels))
        return np.where(inside, level / (len(column.levels) - 1) - 0.5, 0.0)[None]
    bins, unit = np.flatnonzero(_possible(column)), np.eye(BINS)
    pairs = [unit[i] - unit[j] for i in bins for j in bins if i < j]
    return np.array(pairs) if len(bins) <= MAX_PAIRED else np.empty((0, BINS))


def _unknown(column: Column, *shares: Floats) -> str:
    """Say what to state where the bins cannot show a difference: most values are in an end bin."""
    for end, side in ((1, "below"), (-1, "above")):
        most = max(float(q[end] / max(q[1:].sum(), 1e-9)) for q in shares)
        if most > END_SHARE and _is_line(column):
            return (
                f"{min(most, 1):.0%} of a site's values lie more than 3 scales {side} the center: "
                "state a center and scale that fit"
            )
    return ""


def _words(column: Column, mine: Floats, rest: Floats) -> str:
    """Say what differs most in a column, from the normalized histograms."""
    gap = mine - rest
    if abs(gap[0]) > 0.25 * np.abs(gap).sum():
        return f"{'more' if gap[0] > 0 else 'fewer'} missing values ({gap[0]:+.0%})"
    if _is_line(column):
        shift = float(MIDDLES @ gap[1:])
        if abs(shift) < 0.15:
            return "spread or shape differs"
        unit = " days" if column.since is not None else ""
        cut = max(mine[1], mine[-1], rest[1], rest[-1]) > CUT_SHARE
        size = float(f"{abs(shift) * column.scale:.2g}")
        side = "higher" if shift > 0 else "lower"
        return f"{side} by {'at least' if cut else 'about'} {size:,.10g}{unit}"
    most = 1 + int(np.abs(gap[1:]).argmax())
    name = bin_labels(column)[most]
    name = "some values" if name.startswith(GROUP) else name
    return f"{'more' if gap[most] > 0 else 'fewer'} {name} ({gap[most]:+.0%})"


@lru_cache(maxsize=256)
def bin_labels(column: Column) -> tuple[str, ...]:
    """Name the bins; one that no record can fall into has no name.

    >>> bin_labels(Column("age", center=60, scale=10))[:4]
    ('missing', 'below 30', '30 to 40', '40 to 45')
    """
    names = [f"{GROUP} {i}" for i in range(1, BINS)]
    if column.kind == "number":
        cuts = [f"{column.center + column.scale * edge:.3g}" for edge in EDGES]
        inner = [f"{low} to {high}" for low, high in pairwise(cuts)]
        names = [f"below {cuts[0]}", *inner, f"above {cuts[-1]}"]
    elif column.kind == "boolean":
        names = ["false", "true"]
    elif column.levels and len(column.levels) + 1 < BINS:
        names = [*(repr(level) for level in column.levels), "other values"]
    elif column.parts:
        part, period = column.parts[0], PERIODS[column.parts[0]]
        ends = [round(i * period / (BINS - 1)) for i in range(BINS)]
        names = [f"{part} {low} to {high}" for low, high in pairwise(ends)]
        if period < BINS:
            names = [f"{part} {i}" for i in range(period)]
    return ("missing", *names, *[""] * (BINS - 1 - len(names)))
