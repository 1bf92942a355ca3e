"""The latest reading of every signal and client, stamped with its round.

One dense array a signal, so that a policy reads a million clients without a loop of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.rounds import ClientId

Array = NDArray[Any]


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


def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[object, ...]:
    """What two readings must share to be stacked: shape, and the fields' names and shapes."""
    if dtype.names is None:
        return shape
    fields = tuple((name, dtype[name].shape) for name in dtype.names)
    return (*shape, *fields)


class Column:
    """The readings of one signal: a row a client, all of one form."""

    def __init__(self) -> None:
        self.clients: list[ClientId] = []
        self.values: Array = np.empty(0)
        self.stamps: NDArray[np.int64] = np.empty(0, np.int64)
        self._row: dict[ClientId, int] = {}
        self._cache: tuple[Sequence[ClientId], NDArray[np.int64]] | None = None

    def form(self) -> tuple[object, ...] | None:
        """Return the form of this column's readings, None while it is empty."""
        return _form(self.values.dtype, self.values.shape[1:]) if self.clients else None

    def rows(self, clients: Sequence[ClientId]) -> NDArray[np.int64]:
        """Row of each client, -1 where there is no reading."""
        if self._cache is not None and self._cache[0] is clients:
            return self._cache[1]
        get = self._row.get
        rows = np.fromiter((get(c, -1) for c in clients), np.int64, len(clients))
        if isinstance(clients, tuple):  # a list could change under its identity
            self._cache = (clients, rows)
        return rows

    def put(self, readings: Mapping[ClientId, Array], stamp: int) -> None:
        """Store readings that are already known to be of this column's form."""
        if not readings:
            return
        fresh = [client for client in readings if client not in self._row]
        dtype = np.result_type(*{r.dtype for r in readings.values()})
        if self.clients:
            dtype = np.result_type(dtype, self.values.dtype)
        shape = next(iter(readings.values())).shape
        self._grow(len(self.clients) + len(fresh), dtype, shape)
        for client in fresh:
            self._row[client] = len(self.clients)
            self.clients.append(client)
        rows = np.fromiter((self._row[c] for c in readings), np.int64, len(readings))
        self.values[rows] = np.stack([r.astype(dtype, copy=False) for r in readings.values()])
        self.stamps[rows] = stamp
        self._cache = None

    def _grow(self, size: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        used = len(self.clients)
        capacity = len(self.values)
        if size <= capacity and dtype == self.values.dtype:
            return
        capacity = max(size, capacity if size <= capacity else 2 * used)
        values = np.zeros((capacity, *shape), dtype)
        stamps = np.full(capacity, -1, np.int64)
        if used:
            values[:used] = self.values[:used].astype(dtype, copy=False)
            stamps[:used] = self.stamps[:used]
        self.values, self.stamps = values, stamps


class Signals:
    """The server's memory of what clients told it.

    A reading is a NumPy scalar or array, possibly structured; all readings of one signal have the
    same form, fixed by the majority of the first batch. Readings that are not finite or of another
    form are dropped and counted in `dropped`, never stored.

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
        self._columns: dict[str, Column] = {}
        self.dropped: Counter[str] = Counter()

    def record(
        self, name: str, readings: Mapping[ClientId, ArrayLike | None], stamp: int
    ) -> tuple[ClientId, ...]:
        """Store what is valid and return whose readings were kept; None means no answer."""
        answered = {c: as_array(r) for c, r in readings.items() if r is not None}
        finite = {c: r for c, r in answered.items() if r is not None and is_finite(r)}
        column = self._columns.setdefault(name, Column())
        form = column.form()
        if form is None and finite:
            form = Counter(_form(r.dtype, r.shape) for r in finite.values()).most_common(1)[0][0]
        kept = {c: r for c, r in finite.items() if _form(r.dtype, r.shape) == form}
        column.put(kept, stamp)
        if len(kept) < len(answered):
            self.dropped[name] += len(answered) - len(kept)
        return tuple(kept)

    def known(self, name: str, clients: Sequence[ClientId]) -> tuple[ClientId, ...]:
        """Those of `clients` with a reading, in their order."""
        known = np.flatnonzero(self._rows(name, clients) >= 0)
        return tuple(clients[i] for i in known.tolist())

    def read(self, name: str, clients: Sequence[ClientId]) -> tuple[NDArray[np.int64], Array]:
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

    def values(self, name: str, clients: Sequence[ClientId]) -> Array:
        """Return the readings of `clients`, all of whom must have one."""
        positions, values = self.read(name, clients)
        if len(positions) < len(clients):
            unknown = set(clients) - set(self.known(name, clients))
            raise KeyError(f"no {name!r} reading of client {min(unknown)!r}")
        return values

    def rounds(self, name: str, clients: Sequence[ClientId]) -> NDArray[np.int64]:
        """Return the round in which each client's reading was taken, -1 where there is none."""
        rows = self._rows(name, clients)
        known = rows >= 0
        if not known.any():
            return rows
        return np.where(known, self._columns[name].stamps[rows], -1)

    def _rows(self, name: str, clients: Sequence[ClientId]) -> NDArray[np.int64]:
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
        self._columns = {}
        for name, saved in state["columns"].items():
            column = Column()
            column.clients = list(saved["clients"])
            column.values = np.array(saved["values"])
            column.stamps = np.array(saved["stamps"], np.int64)
            column._row = {client: i for i, client in enumerate(column.clients)}
            self._columns[name] = column
        self.dropped = Counter(state["dropped"])


def as_array(reading: ArrayLike) -> Array | None:
    """Return the reading as an array, None if it is no number (a string, a ragged list)."""
    try:
        array = np.asarray(reading)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind in "iubfV" else None
