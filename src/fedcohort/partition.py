"""Splits of a labeled data set over clients.

Every function in `PARTITIONS` is called `partition(labels, clients, rng, *, min_size=1, ...)` and
returns one ascending array of sample indices per client, of at least `min_size`. All samples are
handed out, each once, except by `dirichlet_environment`, in which clients share samples by
definition. The same alpha means something different in each of the Dirichlet partitions.

A split is made as the `owner` of each sample, or as the `counts` of each class per client, which
`scatter` turns into owners: so no sample is lost or handed out twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from fedcohort.exceptions import ConfigError
from fedcohort.options import Count, Positive, PositiveShare, checked_options

IndexArray: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Partition: TypeAlias = Callable[..., list[IndexArray]]
PARTITIONS: dict[str, Partition] = {}


def partition(name: str, *, sharing: bool = False) -> Callable[[Callable[..., Any]], Partition]:
    """Decorator: enter a split, with labels numbered from 0 on, into `PARTITIONS`.

    The split returns owners, counts (clients x classes), or the clients' samples themselves. With
    `sharing`, clients may hold more samples than there are.
    """

    def enter(split: Callable[..., Any]) -> Partition:
        @functools.wraps(split)
        def call(
            labels: ArrayLike, clients: int, rng: Generator, *, min_size: int = 1, **options: Any
        ) -> list[IndexArray]:
            array = np.asarray(labels)
            if array.ndim != 1 or array.size == 0:
                raise ConfigError(f"labels must be one non-empty row, not of shape {array.shape}")
            if clients < 1 or min_size < 0:
                raise ConfigError(
                    f"{name}: clients={clients} must be at least 1, min_size={min_size} at least 0"
                )
            if clients * min_size > array.size and not sharing:
                raise ConfigError(
                    f"{name}: {clients} clients of at least min_size={min_size} need "
                    f"{clients * min_size} samples, but there are {array.size}"
                )
            options = checked_options(name, split, {**options, "min_size": min_size})
            codes = np.unique(array, return_inverse=True)[1].astype(np.int64)
            parts = split(codes, clients, rng, **options)
            if isinstance(parts, list):
                return parts
            if parts.ndim == 2:
                smallest = int(parts.sum(axis=1).min())
                if smallest < min_size:
                    raise ConfigError(
                        f"{name}: with {clients} clients over classes of "
                        f"{parts.sum(axis=0).tolist()} samples a client gets {smallest}, below "
                        f"min_size={min_size}; use fewer clients"
                    )
                parts = scatter(codes, parts, rng)
            return collect(parts, clients)

        PARTITIONS[name] = call
        return call

    return enter


def even_sizes(total: int, parts: int) -> Counts:
    """Split a total into sizes that differ by at most one, larger ones first."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def dirichlet(alpha: Floats, rng: Generator) -> Floats:
    """Draw one Dirichlet vector per row of `alpha`.

    Gamma variates are drawn in log space, G(a) = G(a + 1) U^(1/a): below a = 0.01 they underflow,
    and a row of zeros cannot be normalized.
    """
    uniform = 1.0 - rng.random(alpha.shape)
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0)) + np.log(uniform) / alpha
    draw: Floats = np.exp(log_gamma - log_gamma.max(axis=1, keepdims=True))
    draw /= draw.sum(axis=1, keepdims=True)
    return draw


def deal(mix: Floats, sizes: Counts, supply: Counts, rng: Generator) -> Counts:
    """Hand out a limited supply of classes so that every client gets its size and about its mix.

    All clients ask for as many samples as they still need, drawn from their mix over the classes
    that are not used up, or from what remains if it has no weight there. A class that is asked for
    more than it has serves clients in random order, and those who still need samples ask again.
    """
    counts = np.zeros(mix.shape, dtype=np.int64)
    need, left = sizes.copy(), supply.copy()
    while (rows := np.flatnonzero(need)).size:
        rng.shuffle(rows)
        ask = rng.multinomial(need[rows], normalize_open(mix[rows], left))
        asked_before = np.cumsum(ask, axis=0) - ask
        given = np.clip(left - asked_before, 0, ask)
        counts[rows] += given
        need[rows] -= given.sum(axis=1)
        left -= given.sum(axis=0)
    return counts


