"""The registry's SQLite file: its tables, and transactions that happen whole or not at all.

Write-ahead logging lets readers go on while one writer works; a second writer waits its turn.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fedcohort.exceptions import DataError

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
