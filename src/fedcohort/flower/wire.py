"""What travels between server and client: readings, requests and models, checked on arrival.

Nothing is ever pickled. A reading travels as its raw bytes and a short JSON text that states dtype
and shape. The receiver checks both, and that they account for every byte, before any array is made.
A model's claims about dtypes, shapes and sizes are checked before anything is decoded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from numpy.typing import ArrayLike, NDArray

from fedcohort import storage
from fedcohort.exceptions import DataError
from fedcohort.signals.catalog import Option

LOG = logging.getLogger("flwr.fedcohort")

RECORD = "fedcohort"
QUERY = "query.fedcohort"  # an app may have queries of its own under other names
PROBE, UPLOAD = "train.fedcohort_probe", "train.fedcohort_upload"
RAISED = (1, 2)  # Flower's codes of a client app that could not be loaded, and of one that raised

MAX_FORM = 1024  # characters; a sketch's form has about 80
MAX_FIELDS = 8
MAX_DIMENSIONS = 4
MAX_REASON = 500
MAX_HEADER = 4096  # bytes; the .npy header of a plain array has 128
DTYPES = frozenset({"|b1", "|i1", "|u1", "<f2", "<f4", "<f8"}) | {
    f"<{kind}{size}" for kind in "iu" for size in (2, 4, 8)
}
NUMPY = "numpy.ndarray"  # how Flower says that an array is serialized as .npy

Flat = NDArray[np.float32]


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


def pack(reading: ArrayLike) -> tuple[bytes, str]:
    """Return a reading's bytes and its form."""
    array = np.asarray(reading)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    dtype: Any = array.dtype.str
    if array.dtype.names is not None:
        parts = [(name, array.dtype[name]) for name in array.dtype.names]
        dtype = [[name, part.base.str, list(part.shape)] for name, part in parts]
    return array.tobytes(), json.dumps([dtype, list(array.shape)])


def unpack(data: bytes, form: str, limit: int) -> NDArray[Any]:
    """Return the reading that `pack` packed; DataError for anything else or more than `limit`.

    Examples
    --------
    >>> unpack(*pack(np.arange(3)), limit=100)
    array([0, 1, 2])
    >>> unpack(b"12345678", '["|O", []]', limit=100)
    Traceback (most recent call last):
    ...
    fedcohort.exceptions.DataError: a reading of the form '["|O", []]' cannot be read: '|O'
    """
    if not isinstance(data, bytes) or not isinstance(form, str):
        raise DataError("a reading must be bytes with a form")
    if len(data) > limit:
        raise DataError(f"a reading of {len(data)} bytes; at most {limit} are accepted")
    with untrusted(f"a reading of the form {form[:80]!r}"):
        if len(form) > MAX_FORM:
            raise ValueError("too long")
        kind, shape = json.loads(form)
        dtype = _dtype(kind) if isinstance(kind, str) else _record_dtype(kind)
        if dtype.itemsize * math.prod(_shape(shape)) != len(data):
            raise DataError(f"a reading of {len(data)} bytes does not have the form {form[:80]!r}")
        return np.frombuffer(data, dtype).reshape(shape) if data else np.empty(shape, dtype)


def _record_dtype(fields: Any) -> np.dtype[Any]:
    if not isinstance(fields, list) or not 0 < len(fields) <= MAX_FIELDS:
        raise ValueError("fields")
    return np.dtype([(str(name), _dtype(part), _shape(inner)) for name, part, inner in fields])