def normalize_open(mix: Floats, left: Counts) -> Floats:
    """Normalize each mix over the classes of which something is left."""
    wish = mix * (left > 0)
    wish = np.where(wish.sum(axis=1, keepdims=True) == 0.0, left, wish)
    return np.asarray(wish / wish.sum(axis=1, keepdims=True))


def apportion(counts: Counts, clients: int, max_per_class: int) -> Counts:
    """Assign clients to classes by Jefferson's method, which maximizes the smallest share.

    A class gets at most `max_per_class`, and with enough clients every class gets one.
    """
    quotients = counts[:, None] / np.arange(1.0, max_per_class + 1)
    if clients >= counts.size:
        quotients[:, 0] = np.inf
    chosen = np.argsort(-quotients, axis=None, kind="stable")[:clients]
    return np.bincount(chosen // max_per_class, minlength=counts.size).astype(np.int64)


def by_class(codes: IndexArray, rng: Generator) -> IndexArray:
    """Order the samples by class, at random within each class."""
    order = rng.permutation(codes.size)
    return order[np.argsort(codes[order], kind="stable")]


def scatter(codes: IndexArray, counts: Counts, rng: Generator) -> IndexArray:
    """Turn counts (clients x classes) that use every sample into the owner of each sample."""
    clients, classes = counts.shape
    owner = np.empty(codes.size, dtype=np.int64)
    owner[by_class(codes, rng)] = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return owner


def top_up(owner: IndexArray, clients: int, min_size: int, rng: Generator) -> IndexArray:
    """Give clients below `min_size` random samples of those who have more than `min_size`."""
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(min_size - sizes, 0)
    if not missing.any():
        return owner
    order = by_class(owner, rng)
    rank = np.arange(owner.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = rng.permutation(order[rank >= min_size])[: missing.sum()]
    topped = owner.copy()
    topped[moved] = np.repeat(np.arange(clients), missing)
    return topped


def collect(owner: IndexArray, clients: int) -> list[IndexArray]:
    """List each client's samples in ascending order."""
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])


@partition("iid")
def iid(labels: IndexArray, clients: int, rng: Generator, *, min_size: int = 1) -> IndexArray:
    """Hand out the samples at random, in sizes that differ by at most one (paper 2, case 1)."""
    owner = np.repeat(np.arange(clients), even_sizes(labels.size, clients))
    return rng.permutation(owner)


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

    FedShare's CIFAR split, paper 0's "non-IID", with sizes scaled so that all samples are used.
    """
    if low > high:
        raise ConfigError(f"uniform-sizes: low={low} must be at most high={high}")
    wanted = rng.integers(low, high, clients, endpoint=True).astype(np.float64)
    sizes = _sizes_between(np.cumsum(wanted / wanted.sum()) * labels.size, labels.size)
    owner = rng.permutation(np.repeat(np.arange(clients), sizes))
    return top_up(owner, clients, min_size, rng)


def _sizes_between(cuts: Floats, total: int) -> Counts:
    """Return the sizes, in whole numbers, of the parts of a total that end at these cuts."""
    ends = np.floor(cuts + 0.5).astype(np.int64)
    ends[-1] = total
    return np.diff(ends, prepend=0)


@partition("shards")
def shards(
    labels: IndexArray, clients: int, rng: Generator, *, per_client: Count = 2, min_size: int = 1
) -> IndexArray:
    """Sort by label, cut into equal shards, give `per_client` random shards to each client.

    The pathological split of FedAvg (McMahan et al., 2017); FedCor (paper 3) calls it 2SPC, 1SPC.

    Examples
    --------
    >>> labels = np.repeat([0, 1, 2, 3], 5)
    >>> parts = shards(labels, 4, np.random.default_rng(0), per_client=1)
    >>> sorted(labels[part].tolist() for part in parts)
    [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [3, 3, 3, 3, 3]]
    """
    if clients * per_client > labels.size:
        raise ConfigError(
            f"shards: per_client={per_client} x {clients} clients are more than the "
            f"{labels.size} samples"
        )
    sizes = np.stack([even_sizes(int(n), per_client) for n in even_sizes(labels.size, clients)])
    shuffled = rng.permutation(clients * per_client)
    owner = np.empty(labels.size, dtype=np.int64)
    owner[by_class(labels, rng)] = np.repeat(shuffled // per_client, sizes.ravel()[shuffled])
    return owner


def natural(ids: ArrayLike, *, min_size: int = 1) -> dict[str, IndexArray]:
    """Group the samples by client id; clients with fewer samples than `min_size` are left out.

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
    texts = np.array([str(name) for name in array[starts]], dtype=object)  # keep NULs at the end
    names, runs = np.unique(texts, return_inverse=True)
    owner = np.repeat(runs, np.diff(np.append(starts, array.size)))
    parts = zip(names.tolist(), collect(owner, len(names)), strict=True)
    kept = {name: part for name, part in parts if part.size >= min_size}
    if not kept:
        raise ConfigError(f"natural: none of {len(names)} clients has min_size={min_size} samples")
    return kept


