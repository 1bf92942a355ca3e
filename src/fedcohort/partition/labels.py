"""Partitions at random, by shards, by main class, and by the client ids that come with the data.

`one_label` gives each client a single class, `skewness` a share `xi` of one. `quantity_skew` and
`uniform_sizes` vary the sizes only.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError
from fedcohort.options import Count, Positive, Range
from fedcohort.partition.assign import (
    Counts,
    Floats,
    IndexArray,
    apportion,
    by_class,
    collect,
    deal,
    dirichlet,
    even_sizes,
    partition,
    top_up,
)


@partition("iid")
def iid(labels: IndexArray, clients: int, rng: Generator, *, min_size: int = 1) -> IndexArray:
    """Hand out the samples at random, in sizes that differ by at most one.

    Case 1 of Sketch to Skip and Select (paper 2).

    Examples
    --------
    >>> [part.size for part in iid([0, 1, 0, 1, 2], 2, np.random.default_rng(0))]
    [3, 2]
    """
    owner = np.repeat(np.arange(clients), even_sizes(labels.size, clients))
    return rng.permutation(owner)


@partition("quantity-skew")
def quantity_skew(
    labels: IndexArray, clients: int, rng: Generator, *, alpha: Positive = 0.5, min_size: int = 1
) -> IndexArray:
    """Hand out the samples at random, in sizes drawn from Dir(alpha, ..., alpha).

    Labels are IID, only sizes differ: quantity skew as in [1]_.

    Parameters
    ----------
    alpha : float
        Concentration: 0.5 gives very different sizes, 100 nearly equal ones.

    Examples
    --------
    >>> parts = quantity_skew(np.zeros(100), 4, np.random.default_rng(0))
    >>> [part.size for part in parts]
    [3, 59, 18, 20]

    References
    ----------
    .. [1] Li, Diao, Chen, He (2022), Federated Learning on Non-IID Data Silos: An Experimental
       Study, ICDE.
    """
    shares = dirichlet(np.full((1, clients), alpha), rng)[0]
    return _in_proportion(shares, labels.size, min_size, rng)


@partition("uniform-sizes")
def uniform_sizes(
    labels: IndexArray,
    clients: int,
    rng: Generator,
    *,
    low: Count = 100,
    high: Count = 700,
    min_size: int = 1,
) -> IndexArray:
    """Hand out the samples at random, in sizes proportional to whole numbers in [low, high].

    FedShare's CIFAR split, which paper 0 uses as "non-IID": its labels are IID, only the sizes
    vary, from 100 to 700. FedShare leaves samples over; here sizes are scaled so that all are used.

    Parameters
    ----------
    low, high : int
        Range of the sizes before scaling.

    Examples
    --------
    >>> parts = uniform_sizes(np.zeros(50_000), 100, np.random.default_rng(0))
    >>> sizes = [part.size for part in parts]
    >>> sum(sizes), max(sizes) / min(sizes) <= 7.1
    (50000, True)
    """
    if low > high:
        raise ConfigError(f"uniform-sizes: low={low} must be at most high={high}")
    wanted = rng.integers(low, high, clients, endpoint=True).astype(np.float64)
    return _in_proportion(wanted / wanted.sum(), labels.size, min_size, rng)


def _in_proportion(shares: Floats, total: int, min_size: int, rng: Generator) -> IndexArray:
    """Hand out all samples at random, in sizes proportional to `shares`."""
    ends = np.floor(np.cumsum(shares) * total + 0.5).astype(np.int64)
    ends[-1] = total
    owner = rng.permutation(np.repeat(np.arange(shares.size), np.diff(ends, prepend=0)))
    return top_up(owner, shares.size, min_size, rng)


@partition("shards")
def shards(
    labels: IndexArray, clients: int, rng: Generator, *, per_client: Count = 2, min_size: int = 1
) -> IndexArray:
    """Sort by label, cut into equal shards, give `per_client` random shards to each client.

    FedAvg's pathological split [1]_; FedCor (paper 3) calls it 2SPC and 1SPC. All samples are
    used: client sizes differ by at most one, and so do the shards of one client.

    Parameters
    ----------
    per_client : int
        Shards per client.

    Examples
    --------
    >>> labels = np.repeat([0, 1, 2, 3], 5)
    >>> parts = shards(labels, 4, np.random.default_rng(0), per_client=1)
    >>> sorted(labels[part].tolist() for part in parts)
    [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [3, 3, 3, 3, 3]]

    References
    ----------
    .. [1] McMahan et al. (2017), Communication-Efficient Learning of Deep Networks from
       Decentralized Data, AISTATS.
    """
    if clients * per_client > labels.size:
        raise ConfigError(
            f"shards: per_client={per_client} x {clients} clients must be between {clients} and "
            f"the number of samples, {labels.size}"
        )
    sizes = np.stack([even_sizes(int(n), per_client) for n in even_sizes(labels.size, clients)])
    shuffled = rng.permutation(clients * per_client)
    owner = np.empty(labels.size, dtype=np.int64)
    owner[by_class(labels, rng)] = np.repeat(shuffled // per_client, sizes.ravel()[shuffled])
    return owner


def natural(ids: ArrayLike, *, min_size: int = 1) -> dict[str, IndexArray]:
    """Group the samples by the client that they came from.

    Parameters
    ----------
    ids : array (samples,)
        The client of each sample; anything whose `str` tells clients apart.
    min_size : int
        Clients with fewer samples are left out.

    Returns
    -------
    dict
        Ascending sample indices by client id (a string), in the order of the ids.

    Examples
    --------
    >>> natural(["ann", "bob", "ann"])
    {'ann': array([0, 2]), 'bob': array([1])}
    """
    array = np.asarray(ids, dtype=object)
    if array.ndim != 1 or array.size == 0:
        raise ConfigError(f"ids must be one non-empty row of ids, not of shape {array.shape}")
    # Samples of one client are mostly contiguous, so name runs instead of samples.
    starts = np.flatnonzero(np.concatenate([[True], array[1:] != array[:-1]]))
    heads = [str(name) for name in array[starts]]
    names = sorted(set(heads))
    position = {name: i for i, name in enumerate(names)}
    run = np.array([position[name] for name in heads], dtype=np.int64)
    owner = np.repeat(run, np.diff(np.append(starts, array.size)))
    parts = zip(names, collect(owner, len(names)), strict=True)
    kept = {name: part for name, part in parts if part.size >= min_size}
    if not kept:
        raise ConfigError(f"natural: none of {len(names)} clients has min_size={min_size} samples")
    return kept


@partition("one-label")
def one_label(labels: IndexArray, clients: int, rng: Generator, *, min_size: int = 1) -> Counts:
    """Give every client samples of a single label.

    Case 2 of Sketch to Skip and Select (paper 2). A label gets clients in proportion to its
    samples, which these share evenly, so all samples are used and sizes are as equal as the
    labels allow. With fewer clients than labels, each gets whole labels, at most
    ceil(labels / clients) of them, as in the paper's footnote.

    Examples
    --------
    >>> labels = np.repeat([0, 1], [40, 20])
    >>> parts = one_label(labels, 3, np.random.default_rng(0))
    >>> sorted((int(labels[part][0]), part.size) for part in parts)
    [(0, 20), (0, 20), (1, 20)]
    """
    supply = np.bincount(labels)
    counts = np.zeros((clients, supply.size), dtype=np.int64)
    if clients < supply.size:
        holder = rng.permutation(np.arange(supply.size) % clients)
        counts[holder, np.arange(supply.size)] = supply
    else:
        main, sizes = _share_evenly(supply, apportion(supply, clients, clients))
        counts[rng.permutation(clients), main] = sizes
    return counts


@partition("skewness")
def skewness(
    labels: IndexArray,
    clients: int,
    rng: Generator,
    *,
    xi: Annotated[float, Range(0, 1, above=True)] | Literal["H"],
    min_size: int = 1,
) -> Counts:
    """Give each client a share `xi` of one class and the rest at random from the others.

    FL-DP3S's data skewness (paper 4). Main classes are shared among clients in proportion to
    their samples. All samples are used, and the share comes first: sizes are equal to within one
    unless a main class is too small for that, as with xi = 1 on unequal classes, and then as
    equal as they can be. The rest holds a client's own class only if the other classes cannot
    fill it, for example when one class outnumbers all others together. The paper does not say how
    the rest is spread; here it follows what remains of the other classes.

    Parameters
    ----------
    xi : float or "H"
        Share of the main class, above 0 and at most 1; "H" is two different classes, half each
        (to within the unevenness of the classes).

    Examples
    --------
    >>> labels = np.repeat(np.arange(5), 20)
    >>> parts = skewness(labels, 10, np.random.default_rng(0), xi=0.8)
    >>> {int(np.bincount(labels[part]).max()) for part in parts}
    {8}
    >>> parts = skewness(labels, 10, np.random.default_rng(0), xi="H")
    >>> {tuple(np.unique(labels[part], return_counts=True)[1].tolist()) for part in parts}
    {(5, 5)}
    """
    supply = np.bincount(labels)
    if xi == "H":
        counts = _two_halves(supply, clients, rng)
    else:
        counts = _main_share(supply, clients, xi, rng)
    return counts


def _share_evenly(supply: Counts, holders: Counts) -> tuple[IndexArray, Counts]:
    """Split each class over its number of holders; returns class and size of each portion."""
    portions = [even_sizes(int(n), int(k)) for n, k in zip(supply, holders, strict=True) if k]
    return np.repeat(np.arange(supply.size), holders), np.concatenate(portions)


def _main_share(supply: Counts, clients: int, xi: float, rng: Generator) -> Counts:
    holders = apportion(supply, clients, clients)
    main, sizes = _share_evenly(_budgets(supply, holders, xi), holders)
    shuffled = rng.permutation(clients)
    main, sizes = main[shuffled], sizes[shuffled]
    held = _trim(np.floor(xi * sizes + 0.5).astype(np.int64), main, supply)
    left = supply - np.bincount(main, held, supply.size).astype(np.int64)
    others = left * (np.arange(supply.size) != main[:, None])
    rest = deal(others.astype(np.float64), sizes - held, left, rng)
    _swap_out_main(rest, main, rng)
    rest[np.arange(clients), main] += held
    return rest


def _budgets(supply: Counts, holders: Counts, xi: float) -> Counts:
    """Samples that the clients of each main class hold in total, at most supply / xi."""
    limit = np.where(holders > 0, supply / xi, 0.0)
    total = int(supply.sum())
    if limit.sum() < total * (1 - 1e-12):
        raise ConfigError(
            f"skewness: xi={xi} leaves samples over, since {int(holders.sum())} clients have only "
            f"{np.count_nonzero(holders)} of {supply.size} classes as main class; use at least "
            f"{supply.size} clients or xi of at most {supply[holders > 0].sum() / total:.3f}"
        )
    budget = np.zeros(supply.size)
    tight = holders == 0
    while True:  # equal sizes for all classes that are not at their limit
        free = ~tight
        level = (total - limit[tight].sum()) / max(int(holders[free].sum()), 1)
        budget = np.where(tight, limit, level * holders)
        if not (over := free & (budget > limit)).any():
            break
        tight |= over
    ends = np.floor(np.cumsum(budget) + 0.5).astype(np.int64)
    ends[-1] = total
    return np.diff(ends, prepend=0)


def _trim(held: Counts, main: IndexArray, supply: Counts) -> Counts:
    """Take back what rounding gave the clients of a class beyond its supply, one sample each."""
    over = np.bincount(main, held, supply.size).astype(np.int64) - supply
    for k in np.flatnonzero(over > 0):
        held[np.flatnonzero((main == k) & (held > 0))[: over[k]]] -= 1
    return held


def _swap_out_main(rest: Counts, main: IndexArray, rng: Generator) -> None:
    """Exchange a client's own class in the rest for another class that someone else holds.

    Dealing ends with own classes only when a single class is left, so all of them are alike.
    """
    rows = np.arange(main.size)
    stuck = rest[rows, main]
    if not stuck.any():
        return
    k = int(main[np.argmax(stuck)])
    donors = rest * (main != k)[:, None]
    donors[:, k] = 0
    swaps = int(min(stuck.sum(), donors.sum()))
    taken = rng.multivariate_hypergeometric(donors.ravel(), swaps, method="marginals")
    taken = taken.reshape(rest.shape)
    receivers = rng.permutation(np.repeat(rows, stuck))[:swaps]
    rest -= taken
    rest[:, k] += taken.sum(axis=1)
    np.add.at(rest, (receivers, np.repeat(np.arange(rest.shape[1]), taken.sum(axis=0))), 1)
    np.subtract.at(rest, (receivers, np.full(swaps, k)), 1)


def _two_halves(supply: Counts, clients: int, rng: Generator) -> Counts:
    if supply.size < 2 or 2 * clients < supply.size:
        raise ConfigError(
            f'skewness: xi="H" gives {clients} clients two classes each, which cannot cover '
            f"{supply.size} classes"
        )
    holders = apportion(supply, 2 * clients, clients)
    if (holders > supply).any():
        raise ConfigError(
            f'skewness: xi="H" needs two classes for each of {clients} clients, but classes of '
            f"{supply.tolist()} samples are too small"
        )
    classes, sizes = _share_evenly(supply, holders)
    left, right = _pair_up(classes, rng)
    counts = np.zeros((clients, supply.size), dtype=np.int64)
    counts[np.arange(clients), classes[left]] = sizes[left]
    counts[np.arange(clients), classes[right]] = sizes[right]
    return counts


def _pair_up(classes: IndexArray, rng: Generator) -> tuple[IndexArray, IndexArray]:
    """Pair portions of different classes at random; possible if no class has over half of them."""
    left, right = np.split(rng.permutation(classes.size), 2)
    for i in np.flatnonzero(classes[left] == classes[right]):
        k = classes[left[i]]
        if k != classes[right[i]]:  # mended by an earlier swap
            continue
        j = rng.choice(np.flatnonzero((classes[left] != k) & (classes[right] != k)))
        right[i], right[j] = right[j], right[i]
    return left, right
