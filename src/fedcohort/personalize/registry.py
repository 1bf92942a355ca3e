"""The registry's SQLite file: its tables, and transactions that happen whole or not at all.

Write-ahead logging lets readers go on while one writer works; a second writer waits its turn.

The registry: who is warm, with which sketch and which model; a folder that a person can open.

::

    registry/
      registry.sqlite           ids, metadata, sketches (the content of sketch files)
      models/ab/abcd....safetensors
      index/                    for search among many clients; may be deleted at any time

A model is on disk, whole, before the row that names it is committed; so a crash can leave a file
too many, which `integrity.check` finds, but never a client without its model.

References
----------
Liu, Xu, Coleman, Shrivastava: One-Pass Distribution Sketch for Measuring Data Heterogeneity in
Federated Learning (paper 0), section 4.2 and algorithm 2.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError, UnknownClient, UnlikeSketches
from fedcohort.personalize.records import COLUMNS, Entry, Model, ModelFiles, Record, to_json
from fedcohort.rounds import ClientId
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference

APPLICATION = 0x46435247  # "FCRG": tells `file` and us what the database is
VERSION = 1
PATIENCE = 60.0  # seconds to wait for another writer
SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE clients (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    n REAL NOT NULL,
    epsilon REAL,
    model TEXT,
    reference TEXT,
    metadata TEXT NOT NULL,
    registered TEXT NOT NULL,
    CHECK ((model IS NULL) <> (reference IS NULL))
);
CREATE INDEX clients_by_model ON clients (model);
CREATE TABLE sketches (number INTEGER PRIMARY KEY, content BLOB NOT NULL);
"""


def create(path: Path) -> None:
    """Make an empty database."""
    with translated(path), closing(sqlite3.connect(path, isolation_level=None)) as made:
        made.execute("PRAGMA journal_mode = WAL")
        made.execute(f"PRAGMA application_id = {APPLICATION}")
        made.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")


class Database:
    """One connection, which threads may share: they take turns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        with translated(path):
            uri = f"{path.resolve().as_uri()}?mode=rw"
            self._connection = sqlite3.connect(
                uri, PATIENCE, isolation_level=None, check_same_thread=False, uri=True
            )
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        with translated(self.path):
            self._connection.execute("PRAGMA trusted_schema = OFF")
            self._connection.execute("PRAGMA synchronous = FULL")
            application = self._connection.execute("PRAGMA application_id").fetchone()[0]
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION:
            raise DataError(f"{self.path} is not the database of a registry")
        if version != VERSION:
            raise DataError(f"{self.path} has version {version}; this reader knows {VERSION}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock, translated(self.path):
            return self._connection.execute(sql, values).fetchall()

    def pages(self, sql: str, start: int = 0, size: int = 4096) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``... WHERE number > ? ORDER BY number LIMIT ?``, a page at a time.

        The first column must be the number. Between pages others may write.
        """
        while page := self.rows(sql, start, size):
            yield from page
            start = page[-1][0]

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a block as the only writer; all of it is committed, or after an error nothing."""
        with self._lock, translated(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise what SQLite says as a DataError that names the file."""
    try:
        yield
    except sqlite3.Error as error:
        raise DataError(f"{path}: {error}") from error


FILE = "registry.sqlite"
_SPEC = "SELECT value FROM facts WHERE name = 'spec' AND EXISTS (SELECT 1 FROM clients)"


