"""What travels between server and client: readings, requests and models, checked on arrival.

Nothing is ever pickled. Readings and arrays travel as .npy files, whose headers must account for
every byte before any array is made.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import ArrayLike, NDArray

from fedcohort import storage
from fedcohort.exceptions import DataError
from fedcohort.options import Range, check_fields, typed
from fedcohort.signals.catalog import Option

LOG = logging.getLogger("flwr.fedcohort")

RECORD = "fedcohort"
QUERY = "query.fedcohort"  # an app may have queries of its own under other names
PROBE, UPLOAD = "train.fedcohort_probe", "train.fedcohort_upload"
RAISED = (1, 2)  # Flower's codes of a client app that could not be loaded, and of one that raised

MAX_REASON = 500  # characters
MAX_HEADER = 4096  # bytes; the .npy header of a plain array has 128
NUMPY = "numpy.ndarray"  # how Flower says that an array is serialized as .npy

Flat = NDArray[np.float32]
Int64 = Annotated[int, Range(-1, 2**63 - 1)]


class WrongForm(DataError):
    """An update whose records, names, shapes or metrics the inner strategy cannot use."""


@contextmanager
def untrusted(what: str) -> Iterator[None]:
    """Turn every error that content from another machine can cause into a DataError."""
    try:
        yield
    except DataError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise DataError(f"{what} cannot be read: {error}") from None
    except (AttributeError, SyntaxError, MemoryError) as error:
        raise DataError(f"{what} cannot be read: {type(error).__name__}") from None


# --- readings -----------------------------------------------------------------------------------


def to_bytes(reading: ArrayLike) -> bytes:
    """Return a reading as an .npy file."""
    stream = io.BytesIO()
    np.save(stream, np.asarray(reading), allow_pickle=False)
    return stream.getvalue()


def from_bytes(data: Any, limit: int) -> NDArray[Any]:
    """Return the reading of `to_bytes`; DataError for anything else or more than `limit` bytes.

    Examples
    --------
    >>> from_bytes(to_bytes(np.arange(3)), limit=100)
    array([0, 1, 2])
    >>> from_bytes(b"12345678", limit=100)
    Traceback (most recent call last):
    ...
    fedcohort.exceptions.DataError: a reading cannot be read: damaged .npy header: ...
    """
    if not isinstance(data, bytes):
        raise DataError("a reading must be bytes")
    if len(data) > limit + MAX_HEADER:
        raise DataError(f"a reading of {len(data)} bytes; at most {limit} are accepted")
    with untrusted("a reading"):
        reading = storage.decode_npy(data)
    fields = [reading.dtype[name].base for name in reading.dtype.names or ()]
    if reading.nbytes > limit or not all(map(is_real, fields or [reading.dtype])):
        raise DataError(f"a reading of {reading.nbytes} bytes and dtype {str(reading.dtype)[:80]}")
    return reading


def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds real numbers or truth values of at most eight bytes."""
    return dtype.kind in "fiub" and dtype.itemsize <= 8


def refused(data: bytes) -> NDArray[Any]:
    """Return bytes that were refused as a view of opaque type: charged, dropped and counted."""
    return np.frombuffer(data, np.dtype(("V", len(data)))) if data else np.empty(0, "V1")


# --- requests and errors ------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a client must know to answer, beside the arrays."""

    round: Int64  # from 0
    seed: Int64
    version: str = ""  # of the model; a client that holds it needs no other copy
    arrays: str = "arrays"  # the name of the model's record
    signals: tuple[str, ...] = ()
    # those of the policy by signal, and under "gate" those of the gate
    options: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)
    gate: str | None = None
    on_skip: str = "keep"
    carries_over: bool = True
    held_round: Int64 = -1  # the last one whose updates the server took
    remember: bool = False  # whether the trained model is kept for later queries
    client: str = ""  # empty if it is asked who it is
    classes: Int64 = 0  # outputs of the model
    run: str = ""  # a client forgets what it remembers from another one

    def to_json(self) -> str:
        """Return the request as text, for one entry of a ConfigRecord."""
        return json.dumps(vars(self), default=dict)

    @classmethod
    def from_json(cls, text: Any) -> Request:
        """Read what `to_json` wrote; DataError for anything else."""
        with untrusted(f"the request {str(text)[:80]!r}"):
            request = cls(**json.loads(text))
            check_fields(request, "request")
            for name, options in request.options.items():
                for option, value in options.items():
                    typed(Option | None, value, f"{name}: {option}")
            return request


