"""The registry: warm clients with their sketches and models, in a folder that a person can open.

::

    registry/
      registry.sqlite           ids, metadata, sketches (the content of sketch files)
      models/ab/abcd....safetensors
      index/                    for search among many clients; may be deleted at any time

A model is complete on disk before the row that names it is committed. A crash can therefore leave
an unreferenced file, which `integrity.check` finds, but never a client without its model.
SQLite's write-ahead log lets readers continue while one writer works; a second writer waits.

References
----------
Liu, Xu, Coleman, Shrivastava: One-Pass Distribution Sketch for Measuring Data Heterogeneity in
Federated Learning (paper 0), section 4.2 and algorithm 2.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError, IncompatibleSketches, UnknownClient
from fedcohort.personalize.database import Database
from fedcohort.personalize.models import Model, ModelFiles, Shapes, shapes_of, unlike
from fedcohort.rounds import ClientId, check_id
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference
from fedcohort.storage import LOCK, SUFFIX, locked_folder, remove_leftovers

FILE = "registry.sqlite"
COLUMNS = "id, n, epsilon, model, reference, metadata, registered"
_SPEC = "SELECT value FROM facts WHERE name = 'spec' AND EXISTS (SELECT 1 FROM clients)"


@dataclass(frozen=True)
class Record:
    """A client to register.

    Parameters
    ----------
    client : str
        Any non-empty text.
    sketch : RaceSketch
        Of at least two samples, exact or private, with the same settings as all others.
    model : mapping or path, optional
        Named arrays, or a safetensors file, which is copied. Without a model or a reference the
        client is found by a search, but never advised as a model to start from.
    reference : str, optional
        In place of `model`: the path or URI of a model kept elsewhere. It is never opened.
    metadata : mapping
        Anything that JSON can hold.
    """

    client: ClientId
    sketch: RaceSketch
    model: Model | None = None
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what cannot be registered."""
        check_id(self.client)
        if not isinstance(self.sketch, RaceSketch):
            raise ConfigError(
                f"client {self.client!r}: {type(self.sketch).__name__} is not a sketch"
            )
        check_size(f"client {self.client!r}", self.sketch)
        if self.model is not None and self.reference is not None:
            raise ConfigError(f"client {self.client!r}: give a model or a reference, not both")
        if self.reference is not None:
            check_id(self.reference, f"client {self.client!r}: reference")

    def row(self, model: str | None) -> tuple[Any, ...]:
        """Return the values of `COLUMNS`; `model` is the hash of the stored model."""
        release = self.sketch.release
        return (
            self.client,
            float(self.sketch.n),
            None if release is None else release.epsilon,
            model,
            self.reference,
            _to_json(dict(self.metadata), f"metadata of client {self.client!r}"),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )


@dataclass(frozen=True)
class Entry:
    """What the registry knows about a client, apart from its sketch.

    Parameters
    ----------
    client : str
    n : float
        Samples behind the sketch.
    epsilon : float or None
        Privacy of the sketch, None if it is exact.
    model : str or None
        SHA-256 of the stored model.
    reference : str or None
        Where the model is if it is not stored here.
    metadata : dict
    registered : str
        Date and time in UTC.
    """

    client: ClientId
    n: float
    epsilon: float | None
    model: str | None
    reference: str | None
    metadata: dict[str, Any]
    registered: str

    @classmethod
    def from_row(cls, row: tuple[Any, ...]) -> Entry:
        """Read the values of `COLUMNS`; DataError if the row was damaged."""
        client, n, epsilon, model, reference, metadata, registered = row
        try:
            check_id(client)
            entry = cls(client, n, epsilon, model, reference, json.loads(metadata), registered)
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"client {client!r}: its row is damaged ({error})") from None
        numbers = [n] if epsilon is None else [n, epsilon]
        texts = [registered, *(text for text in (model, reference) if text is not None)]
        if (
            not all(isinstance(x, float) and math.isfinite(x) for x in numbers)
            or not all(isinstance(text, str) for text in texts)
            or not isinstance(entry.metadata, dict)
        ):
            raise DataError(f"client {client!r}: its row is damaged (a value of another type)")
        return entry


