"""Partitions by Dirichlet draws. The same alpha means something different in each of them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.random import Generator
from scipy.optimize import nnls

from fedcohort.exceptions import ConfigError
from fedcohort.options import Count, Positive
from fedcohort.partition.assign import (
    Counts,
    Floats,
    IndexArray,
    collect,
    deal,
    dirichlet,
    even_sizes,
    partition,
    scatter,
    top_up,
)


@partition("dirichlet-per-client")
def dirichlet_per_client(
    labels: IndexArray, clients: int, rng: Generator, *, alpha: Positive, min_size: int = 1
) -> Counts:
    """Give each client a class mix drawn from Dir(alpha, ..., alpha), and equal sizes.

    The class of every sample is drawn from the client's mix, without replacement over the whole
    federation. When a class has been used up, those who still want it draw again from their mix
    over the other classes; small alphas therefore come out a little less skewed than the draws.

    Parameters
    ----------
    alpha : float
        Concentration per class: 0.1 is nearly one class per client, 100 nearly IID.

    Examples
    --------
    >>> labels = np.repeat([0, 1], 50)
    >>> parts = dirichlet_per_client(labels, 4, np.random.default_rng(0), alpha=0.1)
    >>> [np.bincount(labels[part], minlength=2).tolist() for part in parts]
    [[0, 25], [3, 22], [24, 1], [23, 2]]
    """
    supply = np.bincount(labels)
    mix = dirichlet(np.full((clients, supply.size), alpha), rng)
    return deal(mix, even_sizes(labels.size, clients), supply, rng)


@partition("dirichlet-prior")
def dirichlet_prior(
    labels: IndexArray,
    clients: int,
    rng: Generator,
    *,
    alpha: Positive,
    sizes: Literal["equal", "released"] = "equal",
    min_size: int = 1,
) -> Counts | IndexArray:
    """Give each client a class mix drawn from Dir(alpha * class prior).

    FedCor's convention (paper 3): the concentrations sum to alpha, so that with ten classes its
    0.2 is 0.02 per class.

    Parameters
    ----------
    alpha : float
        Sum of the concentrations over classes.
    sizes : {"equal", "released"}
        With "equal", sizes differ by at most one, and a class that is used up is replaced as in
        `dirichlet_per_client`. "released" is the authors' code: mixes are kept, and the sizes are
        those of least sum of squares that use up every class; what rounding leaves over goes to
        clients at random.

    Examples
    --------
    >>> labels = np.repeat([0, 1], 50)
    >>> parts = dirichlet_prior(labels, 4, np.random.default_rng(0), alpha=0.2)
    >>> [part.size for part in parts]
    [25, 25, 25, 25]
    """
    supply = np.bincount(labels)
    mix = dirichlet(np.broadcast_to(alpha * supply / labels.size, (clients, supply.size)), rng)
    if sizes == "equal":
        return deal(mix, even_sizes(labels.size, clients), supply, rng)
    counts = np.floor(mix * least_sizes(mix, supply)[:, None] + 1e-9).astype(np.int64)
    for k in np.flatnonzero(left := supply - counts.sum(axis=0)):
        counts[:, k] += np.bincount(rng.integers(clients, size=left[k]), minlength=clients)
    return top_up(scatter(labels, counts, rng), clients, min_size, rng)


def least_sizes(mix: Floats, supply: Counts) -> Floats:
    """Return x >= 0 of least sum of squares with ``mix.T @ x = supply``.

    Solved as non-negative least squares in which the equations weigh so much more than the sizes
    that they hold to a thousandth of a sample.

    Examples
    --------
    >>> least_sizes(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([30, 10])).round(3).tolist()
    [20.0, 20.0]
    """
    weight = 1e4 * len(mix)
    system = np.concatenate([weight * mix.T, np.eye(len(mix))])
    x, _ = nnls(system, np.concatenate([weight * supply, np.zeros(len(mix))]))
    if np.abs(mix.T @ x - supply).max() > 0.5:
        raise ConfigError(
            f"dirichlet-prior: no sizes of {len(mix)} clients with these mixes use up all classes; "
            "take more clients, a larger alpha or sizes='equal'"
        )
    return np.asarray(x)


@partition("dirichlet-per-class")
def dirichlet_per_class(
    labels: IndexArray,
    clients: int,
    rng: Generator,
    *,
    alpha: Positive,
    cap: bool = True,
    min_size: int = 1,
) -> IndexArray:
    """Split each class over the clients by proportions drawn from Dir(alpha, ..., alpha).

    The convention of the distribution sketch's released code (paper 0) and of most of the
    literature [1]_. Sizes differ. Clients that end below `min_size` get random samples of clients
    that have more, so that one draw is enough and any possible minimum is met.

    Parameters
    ----------
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
    supply = np.bincount(labels)
    shares = dirichlet(np.full((supply.size, clients), alpha), rng)
    owner = scatter(labels, _cut(shares, supply, cap), rng)
    return top_up(owner, clients, min_size, rng)


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


