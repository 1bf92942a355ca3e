"""The latest reading of every signal and client, stamped with its round.

One dense array per signal, so that a policy reads a million clients without a loop of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.registry import lookup
from fedcohort.rounds import ClientId
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.forms import Form

Array = NDArray[Any]
Indices = NDArray[np.int64]
Layout = tuple[int, ...]

_MANY = 256  # clients from which on a lookup of their numbers is kept
_TOGETHER = 1 << 22  # bytes of readings that are checked at a time


class Signals:
    """The server's memory of what clients told it.

    A reading is a NumPy scalar or array, possibly structured. Readings without the form that their
    signal declares are dropped and counted in `dropped`, never stored. Where the form leaves a
    length open, the majority of the first batch fixes it; a later batch in which more clients agree
    on another one than the table holds replaces them.

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
        self.dropped: Counter[str] = Counter()

    def record(
        self,
        name: str,
        readings: Mapping[ClientId, ArrayLike | None],
        stamp: int,
        form: Form | None = None,
    ) -> tuple[ClientId, ...]:
        """Store what is valid and return whose readings were kept; None means no answer.

        `form` is what the signal declares, by default for no options.
        """
        answered = {c: r for c, r in readings.items() if r is not None}
        form = form or lookup("signal", name, SIGNALS).form({})
        clients, parts, votes = list(answered), list[Part](), Counter[Layout]()
        for places, stack in _stacks(list(answered.values())):
            if form.fits(stack.dtype, stack.shape[1:]):
                valid, values = form.checked_together(stack)
                if valid.any():
                    parts.append((places[valid], values))
                    votes[_layout(values)] += len(values)
        column, layout = self._column_for(name, votes)
        places, values = _merge([part for part in parts if _layout(part[1]) == layout])
        kept = tuple(clients[i] for i in places.tolist())
        column.put(kept, values, stamp)
        if len(kept) < len(answered):
            self.dropped[name] += len(answered) - len(kept)
        return kept

    def _column_for(self, name: str, votes: Counter[Layout]) -> tuple[SignalColumn, Layout | None]:
        """Return the column and layout to store readings in, given the layouts that arrived."""
        column = self._columns.setdefault(name, SignalColumn())
        layout = _layout(column.values) if column.clients else None
        if votes:
            usual, count = votes.most_common(1)[0]
            if layout is None:
                return column, usual
            if usual != layout and count > len(column.clients):
                self.dropped[name] += len(column.clients)
                self._columns[name] = column = SignalColumn()
                return column, usual
        return column, layout

    def known(self, name: str, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
        """Those of `clients` with a reading, in their order."""
        return tuple(clients[i] for i in np.flatnonzero(self._rows(name, clients) >= 0).tolist())

    def read(self, name: str, clients: Sequence[ClientId]) -> tuple[Indices, Array]:
        """Return the positions in `clients` that have a reading, and those readings, stacked."""
        rows = self._rows(name, clients)
        positions = np.flatnonzero(rows >= 0)
        if not len(positions):
            return positions, np.empty(0)
        values, rows = self._columns[name].values, rows[positions]
        in_order = len(rows) == int(rows[-1] - rows[0]) + 1 and bool((np.diff(rows) == 1).all())
        view = values[rows[0] : rows[-1] + 1] if in_order else values[rows]
        view = view[:]
        view.flags.writeable = False
        return positions, view

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
        if not (rows >= 0).any():
            return rows
        return np.where(rows >= 0, self._columns[name].stamps[rows], -1)

    def _rows(self, name: str, clients: Sequence[ClientId]) -> Indices:
        column = self._columns.get(name)
        if column is None or not column.clients:
            return np.full(len(clients), -1, np.int64)
        return column.rows(clients)

    def state_dict(self) -> dict[str, Any]:
        """Return everything remembered, as plain values and arrays."""
        columns = {name: c.state_dict() for name, c in self._columns.items() if c.clients}
        return {"columns": columns, "dropped": dict(self.dropped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._columns = {}
        for name, saved in state["columns"].items():
            self._columns[name] = column = SignalColumn()
            column.put(list(saved["clients"]), np.array(saved["values"]), 0)
            column.stamps[:] = saved["stamps"]
        self.dropped = Counter(state["dropped"])


class SignalColumn:
    """The readings of one signal: one row per client, all of one layout."""

    def __init__(self) -> None:
        self.clients: dict[ClientId, int] = {}  # the row of each
        self.values: Array = np.empty(0)
        self.stamps: Indices = np.empty(0, np.int64)
        # the last two lookups, and how many clients there were then
        self._kept: deque[tuple[tuple[ClientId, ...], int, Indices]] = deque(maxlen=2)

    def rows(self, clients: Sequence[ClientId]) -> Indices:
        """Return the row of each client, -1 without a reading; not to be written to."""
        for known, size, rows in self._kept:
            if known is clients and (size == len(self.clients) or rows.min() >= 0):
                return rows
        rows = np.fromiter(map(self.clients.get, clients, repeat(-1)), np.int64, len(clients))
        if isinstance(clients, tuple) and len(clients) >= _MANY:  # a list could change
            self._kept.append((clients, len(self.clients), rows))
        return rows

    def put(self, clients: Sequence[ClientId], values: Array, stamp: int) -> None:
        """Store stacked readings, which are already known to be of this column's layout."""
        if not len(clients):
            return
        used, row_of = len(self.clients), self.clients
        dtype = _widest(values, self.values) if used else values.dtype
        found = (row_of.setdefault(client, len(row_of)) for client in clients)
        rows = np.fromiter(found, np.int64, len(clients))
        self._grow(used, len(row_of), dtype, values.shape[1:])
        self.values[rows] = cast(values, dtype)
        self.stamps[rows] = stamp

    def state_dict(self) -> dict[str, Any]:
        """Return clients, readings and stamps, in the order of the rows."""
        count = len(self.clients)
        values, stamps = self.values[:count], self.stamps[:count]
        return {"clients": list(self.clients), "values": values, "stamps": stamps}

    def _grow(self, used: int, size: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        capacity = len(self.values)
        if size <= capacity and dtype == self.values.dtype:
            return
        capacity = max(size, capacity if size <= capacity else 2 * used)
        values, stamps = np.zeros((capacity, *shape), dtype), np.full(capacity, -1, np.int64)
        if used:
            values[:used] = cast(self.values[:used], dtype)
            stamps[:used] = self.stamps[:used]
        self.values, self.stamps = values, stamps


def as_array(reading: ArrayLike) -> Array | None:
    """Return the reading as an array, None if it is not a number (a string, a ragged list)."""
    try:
        array = np.asarray(reading)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind in "iubfV" and not array.dtype.hasobject else None


Part = tuple[Indices, Array]  # places of readings, and those readings, stacked


def _stacks(readings: list[Any]) -> Iterator[Part]:
    """Yield readings of one dtype and shape, stacked; what is not a reading is left out.

    A list of structured arrays never goes to `np.asarray`, which would promote their dtypes.
    """
    if all(issubclass(kind, int | float | np.number) for kind in set(map(type, readings))):
        with suppress(OverflowError):
            together = np.asarray(readings)
            if together.dtype.kind in "iuf":
                yield np.arange(len(readings)), together
                return
    arrays = [as_array(reading) for reading in readings]
    groups: dict[Any, list[int]] = {}
    for place, array in enumerate(arrays):
        if array is not None and array.size:
            groups.setdefault((array.dtype, array.shape), []).append(place)
    for (dtype, shape), group in groups.items():
        size = max(1, arrays[group[0]].nbytes)  # type: ignore[union-attr]
        step = max(1, _TOGETHER // size)
        for start in range(0, len(group), step):
            places = group[start : start + step]
            joined = b"".join([arrays[i].tobytes() for i in places])  # type: ignore[union-attr]
            yield np.array(places), np.frombuffer(joined, dtype).reshape(-1, *shape)


def _merge(parts: list[Part]) -> Part:
    """Return parts of one layout as one, in the order of the readings, whatever their widths."""
    if len(parts) <= 1:
        return parts[0] if parts else (np.empty(0, np.int64), np.empty(0))
    places = np.sort(np.concatenate([part[0] for part in parts]))
    dtype = _widest(*(values for _, values in parts))
    merged = np.empty((len(places), *parts[0][1].shape[1:]), dtype)
    for at, values in parts:
        merged[np.searchsorted(places, at)] = cast(values, dtype)
    return places, merged


def _layout(values: Array) -> Layout:
    """Return what readings must share to be stacked: their shape, or that of a sketch's counts."""
    return values.shape[1:] if values.dtype.names is None else values.dtype["counts"].shape


def _widest(*values: Array) -> np.dtype[Any]:
    """Return the dtype that holds them all: of one form, they differ in the width of counts."""
    return max((v.dtype for v in values), key=lambda dtype: dtype.itemsize)


def cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return readings in the wider dtype of others of their form.

    Field by field: NumPy 2.0 to 2.4 promote structured dtypes with subarrays to an item size that
    is too small, and a cast then writes past its buffer.
    """
    if values.dtype == dtype or dtype.names is None:
        return values.astype(dtype, copy=False)
    out = np.zeros(values.shape, dtype)
    for name in dtype.names:
        out[name] = values[name]
    return out
