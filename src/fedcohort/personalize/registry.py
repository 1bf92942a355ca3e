"""The registry: warm clients with their sketches and models, in one SQLite database.

Each write is there whole or not at all, and the write-ahead log lets readers continue while one
writer works. A model is known by the SHA-256 of its content; clients with equal models share one.
Every sketch is kept twice: as the content of a sketch file, with its checksum, and as bare counts,
which `newcomers` scans. So there is no index to build, to damage or to wait for.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Self

from numpy.typing import NDArray

from fedcohort import storage
from fedcohort.exceptions import ConfigError, DataError, IncompatibleSketches, UnknownClient
from fedcohort.options import check_fields
from fedcohort.personalize import models
from fedcohort.personalize.models import Model
from fedcohort.rounds import ClientId, check_id
from fedcohort.sketch.file import narrow
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference
from fedcohort.sketch.uncertainty import too_few

FILE = "registry.sqlite"
VERSION = 4  # 3 kept models in files of their own
MAX_MODEL = 999_000_000  # bytes
LOCK_TIMEOUT = 60.0  # seconds to wait for another writer
NO_MODEL = "model IS NULL AND reference IS NULL"
SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE clients (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    n REAL NOT NULL,
    privacy TEXT,
    model TEXT,
    reference TEXT,
    metadata TEXT NOT NULL,
    registered TEXT NOT NULL,
    sketch BLOB NOT NULL,
    CHECK (model IS NULL OR reference IS NULL)
);
CREATE TABLE models (digest TEXT PRIMARY KEY, content BLOB NOT NULL);
CREATE INDEX clients_by_model ON clients (model);
CREATE INDEX clients_without_model ON clients (number) WHERE {NO_MODEL};
CREATE TABLE counts (
    number INTEGER PRIMARY KEY, n REAL NOT NULL, noise REAL NOT NULL, counts BLOB NOT NULL
);
"""
TABLES = "SELECT type, name, sql FROM sqlite_master ORDER BY name"
COLUMNS = "id, n, privacy, model, reference, metadata, registered"


@dataclass(frozen=True)
class Record:
    """A client to register.

    The id is any non-empty text; the sketch has enough records and the settings of all others;
    `model` is named arrays or a safetensors file, which is copied. In its place, `reference` is the
    path or URI of a model kept elsewhere, never opened. `metadata` is anything that JSON can hold.
    """

    client: ClientId
    sketch: RaceSketch
    model: Model | None = None
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """What the registry knows about a client, apart from its sketch.

    `n` samples are behind the sketch, whose budget is `privacy` (None if exact); `model` is the
    SHA-256 of the stored model, `reference` says where it is if not here, `registered` is in UTC.
    """

    client: ClientId
    n: float
    privacy: str | None
    model: str | None
    reference: str | None
    metadata: dict[str, Any]
    registered: str

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Entry:
        """Read the values of `COLUMNS`; DataError if the row was damaged."""
        client, n, privacy, model, reference, metadata, registered = row
        try:
            check_id(client)
            entry = cls(client, n, privacy, model, reference, json.loads(metadata), registered)
            check_fields(entry, "column")
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"client {client!r}: its row is damaged ({error})") from None
        return entry


