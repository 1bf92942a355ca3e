"""The multi-dueling bandit of FedACS: duels by reward, Thompson sampling of a pool, ranks.

Client i has won A_i and lost B_i duels; its quality is theta_i ~ Beta(A_i + 1, B_i + 1).

References
----------
Wang et al. FedACS: Federated Skewness Analytics in Heterogeneous Decentralized Data Environments.
IWQoS 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class RankPosterior(NamedTuple):
    """What the duels say about each client's rank; 1 is the highest reward, the least skew."""

    mean: Array
    lower: Array
    upper: Array


def duel(
    wins: ArrayLike,
    losses: ArrayLike,
    participants: ArrayLike,
    rewards: ArrayLike,
    rate: float = 1.0,
) -> tuple[Array, Array]:
    """Let all participants of a round duel each other (Algorithm 2), in O(k log k).

    Parameters
    ----------
    wins, losses
        A and B of all clients.
    participants
        Positions of those that took part, each once.
    rewards
        Their rewards. For each pair with unequal rewards the higher wins; ties change nothing.
    rate
        How much one duel counts, eta.

    Returns
    -------
    tuple of ndarray
        New wins and losses; the arguments are not changed.

    Examples
    --------
    >>> wins, losses = duel([0, 0, 0, 0], [0, 0, 0, 0], [0, 2, 3], [-5.0, -1.0, -1.0])
    >>> wins.tolist(), losses.tolist()
    ([0.0, 0.0, 1.0, 1.0], [2.0, 0.0, 0.0, 0.0])
    """
    won, lost = _counts(wins, losses)
    who = np.asarray(participants, dtype=np.int64)
    reward = np.asarray(rewards, dtype=np.float64)
    if who.ndim != 1 or who.shape != reward.shape:
        raise ValueError(f"duel: {who.shape} participants but {reward.shape} rewards")
    if np.isnan(reward).any():
        raise ValueError("duel: a reward is NaN; leave that participant out")
    if np.unique(who).size < who.size:
        raise ValueError("duel: a participant appears twice")
    order = np.sort(reward)
    won[who] += rate * np.searchsorted(order, reward, side="left")
    lost[who] += rate * (reward.size - np.searchsorted(order, reward, side="right"))
    return won, lost


def win_probability(wins: tuple[int, int], losses: tuple[int, int]) -> float:
    """Return P(theta_1 > theta_2) for Beta draws of two clients, in closed form.

    The probability that the first client is preferred, as Algorithm 1 sees it: with a, b one more
    than wins and losses, sum_{i < a_1} B(a_2 + i, b_1 + b_2) / ((b_1 + i) B(1 + i, b_1)
    B(a_2, b_2)). Counts must be whole.

    Examples
    --------
    >>> round(win_probability(wins=(1, 0), losses=(0, 0)), 4)      # Beta(2, 1) against Beta(1, 1)
    0.6667
    """
    from scipy.special import betaln

    (a1, a2), (b1, b2) = ((int(x) + 1, int(y) + 1) for x, y in (wins, losses))
    if min(a1, a2, b1, b2) < 1:
        raise ValueError(f"win_probability: {wins=} and {losses=} must not be negative")
    i = np.arange(a1)
    logs = betaln(a2 + i, b1 + b2) - np.log(b1 + i) - betaln(1 + i, b1) - betaln(a2, b2)
    return float(np.exp(logs).sum())


def skew_bounds(updates: ArrayLike, sizes: ArrayLike, low: ArrayLike, high: ArrayLike) -> Array:
    """Return eq. 12 for each client and dimension: how likely IID data are to stray as far.

    By Hoeffding's inequality, the mean of M samples from [low, high] is at least as far from its
    expectation as client i's update is from the mean update with a probability of at most
    2 exp(-2 M (update - mean)^2 / (high - low)^2). The bound can exceed 1.

    Parameters
    ----------
    updates
        One row per client, one column per dimension.
    sizes
        M, the number of samples of each client.
    low, high
        Range of a sample's gradient in each dimension.

    Examples
    --------
    >>> skew_bounds([[0.0], [1.0]], [2, 2], low=[0.0], high=[1.0]).round(4).tolist()
    [[0.7358], [0.7358]]
    """
    rows = np.asarray(updates, dtype=np.float64)
    width = np.asarray(high, dtype=np.float64) - np.asarray(low, dtype=np.float64)
    if rows.ndim != 2 or (width <= 0).any():
        raise ValueError("skew_bounds: updates must be rows, and high above low everywhere")
    gaps = (rows - rows.mean(axis=0)) / width
    return np.asarray(2 * np.exp(-2 * np.asarray(sizes, np.float64)[:, None] * gaps**2))


def regret(preferences: ArrayLike, cohorts: Sequence[Sequence[int]]) -> float:
    """Return the regret of eq. 4: the sum over rounds and members i of P(best beats i) - 1/2.

    Parameters
    ----------
    preferences
        ``preferences[i, j]`` is the probability that client i beats client j, 1/2 on the diagonal.
        The best client is the one that no other beats with more than 1/2.
    cohorts
        The positions of each round's cohort.

    Examples
    --------
    >>> regret([[0.5, 0.9], [0.1, 0.5]], cohorts=[[0], [1], [1]])
    0.8
    """
    table = np.asarray(preferences, dtype=np.float64)
    best = np.flatnonzero((table >= 0.5).all(axis=1))
    if not best.size:
        raise ValueError("regret: no client beats all others with at least 1/2")
    losses = table[best[0]] - 0.5
    return float(sum(losses[np.asarray(cohort, np.int64)].sum() for cohort in cohorts))


