"""The multi-dueling bandit of FedACS (Wang et al., IWQoS 2021): duels, pools and ranks.

Client i has won A_i and lost B_i duels; its quality is theta_i ~ Beta(A_i + 1, B_i + 1).

Each pick of Algorithm 1 takes the client with the largest of fresh Beta draws: a pool of 4,000 out
of 10,000 clients costs 32 million draws. Instead, client i is a Poisson process on (0, 1) whose
intensity is its reversed hazard, r_i = f_i / F_i: its highest point is a Beta draw, and the largest
draw of all is the highest point of the union. Thinning finds it from the top: points are proposed
from a larger, piecewise constant intensity, and one of client i at x is accepted with probability
r_i(x) over its bound. r_i decreases in x, because A, B >= 0 make the densities log-concave; so a
bound at the lower end of an interval holds on all of it.

Import this module inside the function that needs it, because importing Numba takes a second.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.loops import compiled

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
INTERVALS = 32  # when these are used up, the table is rebuilt for the remaining clients
MASS = 8.0  # expected proposals per interval; with more, the bounds are looser
TERMS = 16  # of the series that bounds r below the mean

_jit = compiled(nogil=True)


class RankPosterior(NamedTuple):
    """Mean and 95 % interval of each client's rank; 1 is the highest reward, the least skew."""

    mean: Array
    lower: Array
    upper: Array


def duel(wins: Array, losses: Array, rewards: Array, rate: float = 1.0) -> tuple[Array, Array]:
    """Let all participants of a round duel each other (Algorithm 2), in O(k log k).

    Of each pair with unequal rewards the higher wins `rate`; returns the new wins and losses.
    """
    order = np.sort(rewards)
    won = wins + rate * np.searchsorted(order, rewards, side="left")
    lost = losses + rate * (rewards.size - np.searchsorted(order, rewards, side="right"))
    return won, lost


def rank_posterior(
    wins: ArrayLike, losses: ArrayLike, rng: np.random.Generator, draws: int = 1000
) -> RankPosterior:
    """Return what the duels say about each client's rank, from `draws` joint draws."""
    won, lost = np.asarray(wins, np.float64), np.asarray(losses, np.float64)
    ranks = np.empty((draws, won.size), np.int32)
    for row in ranks:
        order = np.argsort(-rng.beta(won + 1, lost + 1))
        row[order] = np.arange(1, won.size + 1)
    lower, upper = np.quantile(ranks, [0.025, 0.975], axis=0, method="inverted_cdf").astype(float)
    return RankPosterior(ranks.mean(axis=0), lower, upper)


def thompson_pool(
    wins: ArrayLike, losses: ArrayLike, size: int, rng: np.random.Generator
) -> Indices:
    """Draw the pool of Algorithm 1: `size` times the largest of fresh Beta draws."""
    pairs = np.asarray(wins, np.float64) + 1j * np.asarray(losses, np.float64)
    keys, group_of, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    taken = _pool(keys.real + 1.0, keys.imag + 1.0, counts.astype(np.int64), size, rng)
    # turn picks of groups into picks of clients: within a group all are equally likely
    shuffled = rng.permutation(group_of.size)
    members = shuffled[np.argsort(group_of[shuffled], kind="stable")]
    order = np.argsort(taken, kind="stable")
    picks = np.bincount(taken, minlength=len(counts))
    earlier = np.repeat(np.cumsum(counts) - counts - np.cumsum(picks) + picks, picks)
    result = np.empty(taken.size, np.int64)
    result[order] = members[earlier + np.arange(taken.size)]
    return result


def thompson_pool_one_draw(
    wins: ArrayLike, losses: ArrayLike, size: int, rng: np.random.Generator
) -> Indices:
    """Approximate the pool by the `size` largest of one Beta draw per client, in O(N).

    Algorithm 1 draws anew for every pick, which favors uncertain clients more: for a pair of
    clients the probabilities can differ by 15 percent.
    """
    draws = rng.beta(np.asarray(wins) + 1.0, np.asarray(losses) + 1.0)
    top = np.argpartition(-draws, max(size - 1, 0))[:size]
    return np.asarray(top[np.argsort(-draws[top])])


