"""Thompson sampling without replacement, with fresh draws for every pick, in sublinear time.

Each pick of FedACS's Algorithm 1 takes the client with the largest of independent Beta draws, and
every pick draws again: a pool of 4,000 out of 10,000 clients costs 32 million draws.

Import this module inside the function that needs it, because importing Numba takes a second.

Instead, represent client i by a Poisson process on (0, 1) with intensity r_i = f_i / F_i, its
reversed hazard. The highest point of that process lies below x with probability F_i(x), so it is a
Beta draw. The largest draw of all clients is the highest point of the union of the processes.
Thinning finds it from the top: propose points from a larger, piecewise constant intensity, and
accept a point of client i at x with probability r_i(x) over its bound. So r_i is evaluated only
where a point is proposed. Since A, B >= 0, the densities are log-concave and r_i decreases in x:
a bound at the lower end of an interval holds on the whole interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fedcohort.compiled import compiled

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile `function`."""
    return cast(F, compiled(nogil=True)(function))


_INTERVALS = 32  # when these are used up, the table is rebuilt for the remaining clients
_MASS = (
    8.0  # expected proposals per interval: fewer means more intervals, more means a looser bound
)
_TERMS = 16  # terms of the series that bounds r below the mean


@jit
def pool_loop(a: Array, b: Array, counts: Indices, size: int, rng: np.random.Generator) -> Indices:
    """Pick `size` times a group by the largest fresh Beta(a, b) draw of all members left."""
    counts = counts.copy()
    groups = counts.size
    norm = np.empty(groups)
    for g in range(groups):
        norm[g] = math.lgamma(a[g] + b[g]) - math.lgamma(a[g]) - math.lgamma(b[g])
    ends = np.empty(_INTERVALS + 1)  # interval i is (ends[i + 1], ends[i]]
    bounds = np.empty((_INTERVALS, groups))
    trees = np.zeros((_INTERVALS, groups + 1))
    totals = np.empty(_INTERVALS)
    width, used, ends[0] = 0.25, 0, 1.0
    chosen = np.empty(size, np.int64)
    for pick in range(size):
        if used > _INTERVALS // 2 or ends[0] < 1.0:
            used, ends[0] = 0, 1.0
        at, x = 0, ends[0]
        budget = rng.standard_exponential()
        while True:
            if at == used:
                if used == _INTERVALS:  # the table is full: drop what lies above x
                    at, used, ends[0] = 0, 0, x
                width = _add_interval(a, b, norm, counts, ends, bounds, trees, totals, used, width)
                used += 1
            step = totals[at] * (x - ends[at + 1])
            if budget >= step:
                budget -= step
                at += 1
                x = ends[at]
                continue
            x -= budget / totals[at]
            g = _find(trees[at], rng.random() * totals[at])
            level = rng.random() * bounds[at, g]
            if counts[g] > 0 and level < reversed_hazard(a[g], b[g], norm[g], x):
                break
            budget = rng.standard_exponential()
        chosen[pick] = g
        counts[g] -= 1
        for i in range(used):
            totals[i] = max(totals[i] - bounds[i, g], 0.0)
            _add(trees[i], g, -bounds[i, g])
    return chosen


@jit
def _add_interval(
    a: Array, b: Array, norm: Array, counts: Indices, ends: Array, bounds: Array, trees: Array,
    totals: Array, at: int, width: float,
) -> float:  # fmt: skip
    """Append an interval in which about `_MASS` proposals fall; return its width."""
    top = ends[at]
    low, high = 0.0, 0.5 * top  # widths too small and too large
    width = min(width, high)
    while True:
        x = top - width
        total = _fill_bounds(a, b, norm, counts, x, bounds[at])
        mass = total * width
        if mass > 2 * _MASS:
            high = width
        elif mass < _MASS / 4 and width < 0.499 * top:
            low = width
        else:
            break
        if high - low < 1e-3 * high:
            break
        guess = width * _MASS / max(mass, 1e-3 * _MASS)
        width = guess if low < guess < high else 0.5 * (low + high)
    ends[at + 1], totals[at] = x, total
    tree = trees[at]
    tree[:] = 0.0
    for g in range(counts.size):
        tree[g + 1] += counts[g] * bounds[at, g]
        above = (g + 1) + ((g + 1) & -(g + 1))
        if above <= counts.size:
            tree[above] += tree[g + 1]
    return width


@jit
def _fill_bounds(a: Array, b: Array, norm: Array, counts: Indices, x: float, out: Array) -> float:
    """Write a bound of each group's r on [x, 1) and return their sum over all members."""
    log_x, log_y = math.log(x), math.log1p(-x)
    total = 0.0
    for g in range(counts.size):
        if counts[g] == 0:
            out[g] = 0.0
            continue
        mean = a[g] / (a[g] + b[g])
        if x >= mean:
            # F(x) >= 1/e for log-concave laws (Gruenbaum), and >= t / (1 + t) (Cantelli)
            density = math.exp(norm[g] + (a[g] - 1) * log_x + (b[g] - 1) * log_y)
            t = (x - mean) ** 2 * (a[g] + b[g] + 1) / (mean * (1 - mean))
            out[g] = density * (math.e if t * (math.e - 1) < 1 else (1 + t) / t)
        else:
            # r = a / (x (1 - x) S), S a series of positive terms: cutting it short bounds r
            term, series = 1.0, 1.0
            for n in range(_TERMS):
                term *= x * (a[g] + b[g] + n) / (a[g] + 1 + n)
                series += term
            out[g] = a[g] / (x * (1 - x) * series)
        total += counts[g] * out[g]
    return total


@jit
def reversed_hazard(a: float, b: float, norm: float, x: float) -> float:
    """Density over distribution function of Beta(a, b) at x; norm is -log B(a, b)."""
    if x * (a + b + 2) <= a + 1:
        return a / (x * (1 - x) * _fraction(a, b, x))
    density = math.exp(norm + (a - 1) * math.log(x) + (b - 1) * math.log1p(-x))
    return density / (1 - density * x * (1 - x) / b * _fraction(b, a, 1 - x))


@jit
def _fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function, by Lentz' method."""
    tiny = 1e-300
    c = 1.0
    d = 1 - (a + b) * x / (a + 1)
    d = 1 / d if abs(d) > tiny else 1 / tiny
    value = d
    for m in range(1, 100_000):
        for even in (True, False):
            if even:
                term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
            else:
                term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
            d = 1 + term * d
            d = 1 / d if abs(d) > tiny else 1 / tiny
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return value


@jit
def _find(tree: Array, mark: float) -> int:
    """Index whose share of the cumulative sum covers `mark` (Fenwick tree)."""
    size = tree.size - 1
    step = 1
    while 2 * step <= size:
        step *= 2
    at = 0
    while step:
        if at + step <= size and tree[at + step] <= mark:
            at += step
            mark -= tree[at]
        step //= 2
    return min(at, size - 1)


@jit
def _add(tree: Array, index: int, value: float) -> None:
    at = index + 1
    while at < tree.size:
        tree[at] += value
        at += at & -at