def error_line(error: Exception) -> str:
    """Return an error in one line: its class and what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_REASON]


def error_reason(message: Message) -> str | None:
    """Return why a reply has no content, None if it has some: the last line of a traceback."""
    if message.has_content():
        return None
    reason = message.error.reason if message.has_error() else "an empty reply"
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return lines[-1].removesuffix("'>")[:MAX_REASON] if lines else "an error without a reason"


def content_of(message: Message) -> RecordDict:
    """Return what a reply holds; DataError with the reason if that is an error."""
    reason = error_reason(message)
    if reason is not None:
        raise DataError(reason)
    return message.content


def record_of(message: Message) -> ConfigRecord:
    """Return what a reply says beside its update; DataError with the reason if it is an error."""
    return content_of(message).config_records.get(RECORD, ConfigRecord())


# --- models -------------------------------------------------------------------------------------


def is_float(array: Array) -> bool:
    """Whether an array holds parameters, rather than counters such as a batch norm's."""
    return np.dtype(array.dtype).kind == "f"


def flatten(record: ArrayRecord) -> Flat:
    """Return the floating arrays of a model, in their order, as one vector."""
    return _joined([array.numpy() for array in record.values() if is_float(array)])


def _joined(parts: list[NDArray[Any]]) -> Flat:
    if not parts:
        return np.empty(0, np.float32)
    with np.errstate(over="ignore"):  # numbers beyond float32 become infinite and are refused
        return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def unflatten(flat: Flat, like: ArrayRecord, others: ArrayRecord | None = None) -> ArrayRecord:
    """Return a model like another one, with a vector's parameters and the counters of `others`."""
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
    """Return a classifier's number of classes: the size of its last bias, two for one output."""
    sizes = [a.shape[0] for a in record.values() if is_float(a) and len(a.shape) == 1]
    return max(int(sizes[-1]), 2) if sizes else 0


def dtypes_of(record: ArrayRecord) -> dict[str, str]:
    """Return the dtype of each array."""
    return {name: str(array.dtype) for name, array in record.items()}


def in_dtypes(record: ArrayRecord, dtypes: Mapping[str, str]) -> ArrayRecord:
    """Return a model in the app's own dtypes; server optimizers and averages return float64."""
    if all(dtypes.get(name, array.dtype) == array.dtype for name, array in record.items()):
        return record
    kept = {n: np.asarray(a.numpy(), dtypes.get(n, a.dtype)) for n, a in record.items()}
    return ArrayRecord({name: Array(values) for name, values in kept.items()})


def payload(record: ArrayRecord) -> int:
    """Count the bytes of a model's numbers; names, .npy headers and framing are not counted."""
    return sum(np.dtype(a.dtype).itemsize * math.prod(a.shape) for a in record.values())


def version(record: ArrayRecord) -> str:
    """Return a short name of exactly this model."""
    digest = hashlib.blake2b(digest_size=12)
    for name, array in record.items():
        digest.update(name.encode())
        digest.update(array.data)
    return digest.hexdigest()


def checked(record: ArrayRecord, like: ArrayRecord) -> Flat:
    """Return a client's model as a vector; DataError unless finite and of the same shapes."""
    if set(record) != set(like):
        raise WrongForm(f"arrays named {_short(record)}, not {_short(like)}")
    for name, array in record.items():
        have, want = tuple(array.shape), tuple(like[name].shape)
        if have != want:
            raise WrongForm(f"array {name!r} of shape {have}, not {want}")
    values = decoded(record)
    flat = _joined([values[name] for name in like if is_float(like[name])])
    if not np.isfinite(flat).all():
        raise DataError("an update that is not finite")
    return flat


def decoded(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the arrays of a client's record; DataError unless they are sound and finite."""
    values = {}
    for name, array in record.items():
        if array.stype != NUMPY:
            raise WrongForm(f"array {name!r} is serialized as {array.stype!r}")
        with untrusted(f"array {name!r}"):
            values[name] = value = storage.decode_npy(array.data)
        if not is_real(value.dtype):
            raise WrongForm(f"array {name!r} of {value.dtype} does not hold real numbers")
        if (str(value.dtype), value.shape) != (array.dtype, tuple(array.shape)):
            raise DataError(f"array {name!r} is {value.dtype} {value.shape}, not what it says")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise DataError(f"an update that is not finite (array {name!r})")
    return values


def _short(record: ArrayRecord) -> str:
    names = list(record)
    return str(names if len(names) <= 3 else [*names[:3], "..."])