@partition("uniform-plus-dirichlet")
def uniform_plus_dirichlet(
    labels: IndexArray, clients: int, rng: Generator, *, alpha: Positive = 0.5, min_size: int = 1
) -> list[IndexArray]:
    """Split a random half of the samples by `dirichlet_per_class`, the other half IID.

    Paper 0's "MNIST Uniform + Dirichlet". The first `clients // 2` clients share their part of
    the samples by Dirichlet draws with concentration `alpha`, the rest share theirs uniformly.

    Examples
    --------
    >>> labels = np.tile([0, 1], 50)
    >>> parts = uniform_plus_dirichlet(labels, 4, np.random.default_rng(0), alpha=0.1)
    >>> [part.size for part in parts[2:]]
    [25, 25]
    """
    skewed = clients // 2
    owner = rng.permutation(np.repeat(np.arange(clients), even_sizes(labels.size, clients)))
    uniform = collect(owner, clients)[skewed:]
    if not skewed:
        return uniform
    pool = np.flatnonzero(owner < skewed)
    half = dirichlet_per_class(labels[pool], skewed, rng, alpha=alpha, min_size=min_size)
    return [pool[part] for part in half] + uniform


@partition("dirichlet-environment", sharing=True)
def dirichlet_environment(
    labels: IndexArray,
    clients: int,
    rng: Generator,
    *,
    x_med: Positive = 0.2,
    x_max: Positive = 3.0,
    samples: Count = 2000,
    min_size: int = 1,
) -> list[IndexArray]:
    """Draw clients of different skewness, each with its own draw from all samples.

    FedACS, Definition 2 (paper 1): the first half of the clients (rounded up) has
    beta ~ U(0, x_med], the rest beta ~ U(x_med, x_max]; a client's class mix is drawn from
    Dir(beta, ..., beta) and the class of each of its samples from that mix. A client holds no
    sample twice, but clients overlap: with 200 x 2,000 out of 50,000, each sample is held by about
    eight clients. A class of which the client has every sample is removed from its mix.

    Parameters
    ----------
    x_med, x_max : float
        Median and maximum of beta: 0.2 and 3 is the paper's "low", 0.1 and 5 its "high".
    samples : int
        Samples per client, the paper's M.

    Examples
    --------
    >>> labels = np.repeat(np.arange(10), 10)
    >>> parts = dirichlet_environment(labels, 30, np.random.default_rng(0), samples=20)
    >>> {part.size for part in parts}, len(np.unique(np.concatenate(parts))) <= 100
    ({20}, True)
    """
    if x_max <= x_med:
        raise ConfigError(f"dirichlet-environment: x_max={x_max} must be above x_med={x_med}")
    if not max(min_size, 1) <= samples <= labels.size:
        raise ConfigError(
            f"dirichlet-environment: samples={samples} must be at least min_size={min_size} and "
            f"at most the number of samples, {labels.size}"
        )
    supply = np.bincount(labels)
    beta = skewness_levels(clients, x_med, x_max, rng)
    mix = dirichlet(np.broadcast_to(beta[:, None], (clients, supply.size)), rng)
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(supply)[:-1])

    def draw(row: Counts) -> IndexArray:
        picked = [
            members[k][rng.choice(members[k].size, row[k], replace=False, shuffle=False)]
            for k in np.flatnonzero(row)
        ]
        return np.sort(np.concatenate(picked))

    return [draw(row) for row in _class_counts(mix, samples, supply, rng)]


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
