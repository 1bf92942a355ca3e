"""FedACS's Dirichlet skewness environment, in which clients share samples."""

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
    dirichlet,
    encode,
)


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
    sample twice, but clients overlap and some samples may be nobody's: 200 x 2,000 out of 50,000
    put each on about eight clients. A class of which the client already has every sample is left
    out of its mix.

    Parameters
    ----------
    labels, clients, rng
        As for `iid`.
    x_med, x_max : float
        Median and maximum of beta: 0.2 and 3 is the paper's "low", 0.1 and 5 its "high".
    samples : int
        Samples per client, the paper's M.
    min_size : int
        Must not exceed `samples`; here for the sake of one signature.

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
