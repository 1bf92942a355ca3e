"""What all partitions share: checks, Dirichlet draws, handing out classes, collecting indices.

A partition is stored as `owner`, the client of each sample, so no sample can be lost or handed out
twice; or as `counts`, the samples of each class per client, which `scatter` turns into `owner`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.options import checked_options

IndexArray: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


Partition: TypeAlias = Callable[..., list[IndexArray]]
PARTITIONS: dict[str, Partition] = {}


def partition(name: str, *, sharing: bool = False) -> Callable[[Callable[..., Any]], Partition]:
    """Decorator: enter a split into `PARTITIONS`; its labels are then numbers 0..C-1.

    The request and the options are checked first. The function returns the owner of each sample,
    or the counts of each class per client (clients x classes), or the clients' samples themselves.
    With `sharing`, clients hold samples together, so that there may be more than there are.
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
            checked = checked_options(name, split, {**options, "min_size": min_size})
            codes = np.unique(array, return_inverse=True)[1].astype(np.int64)
            parts = split(codes, clients, rng, **checked)
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
    that are not used up. A class that is asked for more than it has serves clients in random
    order, and those who still need samples ask again. Each turn uses up a class or is the last. A
    client whose mix has no weight on any remaining class takes from what remains.

    `mix` is (clients, classes), as are the counts returned, whose rows add up to `sizes`.
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
    """Assign clients to classes in proportion to their samples, at most `max_per_class` each.

    Jefferson's method, which maximizes the smallest share per client. With enough clients, every
    class gets one.
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
