"""The latest reading of every signal and client, stamped with its round.

One dense array per signal, so that a policy reads a million clients without a loop of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.rounds import ClientId
from fedcohort.signals.forms import Form, Numbers, Sketch

Array = NDArray[Any]
Indices = NDArray[np.int64]

_MANY = 256  # clients from which on a lookup of their numbers is kept
_TOGETHER = 1 << 22  # bytes of sketches that are checked at a time
_KEPT = 2  # lookups: of all available clients, and of those that a policy considers


def is_finite(reading: Array) -> bool:
    """Whether a reading, plain or structured, holds finite numbers only.

    Examples
    --------
    >>> is_finite(np.array([1.0, np.inf])), is_finite(np.array(3))
    (False, True)
    """
    if reading.dtype.names is not None:
        return all(is_finite(reading[field]) for field in reading.dtype.names)
    if reading.dtype.kind in "iub":
        return True
    return reading.dtype.kind == "f" and bool(np.isfinite(reading).all())


Layout = tuple[object, ...]


def _layout(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Layout:
    """Return what readings must share to be stacked: shape, and the fields' names and shapes."""
    if dtype.names is None:
        return shape
    fields = tuple((name, dtype[name].shape) for name in dtype.names)
    return (*shape, *fields)


@dataclass
class _Lookup:
    """The numbers of some clients, -1 for unknown ones, from when `known` clients had a number."""

    clients: tuple[ClientId, ...]
    known: int
    numbers: Indices


class ClientNumbers:
    """Consecutive numbers of clients, in the order of arrival.

    All columns share them, so that names are looked up once per round and not once per signal. The
    last lookups are kept; later only names that were unknown are looked up again.

    Examples
    --------
    >>> numbers = ClientNumbers()
    >>> numbers.add(["b", "a"]).tolist(), numbers.find(("a", "b", "c")).tolist()
    ([0, 1], [1, 0, -1])
    """

    def __init__(self) -> None:
        self._number: dict[ClientId, int] = {}
        self._kept: deque[_Lookup] = deque(maxlen=_KEPT)

    def __len__(self) -> int:
        return len(self._number)

    def add(self, clients: Sequence[ClientId]) -> Indices:
        """Return the number of each client; a new one gets the next."""
        number = self._number
        found = (number.setdefault(c, len(number)) for c in clients)
        return np.fromiter(found, np.int64, len(clients))

    def find(self, clients: Sequence[ClientId]) -> Indices:
        """Return the number of each client, -1 where it has none; not to be written to."""
        for kept in self._kept:
            if kept.clients is clients:
                self._update(kept)
                return kept.numbers
        numbers = self._looked_up(clients)
        if isinstance(clients, tuple) and len(clients) >= _MANY:  # a list could change
            self._kept.append(_Lookup(clients, len(self), numbers))
        return numbers

    def _update(self, kept: _Lookup) -> None:
        if kept.known < len(self):
            unknown = np.flatnonzero(kept.numbers < 0)
            again = [kept.clients[i] for i in unknown.tolist()]
            kept.numbers[unknown] = self._looked_up(again)
            kept.known = len(self)

    def _looked_up(self, clients: Sequence[ClientId]) -> Indices:
        return np.fromiter(map(self._number.get, clients, repeat(-1)), np.int64, len(clients))


