"""Load sketch files that are to be compared or merged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedcohort.exceptions import DataError, InvalidSketch, UnlikeSketches
from fedcohort.files.sketching import named_columns
from fedcohort.signals.race import RaceSketch
from fedcohort.signals.transforms import Transform


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
