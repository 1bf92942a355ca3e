"""Look after a registry: check its content, write and read plain files.

A folder of plain files holds ``NAME.sketch`` and ``NAME.safetensors``. ``clients.json`` says which
client a sketch file belongs to, as ``fedcohort sketch --by`` writes it; a file that it does not
name belongs to the client NAME. ``details.json`` holds references and metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedcohort.exceptions import ConfigError, DataError, FedcohortError, InvalidSketch
from fedcohort.files.sketching import INDEX, FileNames
from fedcohort.personalize.models import SUFFIX
from fedcohort.personalize.registry import COLUMNS, Entry, Record, Registry, searched_counts
from fedcohort.progress import watched
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import difference
from fedcohort.storage import refuse_links, write_atomically

DETAILS = "details.json"
SKETCH = ".sketch"


class Problem(NamedTuple):
    """Something that is wrong with a registry.

    `kind` is database, client, sketch, unlike (made with other settings) or model; `subject` is a
    client's id or a file.
    """

    kind: str
    subject: str
    detail: str


def check(registry: Registry) -> list[Problem]:
    """Return all problems of a registry."""
    try:
        damage = [str(row[0]) for row in registry.db.rows("PRAGMA integrity_check")]
        if damage == ["ok"]:
            return [*_sketches(registry), *_models(registry)]
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
            if searched != searched_counts(sketch):
                raise InvalidSketch("the counts that are searched are not those of the sketch")
        except InvalidSketch as error:
            yield Problem("sketch", str(client), f"{error}; register it again")
        except DataError as error:
            yield Problem("client", str(client), str(error))
        else:
            if sketch.spec != spec:
                yield Problem("unlike", str(client), difference(spec or {}, sketch.spec))


def _models(registry: Registry) -> Iterator[Problem]:
    """Hash each model once, however many clients share it."""
    sql = "SELECT min(id), model FROM clients WHERE model IS NOT NULL GROUP BY model"
    rows = list(registry.db.rows(sql))
    if (digest := registry.global_digest()) is not None:
        rows.append(("the global model", digest))
    for whose, digest in watched(rows, "models", len(rows)):
        try:
            registry.model_content(digest)
        except DataError as error:
            yield Problem("model", str(whose), str(error))


def export(registry: Registry, folder: str | os.PathLike[str]) -> int:
    """Write all clients into a new or empty folder, and return how many."""
    root = Path(folder)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} exists and is not an empty folder")
    root.mkdir(parents=True, exist_ok=True)
    names, clients, details = FileNames(), {}, {}
    for entry in registry.entries():
        path = root / names.of(entry.client)
        write_atomically(path, registry.sketch(entry.client).to_bytes())
        if entry.model is not None:
            write_atomically(path.with_suffix(SUFFIX), registry.model_content(entry.model))
        clients[path.name] = entry.client
        details[path.name] = {"reference": entry.reference, "metadata": entry.metadata}
    for name, listed in ((INDEX, clients), (DETAILS, details)):
        write_atomically(root / name, json.dumps(listed, indent=1).encode())
    return len(clients)


def add_folder(
    registry: Registry, folder: str | os.PathLike[str], *, replace: bool = False
) -> tuple[int, dict[str, str]]:
    """Register the clients of a folder; return how many, and files that were skipped with why.

    The folder is what `export` or ``fedcohort sketch --by`` wrote, or any folder of sketch files.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder of sketch files")
    clients, details = _read_object(root / INDEX), _read_object(root / DETAILS)
    names = [*clients, *sorted({path.name for path in root.glob("*" + SKETCH)} - clients.keys())]
    if not names:
        raise ConfigError(f"{root} has no {SKETCH} files")
    count, skipped = 0, {}
    for name in names:
        try:
            client = clients.get(name, name.removesuffix(SKETCH))
            registry.add_many([_record(root, name, client, details.get(name, {}))], replace=replace)
            count += 1
        except (FedcohortError, OSError) as error:
            skipped[name] = str(error)
    return count, skipped


def _read_object(path: Path) -> dict[str, Any]:
    refuse_links(path)
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not an object of sketch files and clients")
    return content


def _record(folder: Path, name: str, client: Any, details: Any) -> Record:
    if Path(name).name != name or not name.endswith(SKETCH):
        raise DataError(f"{folder / INDEX}: {name!r:.80} is not the name of a sketch file")
    if not isinstance(details, dict) or not isinstance(details.get("metadata", {}), dict):
        raise DataError(f"{folder / DETAILS}: the details of {name!r:.80} are not an object")
    path, model = folder / name, (folder / name).with_suffix(SUFFIX)
    refuse_links(path, model)
    facts = details.get("reference"), details.get("metadata", {})
    return Record(client, RaceSketch.load(path), model if model.exists() else None, *facts)
