"""Data of one's own: any arrays of samples, labels and clients."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.datasets.base import Array, Dataset, holdout
from fedcohort.exceptions import DataError
from fedcohort.rounds import stream


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
    x : array (samples, ...)
        Numbers without NaN or infinity; floats become float32, integers int64, bytes stay.
    y : array (samples,)
        Integers from 0 to classes - 1.
    client_ids : array (samples,), optional
        The client of each sample (text or integers); without it, split with `federate`.
    x_test, y_test : arrays, optional
        If left out, a random `test_fraction` of each client's samples (of each class's, without
        clients) is held out, but never all of them.
    test_client_ids : array, optional
        The client of each test sample.
    test_fraction : float
        From 0, for no test data, to below 1.
    classes : int, optional
        By default the largest label plus one.
    name : str
    seed : int
        Decides what is held out.

    Examples
    --------
    >>> data = from_arrays([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1], ["a", "a", "b", "b"],
    ...                    test_fraction=0.5)
    >>> data, sorted(data.client_ids.tolist())
    (Dataset('arrays', 2 + 2 samples of shape (1,), 2 classes, with natural clients), ['a', 'b'])
    """
    samples, labels = _numbers(name, "x", x), _labels(name, "y", y)
    clients = _ids(name, "client_ids", client_ids)
    if (x_test is None) != (y_test is None):
        raise DataError(f"{name}: give both x_test and y_test, or neither")
    if x_test is not None and y_test is not None:
        tests, test_labels = _numbers(name, "x_test", x_test), _labels(name, "y_test", y_test)
        test_clients = _ids(name, "test_client_ids", test_client_ids)
        most = max(_largest(labels), _largest(test_labels))
        found = classes if classes is not None else most + 1
        return Dataset(name, samples, labels, tests, test_labels, found, clients, test_clients)
    if not 0 <= test_fraction < 1:
        raise DataError(f"{name}: test_fraction={test_fraction} must be from 0 to below 1")
    found = classes if classes is not None else _largest(labels) + 1
    whole = Dataset(name, samples, labels, samples[:0], labels[:0], found, clients)
    return _split(whole, test_fraction, seed)


def _split(whole: Dataset, fraction: float, seed: int) -> Dataset:
    ids = whole.client_ids
    test = holdout(whole.y if ids is None else ids, fraction, stream(seed, "test", whole.name))
    return Dataset(
        whole.name,
        whole.x[~test],
        whole.y[~test],
        whole.x[test],
        whole.y[test],
        whole.classes,
        None if ids is None else ids[~test],
        None if ids is None else ids[test],
    )


def _largest(labels: NDArray[np.int64]) -> int:
    return int(labels.max()) if labels.size else -1


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
        if not isinstance(value, (str, int, np.integer)) or value == "":
            raise DataError(f"{name}: {what}[{row}]={value!r} must be text or an integer")
    ids = np.empty(array.size, dtype=object)
    ids[:] = [str(value) for value in array]
    return ids
