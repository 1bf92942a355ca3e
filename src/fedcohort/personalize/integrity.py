"""Is a registry whole? Every file against its hash, every sketch against its checksum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fedcohort.exceptions import DataError, InvalidSketch
from fedcohort.personalize.registry import Registry, wanted_models
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference


class Problem(NamedTuple):
    """Something wrong.

    Parameters
    ----------
    kind : {"database", "sketch", "unlike", "model", "orphan"}
    subject : str
        The client's id, or the file.
    detail : str
    """

    kind: str
    subject: str
    detail: str


def check(registry: Registry) -> list[Problem]:
    """Return all that is wrong with a registry; orphans are harmless, the rest is not.

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
    except DataError as error:
        damage = [str(error)]
    if damage != ["ok"]:
        return [Problem("database", str(registry.db.path), line) for line in damage]
    return [*_sketches(registry), *_models(registry), *_orphans(registry)]


def _sketches(registry: Registry) -> Iterator[Problem]:
    spec = registry.fact("spec")
    sql = (
        "SELECT number, id, content FROM clients LEFT JOIN sketches USING (number) "
        "WHERE number > ? ORDER BY number LIMIT ?"
    )
    for _, client, content in registry.db.pages(sql, size=256):
        try:
            if not isinstance(content, bytes):
                raise InvalidSketch("it is missing")
            sketch = RaceSketch.from_bytes(content)
        except InvalidSketch as error:
            yield Problem("sketch", client, str(error))
            continue
        if sketch.spec != spec:
            yield Problem("unlike", client, difference(spec, sketch.spec))


def _models(registry: Registry) -> Iterator[Problem]:
    """Hash each file once, however many clients share it."""
    stated = registry.fact("global") or {"model": None}
    if stated["model"] is not None:
        yield from _model(registry, "the global model", stated["model"])
    sql = "SELECT min(id), model FROM clients WHERE model IS NOT NULL GROUP BY model"
    for client, digest in registry.db.rows(sql):
        yield from _model(registry, client, digest)


def _model(registry: Registry, whose: str, digest: str) -> Iterator[Problem]:
    try:
        registry.models.verify(digest)
    except DataError as error:
        yield Problem("model", whose, str(error))


def _orphans(registry: Registry) -> Iterator[Problem]:
    with registry.db.writing() as db:  # a model whose row is about to come is no orphan
        strays = list(registry.models.strays(wanted_models(db)))
    for path in strays:
        yield Problem("orphan", str(path), "no client has this model")


def remove_orphans(registry: Registry) -> list[Path]:
    """Delete files in the folder of models that belong to nobody, and return them."""
    with registry.db.writing() as db:
        strays = list(registry.models.strays(wanted_models(db)))
        for path in strays:
            path.unlink(missing_ok=True)
    return strays