class Registry:
    """Sketches and models of warm clients.

    Any number of processes may read while one writes; writers take turns. A folder that cannot be
    written can still be read.

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
            raise DataError(f"{self.path} is not a registry: it has no {FILE}")
        self.models = ModelFiles(self.path / "models")
        self.db = Database(self.path / FILE)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Self:
        """Make a registry in a new or empty folder; see `is_new`."""
        folder = Path(path)
        if not is_new(folder):
            raise ConfigError(f"{folder} exists and is not an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        with locked_folder(folder):
            remove_leftovers(folder)
            if (folder / FILE).exists():
                raise ConfigError(f"{folder} was made a registry by another process just now")
            (folder / "models").mkdir(exist_ok=True)
            Database.create(folder / FILE)
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
            spec = self.spec  # None once all clients were removed
            for record in records:
                record.check()
                if spec is None:
                    spec = record.sketch.spec
                    _set(db, "spec", spec)
                    db.execute("DELETE FROM facts WHERE name IN ('index', 'limit')")
                if record.sketch.spec != spec:
                    raise IncompatibleSketches(
                        f"client {record.client!r}: {difference(spec, record.sketch.spec)}"
                    )
                if replace:
                    replaced |= _delete(db, record.client)
                self._insert(db, record)
                count += 1
        self._discard_models(replaced)
        return count

    def _insert(self, db: sqlite3.Connection, record: Record) -> None:
        if db.execute("SELECT 1 FROM clients WHERE id = ?", (record.client,)).fetchone():
            raise ConfigError(
                f"client {record.client!r} is registered already; remove or replace it"
            )
        model = None
        if record.model is not None:
            model = self._store(db, f"client {record.client!r}", record.model)
        sql = f"INSERT INTO clients ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
        number = db.execute(sql, record.row(model)).lastrowid
        db.execute("INSERT INTO sketches VALUES (?, ?)", (number, record.sketch.to_bytes()))

    def _store(self, db: sqlite3.Connection, whose: str, model: Model) -> str:
        """Store a model, unless its architecture differs from that of the models stored here."""
        shapes, known = shapes_of(model), self._architecture()
        if known is not None and (problem := unlike(shapes, known)):
            raise ConfigError(
                f"{whose}: another architecture than the models of {self.path}: {problem}"
            )
        digest = self.models.put(model)
        if known is None:
            _set(db, "architecture", shapes)
        return digest

    def _architecture(self) -> Shapes | None:
        """Return the shapes of the stored models' arrays; None while no model is stored."""
        known = self.fact("architecture") if self.wanted_models(first=True) else None
        return known if isinstance(known, dict) else None

    def remove(self, client: ClientId) -> None:
        """Remove a client, and its model unless another client has the same."""
        self.get(client)
        with self.db.writing() as db:
            models = _delete(db, client)
        self._discard_models(models)

    def _discard_models(self, digests: set[str]) -> None:
        """Delete models that no row names, while no other writer can add such a row."""
        if not digests:
            return
        with self.db.writing():
            for digest in digests - self.wanted_models(digests):
                self.models.discard(digest)

    def wanted_models(self, among: set[str] | None = None, *, first: bool = False) -> set[str]:
        """Return the models that clients or the global model have.

        Parameters
        ----------
        among : set of str, optional
            Look for these only.
        first : bool
            Stop at the first one.
        """
        stated = self.global_entry() or {"model": None}
        wanted = {stated["model"]} - {None}
        if among is not None:
            sql = "SELECT 1 FROM clients WHERE model = ?"
            return (wanted & among) | {digest for digest in among if self.db.rows(sql, digest)}
        limit = " LIMIT 1" * first
        rows = self.db.rows(f"SELECT DISTINCT model FROM clients WHERE model IS NOT NULL{limit}")
        return wanted | {str(digest) for (digest,) in rows}

    def __len__(self) -> int:
        return int(self.db.rows("SELECT count(*) FROM clients")[0][0])

    def __contains__(self, client: object) -> bool:
        try:
            return bool(self.db.rows("SELECT 1 FROM clients WHERE id = ?", check_id(client)))
        except ConfigError:
            return False

    def get(self, client: ClientId) -> Entry:
        """Return what is known about a client; UnknownClient if it is not registered."""
        sql = f"SELECT {COLUMNS} FROM clients WHERE id = ?"
        found = self.db.rows(sql, check_id(client))
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
        if not found or not isinstance(found[0][0], bytes):
            raise DataError(f"client {client!r}: its sketch is missing; check the registry")
        return RaceSketch.from_bytes(found[0][0])

    def model(self, client: ClientId) -> dict[str, NDArray[Any]]:
        """Load a client's stored model; ConfigError if it has none, or only a reference."""
        entry = self.get(client)
        return self._load(f"client {client!r}", entry.model, entry.reference)

    def set_global(self, model: Model | None = None, *, reference: str | None = None) -> None:
        """Keep the global model, or a reference to it, for newcomers far from every client."""
        if (model is None) == (reference is None):
            raise ConfigError("global model: give a model or a reference to one")
        if reference is not None:
            check_id(reference, "global model: reference")
        before = self.global_entry() or {"model": None}
        with self.db.writing() as db:
            digest = None if model is None else self._store(db, "global model", model)
            _set(db, "global", {"model": digest, "reference": reference})
        self._discard_models({before["model"]} - {None})

    def global_model(self) -> dict[str, NDArray[Any]]:
        """Load the global model; ConfigError if there is none, or only a reference."""
        known = self.global_entry()
        if known is None:
            raise ConfigError(f"{self.path} has no global model: set one with set_global")
        return self._load("the global model", known["model"], known["reference"])

    def global_entry(self) -> dict[str, Any] | None:
        """Return the hash of, or the reference to, the global model; None if there is none."""
        known = self.fact("global")
        if known is not None and (
            not isinstance(known, dict)
            or known.keys() != {"model", "reference"}
            or not all(value is None or isinstance(value, str) for value in known.values())
        ):
            raise DataError(f"{self.path}: the entry of the global model is damaged; set it again")
        return known

    def _load(
        self, whose: str, digest: str | None, reference: str | None
    ) -> dict[str, NDArray[Any]]:
        if digest is not None:
            return self.models.load(digest)
        if reference is None:
            raise ConfigError(f"{whose} was registered without a model")
        raise ConfigError(
            f"{whose} is a reference to {reference!r}, which is never opened; load it yourself"
        )

    @property
    def spec(self) -> dict[str, Any] | None:
        """The settings that all sketches here share; None if there are no clients."""
        found = self.db.rows(_SPEC)
        spec = None if not found else self._parsed("spec", found[0][0])
        if spec is not None and not isinstance(spec, dict):
            raise DataError(f"{self.path}: its fact 'spec' is damaged")
        return spec

    def fact(self, name: str) -> Any:
        """Return a value that belongs to the registry as a whole, None if unknown."""
        found = self.db.rows("SELECT value FROM facts WHERE name = ?", name)
        return self._parsed(name, found[0][0]) if found else None

    def _parsed(self, name: str, value: Any) -> Any:
        try:
            return json.loads(value)
        except (ValueError, TypeError, RecursionError):
            raise DataError(f"{self.path}: its fact {name!r} is damaged") from None

    def set_fact(self, name: str, value: Any) -> None:
        """Store a value that belongs to the registry as a whole."""
        with self.db.writing() as db:
            _set(db, name, value)


