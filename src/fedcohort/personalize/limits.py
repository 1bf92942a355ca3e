"""How far is too far: beyond a limit, a newcomer had better start from the global model.

The limit of a registry comes from its own clients: each in turn is treated as a newcomer and looks
for its nearest among the others. Two rules:

- `spread_limit` uses distances only. A newcomer is near if the squared distance is at most the
  95% quantile of those among warm clients, so that one in twenty newcomers like the others is sent
  away; or if it is at most its own standard error: a distance that sampling and noise explain is
  not a reason to abstain, however alike the warm clients are.
- `gains_limit` also uses how much better than the global model each warm client did with its
  neighbor's model. It takes the limit under which the sum of these gains is largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isnan

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.personalize.registry import Registry
from fedcohort.personalize.search import Neighbor, Search
from fedcohort.rounds import ClientId, stream

QUANTILE = 0.95
ERRORS = 1.0


@dataclass(frozen=True)
class Limit:
    """The largest distance that counts as near.

    Parameters
    ----------
    squared : float
        Squared distance that is near for every newcomer.
    errors : float
        A squared distance of at most this many of its own standard errors is also near.

    Examples
    --------
    >>> limit = Limit(squared=2.0, errors=1.0)
    >>> limit.squared_for(error=0.1), limit.squared_for(error=3.0)
    (2.0, 3.0)
    """

    squared: float
    errors: float = 0.0

    def squared_for(self, error: float) -> float:
        """Return the limit for a newcomer whose squared distance has this standard error."""
        return max(self.squared, self.errors * error) if self.errors else self.squared


NO_LIMIT = Limit(inf)


def distance_limit(distance: float) -> Limit:
    """Return the limit that a person set."""
    if not distance >= 0:
        raise ConfigError(f"max_distance={distance} must be at least 0, 'auto' or None")
    return Limit(distance**2)


def spread_limit(squares: ArrayLike, quantile: float = QUANTILE) -> Limit:
    """Return the limit from distances among warm clients.

    Parameters
    ----------
    squares : array (clients,)
        Squared distance of each warm client to its nearest other.
    quantile : float

    Examples
    --------
    >>> spread_limit([1.0, 2.0, 3.0], quantile=0.5)
    Limit(squared=2.0, errors=1.0)
    """
    if not 0 < quantile <= 1:
        raise ConfigError(f"quantile={quantile} must be above 0 and at most 1")
    return Limit(float(np.quantile(np.asarray(squares, float), quantile)), ERRORS)


def gains_limit(squares: ArrayLike, gains: ArrayLike) -> Limit:
    """Return the limit that would have served the warm clients best.

    Parameters
    ----------
    squares : array (clients,)
        Squared distance of each warm client to what it was recommended.
    gains : array (clients,)
        How much better that was than the global model, on the client's own data.

    Examples
    --------
    >>> gains_limit([1.0, 2.0, 4.0], [0.3, 0.1, -0.2])
    Limit(squared=3.0, errors=0.0)
    >>> gains_limit([1.0, 2.0], [-0.3, -0.1])
    Limit(squared=-inf, errors=0.0)
    """
    far, gain = np.asarray(squares, float), np.asarray(gains, float)
    if far.shape != gain.shape or not far.size or not np.isfinite(gain).all():
        raise ConfigError("gains_limit: give one finite gain per squared distance")
    order = np.argsort(far, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(gain[order])])
    kept = int(np.argmax(total))
    if kept == 0:
        return Limit(-inf)
    if kept == len(order):
        return Limit(float(far[order[-1]]))  # nothing is known beyond it
    return Limit(float(far[order[kept - 1]] + far[order[kept]]) / 2)


SAMPLED = 1000


def leave_one_out(search: Search, most: int = SAMPLED, seed: int = 0) -> dict[ClientId, Neighbor]:
    """Return the nearest other client of each warm client, or of `most` of them.

    Parameters
    ----------
    search : Search
    most : int
        If there are more clients, this many are sampled.
    seed : int
        Seed of the sample.
    """
    registry = search.registry
    numbers = [row[0] for row in registry.db.rows("SELECT number FROM clients ORDER BY number")]
    if len(numbers) > most:
        drawn = stream(seed, "leave-one-out").choice(len(numbers), most, replace=False)
        numbers = [numbers[i] for i in sorted(drawn.tolist())]
    out = {}
    for client, sketch in search.fetch(numbers):
        others = search.nearest(sketch, without=client, with_model=True)
        if others:
            out[client] = others[0]
    return out


def calibrated(
    search: Search, gains: Mapping[ClientId, float] | None = None, most: int = SAMPLED
) -> Limit:
    """Return the limit for newcomers; there is none with fewer than two warm clients.

    Parameters
    ----------
    search : Search
    gains : mapping, optional
        For clients of `leave_one_out`: how much more accurate than the global model the nearest
        other's model is on the client's data. Without it, distances alone decide.
    most : int
        If there are more clients, this many are sampled.
    """
    nearest = leave_one_out(search, most)
    if gains is not None:
        known = [client for client in nearest if client in gains]
        if not known:
            raise ConfigError("calibrated: no gain belongs to a client of leave_one_out")
        return gains_limit([nearest[c].squared for c in known], [gains[c] for c in known])
    if not nearest:
        return NO_LIMIT
    return spread_limit([one.squared for one in nearest.values()])


def store_limit(registry: Registry, limit: Limit) -> None:
    """Store the limit that max_distance="auto" stands for."""
    registry.set_fact("limit", {"squared": repr(limit.squared), "errors": limit.errors})


def stored_limit(registry: Registry) -> Limit | None:
    """Return the stored limit."""
    stored = registry.fact("limit")
    if stored is None:
        return None
    try:
        limit = Limit(float(stored["squared"]), float(stored["errors"]))
        if isnan(limit.squared) or not 0 <= limit.errors < inf:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise DataError(
            f"{registry.path}: {stored!r:.80} is not a distance limit; "
            "store it again with `fedcohort registry index`"
        ) from None
    return limit
