"""Data sets by name, and their division among clients."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedcohort.datasets import heart, images, shakespeare
from fedcohort.datasets.base import Dataset, from_arrays
from fedcohort.datasets.federation import Federation, federate
from fedcohort.datasets.folder import Folder, MissingData, places
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
    "digits": images.read_digits,
    "mnist": images.read_idx,
    "fashion-mnist": images.read_idx,
    "cifar10": images.read_cifar,
    "femnist": images.read_femnist,
    "shakespeare": shakespeare.read,
    "heart-disease": heart.read,
}


def load(
    name: str = "digits", root: str | os.PathLike[str] | None = None, **options: Any
) -> Dataset:
    """Load a data set.

    Parameters
    ----------
    name : str
        One of `DATASETS`.
    root : path, optional
        The folder that holds a folder `name` with the files. By default $FEDCOHORT_DATA, then
        $XDG_CACHE_HOME/fedcohort (~/.cache/fedcohort).
    **options
        `dtype` for mnist, fashion-mnist, cifar10 and femnist; `max_samples` for shakespeare.

    Raises
    ------
    DataError
        If a file is missing or damaged; the message names it and says what it must contain.
    ConfigError
        If there is no such data set or option.

    Examples
    --------
    >>> load("digits")
    Dataset('digits', 1438 + 359 samples of shape (1, 8, 8), 10 classes)
    """
    reader = lookup("data set", name, DATASETS)
    given = checked_options(f"data set {name!r}", reader, options)
    return reader(Folder(name, places(root)), **given)


@dataclass(frozen=True)
class DatasetStatus:
    """Whether a data set can be loaded: from which folder, with how many samples and clients."""

    name: str
    status: Literal["ok", "missing", "damaged"]
    samples: int | None
    clients: int | None
    where: str
    detail: str


def available(root: str | os.PathLike[str] | None = None) -> list[DatasetStatus]:
    """Load every data set to see which are here and whole.

    Examples
    --------
    >>> first = available("no/such/folder")[0]
    >>> first.name, first.status, first.samples
    ('digits', 'ok', 1797)
    """
    return [_examine(name, root) for name in DATASETS]


def _examine(name: str, root: str | os.PathLike[str] | None) -> DatasetStatus:
    folders = [place / name for place in places(root)]
    where = " or ".join(map(str, [f for f in folders if f.is_dir()][:1] or folders))
    if name == "digits":
        where = "scikit-learn"
    has_dtype = "dtype" in inspect.signature(DATASETS[name]).parameters
    try:
        data = load(name, root, **({"dtype": "uint8"} if has_dtype else {}))
    except MissingData as error:
        return DatasetStatus(name, "missing", None, None, where, str(error))
    except DataError as error:
        return DatasetStatus(name, "damaged", None, None, where, str(error))
    clients = None if data.client_ids is None else len(set(data.client_ids.tolist()))
    samples = len(data.y) + len(data.y_test)
    detail = f"{len(data.y)} train, {len(data.y_test)} test, {data.classes} classes"
    return DatasetStatus(name, "ok", samples, clients, where, detail)
