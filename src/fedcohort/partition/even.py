"""Partitions into equal sizes: at random, by shards; and the one that the data brings along."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError
from fedcohort.partition.assign import IndexArray, by_class, check, collect, encode, even_sizes


def iid(labels: ArrayLike, clients: int, rng: Generator, *, min_size: int = 1) -> list[IndexArray]:
    """Deal the samples out at random, in sizes that differ by one at most.

    Case 1 of Sketch to Skip and Select (paper 2).

    Parameters
    ----------
    labels : array (samples,)
    clients : int
    rng : Generator
    min_size : int
        Samples per client at least.

    Returns
    -------
    list of arrays
        Sample indices of each client, ascending.

    Examples
    --------
    >>> [part.size for part in iid([0, 1, 0, 1, 2], 2, np.random.default_rng(0))]
    [3, 2]
    """
    codes = encode(labels)[0]
    check("iid", codes.size, clients, min_size)
    owner = np.repeat(np.arange(clients), even_sizes(codes.size, clients))
    return collect(rng.permutation(owner), clients)


def shards(
    labels: ArrayLike, clients: int, rng: Generator, *, per_client: int = 2, min_size: int = 1
) -> list[IndexArray]:
    """Sort by label, cut into equal shards, deal `per_client` random shards to each client.

    FedAvg's pathological split [1]_; FedCor (paper 3) calls it 2SPC and 1SPC. All samples are
    used: client sizes differ by one at most, and so do the shards of one client.

    Parameters
    ----------
    labels, clients, rng, min_size
        As for `iid`.
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
    codes = encode(labels)[0]
    check("shards", codes.size, clients, min_size)
    if per_client < 1 or clients * per_client > codes.size:
        raise ConfigError(
            f"shards: per_client={per_client} x {clients} clients must be between {clients} and "
            f"the number of samples, {codes.size}"
        )
    sizes = np.stack([even_sizes(int(n), per_client) for n in even_sizes(codes.size, clients)])
    shuffled = rng.permutation(clients * per_client)
    owner = np.empty(codes.size, dtype=np.int64)
    owner[by_class(codes, rng)] = np.repeat(shuffled // per_client, sizes.ravel()[shuffled])
    return collect(owner, clients)


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
    # Samples of a client mostly lie together: naming runs, not samples, spares most of the work.
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
