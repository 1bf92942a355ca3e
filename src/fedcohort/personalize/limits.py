"""How far is too far: when a newcomer had better start from the global model.

Calibrated by leaving out one: each warm client is taken for a newcomer and looks for its nearest
among the others. Two rules:

- `spread_limit` knows distances alone. A newcomer is near if the squared distance is at most the
  95% quantile of those among warm clients, so that a newcomer like the others is sent away one
  time in twenty; or if it is at most its own standard error: a distance that sampling and noise
  explain is no reason to abstain, however alike the warm clients are.
- `gains_limit` also knows how much better than the global model each warm client fared with its
  neighbor's model. It takes the limit under which these gains sum to most.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.exceptions import ConfigError

QUANTILE = 0.95
ERRORS = 1.0


@dataclass(frozen=True)
class Limit:
    """Up to where somebody is near.

    Parameters
    ----------
    squared : float
        Squared distance that is near for everybody.
    errors : float
        So many standard errors of its own squared distance are near for a newcomer in any case.

    Examples
    --------
    >>> limit = Limit(squared=2.0, errors=1.0)
    >>> limit.squared_for(error=0.1), limit.squared_for(error=3.0)
    (2.0, 3.0)
    """

    squared: float
    errors: float = 0.0

    def squared_for(self, error: float) -> float:
        """Return the limit for a newcomer whose squared distance has that standard error."""
        return max(self.squared, self.errors * error) if self.errors else self.squared


NEVER = Limit(inf)  # abstain never


def distance_limit(distance: float) -> Limit:
    """Return the limit that a person set."""
    if not distance >= 0:
        raise ConfigError(f"max_distance={distance} must be at least 0, 'auto' or None")
    return Limit(distance**2)


def spread_limit(squares: ArrayLike, quantile: float = QUANTILE) -> Limit:
    """Return the limit from distances among warm clients (above).

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
    """Return the limit that would have served the warm clients best (above).

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
        raise ConfigError("gains_limit: give one finite gain a squared distance")
    order = np.argsort(far, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(gain[order])])
    kept = int(np.argmax(total))
    if kept == 0:
        return Limit(-inf)
    if kept == len(order):
        return Limit(float(far[order[-1]]))  # nothing is known beyond
    return Limit(float(far[order[kept - 1]] + far[order[kept]]) / 2)
