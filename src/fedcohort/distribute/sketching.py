"""The files of a partitioned data set, sketched by many workers.

Counts are whole numbers and add up in any grouping, so the merged sketch equals that of one
process exactly. Noise, if any, is added once, to the merged sketch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedcohort.distribute.cluster import cluster_error, need_ray
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files import Want
from fedcohort.files.sketching import (
    ALL_ROWS,
    NO_ROWS,
    Classes,
    OnRows,
    join_classes,
    sketch_parts,
)
from fedcohort.files.source import Reading, find_files, open_files
from fedcohort.sketch.race import RaceSketch

TASKS_PER_CPU = 4  # so that a slow worker does not keep the others waiting


class Part(NamedTuple):
    """What one worker made of some files: sketches by client and class, and what it left out."""

    rows: int
    sketches: dict[str, Classes]
    reading: Reading


def sketch_folder(
    path: str | os.PathLike[str],
    want: Want,
    empty: RaceSketch,
    on_rows: OnRows | None = None,
    by_label: bool = False,
    reading: Reading | None = None,
) -> RaceSketch:
    """Return the sketch of all rows of a folder's files.

    Parameters
    ----------
    path : path
        A folder that every node of the cluster sees under this name.
    want : Want
        What to read.
    empty : RaceSketch
        The sketch to begin with.
    on_rows : callable, optional
        Called with the number of rows read, whenever a worker has finished some files.
    by_label : bool
        As in `files.sketching.sketch_source`.
    reading : Reading, optional
        Told what the workers left out and what looks wrong.
    """
    made = _merged(path, want, empty, on_rows, by_label, reading)
    return join_classes(made[ALL_ROWS])


def sketch_folder_clients(
    path: str | os.PathLike[str],
    want: Want,
    empty: RaceSketch,
    on_rows: OnRows | None = None,
    by_label: bool = False,
    reading: Reading | None = None,
) -> Iterator[tuple[str, RaceSketch]]:
    """Yield every client's name and sketch, in the order of their first rows.

    Unlike `sketch_clients`, it holds the sketches of all clients in memory.
    """
    for client, classes in _merged(path, want, empty, on_rows, by_label, reading).items():
        yield client, join_classes(classes)


def _merged(
    path: str | os.PathLike[str],
    want: Want,
    empty: RaceSketch,
    on_rows: OnRows | None,
    by_label: bool,
    reading: Reading | None,
) -> dict[str, Classes]:
    """Add up the sketches of all workers, by client and class."""
    made: dict[str, Classes] = {}
    for part in _parts(path, want, empty, by_label):
        for client, classes in part.sketches.items():
            own = made.setdefault(client, {})
            for label, sketch in classes.items():
                if label in own:
                    own[label].merge(sketch)
                else:
                    own[label] = sketch
        if on_rows is not None:
            on_rows(part.rows)
        if reading is not None:
            reading.add(part.reading)
    if not made:
        raise DataError(NO_ROWS)
    return made


def _parts(
    path: str | os.PathLike[str], want: Want, empty: RaceSketch, by_label: bool
) -> Iterator[Part]:
    """Yield the results of the workers, in the order of the files."""
    root = Path(path).resolve()
    if not root.is_dir():
        raise ConfigError(f"{path}: --ray spreads the files of a folder, this is one file")
    ray, files = need_ray(), find_files(root)
    most = TASKS_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
    task = ray.remote(_sketch).options(num_cpus=1, max_retries=3, retry_exceptions=[OSError])
    shared = ray.put(empty)
    parts = split(files, most)
    tasks = [task.remote(files[0], part, root, want, shared, by_label) for part in parts]
    for number, one in enumerate(tasks):
        try:
            made: Part = ray.get(one)
        except ray.exceptions.RayError as error:
            for other in tasks[number:]:
                ray.cancel(other)
            raise cluster_error(error, f"sketching {path}") from None
        tasks[number] = None  # its result may leave the object store
        yield made


def split(files: Sequence[Path], most: int) -> list[list[Path]]:
    """Cut files into at most `most` consecutive parts of about the same size.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> files = [folder / name for name in "abcd"]
    >>> for file, size in zip(files, (10, 10, 30, 10)):
    ...     _ = file.write_bytes(bytes(size))
    >>> [[file.name for file in part] for part in split(files, 2)]
    [['a', 'b'], ['c', 'd']]
    """
    sizes = np.array([max(1, file.stat().st_size) for file in files], np.float64)
    middles = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    part = np.minimum((middles * most).astype(int), most - 1)
    return [[files[i] for i in np.flatnonzero(part == p).tolist()] for p in np.unique(part)]


def _sketch(
    first: Path, files: Sequence[Path], root: Path, want: Want, empty: RaceSketch, by_label: bool
) -> Part:
    """Sketch some files on a worker."""
    # the first file decides which columns are read and how wide they are
    source = open_files([first, *files], root, want, skip=1)
    seen: list[int] = []
    made = sketch_parts(source, empty, by_label, on_rows=seen.append)
    return Part(sum(seen), made, source.reading)