def thompson_pool(
    wins: ArrayLike, losses: ArrayLike, size: int, rng: np.random.Generator
) -> list[int]:
    """Draw the pool of Algorithm 1: `size` times the largest of fresh Beta draws, then remove it.

    The law is exact, although few of the draws are made: clients with equal counts are handled
    together, and the largest draw is found by thinning a Poisson process from the top.

    Returns
    -------
    list of int
        Positions in the order in which they were taken.

    Examples
    --------
    >>> thompson_pool([9, 0, 500], [0, 9, 0], 2, np.random.default_rng(0))
    [2, 0]
    """
    from fedcohort.numerics._thompson import pool_loop

    won, lost = _counts(wins, losses)
    _check_size(size, won.size)
    keys, member_of, counts = np.unique(won + 1j * lost, return_inverse=True, return_counts=True)
    taken = pool_loop(keys.real + 1.0, keys.imag + 1.0, counts.astype(np.int64), size, rng)
    return [int(i) for i in _members(taken, member_of, counts, rng)]


def thompson_pool_one_draw(
    wins: ArrayLike, losses: ArrayLike, size: int, rng: np.random.Generator
) -> list[int]:
    """Approximate the pool by the `size` largest of one Beta draw per client, in O(N).

    This is not Algorithm 1: a client gets one draw instead of a new one for every pick, which
    favors uncertain clients less. For a pair of clients the probabilities can differ by 15
    percent. Meant for millions of clients whose counts are all different.

    Examples
    --------
    >>> sorted(thompson_pool_one_draw([9, 0, 500], [0, 9, 0], 2, np.random.default_rng(0)))
    [0, 2]
    """
    won, lost = _counts(wins, losses)
    _check_size(size, won.size)
    draws = rng.beta(won + 1, lost + 1)
    if size == 0:
        return []
    top = np.argpartition(-draws, size - 1)[:size]
    return [int(i) for i in top[np.argsort(-draws[top])]]


def rank_posterior(
    wins: ArrayLike,
    losses: ArrayLike,
    rng: np.random.Generator,
    *,
    level: float = 0.95,
    draws: int = 1000,
) -> RankPosterior:
    """Posterior mean and interval of each client's rank: the analytics view, no training needed.

    Parameters
    ----------
    wins, losses
        A and B of all clients.
    rng
        For the intervals, which come from `draws` joint draws; the means are exact.
    level
        Probability that the interval contains the rank.

    Examples
    --------
    >>> ranks = rank_posterior([30, 0, 10], [0, 30, 10], np.random.default_rng(0))
    >>> ranks.mean.round(2).tolist(), ranks.lower.tolist(), ranks.upper.tolist()
    ([1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0])
    """
    won, lost = _counts(wins, losses)
    if not 0 < level < 1 or draws < 1:
        raise ValueError(f"rank_posterior: level={level} must be in (0, 1), draws={draws} >= 1")
    ranks = np.empty((draws, won.size), np.int32)
    for row in ranks:
        order = np.argsort(-rng.beta(won + 1, lost + 1))
        row[order] = np.arange(1, won.size + 1)
    tails = [(1 - level) / 2, (1 + level) / 2]
    lower, upper = np.quantile(ranks, tails, axis=0, method="inverted_cdf").astype(float)
    return RankPosterior(_mean_rank(won, lost), lower, upper)


def _mean_rank(won: Array, lost: Array) -> Array:
    """Expected rank 1/2 + the integral of f_i(x) sum_j P(theta_j > x), by Gauss quadrature.

    The sum includes j = i, which adds one half.
    """
    from scipy.special import betainc, betaln

    keys, member_of, counts = np.unique(won + 1j * lost, return_inverse=True, return_counts=True)
    a, b = keys.real + 1, keys.imag + 1
    narrowest = np.sqrt(a * b / (a + b + 1)) / (a + b)
    panels = int(np.ceil(1 / (2 * narrowest.min(initial=0.5))))
    nodes, weights = np.polynomial.legendre.leggauss(16)
    expected = np.full(a.size, 0.5)
    for panel in range(panels):
        x = (panel + (nodes + 1) / 2) / panels
        above = np.array([counts @ (1 - betainc(a, b, point)) for point in x])
        logs = np.outer(a - 1, np.log(x)) + np.outer(b - 1, np.log1p(-x)) - betaln(a, b)[:, None]
        expected += np.exp(logs) @ (weights / 2 / panels * above)
    return np.asarray(expected[member_of])


def _members(
    taken: NDArray[np.int64],
    member_of: NDArray[np.int64],
    counts: NDArray[np.int64],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Turn picks of groups into picks of clients: within a group all are equally likely."""
    shuffled = rng.permutation(member_of.size)
    by_group = shuffled[np.argsort(member_of[shuffled], kind="stable")]
    starts = np.cumsum(counts) - counts
    order = np.argsort(taken, kind="stable")
    sorted_taken = taken[order]
    first = np.searchsorted(sorted_taken, sorted_taken, side="left")
    result = np.empty(taken.size, np.int64)
    result[order] = by_group[starts[sorted_taken] + np.arange(taken.size) - first]
    return result


def _counts(wins: ArrayLike, losses: ArrayLike) -> tuple[Array, Array]:
    won, lost = np.array(wins, dtype=np.float64), np.array(losses, dtype=np.float64)
    if won.ndim != 1 or won.shape != lost.shape:
        raise ValueError(f"bandit: wins {won.shape} and losses {lost.shape} must be equal vectors")
    if (
        not (np.isfinite(won).all() and np.isfinite(lost).all())
        or min(won.min(initial=0), lost.min(initial=0)) < 0
    ):
        raise ValueError("bandit: wins and losses must be finite and not negative")
    return won, lost


def _check_size(size: int, clients: int) -> None:
    if not 0 <= size <= clients:
        raise ValueError(f"thompson_pool: cannot take {size} of {clients} clients")
