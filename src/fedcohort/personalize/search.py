"""Who is near: exact among few clients, candidates from an index among many, then exact."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcohort.exceptions import ConfigError, DataError, NoClients, UnlikeSketches
from fedcohort.personalize.index import (
    CANDIDATES,
    CAUTION,
    Index,
    Ints,
    Pile,
    PileWriter,
    joined,
    vector,
)
from fedcohort.personalize.records import check_size
from fedcohort.personalize.registry import Registry
from fedcohort.rounds import ClientId
from fedcohort.sketch.distances import Stack, distances_to
from fedcohort.sketch.errors import distance_with_error
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference

EXACT = 10_000
SPARE = 4  # more than asked for, in case rounding swapped them or somebody was removed
_NAME = re.compile("[0-9a-f]{16}")
_FETCH = "SELECT id, content FROM clients JOIN sketches USING (number)"
_PAGE = (
    "SELECT number, content FROM sketches JOIN clients USING (number) "
    "WHERE number > ? ORDER BY number LIMIT ?"
)


class Neighbor(NamedTuple):
    """A client near to a query.

    Parameters
    ----------
    client : str
    distance : float
        Debiased Frobenius distance of the sketches, 0 where noise left its square negative.
    squared : float
        Its square, without bias, so that it may be negative.
    error : float
        Standard error of the square, by sampling and noise (`signals.uncertainty`).
    """

    client: ClientId
    distance: float
    squared: float
    error: float


class Search:
    """Nearest clients of a registry.

    Up to `exact` clients are all compared. Beyond, an index is kept in the registry's folder;
    clients registered after it was built are compared one by one, removed ones are left out.

    Parameters
    ----------
    registry : Registry
    exact : int
        How many clients may be compared one by one before an index is built.

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
        self.spec: dict[str, Any] | None = None
        self._forget()
        self._open_index()
        if self._unindexed() > exact:
            self.build()
        self._refresh()

    def _forget(self) -> None:
        self.index: Index | None = None
        self.rest: Pile | None = None
        self.last = 0  # number of the last client in the index

    def _unindexed(self) -> int:
        sql = "SELECT count(*) FROM (SELECT 1 FROM clients WHERE number > ? LIMIT ?)"
        return int(self.registry.db.rows(sql, self.last, self.exact + 1)[0][0])

    def nearest(
        self, sketch: RaceSketch, k: int = 1, *, without: ClientId | None = None
    ) -> list[Neighbor]:
        """Return the k nearest clients, the nearest first (paper 0, algorithm 2).

        Parameters
        ----------
        sketch : RaceSketch
            Of the newcomer's data, like those of the registry.
        k : int
        without : str, optional
            A client to leave out: itself, where it is asked for its own neighbors.
        """
        if k < 1:
            raise ConfigError(f"nearest: k={k} must be at least 1")
        check_size("the query", sketch)
        self._refresh()
        if self.spec is None:
            raise NoClients(f"no client is registered in {self.registry.path}")
        if sketch.spec != self.spec:
            raise UnlikeSketches(f"the query: {difference(self.spec, sketch.spec)}")
        wanted, there = k + SPARE + (without is not None), self._stacked()
        while True:
            numbers = self._candidates(vector(sketch), wanted)
            found = [(c, s) for c, s in self.fetch(numbers.tolist()) if c != without]
            if len(found) >= k or wanted >= there:
                return _ranked(sketch, found, k) if found else []
            wanted *= 4  # many were removed since

    def _stacked(self) -> int:
        indexed = 0 if self.index is None else len(self.index.pile)
        return indexed + (0 if self.rest is None else len(self.rest))

    def _candidates(self, query: Any, count: int) -> Ints:
        parts = []
        if self.index is not None:
            few = count <= CANDIDATES // 4
            best = self.index.best if few else self.index.pile.best
            parts.append(self.index.pile.numbers[best(query, count)])
        if self.rest is not None:
            parts.append(self.rest.numbers[self.rest.best(query, count)])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def fetch(self, numbers: Sequence[int]) -> list[tuple[ClientId, RaceSketch]]:
        """Return ids and sketches of the clients of these numbers that are still there."""
        out = []
        for lo in range(0, len(numbers), 500):
            some = numbers[lo : lo + 500]
            sql = f"{_FETCH} WHERE number IN ({', '.join('?' * len(some))}) ORDER BY number"
            rows = self.registry.db.rows(sql, *some)
            out += [(client, RaceSketch.from_bytes(content)) for client, content in rows]
        return out

    def _refresh(self) -> None:
        """Stack the sketches registered since the last look."""
        spec = self.registry.spec
        if spec != self.spec and self.spec is not None:
            self._forget()  # emptied, and begun anew with other sketches
        self.spec = spec
        known = self.registry.db.rows("SELECT seq FROM sqlite_sequence WHERE name = 'clients'")
        newest = int(known[0][0]) if known else 0
        seen = int(self.rest.numbers[-1]) if self.rest is not None else self.last
        if newest > seen:
            self.rest = joined(self.rest, self._stack(seen))

    def _stack(self, after: int) -> Pile | None:
        blocks = []
        for block in _blocks(self.registry, after):
            writer = PileWriter(len(block), block[0][1])
            writer.add(block)
            blocks.append(writer.done())
        return joined(*blocks)

    def build(self) -> None:
        """Index all clients and keep the index in the registry's folder."""
        before = self.registry.fact("index")
        folder = self.registry.path / "index" / secrets.token_hex(8)
        folder.mkdir(parents=True)
        try:
            Index.build(self._pile(folder)).save(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.registry.set_fact("index", folder.name)
        self._open_index()
        if isinstance(before, str) and _NAME.fullmatch(before):
            shutil.rmtree(folder.parent / before, ignore_errors=True)

    def _pile(self, folder: Path) -> Pile:
        """Stack everybody registered by now, the counts in a file."""
        sql = "SELECT count(*), max(number) FROM clients"
        count, last = self.registry.db.rows(sql)[0]
        if not count:
            raise NoClients(f"no client is registered in {self.registry.path}")
        writer: PileWriter | None = None
        for block in _blocks(self.registry, 0):
            block = [(number, sketch) for number, sketch in block if number <= last]
            if block:
                writer = writer or PileWriter(count, block[0][1], folder)
                writer.add(block)
        if writer is None:
            raise NoClients(f"all clients of {self.registry.path} have been removed")
        return writer.done()

    def _open_index(self) -> None:
        name = self.registry.fact("index")
        if name is None:
            return
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DataError(f"{self.registry.path}: {name!r} is no name of an index")
        folder = self.registry.path / "index" / name
        if folder.is_dir():  # else somebody deleted it
            self.index = Index.load(folder)
            self.last, self.rest = int(self.index.pile.numbers[-1]), None


def _blocks(registry: Registry, after: int) -> Iterator[list[tuple[int, RaceSketch]]]:
    """Yield numbers and sketches, a block at a time."""
    rows = registry.db.pages(_PAGE, after)
    while block := [(number, RaceSketch.from_bytes(b)) for number, b in islice(rows, 4096)]:
        yield block


def _ranked(
    sketch: RaceSketch, found: Sequence[tuple[ClientId, RaceSketch]], k: int
) -> list[Neighbor]:
    """Compare in full precision, with standard errors for those that are returned."""
    sketches = [other for _, other in found]
    squares = distances_to(sketches, sketch, "mmd") * sketch.rows
    order = np.argsort(squares + CAUTION * Stack(sketches).energy(), kind="stable")[:k]
    out = []
    for i in order.tolist():
        error = distance_with_error(sketch, sketches[i], "mmd").error * sketch.rows
        square = float(squares[i])
        out.append(Neighbor(found[i][0], max(square, 0.0) ** 0.5, square, error))
    return out
