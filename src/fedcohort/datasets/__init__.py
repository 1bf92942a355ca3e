"""Data sets by name, and their division among clients."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedcohort.datasets import published
from fedcohort.datasets.base import Dataset as Dataset
from fedcohort.datasets.base import from_arrays as from_arrays
from fedcohort.datasets.published import MissingData, data_root
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.options import checked_options, parse_named
from fedcohort.partition import PARTITIONS, IndexArray, dirichlet_environment, natural
from fedcohort.registry import in_file, load_object, lookup
from fedcohort.rounds import ClientId, stream

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

    `root` is the folder that holds a folder `name` with the files: by default $FEDCOHORT_DATA, then
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


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set, and the rows of `dataset.x` that each client holds, sorted by client id.

    No client may be empty, and no row given out twice unless `shared`.

    Examples
    --------
    >>> data = from_arrays([[0.0], [1.0], [2.0]], [0, 1, 1], test_fraction=0)
    >>> federation = Federation(data, {"b": [0], "a": [1, 2]})
    >>> federation.clients, federation.label_counts().tolist()
    (('a', 'b'), [[0, 2], [1, 0]])
    """

    dataset: Dataset
    parts: Mapping[ClientId, IndexArray]
    shared: bool = False

    def __post_init__(self) -> None:
        if not self.parts:
            raise DataError(f"{self.dataset.name}: a federation needs at least one client")
        checked = {c: self._checked(c, self.parts[c]) for c in sorted(self.parts)}
        object.__setattr__(self, "parts", checked)
        repeated = np.bincount(np.concatenate(list(checked.values()))) > 1
        if repeated.any() and not self.shared:
            row = int(repeated.argmax())
            one, other = [client for client, rows in checked.items() if row in rows][:2]
            raise DataError(
                f"row {row} is given to clients {one!r} and {other!r}; "
                "give it to one, or make the Federation with shared=True"
            )

    def _checked(self, client: ClientId, part: ArrayLike) -> IndexArray:
        rows = np.asarray(part)
        samples = len(self.dataset.y)
        if rows.size == 0:
            raise DataError(f"client {client!r} has no samples")
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            form = f"{rows.dtype} of shape {rows.shape}"
            raise DataError(f"client {client!r}: {form} is not an index")
        if rows.min() < 0 or rows.max() >= samples:
            raise DataError(f"client {client!r} has rows beyond 0 to {samples - 1}")
        if np.unique(rows).size != rows.size:
            raise DataError(f"client {client!r} holds a sample twice")
        return rows.astype(np.int64)

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The client ids, sorted."""
        return tuple(self.parts)

    def sizes(self) -> NDArray[np.int64]:
        """Count the samples of each client, in the order of `clients`."""
        return np.array([part.size for part in self.parts.values()], dtype=np.int64)

    def label_counts(self) -> NDArray[np.int64]:
        """Count the samples of each class (columns) that each client (rows) holds."""
        y, classes = self.dataset.y, self.dataset.classes
        rows = [np.bincount(y[part], minlength=classes) for part in self.parts.values()]
        return np.stack(rows).astype(np.int64)


def federate(
    dataset: Dataset,
    partition: str | Callable[..., Any] | Sequence[ArrayLike] | Mapping[ClientId, ArrayLike],
    clients: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Federation:
    """Hand a data set out to clients.

    Parameters
    ----------
    partition : str, callable, sequence or mapping
        A name in `PARTITIONS`, with options as in "shards:per_client=1"; "natural" for the clients
        that the data brings along; a function called `partition(labels, clients, rng, **options)`,
        or FILE.py:FUNCTION; or the index arrays themselves, in a list or by client id.
    clients : int, optional
        How many. With "natural", that many of them are drawn at random (all by default).
    **options
        Those of the partition, such as `alpha`.

    Examples
    --------
    >>> federation = federate(load("digits"), "dirichlet-per-client", clients=12, alpha=0.3)
    >>> federation.clients[:2], federation.sizes().sum()
    (('client-00', 'client-01'), np.int64(1438))
    """
    function: Any = partition
    if isinstance(partition, str):
        name, stated = parse_named(partition)
        options, every = stated | options, {**PARTITIONS, "natural": natural}
        known = not in_file(name)
        function = lookup("partition", name, every) if known else load_object("partition", name)
    elif not callable(partition):
        if options or (clients is not None and clients != len(partition)):
            raise ConfigError("federate: index arrays take neither options nor another `clients`")
        return Federation(dataset, _named(partition))
    owner = f"partition {getattr(function, '__name__', 'partition').replace('_', '-')!r}"
    options, rng = checked_options(owner, function, options), stream(seed, "partition")
    if function is natural:
        return Federation(dataset, _natural(dataset, clients, rng, options))
    if clients is None:
        raise ConfigError(f"{owner}: say how many clients")
    try:
        signature(function).bind(dataset.y, clients, rng, **options)
    except TypeError as error:  # an option is missing
        raise ConfigError(f"{owner}: {error}") from error
    parts = function(dataset.y, clients, rng, **options)
    return Federation(dataset, _named(parts), shared=function is dirichlet_environment)


def _named(parts: Mapping[ClientId, Any] | Sequence[ArrayLike]) -> Mapping[ClientId, Any]:
    if isinstance(parts, Mapping):
        return parts
    digits = len(str(len(parts) - 1))
    return {f"client-{i:0{digits}d}": part for i, part in enumerate(parts)}


def _natural(
    dataset: Dataset, clients: int | None, rng: Generator, options: dict[str, Any]
) -> dict[ClientId, IndexArray]:
    if dataset.client_ids is None:
        raise ConfigError(f"data set {dataset.name} has no natural clients; choose a partition")
    parts = natural(dataset.client_ids, **options)
    if clients is None:
        return parts
    if not 1 <= clients <= len(parts):
        raise ConfigError(f"natural: clients={clients} must be from 1 to {len(parts)}")
    names = list(parts)
    drawn = (names[i] for i in rng.choice(len(names), clients, replace=False))
    return {name: parts[name] for name in drawn}