def _dtype(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or text not in DTYPES:
        raise ValueError(repr(text)[:40])
    return np.dtype(text)


def _shape(values: Any) -> tuple[int, ...]:
    is_list = isinstance(values, list) and len(values) <= MAX_DIMENSIONS
    if not is_list or not all(type(v) is int and 0 <= v < 2**40 for v in values):
        raise ValueError("shape")
    return tuple(values)


def to_record(readings: Mapping[str, ArrayLike]) -> ConfigRecord:
    """Return readings by name as one ConfigRecord of bytes and forms."""
    record = ConfigRecord()
    for name, reading in readings.items():
        record[name], record[f"{name}.form"] = pack(reading)
    return record


def from_record(record: ConfigRecord, name: str, limit: int) -> NDArray[Any]:
    """Return one reading of a record; DataError unless it is whole and small enough."""
    return unpack(record.get(name), record.get(f"{name}.form"), limit)  # type: ignore[arg-type]


def refused(data: bytes) -> NDArray[Any]:
    """Return bytes that were refused as a view of opaque type: charged, dropped and counted."""
    return np.frombuffer(data, np.dtype(("V", len(data)))) if data else np.empty(0, "V1")


# --- requests and errors ------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What a client must know to answer, beside the arrays.

    `round` counts from 0; `held_round` is the last one whose updates the server took, or -1. A
    client that holds `version` of the model needs no other copy. `options` are the policy's
    `signal_options`, and under "gate" those of the gate. `remember` asks to keep the trained model
    for later queries. `client` is empty if the client is asked for its id. `classes` are the
    outputs of the model. A client forgets what it remembers from another `run`.
    """

    round: int
    seed: int
    version: str = ""
    arrays: str = "arrays"
    signals: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)
    gate: str | None = None
    on_skip: str = "keep"
    carries_over: bool = True
    held_round: int = -1
    remember: bool = False
    client: str = ""
    classes: int = 0
    run: str = ""

    def to_json(self) -> str:
        """Return the request as text, for one entry of a ConfigRecord."""
        plain = asdict(self)
        plain["options"] = {name: dict(options) for name, options in self.options.items()}
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: Any) -> Request:
        """Read what `to_json` wrote; DataError for anything else."""
        with untrusted(f"the request {str(text)[:80]!r}"):
            plain = json.loads(text)
            request = cls(**{**plain, "signals": tuple(plain["signals"])})
            request._check()
            return request

    def _check(self) -> None:
        """Raise ValueError unless every value has its declared type."""
        numbers = (self.round, self.seed, self.held_round, self.classes)
        words = [self.version, self.arrays, self.on_skip, self.client, self.run, *self.signals]
        words += [] if self.gate is None else [self.gate]
        if not all(type(n) is int and -1 <= n < 2**63 for n in numbers):
            raise ValueError("numbers")
        if not all(isinstance(word, str) for word in words):
            raise ValueError("words")
        if type(self.remember) is not bool or type(self.carries_over) is not bool:
            raise ValueError("truth values")
        for options in self.options.values():
            if not isinstance(options, dict) or not all(map(_is_option, options.values())):
                raise ValueError("options")


def _is_option(value: Any) -> bool:
    """Whether a value can be an option: a word, a truth value or a number that fits 64 bits."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str | None) or (isinstance(value, float) and math.isfinite(value))


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
    """Return the size of a model's last bias, for a classifier its number of classes."""
    sizes = [a.shape[0] for a in record.values() if is_float(a) and len(a.shape) == 1]
    return int(sizes[-1]) if sizes else 0


def dtypes_of(record: ArrayRecord) -> dict[str, str]:
    """Return the dtype of each array."""
    return {name: str(array.dtype) for name, array in record.items()}


def in_dtypes(record: ArrayRecord, dtypes: Mapping[str, str]) -> ArrayRecord:
    """Return a model in the dtypes that the app started with, rounded as ``load_state_dict`` does.

    Server optimizers and averages of counters return float64.
    """
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
    """Return a client's model as a vector; DataError unless it is finite and like the global one.

    Names and shapes must be the same; any real dtype will do.
    """
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
        dtype, shape = _claimed_dtype(name, array), tuple(array.shape)
        if len(array.data) > dtype.itemsize * math.prod(shape) + MAX_HEADER:
            raise DataError(f"array {name!r} of {len(array.data)} bytes is longer than it says")
        try:
            values[name] = value = storage.decode_npy(array.data)
        except ValueError as error:
            raise DataError(f"array {name!r} cannot be decoded: {error}") from None
        if value.dtype != dtype or value.shape != shape:
            raise DataError(f"array {name!r} is {value.dtype} {value.shape}, not what it says")
        if dtype.kind == "f" and not np.isfinite(value).all():
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
    return dtype


def _short(record: ArrayRecord) -> str:
    names = list(record)
    return str(names if len(names) <= 3 else [*names[:3], "..."])
