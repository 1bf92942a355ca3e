"""The shape of a data set, and how one's own arrays take it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.partition import by_class
from fedcohort.rounds import check_id, stream

Array: TypeAlias = NDArray[Any]

#: Mean and standard deviation of the training pixels, as published or as in the README of the data.
CONSTANTS: dict[str, tuple[Any, Any]] = {
    "digits": (0.3056, 0.3763),
    "mnist": (0.1307, 0.3081),
    "fashion-mnist": (0.2860, 0.3530),
    "femnist": (0.9615, 0.1642),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples, labels and, where the data brings them along, clients.

    `x` holds images as float32 in [0, 1] of shape (samples, channels, height, width), tables as
    float32 of shape (samples, features), texts as integer tokens of shape (samples, window); `y`
    the labels, from 0 to classes - 1; `client_ids` the natural client of each sample as text.
    With `tokens`, the integers of x are names and not amounts. `from_arrays` makes one.
    """

    name: str
    x: Array
    y: NDArray[np.int64]
    x_test: Array
    y_test: NDArray[np.int64]
    classes: int
    client_ids: Array | None = None
    test_client_ids: Array | None = None
    tokens: bool = False

    def __post_init__(self) -> None:
        self._check_part("", self.x, self.y, self.client_ids)
        self._check_part("_test", self.x_test, self.y_test, self.test_client_ids)
        if len(self.y) == 0:
            raise DataError(f"{self.name}: there are no training samples")
        if self.x.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"{self.name}: samples of x have shape {self.x.shape[1:]}, "
                f"those of x_test {self.x_test.shape[1:]}"
            )

    def _check_part(self, part: str, x: Array, y: NDArray[np.int64], ids: Array | None) -> None:
        if len(x) != len(y) or (ids is not None and len(ids) != len(y)):
            clients = "" if ids is None else f", client ids {len(ids)}"
            raise DataError(
                f"{self.name}: unequal lengths: x{part} {len(x)}, y{part} {len(y)}{clients}"
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            raise DataError(
                f"{self.name}: y{part} has labels from {y.min()} to {y.max()}; "
                f"with {self.classes} classes they must be from 0 to {self.classes - 1}"
            )

    def standardized(self, mean: ArrayLike | None = None, std: ArrayLike | None = None) -> Dataset:
        """Return the same samples with (x - mean) / std, by numbers or one per channel.

        By default those published for the data set (`CONSTANTS`): measured ones are not public.
        """
        if mean is None or std is None:
            if self.name not in CONSTANTS:
                raise ConfigError(f"{self.name}: no published mean and std; give them")
            mean, std = CONSTANTS[self.name]
        if self.x.dtype.kind != "f":
            raise ConfigError(f"{self.name}: only float samples can be standardized")
        shape = (-1, *[1] * (self.x.ndim - 2))
        shift, scale = (np.asarray(v, np.float32).reshape(shape) for v in (mean, std))
        x, x_test = (self.x - shift) / scale, (self.x_test - shift) / scale
        return dataclasses.replace(self, x=x, x_test=x_test)

    def split_off(self, test: NDArray[np.bool_]) -> Dataset:
        """Return the data set whose test samples are the marked ones of the training samples."""
        return dataclasses.replace(
            self,
            x=self.x[~test],
            y=self.y[~test],
            x_test=self.x[test],
            y_test=self.y[test],
            client_ids=None if self.client_ids is None else self.client_ids[~test],
            test_client_ids=None if self.client_ids is None else self.client_ids[test],
        )

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def __repr__(self) -> str:
        clients = "" if self.client_ids is None else ", with natural clients"
        return (
            f"Dataset({self.name!r}, {len(self.y)} + {len(self.y_test)} samples of shape "
            f"{self.sample_shape}, {self.classes} classes{clients})"
        )


def holdout(groups: ArrayLike, fraction: float, rng: Generator) -> NDArray[np.bool_]:
    """Mark a random fraction of each group, rounded, but never the whole group."""
    group, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    take = np.minimum(np.floor(sizes * fraction + 0.5).astype(np.int64), sizes - 1)
    order = by_class(group, rng)
    rank = np.arange(group.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.zeros(group.size, dtype=np.bool_)
    mask[order] = rank < np.repeat(take, sizes)
    return mask


def from_arrays(
    x: ArrayLike,
    y: ArrayLike,
    client_ids: ArrayLike | None = None,
    x_test: ArrayLike | None = None,
    y_test: ArrayLike | None = None,
    *,
    test_client_ids: ArrayLike | None = None,
    test_fraction: float = 0.2,
    classes: int | None = None,
    name: str = "arrays",
    seed: int = 0,
) -> Dataset:
    """Make a data set of one's own arrays, checked.

    Parameters
    ----------
    x, y : arrays
        Numbers (samples, ...) without NaN or infinity, and integers from 0 to classes - 1. Floats
        become float32, integers int64, bytes stay.
    client_ids, test_client_ids : array (samples,), optional
        The client of each sample (text or integers); without it, split with `federate`.
    x_test, y_test : arrays, optional
        If left out, a random `test_fraction` of each client's samples (of each class's, without
        clients) is held out by `seed`, but never all of them.
    classes : int, optional
        By default the largest label plus one; the smallest label must then be 0.

    Examples
    --------
    >>> data = from_arrays([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1], ["a", "a", "b", "b"],
    ...                    test_fraction=0.5)
    >>> data, sorted(data.client_ids.tolist())
    (Dataset('arrays', 2 + 2 samples of shape (1,), 2 classes, with natural clients), ['a', 'b'])
    """
    if (x_test is None) != (y_test is None):
        raise DataError(f"{name}: give both x_test and y_test, or neither")
    if not 0 <= test_fraction < 1:
        raise DataError(f"{name}: test_fraction={test_fraction} must be from 0 to below 1")
    samples, labels = _numbers(name, "x", x), _labels(name, "y", y)
    clients = _ids(name, "client_ids", client_ids)
    tests, test_labels, test_clients = samples[:0], labels[:0], None
    if x_test is not None and y_test is not None:
        tests, test_labels = _numbers(name, "x_test", x_test), _labels(name, "y_test", y_test)
        test_clients = _ids(name, "test_client_ids", test_client_ids)
    if classes is None:
        every = np.concatenate([labels, test_labels])
        classes, low = (int(every.max()) + 1, int(every.min())) if every.size else (0, 0)
        if low > 0:
            raise DataError(
                f"{name}: the smallest label is {low}, so class 0 would be empty; subtract {low} "
                f"from y, or state classes={classes}"
            )
    whole = Dataset(name, samples, labels, tests, test_labels, classes, clients, test_clients)
    if x_test is not None:
        return whole
    groups = labels if clients is None else clients
    return whole.split_off(holdout(groups, test_fraction, stream(seed, "test", name)))


def _numbers(name: str, what: str, values: ArrayLike) -> Array:
    array = np.asarray(values)
    if array.dtype.kind not in "fiub" or array.ndim < 2:
        raise DataError(
            f"{name}: {what} must be numbers of shape (samples, ...), "
            f"not {array.dtype} of shape {array.shape}"
        )
    if array.dtype.kind == "f":
        bad = ~np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
        if bad.any():
            raise DataError(f"{name}: {what}[{int(np.argmax(bad))}] holds NaN or infinity")
        return array.astype(np.float32)
    return array if array.dtype == np.uint8 else array.astype(np.int64)


def _labels(name: str, what: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iub" and array.size):
        raise DataError(
            f"{name}: {what} must be one row of integers, not {array.dtype} of shape "
            f"{array.shape}; np.unique(..., return_inverse=True) numbers other labels"
        )
    return array.astype(np.int64)


def _ids(name: str, what: str, values: ArrayLike | None) -> Array | None:
    if values is None:
        return None
    array = np.asarray(values, dtype=object)
    if array.ndim != 1:
        raise DataError(f"{name}: {what} must be one row of ids, not of shape {array.shape}")
    for row, value in enumerate(array):
        if not isinstance(value, (str, int, np.integer)):
            raise DataError(f"{name}: {what}[{row}]={value!r} must be text or an integer")
    texts = [str(value) for value in array]
    try:
        for text in set(texts):
            check_id(text, f"{name}: {what}")
    except ConfigError as error:
        raise DataError(str(error)) from None
    return np.array(texts, dtype=object)
