"""Models as Flower's ArrayRecords and as flat vectors.

An `ArrayRecord` from a client is untrusted: its claims about dtype, shape and size are checked
before anything is decoded, and checked again afterwards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedcohort import storage
from fedcohort.exceptions import DataError

Flat = NDArray[np.float32]
HEADER = 4096  # bytes; the .npy header of a plain array has 128
NUMPY = "numpy.ndarray"  # how Flower says that an array is serialized as .npy


class WrongForm(DataError):
    """An update whose records, names, shapes or metrics the inner strategy cannot use."""


def is_float(array: Array) -> bool:
    """Whether an array holds parameters, rather than counters such as a batch norm's."""
    return np.dtype(array.dtype).kind == "f"


def flatten(record: ArrayRecord) -> Flat:
    """Return the floating arrays of a model, in their order, as one vector.

    Examples
    --------
    >>> flatten(ArrayRecord([np.ones((2, 2), np.float32), np.zeros(1, np.float32)])).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0]
    """
    return _joined([array.numpy() for array in record.values() if is_float(array)])


def _joined(parts: list[NDArray[Any]]) -> Flat:
    if not parts:
        return np.empty(0, np.float32)
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite and are refused
        return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def unflatten(flat: Flat, like: ArrayRecord, others: ArrayRecord | None = None) -> ArrayRecord:
    """Return a model with the parameters of a vector and the form of another model.

    Arrays that are not parameters come from `others`, by default from `like`.
    """
    out, start, rest = {}, 0, like if others is None else others
    for name, array in like.items():
        if not is_float(array):
            out[name] = rest[name]
            continue
        size = math.prod(array.shape)
        part = flat[start : start + size].reshape(array.shape)
        out[name] = Array(np.ascontiguousarray(part, array.dtype))
        start += size
    return ArrayRecord(out)


def outputs_of(record: ArrayRecord) -> int:
    """Return the size of a model's last bias, which for a classifier is its number of classes.

    Examples
    --------
    >>> outputs_of(ArrayRecord([np.ones((4, 2)), np.zeros(4), np.ones((3, 4)), np.zeros(3)]))
    3
    """
    sizes = [a.shape[0] for a in record.values() if is_float(a) and len(a.shape) == 1]
    return int(sizes[-1]) if sizes else 0


def dtypes_of(record: ArrayRecord) -> dict[str, str]:
    """Return the dtype of each array."""
    return {name: str(array.dtype) for name, array in record.items()}


def in_dtypes(record: ArrayRecord, dtypes: Mapping[str, str]) -> ArrayRecord:
    """Return a model in the given dtypes, the same record if it has them already.

    Server optimizers and averages of counters return float64. Clients are sent the dtypes that
    their app started with. Numbers are rounded, and truncated to integers, as
    ``load_state_dict`` does.

    Examples
    --------
    >>> averaged = ArrayRecord([np.array([0.5]), np.array(3.6)])
    >>> cast = in_dtypes(averaged, {"0": "float32", "1": "int64"})
    >>> [(a.dtype, a.numpy().tolist()) for a in cast.values()]
    [('float32', [0.5]), ('int64', 3)]
    """
    if all(dtypes.get(name, array.dtype) == array.dtype for name, array in record.items()):
        return record
    return ArrayRecord(
        {
            name: Array(np.asarray(array.numpy(), dtypes.get(name, array.dtype)))
            for name, array in record.items()
        }
    )


def payload(record: ArrayRecord) -> int:
    """Count the bytes of a model's numbers; names, .npy headers and framing are not counted.

    Examples
    --------
    >>> payload(ArrayRecord([np.ones((2, 2), np.float32), np.zeros(1)]))
    24
    """
    return sum(np.dtype(a.dtype).itemsize * math.prod(a.shape) for a in record.values())


def version(record: ArrayRecord) -> str:
    """Return a short name of exactly this model."""
    digest = hashlib.blake2b(digest_size=12)
    for name, array in record.items():
        digest.update(name.encode())
        digest.update(array.data)
    return digest.hexdigest()


def checked(record: ArrayRecord, like: ArrayRecord) -> Flat:
    """Return a client's model as a vector; DataError unless it is finite and like the global one.

    Names and shapes must be the global model's. Any real dtype will do: clients answer in the
    dtypes of their own models.
    """
    if set(record) != set(like):
        raise WrongForm(f"arrays named {_short(list(record))}, not {_short(list(like))}")
    for name, array in record.items():
        if tuple(array.shape) != tuple(like[name].shape):
            expected = tuple(like[name].shape)
            raise WrongForm(f"array {name!r} of shape {tuple(array.shape)}, not {expected}")
    values = decoded(record)
    flat = _joined([values[name] for name in like if is_float(like[name])])
    if not np.isfinite(flat).all():
        raise DataError("an update that is not finite")
    return flat


def decoded(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the arrays of a client's record; DataError unless they are sound and finite."""
    values = {}
    for name, array in record.items():
        values[name] = value = _decoded(name, array, _claimed_dtype(name, array))
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise DataError(f"an update that is not finite (array {name!r})")
    return values


def _claimed_dtype(name: str, array: Array) -> np.dtype[Any]:
    try:
        dtype = np.dtype(array.dtype)
    except (TypeError, ValueError, SyntaxError):
        raise WrongForm(f"array {name!r} has the unknown dtype {str(array.dtype)[:40]!r}") from None
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise WrongForm(f"array {name!r} of {dtype} does not hold real numbers")
    if array.stype != NUMPY:
        raise WrongForm(f"array {name!r} is serialized as {array.stype!r}")
    if len(array.data) > dtype.itemsize * math.prod(array.shape) + HEADER:
        raise DataError(f"array {name!r} of {len(array.data)} bytes is longer than it says")
    return dtype


def _decoded(name: str, array: Array, claimed: np.dtype[Any]) -> NDArray[Any]:
    """Decode an .npy file by hand: NumPy's reader would allocate whatever the header claims."""
    stream = BytesIO(array.data)
    try:
        shape, fortran, dtype, start = storage.read_npy_header(stream)
    except ValueError as error:
        raise DataError(f"array {name!r} cannot be decoded: {error}") from None
    whole = len(array.data) - start == claimed.itemsize * math.prod(array.shape)
    if dtype != claimed or shape != tuple(array.shape) or not whole:
        raise DataError(f"array {name!r} is {dtype} {shape}, not what it says")
    values = np.frombuffer(array.data, dtype, offset=start)
    return values.reshape(shape, order="F" if fortran else "C")


def _short(names: list[str]) -> str:
    return str(names if len(names) <= 3 else [*names[:3], "..."])


def as_saved(record: ArrayRecord) -> dict[str, Any]:
    """Return a model as plain arrays in order, for a checkpoint."""
    return {"names": list(record), "arrays": [array.numpy() for array in record.values()]}


def from_saved(saved: Mapping[str, Any]) -> ArrayRecord:
    """Restore what `as_saved` returned."""
    pairs = zip(saved["names"], saved["arrays"], strict=True)
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in pairs})