class SignalColumn:
    """The readings of one signal: one row per client, all of one layout."""

    def __init__(self, numbers: ClientNumbers) -> None:
        self.clients: list[ClientId] = []
        self.values: Array = np.empty(0)
        self.stamps: Indices = np.empty(0, np.int64)
        self._numbers = numbers
        self._row: Indices = np.full(1, -1, np.int64)  # by number; longer than there are numbers

    def layout(self) -> Layout | None:
        """Return the layout of this column's readings, None while it is empty."""
        return _layout(self.values.dtype, self.values.shape[1:]) if self.clients else None

    def rows(self, clients: Sequence[ClientId]) -> Indices:
        """Row of each client, -1 where there is no reading."""
        numbers = self._numbers.find(clients)
        return np.asarray(self._row_of_number()[numbers])  # the number -1 reads the last row: -1

    def _row_of_number(self) -> Indices:
        """Return the row of each client number, with at least one -1 at the end."""
        missing = len(self._numbers) + 1 - len(self._row)
        if missing > 0:
            more = np.full(max(missing, len(self._row)), -1, np.int64)
            self._row = np.concatenate([self._row, more])
        return self._row

    def put(self, clients: Sequence[ClientId], values: Array, stamp: int) -> None:
        """Store stacked readings, which are already known to be of this column's layout."""
        if not len(clients):
            return
        dtype = values.dtype
        if self.clients:
            dtype = common_dtype(dtype, self.values.dtype)
        numbers = self._numbers.add(clients)
        rows = self._row_of_number()[numbers]
        fresh = np.flatnonzero(rows < 0)
        self._grow(len(self.clients) + fresh.size, dtype, values.shape[1:])
        rows[fresh] = np.arange(fresh.size) + len(self.clients)
        self._row[numbers] = rows
        self.clients += [clients[i] for i in fresh.tolist()]
        self.values[rows] = cast(values, dtype)
        self.stamps[rows] = stamp

    def restore(self, clients: list[ClientId], values: ArrayLike, stamps: ArrayLike) -> None:
        """Hold copies of saved readings, in the order of their rows."""
        self.clients = clients
        self.values, self.stamps = np.array(values), np.array(stamps, np.int64)
        numbers = self._numbers.add(clients)
        self._row_of_number()[numbers] = np.arange(len(clients))

    def _grow(self, size: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        used = len(self.clients)
        capacity = len(self.values)
        if size <= capacity and dtype == self.values.dtype:
            return
        capacity = max(size, capacity if size <= capacity else 2 * used)
        values = np.zeros((capacity, *shape), dtype)
        stamps = np.full(capacity, -1, np.int64)
        if used:
            values[:used] = cast(self.values[:used], dtype)
            stamps[:used] = self.stamps[:used]
        self.values, self.stamps = values, stamps


class Signals:
    """The server's memory of what clients told it.

    A reading is a NumPy scalar or array, possibly structured. Readings that do not have the form
    that their signal declares are dropped and counted in `dropped`, never stored. Where the form
    leaves a length open, the majority of the first batch fixes it; a later batch in which more
    clients agree on another one than the table holds replaces them.

    Examples
    --------
    >>> signals = Signals()
    >>> signals.record("loss", {"a": 1.5, "b": float("nan"), "c": 0.5}, stamp=0)
    ('a', 'c')
    >>> signals.known("loss", ("a", "b", "c"))
    ('a', 'c')
    >>> positions, values = signals.read("loss", ("a", "b", "c"))
    >>> positions.tolist(), values.tolist()
    ([0, 2], [1.5, 0.5])
    >>> signals.dropped
    Counter({'loss': 1})
    """

    def __init__(self) -> None:
        self._columns: dict[str, SignalColumn] = {}
        self._numbers = ClientNumbers()
        self.dropped: Counter[str] = Counter()

    def record(
        self,
        name: str,
        readings: Mapping[ClientId, ArrayLike | None],
        stamp: int,
        form: Form | None = None,
    ) -> tuple[ClientId, ...]:
        """Store what is valid and return whose readings were kept; None means no answer.

        `form` is what the signal declares; without it, any finite numbers of one layout will do.
        """
        answered = {c: r for c, r in readings.items() if r is not None}
        clients, values = _checked_together(answered, form)
        if values is None:
            arrays = {c: _checked(r, form) for c, r in answered.items()}
            sound = {c: r for c, r in arrays.items() if r is not None}
            layouts = {c: _layout(r.dtype, r.shape) for c, r in sound.items()}
            column, layout = self._column_for(name, Counter(layouts.values()))
            clients = [c for c in sound if layouts[c] == layout]
            values = _stacked([sound[c] for c in clients])
        else:
            arrived = _layout(values.dtype, values.shape[1:])
            column, layout = self._column_for(name, Counter({arrived: len(clients)}))
            clients = clients if layout == arrived else []
        column.put(clients, values, stamp)
        if len(clients) < len(answered):
            self.dropped[name] += len(answered) - len(clients)
        return tuple(clients)

    def _column_for(
        self, name: str, arrived: Counter[Layout]
    ) -> tuple[SignalColumn, Layout | None]:
        """Return the column and layout to store readings in, given the layouts that arrived."""
        column = self._columns.setdefault(name, SignalColumn(self._numbers))
        layout = column.layout()
        if arrived:
            usual, votes = arrived.most_common(1)[0]
            if layout is None:
                return column, usual
            if usual != layout and votes > len(column.clients):
                self.dropped[name] += len(column.clients)
                self._columns[name] = column = SignalColumn(self._numbers)
                return column, usual
        return column, layout

    def known(self, name: str, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
        """Those of `clients` with a reading, in their order."""
        known = np.flatnonzero(self._rows(name, clients) >= 0)
        return tuple(clients[i] for i in known.tolist())

    def read(self, name: str, clients: Sequence[ClientId]) -> tuple[Indices, Array]:
        """Return the positions in `clients` that have a reading, and those readings, stacked."""
        rows = self._rows(name, clients)
        positions = np.flatnonzero(rows >= 0)
        if not len(positions):
            return positions, np.empty(0)
        values, rows = self._columns[name].values, rows[positions]
        whole = len(rows) == int(rows[-1] - rows[0]) + 1 and bool((np.diff(rows) == 1).all())
        view = values[rows[0] : rows[-1] + 1] if whole else values[rows]
        view = view[:]
        view.flags.writeable = False
        return positions, view

    def read_parts(
        self, name: str, clients: Sequence[ClientId], size: int
    ) -> Iterator[tuple[Indices, Array]]:
        """As `read`, `size` readings at a time, where all of them would take much memory.

        Examples
        --------
        >>> signals = Signals()
        >>> _ = signals.record("loss", {"a": 1.5, "c": 0.5}, stamp=0)
        >>> [(p.tolist(), v.tolist()) for p, v in signals.read_parts("loss", ("a", "b", "c"), 1)]
        [([0], [1.5]), ([2], [0.5])]
        """
        rows = self._rows(name, clients)
        positions = np.flatnonzero(rows >= 0)
        for start in range(0, len(positions), size):
            part = positions[start : start + size]
            yield part, self._columns[name].values[rows[part]]

    def field(self, name: str, field: str, clients: Sequence[ClientId]) -> Array:
        """Return one field of the clients' structured readings, for those that have one."""
        rows = self._rows(name, clients)
        column = self._columns.get(name)
        return np.empty(0) if column is None else column.values[field][rows[rows >= 0]]

    def values(self, name: str, clients: Sequence[ClientId]) -> Array:
        """Return the readings of `clients`, all of whom must have one."""
        positions, values = self.read(name, clients)
        if len(positions) < len(clients):
            unknown = set(clients) - set(self.known(name, clients))
            raise KeyError(f"no {name!r} reading of client {min(unknown)!r}")
        return values

    def rounds(self, name: str, clients: Sequence[ClientId]) -> Indices:
        """Return the round in which each client's reading was taken, -1 where there is none."""
        rows = self._rows(name, clients)
        known = rows >= 0
        if not known.any():
            return rows
        return np.where(known, self._columns[name].stamps[rows], -1)

    def _rows(self, name: str, clients: Sequence[ClientId]) -> Indices:
        column = self._columns.get(name)
        if column is None or not column.clients:
            return np.full(len(clients), -1, np.int64)
        return column.rows(clients)

    def state_dict(self) -> dict[str, Any]:
        """Return everything remembered, as plain values and arrays."""
        columns = {
            name: {
                "clients": list(c.clients),
                "values": c.values[: len(c.clients)],
                "stamps": c.stamps[: len(c.clients)],
            }
            for name, c in self._columns.items()
            if c.clients
        }
        return {"columns": columns, "dropped": dict(self.dropped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._columns, self._numbers = {}, ClientNumbers()
        for name, saved in state["columns"].items():
            self._columns[name] = column = SignalColumn(self._numbers)
            column.restore(list(saved["clients"]), saved["values"], saved["stamps"])
        self.dropped = Counter(state["dropped"])


def as_array(reading: ArrayLike) -> Array | None:
    """Return the reading as an array, None if it is not a number (a string, a ragged list)."""
    try:
        array = np.asarray(reading)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind in "iubfV" else None


def _checked(reading: ArrayLike, form: Form | None) -> Array | None:
    """Return a reading that has the form and is finite, or None."""
    array = as_array(reading)
    if array is not None and form is not None:
        array = form.checked(array)
    return array if array is not None and is_finite(array) else None


def _checked_together(
    readings: Mapping[ClientId, ArrayLike], form: Form | None
) -> tuple[list[ClientId], Array | None]:
    """Check readings of one layout all at once; (..., None) where they are not alike."""
    if isinstance(form, Sketch):
        return _sketches_of(readings, form)
    if not isinstance(form, Numbers):
        return list(readings), None
    clients, values = _numbers_of(readings) if not form.shape else _vectors_of(readings, form)
    if values is None:
        return clients, None
    with np.errstate(over="ignore", invalid="ignore"):
        stored = values.astype(form.dtype)  # a range may be wider than the dtype
    sound = form.inside(values) & np.isfinite(stored)
    kept = sound.all(axis=tuple(range(1, values.ndim)))
    if not kept.all():
        clients = [clients[i] for i in np.flatnonzero(kept).tolist()]
        stored = stored[kept]
    return clients, stored


def _sketches_of(
    readings: Mapping[ClientId, ArrayLike], form: Sketch
) -> tuple[list[ClientId], Array | None]:
    """Return whose readings are sketches, and those stacked; (..., None) if their shapes differ."""
    clients = list(readings)
    by_dtype: dict[np.dtype[Any], dict[int, Array]] = {}
    for place, reading in enumerate(readings.values()):
        array = as_array(reading)
        if array is not None and not array.shape:
            by_dtype.setdefault(array.dtype, {})[place] = array
    fitting = [(dtype, group) for dtype, group in by_dtype.items() if form.fits(dtype)]
    if len({dtype["counts"].shape for dtype, _ in fitting}) != 1:
        return clients, None
    parts = [part for dtype, group in fitting for part in _sketches_of_dtype(group, dtype, form)]
    kept = np.sort(np.concatenate([places for places, _ in parts]))
    values = np.empty(len(kept), reduce(common_dtype, {part.dtype for _, part in parts}))
    for places, sketches in parts:
        values[np.searchsorted(kept, places)] = cast(sketches, values.dtype)
    return [clients[i] for i in kept.tolist()], values


def _sketches_of_dtype(
    group: Mapping[int, Array], dtype: np.dtype[Any], form: Sketch
) -> Iterator[tuple[Indices, Array]]:
    """Yield the places of readings that are sketches, and those stacked, part by part."""
    places, arrays = np.array(list(group)), list(group.values())
    step = max(1, _TOGETHER // dtype.itemsize)
    for start in range(0, len(arrays), step):
        part = slice(start, start + step)
        joined = b"".join([array.tobytes() for array in arrays[part]])  # np.stack takes longer
        sound, sketches = form.checked_together(np.frombuffer(joined, dtype))
        yield places[part][sound], sketches


def _vectors_of(
    readings: Mapping[ClientId, ArrayLike], form: Numbers
) -> tuple[list[ClientId], Array | None]:
    """Stack the readings that have the form's shape; (..., None) if they are not alike."""
    arrays = {c: as_array(r) for c, r in readings.items()}
    fitting = {c: a for c, a in arrays.items() if a is not None and form.fits(a)}
    if len({(a.dtype, a.shape) for a in fitting.values()}) != 1:
        return list(readings), None
    return list(fitting), np.stack(list(fitting.values()))


def _numbers_of(
    readings: Mapping[ClientId, ArrayLike],
) -> tuple[list[ClientId], Array | None]:
    """Return the single numbers among the readings; (..., None) if they cannot be one array."""
    clients = list(readings)
    values = _numbers(list(readings.values()))
    if values is None:  # one that is not a number must not make all others slow
        found = [_number(reading) for reading in readings.values()]
        clients = [c for c, number in zip(clients, found, strict=True) if number is not None]
        values = _numbers([number for number in found if number is not None])
    return clients, values


def _numbers(values: list[Any]) -> Array | None:
    """Return single numbers as one array; None where they are something else."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        return None
    return array if array.shape == (len(values),) and array.dtype.kind in "iuf" else None


def _number(reading: ArrayLike) -> Any:
    """Return a single number as Python's, None for anything else."""
    array = as_array(reading)
    return (
        array.item()
        if array is not None and not array.shape and array.dtype.kind in "iuf"
        else None
    )


def _stacked(arrays: Sequence[Array]) -> Array:
    """Stack readings of one layout, whatever the widths of their numbers."""
    if not arrays:
        return np.empty(0)
    dtype = reduce(common_dtype, {a.dtype for a in arrays})
    return np.stack([cast(a, dtype) for a in arrays])


def common_dtype(first: np.dtype[Any], second: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype that holds readings of both dtypes, which have the same form.

    Field by field: NumPy 2.0 to 2.4 promote structured dtypes with subarrays to an item size that
    is too small, and a cast then writes past its buffer.

    Examples
    --------
    >>> from fedcohort.signals.forms import sketch_dtype
    >>> common_dtype(sketch_dtype(2, 2, "i2"), sketch_dtype(2, 2, "i4")).itemsize
    32
    """
    if first == second:
        return first
    if first.names is None or second.names is None:
        return np.result_type(first, second)
    fields = []
    for name in first.names:
        base = np.result_type(first[name].base, second[name].base)
        fields.append((name, base, first[name].shape))
    return np.dtype(fields)


def cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return `values` in a dtype with the same fields, copied field by field (see `common_dtype`).

    Examples
    --------
    >>> from fedcohort.signals.forms import sketch_dtype
    >>> cast(np.zeros(3, sketch_dtype(1, 2, "i2")), sketch_dtype(1, 2, "i8")).shape
    (3,)
    """
    if values.dtype == dtype:
        return values
    if dtype.names is None:
        return values.astype(dtype)
    out = np.zeros(values.shape, dtype)
    for name in dtype.names:
        out[name] = values[name]
    return out
