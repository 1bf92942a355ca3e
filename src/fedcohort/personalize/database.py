"""The registry's SQLite file: its tables, one connection that threads share, and its errors."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fedcohort.exceptions import DataError
from fedcohort.storage import write_atomically

APPLICATION = 0x46435247  # "FCRG": the application id in the database's header
VERSION = 2  # 1 required a model for every client
LOCK_TIMEOUT = 60.0  # seconds to wait for another writer
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
    CHECK (model IS NULL OR reference IS NULL)
);
CREATE INDEX clients_by_model ON clients (model);
CREATE TABLE sketches (number INTEGER PRIMARY KEY, content BLOB NOT NULL);
"""
_TABLES = "SELECT type, name, sql FROM sqlite_master ORDER BY name"


class Database:
    """One SQLite connection; threads that share it take turns.

    Where the folder cannot be written, the database is opened read-only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self.read_only = not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))
        log = path.with_name(path.name + "-wal")
        # Without a log nobody is writing, and SQLite need not create one to read.
        frozen = self.read_only and not (log.exists() and log.stat().st_size)
        mode = "mode=rw" if not self.read_only else "mode=ro" + "&immutable=1" * frozen
        with sqlite_errors(path):
            self._connection = sqlite3.connect(
                f"{path.resolve().as_uri()}?{mode}",
                LOCK_TIMEOUT,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
        # Damaged text must not fail a whole query; it is refused where it is used.
        self._connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def create(path: Path) -> None:
        """Make an empty database, whole or not at all."""
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
            made.execute(f"PRAGMA application_id = {APPLICATION}")
            made.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            content = bytearray(made.serialize())
        content[18:20] = b"\2\2"  # SQLite's mark of a database with a write-ahead log
        write_atomically(path, bytes(content))

    def _prepare(self) -> None:
        with sqlite_errors(self.path):
            self._connection.execute("PRAGMA trusted_schema = OFF")
            self._connection.execute("PRAGMA synchronous = FULL")
            application = self._connection.execute("PRAGMA application_id").fetchone()[0]
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if application != APPLICATION:
            raise DataError(f"{self.path} is not the database of a registry")
        if version != VERSION:
            raise DataError(f"{self.path} has version {version}; this version reads {VERSION}")
        if self.rows(_TABLES) != _expected_tables():
            raise DataError(f"{self.path} has other tables than a registry")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock, sqlite_errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    def pages(self, sql: str, start: int = 0, size: int = 256) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of ``... WHERE number > ? ORDER BY number LIMIT ?``, a page at a time.

        The first column must be the number. Others may write between pages. DataError if a damaged
        database returns the same numbers again, which would never end.
        """
        while page := self.rows(sql, start, size):
            last = page[-1][0]
            if not isinstance(last, int) or last <= start:
                raise DataError(f"{self.path}: it is damaged, the numbers of its rows do not rise")
            yield from page
            start = last

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
def _expected_tables() -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(SCHEMA)
        return made.execute(_TABLES).fetchall()


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as a DataError that names the file.

    SQLite quotes damaged text in its messages, which Python then cannot decode.
    """
    try:
        yield
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error
