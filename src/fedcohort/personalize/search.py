"""The nearest clients of a registry: all are compared if they are few, else candidates of an index.

A damaged index or sketch does not stop a search. Without its index all clients are compared; a
client whose sketch is damaged is skipped. Both are warned about, with their names.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcohort.exceptions import (
    ConfigError,
    DataError,
    FedcohortError,
    IncompatibleSketches,
    NoClients,
)
from fedcohort.personalize.index import (
    CANDIDATES,
    ENERGY_SHARE,
    Index,
    Ints,
    SketchTable,
    SketchTableWriter,
    concatenated,
    query_vector,
)
from fedcohort.personalize.registry import Registry, check_size
from fedcohort.rounds import ClientId, check_id
from fedcohort.sketch.distances import Stack, squares_to
from fedcohort.sketch.errors import squared_errors
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference
from fedcohort.storage import locked_folder

EXACT = 10_000
SPARE = 4  # more than asked for, in case rounding swapped them or one was removed
BLOCK = 1 << 26  # counts of the sketches that are unpacked at a time
KEPT = 1 << 23  # counts of the sketches that are kept for the next search
_NAME = re.compile("[0-9a-f]{16}")
_JOIN = "FROM clients JOIN sketches USING (number)"
_PAGE = f"SELECT number, id, content {_JOIN} WHERE number > ? ORDER BY number LIMIT ?"


class Neighbor(NamedTuple):
    """A client near a query.

    Parameters
    ----------
    client : str
    distance : float
        Debiased Frobenius distance of the sketches, 0 where noise left its square negative.
    squared : float
        Its square, without bias, so that it may be negative.
    error : float
        Standard error of the square, from sampling and noise (`sketch.errors`).
    """

    client: ClientId
    distance: float
    squared: float
    error: float


class Search:
    """Finds the nearest clients of a registry.

    Up to `exact` clients are all compared. Beyond, an index is kept in the registry's folder;
    clients registered after it was built are compared one by one, removed ones are left out.

    Parameters
    ----------
    registry : Registry
    exact : int
        How many clients may be compared one by one before an index is built.

    Attributes
    ----------
    skipped : dict
        Clients whose sketches are damaged, with the reason.

    Examples
    --------
    >>> import tempfile
    >>> empty = RaceSketch.srp(dim=2, rows=50, bits=3)
    >>> def sketch(center):
    ...     made = empty.empty_like()
    ...     made.add(np.random.default_rng(0).normal(center, 0.3, (100, 2)))
    ...     return made
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Registry.create(f"{folder}/warm") as registry:
    ...         registry.add("east", sketch([1, 0]), reference="models/east")
    ...         registry.add("north", sketch([0, 1]), reference="models/north")
    ...         found = Search(registry).nearest(sketch([0.1, 0.9]), k=2)
    >>> [neighbor.client for neighbor in found]
    ['north', 'east']
    """

    def __init__(self, registry: Registry, exact: int = EXACT) -> None:
        self.registry, self.exact = registry, exact
        self.spec = registry.spec
        self.skipped: dict[ClientId, str] = {}
        self._reset()
        damaged = not self._open_index()
        if not (damaged or registry.db.read_only) and self._unindexed() > exact:
            self.build()
        self._refresh()

    def _reset(self) -> None:
        self.index: Index | None = None
        self.recent: SketchTable | None = None  # clients that are not in the index
        self._parsed: dict[tuple[ClientId, bytes], RaceSketch] = {}
        self.last = 0  # number of the last client in the index
        self._seen = 0  # number of the last client in the index or in `recent`

    def _unindexed(self) -> int:
        sql = "SELECT count(*) FROM (SELECT 1 FROM clients WHERE number > ? LIMIT ?)"
        return int(self.registry.db.rows(sql, self.last, self.exact + 1)[0][0])

    def nearest(
        self,
        sketch: RaceSketch,
        k: int = 1,
        *,
        without: ClientId | None = None,
        with_model: bool = False,
    ) -> list[Neighbor]:
        """Return the k nearest clients, the nearest first (paper 0, algorithm 2).

        Parameters
        ----------
        sketch : RaceSketch
            Of the newcomer's data, with the settings of the registry's sketches.
        k : int
        without : str, optional
            A client to leave out, such as the one that asks.
        with_model : bool
            Leave out clients without a model or a reference to one.
        """
        if k < 1:
            raise ConfigError(f"nearest: k={k} must be at least 1")
        check_size("the query", sketch)
        self._refresh()
        if self.spec is None:
            raise NoClients(f"no client is registered in {self.registry.path}")
        if sketch.spec != self.spec:
            raise IncompatibleSketches(f"the query: {difference(self.spec, sketch.spec)}")
        wanted, total = k + SPARE + (without is not None), self._size()
        while True:
            numbers = self._candidates(query_vector(sketch), wanted)
            found = self.fetch(numbers.tolist(), with_model=with_model)
            found = [(client, other) for client, other in found if client != without]
            if len(found) >= k or wanted >= total:
                return _ranked(sketch, found, k) if found else []
            wanted *= 4  # many were left out

    def _size(self) -> int:
        indexed = 0 if self.index is None else len(self.index.table)
        return indexed + (0 if self.recent is None else len(self.recent))

    def _candidates(self, query: Any, count: int) -> Ints:
        parts = []
        if self.index is not None:
            few = count <= CANDIDATES // 4
            best = self.index.best if few else self.index.table.best
            parts.append(self.index.table.numbers[best(query, count)])
        if self.recent is not None:
            parts.append(self.recent.numbers[self.recent.best(query, count)])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def fetch(
        self, numbers: Sequence[int], *, with_model: bool = False
    ) -> list[tuple[ClientId, RaceSketch]]:
        """Return ids and sketches of the clients of these numbers that are still registered."""
        having = "AND coalesce(model, reference) IS NOT NULL" if with_model else ""
        out = []
        for lo in range(0, len(numbers), 500):
            some = numbers[lo : lo + 500]
            marks = ", ".join("?" * len(some))
            sql = f"SELECT id, content {_JOIN} WHERE number IN ({marks}) {having} ORDER BY number"
            for client, content in self.registry.db.rows(sql, *some):
                sketch = self._kept(client, content)
                if sketch is not None:
                    out.append((client, sketch))
        return out

    def _unpacked(self, client: Any, content: Any) -> RaceSketch | None:
        """Return a stored sketch; None, after a warning, if it is damaged."""
        try:
            check_id(client)
            sketch = RaceSketch.from_bytes(content)
            if sketch.spec != self.spec:
                raise IncompatibleSketches(difference(self.spec or {}, sketch.spec))
            check_size("its sketch", sketch)
        except (FedcohortError, TypeError) as error:
            if client not in self.skipped:
                self.skipped[client] = str(error)
                warnings.warn(
                    f"{self.registry.path}: client {client!r} is skipped, its sketch is damaged "
                    f"({error}); register it again",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None
        return sketch

    def _kept(self, client: Any, content: Any) -> RaceSketch | None:
        """Do the same, and keep the sketch: the next search probably needs it too."""
        if (client, content) in self._parsed:
            return self._parsed[client, content]
        sketch = self._unpacked(client, content)
        if sketch is not None:
            if len(self._parsed) * sketch.counts.size >= KEPT:
                self._parsed.clear()
            self._parsed[client, content] = sketch
        return sketch

    def sketches(self, clients: Sequence[ClientId]) -> list[RaceSketch]:
        """Return clients' sketches, which must not be changed: the next search may use them."""
        found: dict[ClientId, RaceSketch | None] = {}
        for lo in range(0, len(clients), 500):
            some = clients[lo : lo + 500]
            sql = f"SELECT id, content {_JOIN} WHERE id IN ({', '.join('?' * len(some))})"
            rows = self.registry.db.rows(sql, *some)
            found.update((client, self._kept(client, content)) for client, content in rows)
        return [found.get(c) or self.registry.sketch(c) for c in clients]

    def _refresh(self) -> None:
        """Stack the sketches registered since the last call."""
        spec = self.registry.spec
        if spec != self.spec and self.spec is not None:
            self._reset()  # emptied, then filled with other sketches
        self.spec = spec
        newest = newest_number(self.registry)
        if newest > self._seen:
            self.recent = concatenated(self.recent, self._stack(self._seen))
            self._seen = newest

    def _stack(self, after: int) -> SketchTable | None:
        tables = []
        for block in self._blocks(after):
            writer = SketchTableWriter(len(block), block[0][1])
            writer.add(block)
            tables.append(writer.done())
        return concatenated(*tables)

    def _blocks(self, after: int) -> Iterator[list[tuple[int, RaceSketch]]]:
        """Yield numbers and sketches, a block at a time."""
        rows = self.registry.db.pages(_PAGE, after)
        unpacked = ((number, self._unpacked(client, b)) for number, client, b in rows)
        pairs = ((number, sketch) for number, sketch in unpacked if sketch is not None)
        for first in pairs:
            size = max(1, min(4096, BLOCK // first[1].counts.size))
            yield [first, *islice(pairs, size - 1)]

    def build(self) -> None:
        """Index all clients and keep the index in the registry's folder."""
        root = self.registry.path / "index"
        root.mkdir(exist_ok=True)
        with locked_folder(root):
            folder = root / f"new-{secrets.token_hex(8)}"
            folder.mkdir()
            try:
                name = Index.build(self._table(folder), self.spec or {}, folder)
                shutil.rmtree(root / name, ignore_errors=True)
                os.rename(folder, root / name)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self.registry.set_fact("index", name)
            _remove_others(root, name)
        self._open_index()

    def rebuild(self) -> None:
        """Build the index again, or remove it where so few clients need none."""
        if len(self.registry) > self.exact:
            self.build()
            return
        self.registry.set_fact("index", None)
        shutil.rmtree(self.registry.path / "index", ignore_errors=True)
        self._reset()

    def _table(self, folder: Path) -> SketchTable:
        """Stack all clients registered by now, the counts in a file."""
        self.spec = self.registry.spec
        sql = "SELECT count(*), max(number) FROM clients"
        count, last = self.registry.db.rows(sql)[0]
        writer: SketchTableWriter | None = None
        for block in self._blocks(0):
            block = [(number, sketch) for number, sketch in block if number <= last]
            if block:
                writer = writer or SketchTableWriter(count, block[0][1], folder)
                writer.add(block)
        if writer is None:
            raise NoClients(f"no client of {self.registry.path} has a sketch that can be indexed")
        return writer.done()

    def _open_index(self) -> bool:
        """Open the index if there is one; False, after a warning, if it is damaged."""
        try:
            self.index = open_index(self.registry)
        except DataError as error:
            warnings.warn(f"{error}; all clients are compared", RuntimeWarning, stacklevel=3)
            return False
        if self.index is not None:
            self.last, self.recent = int(self.index.table.numbers[-1]), None
            self._seen = self.last
        return True


def open_index(registry: Registry) -> Index | None:
    """Open the index of a registry; None if there is none, DataError if it is damaged."""
    name, spec = registry.fact("index"), registry.spec
    if name is None or spec is None:
        return None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DataError(f"{registry.path}: {name!r:.80} is not the name of an index")
    folder = registry.path / "index" / name
    if not folder.is_dir():
        return None  # it may be deleted at any time
    index = Index.load(folder, spec)
    if index.table.numbers[-1] > newest_number(registry):
        raise DataError(f"the index {folder} names clients that were never registered")
    return index


def newest_number(registry: Registry) -> int:
    """Return the largest number that a client ever had."""
    known = registry.db.rows("SELECT seq FROM sqlite_sequence WHERE name = 'clients'")
    if known and not isinstance(known[0][0], int):
        raise DataError(f"{registry.path}: the counter of clients is damaged")
    return known[0][0] if known else 0


def _remove_others(root: Path, name: str) -> None:
    """Delete old indexes, and those that killed builders left."""
    for path in root.iterdir():
        if path.is_dir() and path.name != name:
            shutil.rmtree(path, ignore_errors=True)


def _ranked(
    sketch: RaceSketch, found: Sequence[tuple[ClientId, RaceSketch]], k: int
) -> list[Neighbor]:
    """Compare in full precision, with standard errors for those that are returned."""
    sketches = [other for _, other in found]
    stack = Stack(sketches)
    own = stack.error_variance()
    squares = squares_to(stack, own, sketch)
    order = np.argsort(squares + ENERGY_SHARE * own, kind="stable")[:k]
    errors = squared_errors(sketch, [sketches[i] for i in order]).tolist()
    out = []
    for i, error in zip(order.tolist(), errors, strict=True):
        square = float(squares[i])
        out.append(Neighbor(found[i][0], max(square, 0.0) ** 0.5, square, error))
    return out
