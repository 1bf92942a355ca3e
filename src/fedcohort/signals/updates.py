"""Readings that a server takes from updates themselves, which cost no bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]


def update_distance(
    updates: Floats, sizes: ArrayLike, *, weighted: bool = False, scale_by_size: bool = False
) -> NDArray[np.float64]:
    """Distance of each update from the cohort's mean update (paper 1, equation 14).

    Parameters
    ----------
    updates : array (clients, parameters)
        Trained models minus the global one, or the part of them that is compared.
    sizes : array (clients,)
        Numbers of examples.
    weighted : bool, default=False
        Weigh the mean by sizes.
    scale_by_size : bool, default=False
        Multiply by the square root of the size: a small client's update scatters more.

    Examples
    --------
    >>> updates = np.array([[0.0, 0.0], [4.0, 0.0]])
    >>> update_distance(updates, [1, 3]).tolist()
    [2.0, 2.0]
    >>> update_distance(updates, [1, 3], weighted=True).tolist()
    [3.0, 1.0]
    """
    counts = np.asarray(sizes, np.float64)
    weights = counts if weighted else np.ones(len(counts))
    exact = np.asarray(updates, np.float64)
    distances = np.linalg.norm(exact - weights / weights.sum() @ exact, axis=1)
    return np.asarray(distances * np.sqrt(counts) if scale_by_size else distances)


def last_layer(names: Sequence[str], sizes: Sequence[int]) -> int:
    """Count the parameters of the last layer from the names of a model's arrays.

    A layer's arrays stand together and share what comes before the last dot of their names; names
    without dots are layers of their own.

    Examples
    --------
    >>> last_layer(["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"], [50, 5, 10, 2])
    12
    >>> last_layer(["0", "1"], [50, 5])
    5
    """
    owner = names[-1].rpartition(".")[0]
    total = 0
    for name, size in zip(reversed(names), reversed(sizes), strict=True):
        if total and (not owner or name.rpartition(".")[0] != owner):
            break
        total += size
    return total
