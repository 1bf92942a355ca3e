"""What several policies do with readings: any signal as vectors, sizes, weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike, NDArray

from fedcohort.policies.base import pick
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

PROFILES = ("feature_profile", "race_sketch", "insight")
QUERIES = ("model_sketch", "gradient_sketch")
REPLIES = ("update_sketch",)


def vector_needs(policy: str, signal: str, *profile: str) -> Needs:
    """Return the needs of a policy that compares clients by the vectors of `signal`."""
    known = (*PROFILES, *QUERIES, *REPLIES)
    if signal not in known:
        raise ValueError(f"{policy}: signal={signal!r} is none of {', '.join(known)}")
    return Needs(
        profile=frozenset({signal} if signal in PROFILES else ()) | frozenset(profile),
        query=frozenset({signal} if signal in QUERIES else ()),
        reply=frozenset({signal} if signal in REPLIES else ()),
    )


def vectors(
    signals: Signals,
    name: str,
    clients: Sequence[ClientId],
    since: int | None = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Indices, NDArray[Any]]:
    """Positions of the clients with a usable reading, and the readings as rows of numbers.

    A sketch becomes its counts over n; an empty one is not usable. With `since`, readings of
    earlier rounds are left out. `dtype` is that of the rows, but for sketches; a number that it
    cannot hold becomes infinite.
    """
    positions, readings = signals.read(name, clients)
    if since is not None and len(positions):
        fresh = signals.rounds(name, clients)[positions] >= since
        positions, readings = positions[fresh], readings[fresh]
    if not len(positions):
        return positions, np.empty((0, 0))
    if readings.dtype.names is None:
        with np.errstate(over="ignore"):
            return positions, readings.reshape(len(positions), -1).astype(dtype)
    return _sketch_vectors(positions, readings)


def _sketch_vectors(positions: Indices, readings: NDArray[Any]) -> tuple[Indices, Array]:
    filled = readings["n"] > 0
    counts = readings["counts"][filled].reshape(int(filled.sum()), -1)
    return positions[filled], np.asarray(counts / readings["n"][filled][:, None])


def sizes(signals: Signals, clients: Sequence[ClientId]) -> Array:
    """Number of examples of each client; the mean of the known where it is unknown."""
    positions, known = signals.read("num_examples", clients)
    result = np.full(len(clients), float(known.mean()) if len(positions) else 1.0)
    result[positions] = known
    return np.asarray(np.maximum(result, 0.0))


def inverse_inclusion(share: Array, inclusion: Array) -> tuple[float, ...]:
    """Weights p_i / pi_i of Horvitz and Thompson: the aggregate has the expectation sum p_i x_i."""
    return tuple((share / inclusion).tolist())


def at_least(policy: str, least: int, **options: int | None) -> None:
    """Refuse options that are too small; None is always fine."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"{policy}: {name}={value} must be at least {least}")


def check_weights(policy: str, weights: str | None) -> None:
    """Refuse what is not a way to weigh the cohort."""
    if weights not in (None, "inverse-inclusion"):
        raise ValueError(f"{policy}: weights={weights!r} must be None or 'inverse-inclusion'")


def draw(logits: Array, size: int, rng: Generator) -> Indices:
    """Positions drawn one after the other in proportion to exp(logits)."""
    places: Any = range(len(logits))
    return np.array(pick(places, size, rng, logits), np.int64)


def some(count: int, limit: int | None, rng: Generator) -> Indices:
    """Positions of at most `limit` of `count` clients, drawn uniformly, sorted."""
    if limit is None or count <= limit:
        return np.arange(count)
    return np.sort(rng.choice(count, limit, replace=False))
