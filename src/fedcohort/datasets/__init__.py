"""Data sets by name, and their division among clients."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedcohort.datasets import published
from fedcohort.datasets.base import Dataset, MissingData, data_root, from_arrays
from fedcohort.datasets.federation import Federation, federate
from fedcohort.exceptions import DataError
from fedcohort.options import checked_options
from fedcohort.registry import lookup

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetStatus",
    "Federation",
    "available",
    "federate",
    "from_arrays",
    "load",
]

DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": published.read_digits,
    "mnist": published.read_idx,
    "fashion-mnist": published.read_idx,
    "cifar10": published.read_cifar,
    "femnist": published.read_femnist,
    "shakespeare": published.read_shakespeare,
    "heart-disease": published.read_heart,
}


def load(
    name: str = "digits", root: str | os.PathLike[str] | None = None, **options: Any
) -> Dataset:
    """Load one of `DATASETS`; `max_samples` is an option of shakespeare.

    Parameters
    ----------
    root : path, optional
        The folder that holds a folder `name` with the files. By default $FEDCOHORT_DATA, then
        $XDG_CACHE_HOME/fedcohort (~/.cache/fedcohort). A file that is missing or damaged gives a
        DataError that says what it must contain.

    Examples
    --------
    >>> load("digits")
    Dataset('digits', 1438 + 359 samples of shape (1, 8, 8), 10 classes)
    """
    reader = lookup("data set", name, DATASETS)
    checked = checked_options(f"data set {name!r}", reader, options)
    return reader(data_root(root) / name, **checked)


@dataclass(frozen=True)
class DatasetStatus:
    """Whether a data set can be loaded: from which folder, with how many samples and clients."""

    name: str
    status: str  # ok, missing or damaged
    samples: int | None
    clients: int | None
    where: str
    detail: str


def available(root: str | os.PathLike[str] | None = None) -> list[DatasetStatus]:
    """Load every data set to see which are here and whole."""
    return [_examine(name, root) for name in DATASETS]


def _examine(name: str, root: str | os.PathLike[str] | None) -> DatasetStatus:
    where = "scikit-learn" if name == "digits" else str(data_root(root) / name)
    try:
        data = load(name, root)
    except DataError as error:
        status = "missing" if isinstance(error, MissingData) else "damaged"
        return DatasetStatus(name, status, None, None, where, str(error))
    clients = None if data.client_ids is None else len(set(data.client_ids.tolist()))
    samples = len(data.y) + len(data.y_test)
    detail = f"{len(data.y)} train, {len(data.y_test)} test, {data.classes} classes"
    return DatasetStatus(name, "ok", samples, clients, where, detail)
