"""Checks a registry: every model against its hash, every sketch against its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from fedcohort.exceptions import DataError, InvalidSketch
from fedcohort.personalize.registry import COLUMNS, Entry, Registry, narrow
from fedcohort.progress import watched
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference


class Problem(NamedTuple):
    """Something that is wrong with a registry.

    `kind` is database, client, sketch, unlike, model, orphan (a model that no client has, such as a
    killed writer leaves) or foreign (no registry wrote the file); `subject` is an id or a file.
    """

    kind: str
    subject: str
    detail: str


def check(registry: Registry) -> list[Problem]:
    """Return all problems of a registry; only orphans are harmless."""
    try:
        damage = [str(row[0]) for row in registry.db.rows("PRAGMA integrity_check")]
        if damage == ["ok"]:
            return [p for part in (_sketches, _models, _files) for p in part(registry)]
    except DataError as error:
        damage = [str(error)]
    return [Problem("database", str(registry.db.path), line) for line in damage]


def _sketches(registry: Registry) -> Iterator[Problem]:
    spec = registry.spec
    sql = (
        f"SELECT number, sketch, counts.n, noise, counts, {COLUMNS.replace('n,', 'clients.n,', 1)} "
        "FROM clients LEFT JOIN counts USING (number) WHERE number > ? ORDER BY number LIMIT ?"
    )
    rows = (row for page in registry.db.pages(sql) for row in page)
    for row in watched(rows, "sketches", len(registry)):
        content, searched, client = row[1], row[2:5], row[5]
        try:
            Entry.from_row(row[5:])
            if not isinstance(content, bytes):
                raise InvalidSketch("it is missing")
            sketch = RaceSketch.from_bytes(content)
            if searched != (float(sketch.n), float(sketch.noise), narrow(sketch.counts).tobytes()):
                raise InvalidSketch("the counts that are searched are not those of the sketch")
        except InvalidSketch as error:
            yield Problem("sketch", str(client), f"{error}; register it again")
        except DataError as error:
            yield Problem("client", str(client), str(error))
        else:
            if sketch.spec != spec:
                yield Problem("unlike", str(client), difference(spec or {}, sketch.spec))


def _models(registry: Registry) -> Iterator[Problem]:
    """Hash each file once, however many clients share it."""
    sql = "SELECT min(id), model FROM clients WHERE model IS NOT NULL GROUP BY model"
    rows = list(registry.db.rows(sql))
    if (stated := registry.global_entry()) and stated["model"] is not None:
        rows.append(("the global model", stated["model"]))
    for whose, digest in watched(rows, "models", len(rows)):
        try:
            registry.models.verify(digest)
        except DataError as error:
            yield Problem("model", str(whose), str(error))


def _writers_excluded(registry: Registry) -> AbstractContextManager[Any]:
    """Exclude writers, because a model is stored before the row that names it."""
    return nullcontext() if registry.db.read_only else registry.db.writing()


def _files(registry: Registry) -> Iterator[Problem]:
    with _writers_excluded(registry):
        orphans, foreign = registry.models.unreferenced(registry.wanted_models())
    for path in orphans:
        yield Problem("orphan", str(path), "no client has this model")
    for path in foreign:
        yield Problem("foreign", str(path), "no registry wrote this; look at it and move it away")


def remove_orphans(registry: Registry) -> list[Path]:
    """Delete the models that no client has, and return them; foreign files stay."""
    with registry.db.writing():
        orphans, _ = registry.models.unreferenced(registry.wanted_models())
        for path in orphans:
            path.unlink(missing_ok=True)
    return orphans
