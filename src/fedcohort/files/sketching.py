"""Sketch a source: all of it, or each of its clients.

Load sketch files that are to be compared or merged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcohort.exceptions import DataError, InvalidSketch, UnlikeSketches
from fedcohort.files.source import Source
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

OnRows = Callable[[int], None]
MEMORY = 512 << 20  # for the sketches of one pass over the data
COLUMNS = "columns "
LONGEST_NAME = 1 << 16


def sketch_source(source: Source, empty: RaceSketch, on_rows: OnRows | None = None) -> RaceSketch:
    """Return the sketch of all rows; `on_rows` hears how many were read at a time."""
    sketch = empty.empty_like()
    for block in source.blocks():
        _add(sketch, block.x, block.y)
        if on_rows is not None:
            on_rows(len(block.x))
    if not sketch.n:
        raise DataError("the data have no rows, so there is nothing to sketch")
    return sketch


def sketch_clients(
    source: Source, empty: RaceSketch, on_rows: OnRows | None = None, memory: int = MEMORY
) -> Iterator[tuple[str, RaceSketch]]:
    """Yield every client's name and sketch, in the order of their first rows.

    Where the sketches of all clients would take more than `memory` bytes, the data are read
    several times, and each pass makes those of the next clients.
    """
    most = max(1, memory // empty.counts.nbytes)
    done: set[str] = set()
    while made := _one_pass(source, empty, done, most, on_rows):
        yield from made.items()
        done |= made.keys()
        if len(made) < most:
            break
    if not done:
        raise DataError("the data have no rows, so there is nothing to sketch")


def _one_pass(
    source: Source, empty: RaceSketch, done: set[str], most: int, on_rows: OnRows | None
) -> dict[str, RaceSketch]:
    made: dict[str, RaceSketch] = {}
    for block in source.blocks():
        if block.clients is None:
            raise ValueError("a source without client ids cannot be divided by client")
        for client, rows in _groups(block.clients):
            if client in made or (client not in done and len(made) < most):
                x = block.x[rows] if isinstance(block.x, np.ndarray) else _take(block.x, rows)
                sketch = made.setdefault(client, empty.empty_like())
                _add(sketch, x, None if block.y is None else block.y[rows])
        if on_rows is not None:
            on_rows(len(block.x))
    return made


def _groups(clients: np.ndarray[Any, np.dtype[np.object_]]) -> Iterator[tuple[str, Any]]:
    """Yield each client of a block with the positions of its rows, first come first."""
    where: dict[str, list[int]] = {}
    for row, client in enumerate(clients.tolist()):
        where.setdefault(client, []).append(row)
    for client, rows in where.items():
        yield client, np.array(rows)


def _take(items: list[Any], rows: Any) -> list[Any]:
    return [items[i] for i in rows]


def _add(sketch: RaceSketch, x: Any, y: Any) -> None:
    try:
        sketch.add(x, y)
    except ValueError as error:  # such as a label beyond the last class
        raise DataError(str(error)) from None


def columns_name(columns: tuple[str, ...]) -> str:
    """Name the columns in the way a sketch's header states them.

    Sketches of other columns, or of the same in another order, are thereby refused as unlike.

    Examples
    --------
    >>> columns_name(("age", "height"))
    'columns ["age", "height"]'
    """
    text = COLUMNS + json.dumps(list(columns), ensure_ascii=False)
    if len(text) <= LONGEST_NAME:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{COLUMNS}{json.dumps([f'{len(columns)} columns', digest])}"


def named_columns(name: str | None) -> list[str] | None:
    """Read `columns_name` back; None for a name that is none of its making."""
    if name is None or not name.startswith(COLUMNS):
        return None
    try:
        columns = json.loads(name.removeprefix(COLUMNS))
    except ValueError:
        return None
    return columns if isinstance(columns, list) else None


def load_sketch(path: Path) -> RaceSketch:
    """Load one sketch; errors name the file."""
    try:
        return RaceSketch.load(path)
    except InvalidSketch as error:
        message = str(error)
        raise InvalidSketch(message if str(path) in message else f"{path}: {message}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def load_alike(paths: Sequence[Path]) -> Iterator[tuple[Path, RaceSketch]]:
    """Yield sketches one by one, each checked against the first."""
    first: tuple[Path, RaceSketch] | None = None
    for path in sketch_files(paths):
        sketch = load_sketch(path)
        first = first or (path, sketch)
        try:
            first[1].check_alike(sketch)
        except UnlikeSketches as error:
            why = other_columns(first[1], sketch) or str(error)
            raise UnlikeSketches(f"{first[0]} and {path} are unlike: {why}") from None
        yield path, sketch


def sketch_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and the sketches inside the folders; none may come twice."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.sketch")) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: no .sketch files in this folder")
        files += inside
    seen: set[Path] = set()
    for path in files:
        if (real := path.resolve()) in seen:
            raise DataError(f"{path}: given twice")
        seen.add(real)
    return files


def other_columns(a: RaceSketch, b: RaceSketch) -> str | None:
    """Say in which columns two sketches differ; None if not in columns."""
    if not (isinstance(a.transform, Transform) and isinstance(b.transform, Transform)):
        return None
    mine, theirs = named_columns(a.transform.embedding), named_columns(b.transform.embedding)
    if mine is None or theirs is None or mine == theirs:
        return None
    if sorted(mine) == sorted(theirs):
        return "the same columns in another order; give all sites the same --columns"
    only = [c for c in mine if c not in theirs][:3], [c for c in theirs if c not in mine][:3]
    return f"other columns, {only[0]} and {only[1]}; give all sites the same --columns"