class Registry:
    """Warm clients' sketches and models.

    Any number of processes may read while one writes; writers take turns.

    Parameters
    ----------
    path : path
        A folder made by `Registry.create`.

    Examples
    --------
    >>> import tempfile
    >>> sketch = RaceSketch.srp(dim=2, rows=10, bits=2)
    >>> sketch.add([[1.0, 0.1], [2.0, 0.1], [0.5, 0.2]])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Registry.create(f"{folder}/warm") as registry:
    ...         registry.add("ann", sketch, {"w": [0.5, 1.0]}, metadata={"site": "north"})
    ...         registry.add("bob", sketch, reference="s3://models/bob")
    ...         len(registry), registry.model("ann"), registry.get("bob").reference
    (2, {'w': array([0.5, 1. ])}, 's3://models/bob')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / FILE).is_file():
            raise DataError(f"{self.path} is no registry: there is no {FILE} in it")
        self.models = ModelFiles(self.path / "models")
        self.db = Database(self.path / FILE)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Make a registry in a new or empty folder."""
        folder = Path(path)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is not an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "models").mkdir()
        create(folder / FILE)
        return cls(folder)

    def close(self) -> None:
        """Close the database."""
        self.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(
        self,
        client: ClientId,
        sketch: RaceSketch,
        model: Model | None = None,
        *,
        reference: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> None:
        """Register a client; see `Record`. A known id is refused unless `replace` is set."""
        self.add_many([Record(client, sketch, model, reference, metadata or {})], replace=replace)

    def add_many(self, records: Iterable[Record], *, replace: bool = False) -> int:
        """Register many clients, all or none, and return how many; faster than one by one."""
        count, replaced = 0, set()
        with self.db.writing() as db:
            spec = self.spec  # an emptied registry is free again
            for record in records:
                record.check()
                if spec is None:
                    spec = record.sketch.spec
                    _set(db, "spec", spec)
                    db.execute("DELETE FROM facts WHERE name IN ('index', 'limit')")
                _check_alike(record, spec)
                if replace:
                    replaced |= _delete(db, record.client)
                self._insert(db, record)
                count += 1
        self._forget_models(replaced)
        return count

    def _insert(self, db: sqlite3.Connection, record: Record) -> None:
        if db.execute("SELECT 1 FROM clients WHERE id = ?", (record.client,)).fetchone():
            raise ConfigError(
                f"client {record.client!r} is registered already; remove or replace it"
            )
        model = None if record.model is None else self.models.put(record.model)
        sql = f"INSERT INTO clients ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        number = db.execute(sql, record.row(model)).lastrowid
        db.execute("INSERT INTO sketches VALUES (?, ?)", (number, record.sketch.to_bytes()))

    def remove(self, client: ClientId) -> None:
        """Forget a client, and its model where nobody else has the same."""
        self.get(client)
        with self.db.writing() as db:
            models = _delete(db, client)
        self._forget_models(models)

    def _forget_models(self, digests: set[str]) -> None:
        """Delete models that no row names any more, while no other writer can name them anew."""
        if not digests:
            return
        with self.db.writing() as db:
            for digest in digests - wanted_models(db, digests):
                self.models.discard(digest)

    def __len__(self) -> int:
        return int(self.db.rows("SELECT count(*) FROM clients")[0][0])

    def __contains__(self, client: object) -> bool:
        return bool(self.db.rows("SELECT 1 FROM clients WHERE id = ?", client))

    def get(self, client: ClientId) -> Entry:
        """Return what is known of a client; UnknownClient if nothing is."""
        found = self.db.rows(f"SELECT {COLUMNS} FROM clients WHERE id = ?", client)
        if not found:
            raise UnknownClient(f"no client {client!r} is registered in {self.path}")
        return Entry.from_row(found[0])

    def entries(self) -> Iterator[Entry]:
        """Yield all clients in the order of registration."""
        sql = f"SELECT number, {COLUMNS} FROM clients WHERE number > ? ORDER BY number LIMIT ?"
        return (Entry.from_row(row[1:]) for row in self.db.pages(sql))

    def sketch(self, client: ClientId) -> RaceSketch:
        """Return a client's sketch."""
        sql = "SELECT content FROM sketches JOIN clients USING (number) WHERE id = ?"
        found = self.db.rows(sql, self.get(client).client)
        if not found:
            raise DataError(f"client {client!r}: its sketch is missing; check the registry")
        return RaceSketch.from_bytes(found[0][0])

    def model(self, client: ClientId) -> dict[str, NDArray[Any]]:
        """Load a client's stored model; ConfigError where there is only a reference."""
        entry = self.get(client)
        return self._load(f"client {client!r}", entry.model, entry.reference)

    def set_global(self, model: Model | None = None, *, reference: str | None = None) -> None:
        """Keep the global model, or where it lies, for newcomers to whom nobody is near."""
        if (model is None) == (reference is None):
            raise ConfigError("global model: give a model or a reference to one")
        before = self.fact("global") or {"model": None}
        with self.db.writing() as db:
            digest = None if model is None else self.models.put(model)
            _set(db, "global", {"model": digest, "reference": reference})
        self._forget_models({before["model"]} - {None})

    def global_model(self) -> dict[str, NDArray[Any]]:
        """Load the global model; ConfigError where there is none, or only a reference."""
        known = self.fact("global")
        if known is None:
            raise ConfigError(f"{self.path} has no global model: set one with set_global")
        return self._load("the global model", known["model"], known["reference"])

    def _load(
        self, whose: str, digest: str | None, reference: str | None
    ) -> dict[str, NDArray[Any]]:
        if digest is None:
            raise ConfigError(
                f"{whose} is a reference to {reference!r}, which is never opened; load it yourself"
            )
        return self.models.load(digest)

    @property
    def spec(self) -> dict[str, Any] | None:
        """What all sketches here have in common; None if there are none."""
        found = self.db.rows(_SPEC)
        return dict(json.loads(found[0][0])) if found else None

    def fact(self, name: str) -> Any:
        """Return a value that belongs to the registry as a whole, None if unknown."""
        found = self.db.rows("SELECT value FROM facts WHERE name = ?", name)
        return json.loads(found[0][0]) if found else None

    def set_fact(self, name: str, value: Any) -> None:
        """Keep a value, such as a calibrated limit."""
        with self.db.writing() as db:
            _set(db, name, value)


def wanted_models(db: sqlite3.Connection, among: set[str] | None = None) -> set[str]:
    """Return the models that a client, or the global model, has: all, or those in question."""
    stated = db.execute("SELECT value FROM facts WHERE name = 'global'").fetchall()
    wanted = {json.loads(value)["model"] for (value,) in stated} - {None}
    if among is None:
        rows = db.execute("SELECT DISTINCT model FROM clients WHERE model IS NOT NULL")
        return wanted | {digest for (digest,) in rows}
    sql = "SELECT 1 FROM clients WHERE model = ?"
    return (wanted & among) | {d for d in among if db.execute(sql, (d,)).fetchone()}


def _check_alike(record: Record, spec: dict[str, Any]) -> None:
    if record.sketch.spec != spec:
        raise UnlikeSketches(f"client {record.client!r}: {difference(spec, record.sketch.spec)}")


def _set(db: sqlite3.Connection, name: str, value: Any) -> None:
    row = (name, to_json(value, name))
    db.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = ?2", row)


def _delete(db: sqlite3.Connection, client: ClientId) -> set[str]:
    """Delete a client's rows, if there are some, and return the model that they named."""
    rows = db.execute("SELECT number, model FROM clients WHERE id = ?", (client,)).fetchall()
    for number, _ in rows:
        db.execute("DELETE FROM sketches WHERE number = ?", (number,))
        db.execute("DELETE FROM clients WHERE number = ?", (number,))
    return {model for _, model in rows if model is not None}