@partition("dirichlet-per-client")
def dirichlet_per_client(
    labels: IndexArray, clients: int, rng: Generator, *, alpha: Positive, min_size: int = 1
) -> Counts:
    """Give each client a class mix drawn from Dir(alpha, ..., alpha), and equal sizes.

    When a class has been used up, those who still want it draw again over the other classes. An
    alpha of 0.1 is nearly one class per client, 100 nearly IID.
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
    0.2 is 0.02 per class. Sizes are equal, as in `dirichlet_per_client`; or "released", as in the
    authors' code: mixes are kept, and the sizes are those of least sum of squares that use up every
    class; what rounding leaves over goes to clients at random.
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

    The equations weigh so much more than the sizes that they hold to a thousandth of a sample.
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
    labels: IndexArray, clients: int, rng: Generator, *, alpha: Positive, min_size: int = 1
) -> IndexArray:
    """Split each class over the clients by proportions drawn from Dir(alpha, ..., alpha).

    The convention of paper 0's released code and of Yurochkin et al. (2019). Sizes differ, but a
    client that has reached the average gets nothing of the classes that follow, and those below
    `min_size` get random samples of clients that have more.
    """
    supply = np.bincount(labels)
    shares = dirichlet(np.full((supply.size, clients), alpha), rng)
    counts = np.zeros((clients, supply.size), dtype=np.int64)
    for k in range(supply.size):
        has_room = counts.sum(axis=1) < labels.size / clients
        share = shares[k] * has_room
        if share.sum() == 0.0:  # all of the draw fell on clients that are full
            share = has_room.astype(np.float64)
        reach = np.cumsum(share)
        cuts = np.floor(reach / reach[-1] * supply[k]).astype(np.int64)
        counts[:, k] = np.diff(cuts, prepend=0)
    return top_up(scatter(labels, counts, rng), clients, min_size, rng)


@partition("uniform-plus-dirichlet")
def uniform_plus_dirichlet(
    labels: IndexArray, clients: int, rng: Generator, *, alpha: Positive = 0.5, min_size: int = 1
) -> list[IndexArray]:
    """Split a random half of the samples by `dirichlet_per_class`, the other half IID.

    Paper 0's "MNIST Uniform + Dirichlet": the first `clients // 2` clients share the first half.
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
    Dir(beta, ..., beta) and the class of each of its `samples` from that mix. A client holds no
    sample twice, but clients overlap. A class of which it has every sample leaves its mix. The
    paper's "low" is x_med = 0.2 and x_max = 3, its "high" 0.1 and 5.
    """
    if x_max <= x_med:
        raise ConfigError(f"dirichlet-environment: x_max={x_max} must be above x_med={x_med}")
    if not max(min_size, 1) <= samples <= labels.size:
        raise ConfigError(
            f"dirichlet-environment: samples={samples} must be at least min_size={min_size} and "
            f"at most the number of samples, {labels.size}"
        )
    supply, unit = np.bincount(labels), 1.0 - rng.random(clients)
    skewed = np.arange(clients) < (clients + 1) // 2
    beta = np.where(skewed, x_med * unit, x_med + (x_max - x_med) * unit)
    mix = dirichlet(np.broadcast_to(beta[:, None], (clients, supply.size)), rng)
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(supply)[:-1])

    def draw(rows: IndexArray, count: int) -> IndexArray:
        return rows[rng.choice(rows.size, count, replace=False, shuffle=False)]

    return [
        np.sort(np.concatenate([draw(members[k], row[k]) for k in np.flatnonzero(row)]))
        for row in _class_counts(mix, samples, supply, rng)
    ]


def _class_counts(mix: Floats, samples: int, supply: Counts, rng: Generator) -> Counts:
    """Draw each client's counts from its mix; no client takes more of a class than there is."""
    counts = np.zeros(mix.shape, dtype=np.int64)
    while (rows := np.flatnonzero(counts.sum(axis=1) < samples)).size:
        left = supply - counts[rows]
        needed = samples - counts[rows].sum(axis=1)
        counts[rows] += np.minimum(rng.multinomial(needed, normalize_open(mix[rows], left)), left)
    return counts