@_jit
def _pool(a, b, counts, size, rng):
    """Pick `size` times a group by the largest fresh Beta(a, b) draw of all members left."""
    counts = counts.copy()
    norm = np.empty(counts.size)
    for g in range(counts.size):
        norm[g] = math.lgamma(a[g] + b[g]) - math.lgamma(a[g]) - math.lgamma(b[g])
    ends = np.empty(INTERVALS + 1)  # interval i is (ends[i + 1], ends[i]]
    bounds = np.empty((INTERVALS, counts.size))
    totals = np.empty(INTERVALS)
    width, used, ends[0] = 0.25, 0, 1.0
    chosen = np.empty(size, np.int64)
    for pick in range(size):
        if used > INTERVALS // 2 or ends[0] < 1.0:
            used, ends[0] = 0, 1.0
        at, x = 0, ends[0]
        budget = rng.standard_exponential()
        while True:
            if at == used:
                if used == INTERVALS:  # the table is full: drop what lies above x
                    at, used, ends[0] = 0, 0, x
                width, totals[used] = _bound_interval(
                    a, b, norm, counts, ends[used], width, bounds[used]
                )
                ends[used + 1] = ends[used] - width
                used += 1
            step = totals[at] * (x - ends[at + 1])
            if budget >= step:
                budget -= step
                at += 1
                x = ends[at]
                continue
            x -= budget / totals[at]
            g = _find(counts, bounds[at], rng.random() * totals[at])
            level = rng.random() * bounds[at, g]
            if counts[g] > 0 and level < reversed_hazard(a[g], b[g], norm[g], x):
                break
            budget = rng.standard_exponential()
        chosen[pick] = g
        counts[g] -= 1
        for i in range(used):
            totals[i] = max(totals[i] - bounds[i, g], 0.0)
    return chosen


@_jit
def _find(counts, bound, mark):
    """Return the group whose share of the summed bounds covers `mark`."""
    total, last = 0.0, 0
    for g in range(counts.size):
        if counts[g] > 0:
            total += counts[g] * bound[g]
            last = g
            if total > mark:
                break
    return last


@_jit
def _bound_interval(a, b, norm, counts, top, width, bound):
    """Return the width below `top` in which about `MASS` proposals fall, and the bounds' sum."""
    low, high = 0.0, 0.5 * top  # widths too small and too large
    width = min(width, high)
    while True:
        total = fill_bounds(a, b, norm, counts, top - width, bound)
        mass = total * width
        if mass > 2 * MASS:
            high = width
        elif mass < MASS / 4 and width < 0.499 * top:
            low = width
        else:
            break
        if high - low < 1e-3 * high:
            break
        guess = width * MASS / max(mass, 1e-3 * MASS)
        width = guess if low < guess < high else 0.5 * (low + high)
    return width, total


@_jit
def fill_bounds(a, b, norm, counts, x, bound):
    """Write a bound of each group's r on [x, 1) and return their sum over all members."""
    log_x, log_y = math.log(x), math.log1p(-x)
    total = 0.0
    for g in range(counts.size):
        if counts[g] == 0:
            bound[g] = 0.0
            continue
        mean = a[g] / (a[g] + b[g])
        if x >= mean:
            # F(x) >= 1/e for log-concave laws (Gruenbaum), and >= t / (1 + t) (Cantelli)
            density = math.exp(norm[g] + (a[g] - 1) * log_x + (b[g] - 1) * log_y)
            t = (x - mean) ** 2 * (a[g] + b[g] + 1) / (mean * (1 - mean))
            bound[g] = density * (math.e if t * (math.e - 1) < 1 else (1 + t) / t)
        else:
            bound[g] = a[g] / (x * (1 - x) * _series(a[g], b[g], x, TERMS))  # too short a sum
        total += counts[g] * bound[g]
    return total


@_jit
def reversed_hazard(a, b, norm, x):
    """Density over distribution function of Beta(a, b) at x; norm is -log B(a, b)."""
    if x * (a + b + 2) <= a + 1:
        return a / (x * (1 - x) * _series(a, b, x, 1_000_000))
    density = math.exp(norm + (a - 1) * math.log(x) + (b - 1) * math.log1p(-x))
    return density / (1 - density * x * (1 - x) / b * _series(b, a, 1 - x, 1_000_000))


@_jit
def _series(a, b, x, most):
    """Return B(a, b) F(x) a / (x^a (1 - x)^b), a series of positive terms; at `most` so many."""
    term = total = 1.0
    for n in range(most):
        term *= x * (a + b + n) / (a + 1 + n)
        total += term
        if term < 1e-16 * total:
            break
    return total
