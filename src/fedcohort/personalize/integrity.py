"""Checks a registry: every file against its hash, every sketch against its checksum, the index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from fedcohort.exceptions import DataError, InvalidSketch
from fedcohort.personalize import index
from fedcohort.personalize.registry import COLUMNS, Entry, Registry
from fedcohort.personalize.search import open_index
from fedcohort.progress import watched
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference


class Problem(NamedTuple):
    """Something that is wrong with a registry.

    Parameters
    ----------
    kind : {"database", "client", "sketch", "unlike", "model", "index", "orphan"}
    subject : str
        The client's id, or the file.
    detail : str
    """

    kind: str
    subject: str
    detail: str


def check(registry: Registry) -> list[Problem]:
    """Return all problems of a registry; only orphans are harmless.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Registry.create(f"{folder}/warm") as registry:
    ...         check(registry)
    []
    """
    try:
        damage = [str(row[0]) for row in registry.db.rows("PRAGMA integrity_check")]
        if damage == ["ok"]:
            parts = (_sketches, _models, _index, _orphans)
            return [problem for part in parts for problem in part(registry)]
    except DataError as error:
        damage = [str(error)]
    return [Problem("database", str(registry.db.path), line) for line in damage]


def _sketches(registry: Registry) -> Iterator[Problem]:
    spec = registry.spec
    sql = (
        f"SELECT number, content, {COLUMNS} FROM clients LEFT JOIN sketches USING (number) "
        "WHERE number > ? ORDER BY number LIMIT ?"
    )
    pages = watched(registry.db.pages(sql, size=256), "sketches", len(registry))
    for _, content, *row in pages:
        client = str(row[0])
        try:
            Entry.from_row(tuple(row))
            if not isinstance(content, bytes):
                raise InvalidSketch("it is missing")
            sketch = RaceSketch.from_bytes(content)
        except InvalidSketch as error:
            yield Problem("sketch", client, str(error))
        except DataError as error:
            yield Problem("client", client, str(error))
        else:
            if sketch.spec != spec:
                yield Problem("unlike", client, difference(spec or {}, sketch.spec))


def _models(registry: Registry) -> Iterator[Problem]:
    """Hash each file once, however many clients share it."""
    stated = registry.global_entry() or {"model": None}
    if stated["model"] is not None:
        yield from _model(registry, "the global model", stated["model"])
    sql = "SELECT min(id), model FROM clients WHERE model IS NOT NULL GROUP BY model"
    rows = list(registry.db.rows(sql))
    for client, digest in watched(rows, "models", len(rows)):
        yield from _model(registry, str(client), digest)


def _model(registry: Registry, whose: str, digest: str) -> Iterator[Problem]:
    try:
        registry.models.verify(digest)
    except DataError as error:
        yield Problem("model", whose, str(error))


def _index(registry: Registry) -> Iterator[Problem]:
    try:
        if open_index(registry) is not None:
            index.verify(registry.path / "index" / registry.fact("index"))
    except DataError as error:
        yield Problem("index", str(registry.path / "index"), str(error))


def _writers_excluded(registry: Registry) -> AbstractContextManager[Any]:
    """Exclude writers, because a model is stored before the row that names it."""
    return nullcontext() if registry.db.read_only else registry.db.writing()


def _orphans(registry: Registry) -> Iterator[Problem]:
    with _writers_excluded(registry):
        found = list(registry.models.unreferenced(registry.wanted_models()))
    for path in found:
        yield Problem("orphan", str(path), "no client has this model")


def remove_orphans(registry: Registry) -> list[Path]:
    """Delete the files in the folder of models that no client has, and return them."""
    with registry.db.writing():
        found = list(registry.models.unreferenced(registry.wanted_models()))
        for path in found:
            path.unlink(missing_ok=True)
    return found