@partition("one-label")
def one_label(labels: IndexArray, clients: int, rng: Generator, *, min_size: int = 1) -> Counts:
    """Give every client samples of a single label (paper 2, case 2).

    A label gets clients in proportion to its samples, which these share evenly. With fewer clients
    than labels, each gets whole labels, at most ceil(labels / clients), as in the paper's footnote.
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
    xi: PositiveShare | Literal["H"],
    min_size: int = 1,
) -> Counts:
    """Give each client a share `xi` of one class and the rest at random from the others.

    FL-DP3S's data skewness (paper 4); "H" is two different classes, half each. Main classes get
    clients in proportion to their samples. The share comes before equal sizes, which differ where a
    main class is too small. The paper does not say how the rest is spread; here it follows what
    remains of the other classes, and holds a client's own class only if these cannot fill it.
    """
    supply = np.bincount(labels)
    if xi == "H":
        return _two_halves(supply, clients, rng)
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


def _share_evenly(supply: Counts, holders: Counts) -> tuple[IndexArray, Counts]:
    """Split each class over its number of holders; returns class and size of each portion."""
    portions = [even_sizes(int(n), int(k)) for n, k in zip(supply, holders, strict=True) if k]
    return np.repeat(np.arange(supply.size), holders), np.concatenate(portions)


def _budgets(supply: Counts, holders: Counts, xi: float) -> Counts:
    """Samples that the clients of each main class hold in total, at most supply / xi."""
    limit, total = np.where(holders > 0, supply / xi, 0.0), int(supply.sum())
    if limit.sum() < total * (1 - 1e-12):
        raise ConfigError(
            f"skewness: xi={xi} leaves samples over; use at least {supply.size} clients "
            f"or xi of at most {supply[holders > 0].sum() / total:.3f}"
        )
    tight = holders == 0
    while True:  # equal sizes for all classes that are not at their limit
        free = ~tight
        level = (total - limit[tight].sum()) / max(int(holders[free].sum()), 1)
        budget = np.where(tight, limit, level * holders)
        if not (over := free & (budget > limit)).any():
            break
        tight |= over
    return _sizes_between(np.cumsum(budget), total)


def _trim(held: Counts, main: IndexArray, supply: Counts) -> Counts:
    """Take back what rounding gave the clients of a class beyond its supply, one sample each."""
    over = np.bincount(main, held, supply.size).astype(np.int64) - supply
    for k in np.flatnonzero(over > 0):
        held[np.flatnonzero((main == k) & (held > 0))[: over[k]]] -= 1
    return held


def _swap_out_main(rest: Counts, main: IndexArray, rng: Generator) -> None:
    """Exchange a client's own class in the rest for another class that someone else holds."""
    rows = np.arange(main.size)
    stuck = rest[rows, main]
    if not stuck.any():
        return
    k = int(main[np.argmax(stuck)])  # the same for all: dealing ends so if one class is left
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
    wanted = f'skewness: xi="H" gives {clients} clients two classes each'
    if supply.size < 2 or 2 * clients < supply.size:
        raise ConfigError(f"{wanted}, which cannot cover {supply.size} classes")
    holders = apportion(supply, 2 * clients, clients)
    if (holders > supply).any():
        raise ConfigError(f"{wanted}, but classes of {supply.tolist()} samples are too small")
    classes, sizes = _share_evenly(supply, holders)
    left, right = _pair_up(classes, rng)
    counts = np.zeros((clients, supply.size), dtype=np.int64)
    for half in (left, right):
        counts[np.arange(clients), classes[half]] = sizes[half]
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
