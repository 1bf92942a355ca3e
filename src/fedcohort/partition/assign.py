"""What all partitions share: checks, Dirichlet draws, handing out classes, collecting indices.

A partition is stored as `owner`, the client of each sample, so no sample can be lost or handed out
twice; or as `counts`, the samples of each class per client, which `scatter` turns into `owner`.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError

IndexArray: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def encode(labels: ArrayLike) -> tuple[IndexArray, Counts]:
    """Number the labels 0..C-1 and count them."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0:
        raise ConfigError(f"labels must be one non-empty row of labels, not of shape {array.shape}")
    codes, counts = np.unique(array, return_inverse=True, return_counts=True)[1:]
    return codes.astype(np.int64), counts.astype(np.int64)


def check(who: str, samples: int, clients: int, min_size: int) -> None:
    """Raise if no partition can satisfy the request."""
    if clients < 1:
        raise ConfigError(f"{who}: clients={clients} is below 1")
    if min_size < 0:
        raise ConfigError(f"{who}: min_size={min_size} is negative")
    if clients * min_size > samples:
        raise ConfigError(
            f"{who}: {clients} clients of at least min_size={min_size} need "
            f"{clients * min_size} samples, but there are {samples}"
        )


def check_positive(who: str, **values: float) -> None:
    """Raise if a parameter is not a positive number."""
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise ConfigError(f"{who}: {name}={value} must be a positive number")


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
    order, and those who still need samples ask again. Each turn uses up a class or is the last, so
    there are at most C + 1 turns. A client whose mix has no weight on any remaining class takes
    from what remains.

    Parameters
    ----------
    mix : array (clients, classes)
        Non-negative weights.
    sizes : array (clients,)
        Samples per client; the sum must not exceed that of `supply`.
    supply : array (classes,)
        Samples per class.

    Returns
    -------
    array (clients, classes)
        Counts with row sums `sizes` and column sums of at most `supply`.
    """
    counts = np.zeros(mix.shape, dtype=np.int64)
    need, left = sizes.copy(), supply.copy()
    while (rows := np.flatnonzero(need)).size:
        rng.shuffle(rows)
        ask = rng.multinomial(need[rows], _over_open(mix[rows], left))
        asked_before = np.cumsum(ask, axis=0) - ask
        given = np.clip(left - asked_before, 0, ask)
        counts[rows] += given
        need[rows] -= given.sum(axis=1)
        left -= given.sum(axis=0)
    return counts


def _over_open(mix: Floats, left: Counts) -> Floats:
    """Normalize each mix over the classes of which something is left."""
    wish: Floats = mix * (left > 0)
    wish[wish.sum(axis=1) == 0.0] = left
    wish /= wish.sum(axis=1, keepdims=True)
    return wish


def apportion(counts: Counts, clients: int, most: int) -> Counts:
    """Assign clients to classes in proportion to their samples, at most `most` per class.

    Jefferson's method, which maximizes the smallest share per client. If there are at least as
    many clients as classes, every class gets one.
    """
    quotients = counts[:, None] / np.arange(1.0, most + 1)
    if clients >= counts.size:
        quotients[:, 0] = np.inf
    chosen = np.argsort(-quotients, axis=None, kind="stable")[:clients]
    return np.bincount(chosen // most, minlength=counts.size).astype(np.int64)


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
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=clients)).tolist()
    return [order[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
