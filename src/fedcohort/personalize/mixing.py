"""Averages of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.rounds import ClientId

Arrays = Mapping[str, NDArray[Any]]


def average(models: Mapping[ClientId, tuple[float, Arrays]]) -> dict[str, NDArray[Any]]:
    """Average models of one architecture, array by array.

    Parameters
    ----------
    models : mapping of client to (weight, named arrays)
        Weights sum to one. Whole numbers, such as counters, are taken from the heaviest model.

    Examples
    --------
    >>> ann, bob = {"w": np.array([0.0, 4.0])}, {"w": np.array([4.0, 0.0])}
    >>> average({"ann": (0.75, ann), "bob": (0.25, bob)})
    {'w': array([1., 3.])}
    """
    if not models:
        raise ConfigError("average: give at least one model")
    heaviest = max(models, key=lambda client: models[client][0])
    out = {}
    for name, like in models[heaviest][1].items():
        total = np.zeros(like.shape, np.float64)
        for client, (weight, arrays) in models.items():
            _check(client, arrays, heaviest, models[heaviest][1], name)
            total += weight * arrays[name].astype(np.float64)
        out[name] = total.astype(like.dtype) if like.dtype.kind == "f" else like
    return out


def _check(client: ClientId, arrays: Arrays, other: ClientId, like: Arrays, name: str) -> None:
    if arrays.keys() != like.keys():
        odd = sorted(arrays.keys() ^ like.keys())[0]
        raise DataError(f"clients {client!r} and {other!r}: only one of their models has {odd!r}")
    if arrays[name].shape != like[name].shape:
        raise DataError(
            f"clients {client!r} and {other!r}: {name!r} has shapes {arrays[name].shape} "
            f"and {like[name].shape}; only like models can be averaged"
        )
