"""The limit of a registry, from its own clients: leave one out, look for its nearest."""

from __future__ import annotations

from collections.abc import Mapping

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.personalize.limits import NEVER, Limit, gains_limit, spread_limit
from fedcohort.personalize.registry import Registry
from fedcohort.personalize.search import Neighbor, Search
from fedcohort.rounds import ClientId, stream

SAMPLED = 1000


def leave_one_out(search: Search, most: int = SAMPLED, seed: int = 0) -> dict[ClientId, Neighbor]:
    """Return the nearest other client of each warm client, or of `most` of them.

    Parameters
    ----------
    search : Search
    most : int
        More clients than that are sampled.
    seed : int
        Of the sample.
    """
    registry = search.registry
    numbers = [row[0] for row in registry.db.rows("SELECT number FROM clients ORDER BY number")]
    if len(numbers) > most:
        drawn = stream(seed, "leave-one-out").choice(len(numbers), most, replace=False)
        numbers = [numbers[i] for i in sorted(drawn.tolist())]
    out = {}
    for client, sketch in search.fetch(numbers):
        others = search.nearest(sketch, without=client)
        if others:
            out[client] = others[0]
    return out


def calibrated(
    search: Search, gains: Mapping[ClientId, float] | None = None, most: int = SAMPLED
) -> Limit:
    """Return the limit for newcomers; with fewer than two warm clients there is none.

    Parameters
    ----------
    search : Search
    gains : mapping, optional
        For clients of `leave_one_out`: how much more accurate than the global model the nearest
        other's model is on the client's data. Without it, distances alone decide (`limits`).
    most : int
        More clients than that are sampled.
    """
    nearest = leave_one_out(search, most)
    if gains is not None:
        known = [client for client in nearest if client in gains]
        if not known:
            raise ConfigError("calibrated: none of the gains is of a client of leave_one_out")
        return gains_limit([nearest[c].squared for c in known], [gains[c] for c in known])
    if not nearest:
        return NEVER
    return spread_limit([one.squared for one in nearest.values()])


def keep(registry: Registry, limit: Limit) -> None:
    """Store a limit for everybody who asks with max_distance="auto"."""
    registry.set_fact("limit", {"squared": repr(limit.squared), "errors": limit.errors})


def kept(registry: Registry) -> Limit | None:
    """Return the stored limit."""
    stored = registry.fact("limit")
    if stored is None:
        return None
    try:
        return Limit(float(stored["squared"]), float(stored["errors"]))
    except (TypeError, KeyError, ValueError):
        raise DataError(f"{registry.path}: {stored!r} is no limit; calibrate it anew") from None
