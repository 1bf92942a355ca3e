"""Partitions by Dirichlet draws. The same alpha means something different in each of them.

`dirichlet_environment` is FedACS's, in which clients share samples; the others hand out each
sample once.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError
from fedcohort.partition.assign import (
    Counts,
    Floats,
    IndexArray,
    check,
    check_positive,
    collect,
    deal,
    dirichlet,
    encode,
    even_sizes,
    scatter,
    top_up,
)


def dirichlet_per_client(
    labels: ArrayLike, clients: int, rng: Generator, *, alpha: float, min_size: int = 1
) -> list[IndexArray]:
    """Give each client a class mix drawn from Dir(alpha, ..., alpha), and equal sizes.

    The class of every sample is drawn from the client's mix, without replacement over the whole
    federation. When a class has been used up, those who still want it draw again from their mix
    over the other classes, so that all samples are used and sizes differ by one at most; small
    alphas therefore come out a little less skewed than the draws.

    Parameters
    ----------
    labels, clients, rng, min_size
        As for `iid`.
    alpha : float
        Concentration per class: 0.1 is nearly one class per client, 100 nearly IID.

    Examples
    --------
    >>> labels = np.repeat([0, 1], 50)
    >>> parts = dirichlet_per_client(labels, 4, np.random.default_rng(0), alpha=0.1)
    >>> [np.bincount(labels[part], minlength=2).tolist() for part in parts]
    [[0, 25], [3, 22], [24, 1], [23, 2]]
    """
    codes, counts = encode(labels)
    check_positive("dirichlet-per-client", alpha=alpha)
    concentration = np.full(counts.size, float(alpha))
    return _mixed("dirichlet-per-client", codes, clients, rng, concentration, min_size)


def dirichlet_prior(
    labels: ArrayLike, clients: int, rng: Generator, *, alpha: float, min_size: int = 1
) -> list[IndexArray]:
    """Give each client a class mix drawn from Dir(alpha * class prior), and equal sizes.

    FedCor's convention (paper 3): the concentrations sum to alpha, so that with ten classes its
    0.2 is 0.02 per class. Its released code keeps the mixes and solves a quadratic program for
    client sizes as equal as they allow; here sizes are equal to within one, all samples are used,
    and a class that is used up is replaced as in `dirichlet_per_client`.

    Parameters
    ----------
    labels, clients, rng, min_size
        As for `iid`.
    alpha : float
        Sum of the concentrations over classes.

    Examples
    --------
    >>> labels = np.repeat([0, 1], 50)
    >>> parts = dirichlet_prior(labels, 4, np.random.default_rng(0), alpha=0.2)
    >>> [part.size for part in parts]
    [25, 25, 25, 25]
    """
    codes, counts = encode(labels)
    check_positive("dirichlet-prior", alpha=alpha)
    return _mixed("dirichlet-prior", codes, clients, rng, alpha * counts / codes.size, min_size)


def _mixed(
    who: str, codes: IndexArray, clients: int, rng: Generator, alpha: Floats, min_size: int
) -> list[IndexArray]:
    check(who, codes.size, clients, min_size)
    mix = dirichlet(np.broadcast_to(alpha, (clients, alpha.size)), rng)
    counts = deal(mix, even_sizes(codes.size, clients), np.bincount(codes), rng)
    return collect(scatter(codes, counts, rng), clients)


def dirichlet_per_class(
    labels: ArrayLike,
    clients: int,
    rng: Generator,
    *,
    alpha: float,
    cap: bool = True,
    min_size: int = 1,
) -> list[IndexArray]:
    """Split each class over the clients by proportions drawn from Dir(alpha, ..., alpha).

    The convention of the distribution sketch's released code (paper 0) and of most of the
    literature [1]_. Sizes differ. Clients that end below `min_size` get random samples of clients
    that have more, so that one draw is enough and any possible minimum is met.

    Parameters
    ----------
    labels, clients, rng, min_size
        As for `iid`.
    alpha : float
        Concentration per client.
    cap : bool
        A client that has reached the average size gets nothing of the classes that follow.

    Examples
    --------
    >>> labels = np.repeat([0, 1], 50)
    >>> parts = dirichlet_per_class(labels, 4, np.random.default_rng(0), alpha=0.5)
    >>> sum(part.size for part in parts), min(part.size for part in parts) >= 1
    (100, True)

    References
    ----------
    .. [1] Yurochkin et al. (2019), Bayesian Nonparametric Federated Learning of Neural Networks,
       ICML.
    """
    codes, counts = encode(labels)
    check("dirichlet-per-class", codes.size, clients, min_size)
    check_positive("dirichlet-per-class", alpha=alpha)
    shares = dirichlet(np.full((counts.size, clients), alpha), rng)
    owner = scatter(codes, _cut(shares, counts, cap), rng)
    return collect(top_up(owner, clients, min_size, rng), clients)


def _cut(shares: Floats, class_sizes: Counts, cap: bool) -> Counts:
    """Cut each class at the cumulative shares; returns counts (clients x classes)."""
    classes, clients = shares.shape
    counts = np.zeros((clients, classes), dtype=np.int64)
    limit = class_sizes.sum() / clients if cap else np.inf
    for k in range(classes):
        open_ = counts.sum(axis=1) < limit
        share = shares[k] * open_
        if share.sum() == 0.0:  # all of the draw fell on clients that are full
            share = open_.astype(np.float64)
        reach = np.cumsum(share)
        cuts = np.floor(reach / reach[-1] * class_sizes[k]).astype(np.int64)
        counts[:, k] = np.diff(cuts, prepend=0)
    return counts


def uniform_plus_dirichlet(
    labels: ArrayLike, clients: int, rng: Generator, *, alpha: float = 0.5, min_size: int = 1
) -> list[IndexArray]:
    """Split a random half of the samples by `dirichlet_per_class`, the other half IID.

    Paper 0's "MNIST Uniform + Dirichlet". The first `clients // 2` clients share their part of
    the samples by Dirichlet draws, the rest share theirs uniformly.

    Parameters
    ----------
    labels, clients, rng, min_size
        As for `iid`.
    alpha : float
        Concentration per client of the first half.

    Examples
    --------
    >>> labels = np.tile([0, 1], 50)
    >>> parts = uniform_plus_dirichlet(labels, 4, np.random.default_rng(0), alpha=0.1)
    >>> [part.size for part in parts[2:]]
    [25, 25]
    """
    codes = encode(labels)[0]
    check("uniform-plus-dirichlet", codes.size, clients, min_size)
    check_positive("uniform-plus-dirichlet", alpha=alpha)
    skewed = clients // 2
    owner = rng.permutation(np.repeat(np.arange(clients), even_sizes(codes.size, clients)))
    uniform = collect(owner, clients)[skewed:]
    if not skewed:
        return uniform
    pool = np.flatnonzero(owner < skewed)
    half = dirichlet_per_class(codes[pool], skewed, rng, alpha=alpha, min_size=min_size)
    return [pool[part] for part in half] + uniform


def dirichlet_environment(
    labels: ArrayLike,
    clients: int,
    rng: Generator,
    *,
    x_med: float = 0.2,
    x_max: float = 3.0,
    samples: int = 2000,
    min_size: int = 1,
) -> list[IndexArray]:
    """Draw clients of different skewness, each with its own draw from all samples.

    FedACS, Definition 2 (paper 1): the first half of the clients (rounded up) has
    beta ~ U(0, x_med], the rest beta ~ U(x_med, x_max]; a client's class mix is drawn from
    Dir(beta, ..., beta) and the class of each of its samples from that mix. A client holds no
    sample twice, but clients overlap, and some samples may belong to nobody: with 200 x 2,000 out
    of 50,000, each sample is held by about eight clients. A class of which the client already has
    every sample is removed from its mix.

    Parameters
    ----------
    labels, clients, rng
        As for `iid`.
    x_med, x_max : float
        Median and maximum of beta: 0.2 and 3 is the paper's "low", 0.1 and 5 its "high".
    samples : int
        Samples per client, the paper's M.
    min_size : int
        Must not exceed `samples`; accepted so that all partitions have the same signature.

    Examples
    --------
    >>> labels = np.repeat(np.arange(10), 10)
    >>> parts = dirichlet_environment(labels, 30, np.random.default_rng(0), samples=20)
    >>> {part.size for part in parts}, len(np.unique(np.concatenate(parts))) <= 100
    ({20}, True)
    """
    codes, supply = encode(labels)
    check("dirichlet-environment", codes.size, clients, 0)
    check_positive("dirichlet-environment", x_med=x_med, x_max=x_max)
    if x_max <= x_med:
        raise ConfigError(f"dirichlet-environment: x_max={x_max} must be above x_med={x_med}")
    if not max(min_size, 1) <= samples <= codes.size:
        raise ConfigError(
            f"dirichlet-environment: samples={samples} must be at least min_size={min_size} and "
            f"at most the number of samples, {codes.size}"
        )
    beta = skewness_levels(clients, x_med, x_max, rng)
    mix = dirichlet(np.broadcast_to(beta[:, None], (clients, supply.size)), rng)
    return _pick(codes, _class_counts(mix, samples, supply, rng), rng)


def skewness_levels(clients: int, x_med: float, x_max: float, rng: Generator) -> Floats:
    """Draw the concentration beta of each client, the skewed half first."""
    unit = 1.0 - rng.random(clients)
    skewed = np.arange(clients) < (clients + 1) // 2
    return np.where(skewed, x_med * unit, x_med + (x_max - x_med) * unit)


def _class_counts(mix: Floats, samples: int, supply: Counts, rng: Generator) -> Counts:
    """Draw each client's counts from its mix; no client takes more of a class than there is."""
    counts = np.zeros(mix.shape, dtype=np.int64)
    while (rows := np.flatnonzero(counts.sum(axis=1) < samples)).size:
        left = supply - counts[rows]
        wish = mix[rows] * (left > 0)
        wish = np.where(wish.sum(axis=1, keepdims=True) == 0.0, left, wish)
        ask = rng.multinomial(
            samples - counts[rows].sum(axis=1), wish / wish.sum(axis=1, keepdims=True)
        )
        counts[rows] += np.minimum(ask, left)
    return counts


def _pick(codes: IndexArray, counts: Counts, rng: Generator) -> list[IndexArray]:
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])

    def draw(row: Counts) -> IndexArray:
        """Draw one client's samples, without replacement."""
        picked = [
            members[k][rng.choice(members[k].size, row[k], replace=False, shuffle=False)]
            for k in np.flatnonzero(row)
        ]
        return np.sort(np.concatenate(picked))

    return [draw(row) for row in counts]