class Database:
    """One SQLite connection, read-only where the folder is; threads that share it take turns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self.read_only = not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))
        log = path.with_name(path.name + "-wal")
        # Without a log nobody is writing, and SQLite need not create one to read.
        frozen = self.read_only and not (log.exists() and log.stat().st_size)
        mode = "mode=rw" if not self.read_only else "mode=ro" + "&immutable=1" * frozen
        options: Any = {"isolation_level": None, "check_same_thread": False, "uri": True}
        with sqlite_errors(path):
            url = f"{path.resolve().as_uri()}?{mode}"
            self._connection: sqlite3.Connection = sqlite3.connect(url, LOCK_TIMEOUT, **options)
        # Damaged text must not fail a whole query; it is refused where it is used.
        self._connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        try:
            self.rows("PRAGMA trusted_schema = OFF")
            self.rows("PRAGMA synchronous = FULL")
            ((version,),) = self.rows("PRAGMA user_version")
            if version != VERSION:
                raise DataError(
                    f"{path} has version {version} and this program reads {VERSION}; export it "
                    "with the program that wrote it, and add the folder to a new registry"
                )
            if self.rows(TABLES) != _empty_database()[1]:
                raise DataError(f"{path} has other tables than a registry")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock, sqlite_errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    def pages(self, sql: str, size: int = 256) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows of ``SELECT number, ... WHERE number > ? ORDER BY number LIMIT ?``.

        Others may write between pages. A damaged database that returns the same numbers again,
        which would never end, is a DataError.
        """
        last = -1
        while page := self.rows(sql, last, size):
            if not isinstance(page[-1][0], int) or page[-1][0] <= last:
                raise DataError(f"{self.path}: it is damaged, the numbers of its rows do not rise")
            yield page
            last = page[-1][0]

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a block as the only writer; all of it is committed, or nothing after an error."""
        with self._lock, sqlite_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


@cache
def _empty_database() -> tuple[bytes, list[tuple[Any, ...]]]:
    """Return the content of an empty database, and its tables."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
        memory.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        content, tables = bytearray(memory.serialize()), memory.execute(TABLES).fetchall()
    content[18:20] = b"\2\2"  # SQLite's mark of a database with a write-ahead log
    return bytes(content), tables


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as a DataError; damaged text is none to Python."""
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError) as error:
        raise DataError(f"{path}: {error}") from error


class Registry(AbstractContextManager["Registry"]):
    """Sketches and models of warm clients.

    Any number of processes may read while one writes; writers take turns. A folder that cannot be
    written can still be read.

    Examples
    --------
    >>> import tempfile
    >>> sketch = RaceSketch.srp(dim=2, rows=10, bits=2)
    >>> sketch.add([[1.0, 0.1], [2.0, 0.1], [0.5, 0.2]] * 10)
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
            raise DataError(f"{self.path} is not a registry: it has no {FILE}")
        ends = ("", "-wal", "-shm", "-journal")
        storage.refuse_links(*(self.path / f"{FILE}{end}" for end in ends))
        self.db = Database(self.path / FILE)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Make a registry in a folder that is new, empty or as a killed `create` left it."""
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder")
        folder.mkdir(parents=True, exist_ok=True)
        if any(p.name != storage.LOCK and p.suffix != storage.SUFFIX for p in folder.iterdir()):
            raise ConfigError(f"{folder} exists and is not an empty folder")
        with storage.locked_folder(folder):
            storage.remove_leftovers(folder)
            if (folder / FILE).exists():
                raise ConfigError(f"{folder} was made a registry by another process just now")
            storage.write_atomically(folder / FILE, _empty_database()[0])
        return cls(folder)

    def close(self) -> None:
        """Close the database."""
        self.db.close()

    def __exit__(self, *error: object) -> None:
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
        count = 0
        with self.db.writing() as db:
            spec = self.spec  # None once all clients were removed
            for record in records:
                whose = f"client {check_id(record.client)!r}"
                check_size(whose, record.sketch)
                if spec is None:
                    spec = record.sketch.spec
                    _set_fact(db, "spec", spec)
                if record.sketch.spec != spec:
                    raise IncompatibleSketches(f"{whose}: {difference(spec, record.sketch.spec)}")
                if replace:
                    self._delete(db, record.client)
                self._insert(db, whose, record)
                count += 1
        return count

    def _insert(self, db: sqlite3.Connection, whose: str, record: Record) -> None:
        sketch, reference = record.sketch, record.reference
        if db.execute("SELECT 1 FROM clients WHERE id = ?", (record.client,)).fetchone():
            raise ConfigError(f"{whose} is registered already; remove or replace it")
        if record.model is not None and reference is not None:
            raise ConfigError(f"{whose}: give a model or a reference, not both")
        row = (
            record.client,
            float(sketch.n),
            None if (total := sketch.total_release) is None else total.budget(),
            None if record.model is None else self._store(db, whose, record.model),
            None if reference is None else check_id(reference, f"{whose}: reference"),
            _to_json(dict(record.metadata), f"metadata of {whose}"),
            datetime.now(UTC).isoformat(timespec="seconds"),
            sketch.to_bytes(),
        )
        sql = f"INSERT INTO clients ({COLUMNS}, sketch) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        number = db.execute(sql, row).lastrowid
        db.execute("INSERT INTO counts VALUES (?, ?, ?, ?)", (number, *searched_counts(sketch)))

    def _store(self, db: sqlite3.Connection, whose: str, model: Model) -> str:
        """Store a model, unless its architecture differs from that of the models stored here."""
        content = models.content_of(model)
        if len(content) > MAX_MODEL:
            raise ConfigError(
                f"{whose}: a model of {len(content):,} bytes does not fit into SQLite; keep it "
                "elsewhere and give its reference"
            )
        shapes, digest = models.shapes_of(content), hashlib.sha256(content).hexdigest()
        some = self.db.rows("SELECT 1 FROM models LIMIT 1")
        expected = self.fact("architecture") if some else None
        if expected is not None and (problem := models.architecture_difference(shapes, expected)):
            raise ConfigError(
                f"{whose}: another architecture than the models of {self.path}: {problem}"
            )
        _set_fact(db, "architecture", shapes)
        db.execute("INSERT OR IGNORE INTO models VALUES (?, ?)", (digest, content))
        return digest

    def remove(self, client: ClientId) -> None:
        """Remove a client, and its model unless another client has the same."""
        self.get(client)
        with self.db.writing() as db:
            self._delete(db, client)

    def _delete(self, db: sqlite3.Connection, client: ClientId) -> None:
        sql = "DELETE FROM clients WHERE id = ? RETURNING number, model"
        rows = db.execute(sql, (client,)).fetchall()
        db.executemany("DELETE FROM counts WHERE number = ?", [row[:1] for row in rows])
        self._drop_unused(db, {model for _, model in rows})

    def _drop_unused(self, db: sqlite3.Connection, digests: set[str | None]) -> None:
        unused = "digest = ?1 AND NOT EXISTS (SELECT 1 FROM clients WHERE model = ?1)"
        for digest in digests - {self.global_digest()}:
            db.execute(f"DELETE FROM models WHERE {unused}", (digest,))

    def __len__(self) -> int:
        return int(self.db.rows("SELECT count(*) FROM clients")[0][0])

    def get(self, client: ClientId) -> Entry:
        """Return what is known about a client; UnknownClient if it is not registered."""
        return Entry.from_row(self._row(client, COLUMNS))

    def _row(self, client: ClientId, columns: str) -> tuple[Any, ...]:
        for row in self.db.rows(f"SELECT {columns} FROM clients WHERE id = ?", check_id(client)):
            return row
        raise UnknownClient(f"no client {client!r} is registered in {self.path}")

    def entries(self) -> Iterator[Entry]:
        """Yield all clients in the order of registration."""
        sql = f"SELECT number, {COLUMNS} FROM clients WHERE number > ? ORDER BY number LIMIT ?"
        return (Entry.from_row(row[1:]) for page in self.db.pages(sql) for row in page)

    def sketch(self, client: ClientId) -> RaceSketch:
        """Return a client's sketch."""
        (content,) = self._row(client, "sketch")
        if not isinstance(content, bytes):
            raise DataError(f"client {client!r}: its sketch is damaged; register it again")
        return RaceSketch.from_bytes(content)

    def model(self, client: ClientId) -> dict[str, NDArray[Any]]:
        """Load a client's stored model; ConfigError if it has none, or only a reference."""
        entry = self.get(client)
        if entry.model is not None:
            return models.unpack(self.model_content(entry.model))
        if entry.reference is None:
            raise ConfigError(f"client {client!r} was registered without a model")
        raise ConfigError(
            f"client {client!r} is a reference to {entry.reference!r}, which is never opened; "
            "load it yourself"
        )

    def model_content(self, digest: str) -> bytes:
        """Return a model as the content of a safetensors file, checked against its hash."""
        for (content,) in self.db.rows("SELECT content FROM models WHERE digest = ?", digest):
            if isinstance(content, bytes) and hashlib.sha256(content).hexdigest() == digest:
                return content
            raise DataError(f"{self.path}: the model {digest!r:.80} is damaged")
        raise DataError(f"{self.path}: the model {digest!r:.80} is missing")

    def set_global(self, model: Model) -> None:
        """Keep the global model, for newcomers far from every client."""
        with self.db.writing() as db:
            before = self.global_digest()
            _set_fact(db, "global", {"model": self._store(db, "global model", model)})
            self._drop_unused(db, {before})

    def global_model(self) -> dict[str, NDArray[Any]]:
        """Load the global model; ConfigError if there is none."""
        if (digest := self.global_digest()) is None:
            raise ConfigError(f"{self.path} has no global model: set one with set_global")
        return models.unpack(self.model_content(digest))

    def global_digest(self) -> str | None:
        """Return the hash of the global model; None if there is none."""
        return str(fact.get("model")) if (fact := self.fact("global")) is not None else None

    @property
    def spec(self) -> dict[str, Any] | None:
        """The settings that all sketches here share; None if there are no clients."""
        return self.fact("spec") if self.db.rows("SELECT 1 FROM clients LIMIT 1") else None

    def fact(self, name: str) -> dict[str, Any] | None:
        """Return what belongs to the registry as a whole; None if unknown."""
        rows = self.db.rows("SELECT value FROM facts WHERE name = ?", name)
        try:
            value = json.loads(rows[0][0]) if rows else None
        except (ValueError, TypeError, RecursionError):
            value = "damaged"
        if value is not None and not isinstance(value, dict):
            raise DataError(f"{self.path}: its fact {name!r} is damaged")
        return value


def check_size(whose: str, sketch: RaceSketch) -> None:
    """Refuse a sketch of too few records, or too few for its noise: it is near to anybody."""
    if not isinstance(sketch, RaceSketch):
        raise ConfigError(f"{whose}: {type(sketch).__name__} is not a sketch")
    if too_few([sketch])[0]:
        noisy = ", for so much noise" if sketch.private else ""
        raise DataError(
            f"{whose}: cannot tell who is near a sketch of n={sketch.n:g} samples{noisy}; "
            "sketch more data"
        )


def searched_counts(sketch: RaceSketch) -> tuple[float, float, bytes]:
    """Return a sketch as the table of counts holds it."""
    return float(sketch.n), float(sketch.noise), narrow(sketch.counts).tobytes()


def _to_json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} cannot be written as JSON: {error}") from None


def _set_fact(db: sqlite3.Connection, name: str, value: Any) -> None:
    row = (name, _to_json(value, name))
    db.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = ?2", row)