def is_new(folder: Path) -> bool:
    """Whether a folder does not exist, or holds at most what a killed `Registry.create` left."""
    if not folder.is_dir():
        return not folder.exists()
    return all(
        path.name == LOCK
        or path.name.endswith(SUFFIX)
        or (path.name == "models" and path.is_dir() and not any(path.iterdir()))
        for path in folder.iterdir()
    )


def check_size(whose: str, sketch: RaceSketch) -> None:
    """Refuse a sketch of fewer than two samples: its sampling error cannot be estimated."""
    if not sketch.n >= 2:
        raise ConfigError(
            f"{whose}: a sketch of n={sketch.n:g} samples cannot be compared; sketch two or more"
        )


def _to_json(value: Any, what: str) -> str:
    try:
        text = json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} cannot be written as JSON: {error}") from None
    return text


def _set(db: sqlite3.Connection, name: str, value: Any) -> None:
    row = (name, _to_json(value, name))
    db.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = ?2", row)


def _delete(db: sqlite3.Connection, client: ClientId) -> set[str]:
    """Delete a client's rows, if there are any, and return the model that they named."""
    rows = db.execute("SELECT number, model FROM clients WHERE id = ?", (client,)).fetchall()
    for number, _ in rows:
        db.execute("DELETE FROM sketches WHERE number = ?", (number,))
        db.execute("DELETE FROM clients WHERE number = ?", (number,))
    return {model for _, model in rows if model is not None}
