"""Clients of a registry as plain files: sketches, models and a list of both.

A folder holds sketch files and models, ``NAME.sketch`` and ``NAME.safetensors``, and optionally
``clients.json`` with each client's id, files, reference and metadata. Without that list, a client's
id is the name of its sketch file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from fedcohort.exceptions import ConfigError, DataError, FedcohortError
from fedcohort.personalize.models import SUFFIX
from fedcohort.personalize.registry import Record, Registry
from fedcohort.sketch.race import RaceSketch
from fedcohort.storage import write_atomically

LIST = "clients.json"
SKETCH = ".sketch"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def export(registry: Registry, folder: str | os.PathLike[str]) -> int:
    """Write all clients into a new or empty folder, and return how many.

    Examples
    --------
    >>> import tempfile
    >>> sketch = RaceSketch.srp(dim=2, rows=10, bits=2)
    >>> sketch.add([[1.0, 0.1], [2.0, 0.1]])
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with Registry.create(f"{root}/warm") as registry:
    ...         registry.add("ann", sketch, {"w": [0.5]})
    ...         export(registry, f"{root}/files"), sorted(os.listdir(f"{root}/files"))
    (1, ['ann.safetensors', 'ann.sketch', 'clients.json'])
    """
    root = Path(folder)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} exists and is not an empty folder")
    root.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, entry in enumerate(registry.entries()):
        name = entry.client if _PLAIN.fullmatch(entry.client) else f"_{number}"
        write_atomically(root / (name + SKETCH), registry.sketch(entry.client).to_bytes())
        if entry.model is not None:
            registry.models.verify(entry.model)
            content = registry.models.path(entry.model).read_bytes()
            write_atomically(root / (name + SUFFIX), content)
        listed.append(
            {
                "client": entry.client,
                "sketch": name + SKETCH,
                "model": None if entry.model is None else name + SUFFIX,
                "reference": entry.reference,
                "metadata": entry.metadata,
            }
        )
    write_atomically(root / LIST, json.dumps(listed, indent=1).encode())
    return len(listed)


def add_folder(
    registry: Registry, folder: str | os.PathLike[str], *, replace: bool = False
) -> tuple[int, dict[str, str]]:
    """Register the clients of a folder.

    Parameters
    ----------
    registry : Registry
    folder : path
        What `export` wrote, or any folder of sketch files.
    replace : bool
        Replace known clients.

    Returns
    -------
    int
        How many were registered.
    dict
        Files that were skipped, with the reason.
    """
    count, skipped = 0, {}
    for listed in _listed(Path(folder)):
        try:
            registry.add_many([_record(Path(folder), listed)], replace=replace)
            count += 1
        except (FedcohortError, OSError) as error:
            skipped[str(listed.get("sketch"))] = str(error)
    return count, skipped


def _listed(folder: Path) -> list[dict[str, Any]]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder of sketch files")
    if not (folder / LIST).exists():
        found = sorted(folder.glob("*" + SKETCH))
        if not found:
            raise ConfigError(f"{folder} has no {SKETCH} files")
        return [_from_names(path) for path in found]
    try:
        listed = json.loads((folder / LIST).read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{folder / LIST} is not JSON: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise DataError(f"{folder / LIST} is not a list of clients")
    return listed


def _from_names(path: Path) -> dict[str, Any]:
    model = path.with_suffix(SUFFIX)
    return {
        "client": path.name.removesuffix(SKETCH),
        "sketch": path.name,
        "model": model.name if model.exists() else None,
    }


def _record(folder: Path, listed: dict[str, Any]) -> Record:
    files = {}
    for key in ("sketch", "model"):
        name = listed.get(key)
        if name is not None and (not isinstance(name, str) or Path(name).name != name):
            raise DataError(f"{folder / LIST}: {key} {name!r:.80} is not the name of a file")
        files[key] = None if name is None else folder / name
    if files["sketch"] is None:
        raise DataError(f"{folder / LIST}: client {listed.get('client')!r:.80} has no sketch")
    metadata = listed.get("metadata", {})
    if not isinstance(metadata, dict):
        raise DataError(f"{folder / LIST}: metadata {metadata!r:.80} is not an object")
    sketch = RaceSketch.load(files["sketch"])
    return Record(
        str(listed.get("client", "")), sketch, files["model"], listed.get("reference"), metadata
    )
