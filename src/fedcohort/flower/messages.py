"""Readings and requests as Flower records: plain bytes with a checked form, never pickled.

A reading travels as its raw bytes and a short JSON text that states dtype and shape. The receiver
checks both, and that they account for every byte, before any array is made; the array is then a
view of the bytes that arrived.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import DataError
from fedcohort.signals.catalog import Option

RECORD = "fedcohort"
QUERY = "query.fedcohort_"  # an app may have queries of its own, under any other name
PROBE, UPLOAD = "train.fedcohort_probe", "train.fedcohort_upload"
MAX_FORM = 1024  # characters; a sketch's form has about 80
MAX_FIELDS = 8
MAX_DIMENSIONS = 4
KINDS = frozenset(
    f"{order}{kind}{size}" for order in "<|" for kind in "biuf" for size in (1, 2, 4, 8)
) - {"<b2", "<b4", "<b8", "|b2", "|b4", "|b8", "<f1", "|f1"}


def pack(reading: ArrayLike) -> tuple[bytes, str]:
    r"""Return a reading's bytes and its form.

    Examples
    --------
    >>> pack(np.array([1.0, 2.0], np.float32))
    (b'\x00\x00\x80?\x00\x00\x00@', '["<f4", [2]]')
    """
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
        dtype, shape = _parsed(form)
        if dtype.itemsize * math.prod(shape) != len(data):
            raise DataError(f"a reading of {len(data)} bytes does not have the form {form[:80]!r}")
        return np.frombuffer(data, dtype).reshape(shape) if data else np.empty(shape, dtype)


@contextmanager
def untrusted(what: str) -> Iterator[None]:
    """Turn every error that content from another machine can cause into a DataError.

    Examples
    --------
    >>> with untrusted("a shape"):
    ...     np.empty((0, 2**40, 2**40))
    Traceback (most recent call last):
    ...
    fedcohort.exceptions.DataError: a shape cannot be read: array is too big; ...
    """
    try:
        yield
    except DataError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise DataError(f"{what} cannot be read: {error}") from None
    except (AttributeError, MemoryError) as error:
        raise DataError(f"{what} cannot be read: {type(error).__name__}") from None


def _parsed(form: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if len(form) > MAX_FORM:
        raise ValueError
    kind, shape = json.loads(form)
    if isinstance(kind, str):
        return _kind(kind), _shape(shape)
    if not isinstance(kind, list) or not 0 < len(kind) <= MAX_FIELDS:
        raise ValueError
    fields = [(str(name), _kind(part), _shape(inner)) for name, part, inner in kind]
    return np.dtype(fields), _shape(shape)


def _kind(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or text not in KINDS:
        raise ValueError(repr(text)[:40])
    return np.dtype(text)


def _shape(values: Any) -> tuple[int, ...]:
    whole = isinstance(values, list) and all(type(v) is int and 0 <= v < 2**40 for v in values)
    if not whole or len(values) > MAX_DIMENSIONS:
        raise ValueError
    return tuple(values)


def to_record(readings: Mapping[str, ArrayLike]) -> ConfigRecord:
    """Return readings by name as one ConfigRecord of bytes and forms."""
    record = ConfigRecord()
    for name, reading in readings.items():
        record[name], record[f"{name}.form"] = pack(reading)
    return record


def raw(record: ConfigRecord | None, name: str) -> bytes | None:
    """Return the bytes that came under a name, None if there are none."""
    data = None if record is None else record.get(name)
    return data if isinstance(data, bytes) else None


def from_record(record: ConfigRecord, name: str, limit: int) -> NDArray[Any]:
    """Return one reading of a record; DataError unless it is whole and small enough."""
    return unpack(record.get(name), record.get(f"{name}.form"), limit)  # type: ignore[arg-type]


def refused(data: bytes) -> NDArray[Any]:
    """Return bytes that were refused as something a session charges, drops and counts.

    A view of opaque type: no numbers are read and no memory is taken.

    Examples
    --------
    >>> refused(b"hello").nbytes, refused(b"hello").dtype.kind
    (5, 'V')
    """
    return np.frombuffer(data, np.dtype(("V", len(data)))) if data else np.empty(0, "V1")


def _is_option(value: Any) -> bool:
    """Whether a value can be an option: a word, a truth value or a number that fits 64 bits."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, float) and math.isfinite(value))
    )


@dataclass(frozen=True)
class Request:
    """What a client must know to answer, beside the arrays.

    Parameters
    ----------
    round : int
        0 for the first one.
    seed : int
        Of the local batches.
    version : str
        Names the model: a client that holds this one needs no other copy.
    arrays : str
        Name of the ArrayRecord in training messages.
    signals : tuple of str
        The readings wanted, in a query or with the update.
    options : mapping
        How signals are made, by signal (the policy's `signal_options`).
    gate : str, optional
        The gate, and under `options` what a client must know of it.
    on_skip : str
        What a client that is not asked to upload does with what it learned.
    held_round : int
        The last round whose updates the server took, -1 before the first.
    remember : bool
        Whether the client keeps its trained model, for later queries about it.
    client : str
        The client's id at the server, for clients that are known by a registered name only.
    classes : int
        Outputs of the model, for sketches that hash labels; `attach(classes=...)` wins.
    run : str
        Names the run: a client forgets what it remembers from another one.
    """

    round: int
    seed: int
    version: str = ""
    arrays: str = "arrays"
    signals: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Option]] = field(default_factory=dict)
    gate: str | None = None
    on_skip: str = "keep"
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

    def _check(self) -> None:
        """Raise ValueError unless every value has its declared type."""
        whole = (self.round, self.seed, self.held_round)
        words = [self.version, self.arrays, self.on_skip, self.client, self.run, *self.signals]
        words += [] if self.gate is None else [self.gate]
        if not all(type(n) is int and -1 <= n < 2**63 for n in whole):
            raise ValueError("numbers")
        if not all(isinstance(word, str) for word in words) or type(self.remember) is not bool:
            raise ValueError("words")
        for options in self.options.values() if isinstance(self.options, dict) else [None]:
            if not isinstance(options, dict) or not all(map(_is_option, options.values())):
                raise ValueError("options")

    @classmethod
    def from_json(cls, text: Any) -> Request:
        """Read what `to_json` wrote; DataError for anything else."""
        try:
            plain = json.loads(text)
            request = cls(**{**plain, "signals": tuple(plain["signals"])})
            request._check()
            return request
        except (ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f"not a request of fedcohort: {str(text)[:80]!r}") from None
