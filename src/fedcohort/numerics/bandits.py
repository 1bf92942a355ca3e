"""The multi-dueling bandit of FedACS: duels by reward, Thompson sampling of a pool, ranks.

Client i has won A_i and lost B_i duels; its quality is theta_i ~ Beta(A_i + 1, B_i + 1).

References
----------
Wang et al. FedACS: Federated Skewness Analytics in Heterogeneous Decentralized Data Environments.
IWQoS 2021.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


class RankPosterior(NamedTuple):
    """What the duels say about each client's rank; 1 is the highest reward, the least skew."""

    mean: Array
    lower: Array
    upper: Array


def duel(wins: Array, losses: Array, rewards: Array, rate: float = 1.0) -> tuple[Array, Array]:
    """Let all participants of a round duel each other (Algorithm 2), in O(k log k).

    Of each pair with unequal rewards the higher wins `rate`; returns the new wins and losses.

    Examples
    --------
    >>> wins, losses = duel(np.zeros(3), np.zeros(3), np.array([-5.0, -1.0, -1.0]))
    >>> wins.tolist(), losses.tolist()
    ([0.0, 1.0, 1.0], [2.0, 0.0, 0.0])
    """
    order = np.sort(rewards)
    won = wins + rate * np.searchsorted(order, rewards, side="left")
    lost = losses + rate * (rewards.size - np.searchsorted(order, rewards, side="right"))
    return won, lost


def thompson_pool(
    wins: ArrayLike, losses: ArrayLike, size: int, rng: np.random.Generator
) -> Indices:
    """Draw the pool of Algorithm 1: `size` times the largest of fresh Beta draws, then remove it.

    The law is exact, although few of the draws are made: clients with equal counts are handled
    together, and the largest draw is found by thinning a Poisson process from the top.

    Examples
    --------
    >>> thompson_pool([9, 0, 500], [0, 9, 0], 2, np.random.default_rng(0)).tolist()
    [2, 0]
    """
    from fedcohort.numerics._thompson import pool_loop

    keys, member_of, counts = _standings(wins, losses)
    taken = pool_loop(keys.real + 1.0, keys.imag + 1.0, counts.astype(np.int64), size, rng)
    # turn picks of groups into picks of clients: within a group all are equally likely
    shuffled = rng.permutation(member_of.size)
    by_group = shuffled[np.argsort(member_of[shuffled], kind="stable")]
    starts = np.cumsum(counts) - counts
    order = np.argsort(taken, kind="stable")
    sorted_taken = taken[order]
    first = np.searchsorted(sorted_taken, sorted_taken, side="left")
    result = np.empty(taken.size, np.int64)
    result[order] = by_group[starts[sorted_taken] + np.arange(taken.size) - first]
    return result


def thompson_pool_one_draw(
    wins: ArrayLike, losses: ArrayLike, size: int, rng: np.random.Generator
) -> Indices:
    """Approximate the pool by the `size` largest of one Beta draw per client, in O(N).

    This is not Algorithm 1, in which a client gets a new draw for every pick, and favors uncertain
    clients less: for a pair of clients the probabilities can differ by 15 percent.
    """
    draws = rng.beta(np.asarray(wins) + 1.0, np.asarray(losses) + 1.0)
    top = np.argpartition(-draws, max(size - 1, 0))[:size]
    return np.asarray(top[np.argsort(-draws[top])])


def rank_posterior(
    wins: ArrayLike,
    losses: ArrayLike,
    rng: np.random.Generator,
    *,
    level: float = 0.95,
    draws: int = 1000,
) -> RankPosterior:
    """Posterior mean and interval of each client's rank, from `draws` joint draws.

    Examples
    --------
    >>> ranks = rank_posterior([30, 0, 10], [0, 30, 10], np.random.default_rng(0))
    >>> ranks.mean.round(2).tolist(), ranks.lower.tolist(), ranks.upper.tolist()
    ([1.0, 3.0, 2.0], [1.0, 3.0, 2.0], [1.0, 3.0, 2.0])
    """
    won, lost = np.asarray(wins, np.float64), np.asarray(losses, np.float64)
    ranks = np.empty((draws, won.size), np.int32)
    for row in ranks:
        order = np.argsort(-rng.beta(won + 1, lost + 1))
        row[order] = np.arange(1, won.size + 1)
    tails = [(1 - level) / 2, (1 + level) / 2]
    lower, upper = np.quantile(ranks, tails, axis=0, method="inverted_cdf").astype(float)
    return RankPosterior(ranks.mean(axis=0), lower, upper)


def _standings(
    wins: ArrayLike, losses: ArrayLike
) -> tuple[NDArray[np.complex128], Indices, Indices]:
    """Return the different (wins, losses), whose they are, and how many clients have each."""
    pairs = np.asarray(wins, np.float64) + 1j * np.asarray(losses, np.float64)
    return np.unique(pairs, return_inverse=True, return_counts=True)
