"""Models as ArrayRecords and as flat vectors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fedcohort import npy
from fedcohort.exceptions import DataError

Flat = NDArray[np.float32]
HEADER = 4096  # bytes; an .npy header of a plain array has 128


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
    parts = [array.numpy().ravel() for array in record.values() if is_float(array)]
    return np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)


def unflatten(flat: Flat, like: ArrayRecord) -> ArrayRecord:
    """Return a model with the parameters of a vector and the form of another model."""
    out, start = {}, 0
    for name, array in like.items():
        size = math.prod(array.shape) if is_float(array) else 0
        part = flat[start : start + size].reshape(array.shape) if size else array.numpy()
        out[name] = Array(np.ascontiguousarray(part, array.dtype))
        start += size
    return ArrayRecord(out)


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
    """Return a client's model as a vector; DataError unless it is finite and of the same form.

    Names, dtypes and shapes as stated, and the sizes of the bytes, are compared before anything is
    decoded; then what was decoded is compared again, for statements can lie.
    """
    if list(record) != list(like):
        raise DataError(f"arrays named {_short(list(record))}, not {_short(list(like))}")
    for name, array in record.items():
        _check_claim(name, array, like[name])
    decoded = {name: _decoded(name, array, like[name]) for name, array in record.items()}
    parts = [part.ravel() for name, part in decoded.items() if is_float(like[name])]
    flat = np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
    if not np.isfinite(flat).all():
        raise DataError("an update that is not finite")
    return flat


def _check_claim(name: str, array: Array, like: Array) -> None:
    if array.dtype != like.dtype or tuple(array.shape) != tuple(like.shape):
        raise DataError(
            f"array {name!r} of {array.dtype} {tuple(array.shape)}, not {like.dtype} "
            f"{tuple(like.shape)}"
        )
    if array.stype != like.stype:
        raise DataError(f"array {name!r} is serialized as {array.stype!r}")
    if len(array.data) > np.dtype(like.dtype).itemsize * math.prod(like.shape) + HEADER:
        raise DataError(f"array {name!r} of {len(array.data)} bytes is longer than it says")


def _decoded(name: str, array: Array, like: Array) -> NDArray[Any]:
    """Decode an .npy file by hand: NumPy's reader would allocate whatever the header claims."""
    stream = BytesIO(array.data)
    try:
        shape, fortran, dtype, start = npy.read_header(stream)
    except ValueError as error:
        raise DataError(f"array {name!r} cannot be decoded: {error}") from None
    size = np.dtype(like.dtype).itemsize * math.prod(like.shape)
    whole = len(array.data) - start == size
    if dtype != np.dtype(like.dtype) or shape != tuple(like.shape) or not whole:
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
