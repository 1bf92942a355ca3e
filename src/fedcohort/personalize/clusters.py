"""Groups of warm clients that their sketches cannot tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError
from fedcohort.signals.distances import distance_matrix
from fedcohort.signals.race import RaceSketch
from fedcohort.signals.uncertainty import distance_with_error

MOST = 2000  # clients; all their distances are computed
SAMPLED = 200
CUT = 0.5  # of a standard error, which is an upper bound and mostly a loose one


def clusters(sketches: Sequence[RaceSketch], cut: float | None = None) -> NDArray[np.int64]:
    """Group clients by average linkage of their debiased squared distances.

    Parameters
    ----------
    sketches : sequence of RaceSketch
    cut : float, optional
        Groups are joined while their squared distance, on average, is below. By default half the
        median standard error of such a distance: what noise and sampling explain is joined, and
        under much noise all become one group.

    Returns
    -------
    int array
        The group of each client, from 0.

    Examples
    --------
    >>> empty = RaceSketch.srp(dim=2, rows=50, bits=3)
    >>> def sketch(center, seed):
    ...     made = empty.empty_like()
    ...     made.add(np.random.default_rng(seed).normal(center, 0.2, (200, 2)))
    ...     return made
    >>> clusters([sketch(c, i) for i, c in enumerate([(1, 0), (0, 1), (1, 0), (0, 1)])]).tolist()
    [0, 1, 0, 1]
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    if len(sketches) > MOST:
        raise ConfigError(
            f"clusters: {len(sketches)} clients are more than {MOST}; "
            "use the strategy 'match' or 'k-nearest'"
        )
    if len(sketches) < 2:
        return np.zeros(len(sketches), np.int64)
    squares = np.maximum(distance_matrix(sketches, "mmd") * sketches[0].rows, 0)
    tree = linkage(squareform(squares, checks=False), "average")
    height = CUT * typical_error(sketches) if cut is None else cut
    groups = fcluster(tree, height, "distance")
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    names: NDArray[np.int64] = np.argsort(np.argsort(first))[inverse]  # in order of appearance
    return names


def typical_error(sketches: Sequence[RaceSketch]) -> float:
    """Median standard error of the squared distance between two of the clients."""
    pairs = zip(sketches, [*sketches[1:], sketches[0]], strict=True)
    errors = [distance_with_error(a, b, "mmd").error for a, b in islice(pairs, SAMPLED)]
    return float(np.median(errors)) * sketches[0].rows
