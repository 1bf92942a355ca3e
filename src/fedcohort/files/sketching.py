"""Sketch a source, all of it or each of its clients; load sketch files to compare or merge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.exceptions import DataError, IncompatibleSketches, InvalidSketch
from fedcohort.files.columns import columns_of
from fedcohort.files.marginals import bins_of, copies
from fedcohort.files.source import Block, Source
from fedcohort.rounds import check_id
from fedcohort.sketch.race import RaceSketch

OnRows = Callable[[int], None]
INDEX = "clients.json"
ALL_ROWS = ""  # the client of data without client ids
NO_ROWS = "the data have no rows, so there is nothing to sketch"
MEMORY = 512 << 20  # for the sketches of one pass over the data
ONE_BUCKET = 0.8  # share of the records in the fullest bucket of a row, on average


def sketch_source(source: Source, empty: RaceSketch, on_rows: OnRows | None = None) -> RaceSketch:
    """Return the sketch of all rows of data without client ids, begun with `empty`."""
    ((_, sketch),) = sketch_clients(source, empty, on_rows)
    return sketch


def sketch_clients(
    source: Source, empty: RaceSketch, on_rows: OnRows | None = None, memory: int = MEMORY
) -> Iterator[tuple[str, RaceSketch]]:
    """Yield every client's name and sketch, in the order of their first rows.

    Data without client ids are one client, `ALL_ROWS`. Where the sketches of all clients would
    take more than `memory` bytes, each pass over the data makes those of the next clients.
    """
    max_clients = max(1, memory // empty.counts.nbytes)
    done: set[str] = set()
    while by_client := sketch_parts(source, empty, done, max_clients, on_rows):
        yield from by_client.items()
        done |= by_client.keys()
        if len(by_client) < max_clients:
            break
    if not done:
        raise DataError(NO_ROWS)


def sketch_parts(
    source: Source,
    empty: RaceSketch,
    done: Collection[str] = (),
    max_clients: int | None = None,
    on_rows: OnRows | None = None,
) -> dict[str, RaceSketch]:
    """Make one pass over the data; return a sketch per client.

    Clients in `done` are left out, and at most `max_clients` are sketched.
    """
    by_client: dict[str, RaceSketch] = {}
    for block in source.blocks():
        bins = None if empty.marginals is None else bins_of(source.columns, block.parts)
        for client, rows in _groups(block):
            if client not in by_client:
                if client in done or (max_clients is not None and len(by_client) >= max_clients):
                    continue
                if block.clients is not None:
                    check_id(client)
                by_client[client] = empty.empty_like()
            sketch, y = by_client[client], None if block.y is None else block.y[rows]
            try:
                sketch.add(_take(block.x, rows), y)
            except ValueError as error:  # such as a label beyond the last class
                raise DataError(str(error)) from None
            if sketch.marginals is not None and bins is not None:
                sketch.marginals.add(bins[rows])
        if on_rows is not None:
            on_rows(len(block.x))
    return by_client


def _groups(block: Block) -> Iterator[tuple[str, Any]]:
    """Yield each client of a block with the positions of its rows, first come first."""
    if block.clients is None:
        if len(block.x):
            yield ALL_ROWS, slice(None)
        return
    where: dict[str, list[int]] = {}
    for row, client in enumerate(block.clients.tolist()):
        where.setdefault(client, []).append(row)
    for client, rows in where.items():
        yield client, np.array(rows)


def _take(items: Any, rows: Any) -> Any:
    if isinstance(items, np.ndarray) or isinstance(rows, slice):
        return items[rows]
    return [items[i] for i in rows]


def load_sketch(path: Path) -> RaceSketch:
    """Load one sketch; errors name the file."""
    try:
        sketch = RaceSketch.load(path)
        columns_of(sketch)
        return sketch
    except InvalidSketch as error:
        message = str(error)
        raise InvalidSketch(message if str(path) in message else f"{path}: {message}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def load_alike(paths: Sequence[Path]) -> Iterator[tuple[Path, RaceSketch]]:
    """Yield sketches one by one, each checked against the first.

    Merged sketches that lie in a folder are left out: their data are those of the others.
    """
    given = set(paths)
    first: tuple[Path, RaceSketch] | None = None
    for path in sketch_files(paths):
        sketch = load_sketch(path)
        if path not in given and sketch.origin.get("merged"):
            continue
        first = first or (path, sketch)
        try:
            first[1].check_alike(sketch)
        except IncompatibleSketches as error:
            raise IncompatibleSketches(f"{first[0]} and {path} are unlike: {error}") from None
        yield path, sketch


def sketch_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and the sketches inside the folders; none may come twice."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.sketch")) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: no .sketch files in this folder")
        lost = [name for name in _index(path) if not (path / name).is_file()]
        if lost:
            raise DataError(
                f"{path}: the set of sketches is not complete, {len(lost)} are missing "
                f"({lost[0]}, ...); make it again"
            )
        files += inside
    seen: set[Path] = set()
    for path in files:
        if (real := path.resolve()) in seen:
            raise DataError(f"{path}: given twice")
        seen.add(real)
    return files


def client_names(paths: Sequence[Path]) -> list[str]:
    """Return the clients of sketch files, from the folder's index or else from the file names.

    Two clients of one name are called by their paths.
    """
    indexes = {folder: _index(folder) for folder in {path.parent for path in paths}}
    names = [indexes[path.parent].get(path.name, path.stem) for path in paths]
    uses = Counter(names)
    return [name if uses[name] == 1 else str(path) for path, name in zip(paths, names, strict=True)]


def _index(folder: Path) -> dict[str, str]:
    try:
        names = json.loads((folder / INDEX).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # no index, or somebody else's file of that name
    if not isinstance(names, dict):
        return {}
    return {k: v for k, v in names.items() if isinstance(v, str) and v}


def concentration(counts: Any, n: float) -> float:
    """Return the share of the records in the fullest bucket, averaged over rows."""
    return float(counts.max(axis=1).mean() / n)


def sketch_warnings(sketch: RaceSketch) -> list[str]:
    """Say why an exact sketch cannot tell anything apart, and whether its records are copies."""
    messages = []
    if sketch.n >= 10 and concentration(sketch.counts, sketch.n) > ONE_BUCKET:
        remedy = "set center=... or hash=pstable: srp compares directions from 0"
        if sketch.family.name != "srp":
            remedy = "choose a smaller width, or scale the columns"
        messages.append(
            f"most records fall into one bucket, so that every distance will be about 0: {remedy}"
        )
    if (times := copies(sketch)) > 1:
        messages.append(f"every record seems to be there {times} times: remove the copies")
    return messages


def same_data(sketches: Sequence[RaceSketch], names: Sequence[str]) -> list[str]:
    """Say which clients seem to hold records several times, or the data of another one."""
    messages, equal = [], dict[bytes, list[str]]()
    for sketch, name in zip(sketches, names, strict=True):
        if sketch.n:
            equal.setdefault(sketch.counts.tobytes(), []).append(name)
        if (times := copies(sketch)) > 1:
            messages.append(
                f"Every record of {name} seems to be there {times} times: all counts are "
                f"multiples of {times}. Remove the copies."
            )
    for twins in equal.values():
        if len(twins) > 1:
            listed = ", ".join(twins[:8]) + (", ..." if len(twins) > 8 else "")
            messages.append(f"The sketches of {listed} are equal: the same data twice?")
    return messages
