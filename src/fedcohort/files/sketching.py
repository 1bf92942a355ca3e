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
from fedcohort.files.marginals import bins_of
from fedcohort.files.source import Block, Source
from fedcohort.rounds import check_id
from fedcohort.sketch.race import RaceSketch, distance_matrix, pooled
from fedcohort.sketch.transforms import Transform

OnRows = Callable[[int], None]
Classes = dict[int, RaceSketch]  # the sketch of each class of one client
INDEX = "clients.json"
ALL_ROWS = ""  # the client of data without client ids
NO_ROWS = "the data have no rows, so there is nothing to sketch"
MEMORY = 512 << 20  # for the sketches of one pass over the data


def sketch_source(
    source: Source, empty: RaceSketch, on_rows: OnRows | None = None, by_label: bool = False
) -> RaceSketch:
    """Return the sketch of all rows, begun with `empty`.

    With `by_label` it also states how far the classes are apart; see `join_classes`.
    """
    by_client = sketch_parts(source, empty, by_label, on_rows=on_rows)
    if not by_client:
        raise DataError(NO_ROWS)
    return join_classes(by_client[ALL_ROWS])


def sketch_clients(
    source: Source,
    empty: RaceSketch,
    on_rows: OnRows | None = None,
    memory: int = MEMORY,
    by_label: bool = False,
) -> Iterator[tuple[str, RaceSketch]]:
    """Yield every client's name and sketch, in the order of their first rows.

    Where the sketches of all clients would take more than `memory` bytes, the data are read
    several times, and each pass makes those of the next clients.
    """
    step = empty.transform
    classes = step.classes if by_label and isinstance(step, Transform) else 1
    most = max(1, memory // (empty.counts.nbytes * max(1, classes)))
    done: set[str] = set()
    while by_client := sketch_parts(source, empty, by_label, done, most, on_rows):
        for client in by_client:  # all of them before the first is used
            check_id(client)
        yield from ((client, join_classes(parts)) for client, parts in by_client.items())
        done |= by_client.keys()
        if len(by_client) < most:
            break
    if not done:
        raise DataError(NO_ROWS)


def sketch_parts(
    source: Source,
    empty: RaceSketch,
    by_label: bool,
    done: Collection[str] = (),
    most: int | None = None,
    on_rows: OnRows | None = None,
) -> dict[str, Classes]:
    """Make one pass over the data; return a sketch per client, and with `by_label` per class.

    Clients in `done` are left out, and at most `most` clients are sketched. Data without client
    ids are one client, `ALL_ROWS`.
    """
    by_client: dict[str, Classes] = {}
    for block in source.blocks():
        bins = None if empty.marginals is None else bins_of(source.columns, block.parts)
        for client, rows in _groups(block):
            begun = client in by_client
            if not begun and (client in done or (most is not None and len(by_client) >= most)):
                continue
            classes = by_client.setdefault(client, {})
            for label, positions in _by_label(block, rows) if by_label else ((0, rows),):
                sketch = classes.setdefault(label, empty.empty_like())
                y = None if block.y is None else block.y[positions]
                _add(
                    sketch, _take(block.x, positions), y, None if bins is None else bins[positions]
                )
        if on_rows is not None:
            on_rows(len(block.x))
    return by_client


def join_classes(classes: Classes) -> RaceSketch:
    """Return the sketch of a client's classes together.

    It states how far they are apart: the median distance over pairs of classes with ten records
    or more, as `origin["label_split"]`. This is a reference for the distances between clients. It
    is exact, so it belongs to exact sketches only.
    """
    total = pooled(list(classes.values())) if len(classes) > 1 else next(iter(classes.values()))
    large = [sketch for sketch in classes.values() if sketch.n >= 10]
    if len(large) > 1:
        squares = distance_matrix(large, "mmd")[np.triu_indices(len(large), 1)]
        total.origin["label_split"] = float(np.sqrt(max(np.median(squares), 0.0)))
    return total


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


def _by_label(block: Block, rows: Any) -> Iterator[tuple[int, Any]]:
    if block.y is None:
        raise ValueError("a source without labels cannot be divided by label")
    positions = np.arange(len(block.y))[rows]
    labels = block.y[positions]
    for label in np.unique(labels).tolist():
        yield label, positions[labels == label]


def _take(items: Any, rows: Any) -> Any:
    if isinstance(items, np.ndarray) or isinstance(rows, slice):
        return items[rows]
    return [items[i] for i in rows]


def _add(sketch: RaceSketch, x: Any, y: Any, bins: Any = None) -> None:
    try:
        sketch.add(x, y)
        if sketch.marginals is not None:
            sketch.marginals.add(bins)
    except ValueError as error:  # such as a label beyond the last class
        raise DataError(str(error)) from None


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
        if path.is_dir() and (lost := lost_files(path)):
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


def lost_files(folder: Path) -> list[str]:
    """Return the sketches that a folder's index names and that are not there."""
    return [name for name in _index(folder) if not (folder / name).is_file()]


def _index(folder: Path) -> dict[str, str]:
    try:
        names = json.loads((folder / INDEX).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # no index, or somebody else's file of that name
    if not isinstance(names, dict):
        return {}
    return {k: v for k, v in names.items() if isinstance(v, str) and v}


def sketch_warnings(sketch: RaceSketch, source: Source) -> list[str]:
    """Say why an exact sketch cannot tell anything apart, if it cannot."""
    messages = source.reading.warnings()
    if sketch.n >= 10 and concentration(sketch.counts, sketch.n) > ONE_BUCKET:
        messages.append(_why_one_bucket(sketch, source))
    return messages


ONE_BUCKET = 0.8  # share of the records in the fullest bucket of a row, on average


def concentration(counts: Any, n: float) -> float:
    """Return the share of the records in the fullest bucket, averaged over rows."""
    return float(counts.max(axis=1).mean() / n)


def _why_one_bucket(sketch: RaceSketch, source: Source) -> str:
    what = "most records fall into one bucket, so that every distance will be about 0"
    ranges = source.reading.ranges.values()
    if sketch.family.name != "srp":
        return f"{what}: choose a smaller width, or scale the columns"
    if source.dim == 1:
        return f"{what}: srp sees only the sign of a single number; set center=... or hash=pstable"
    if ranges and all(low >= 0 for low, _ in ranges):
        return f"{what}: all values are positive, so all vectors point the same way; set center=..."
    return f"{what}: all records point the same way; center and scale the columns"
