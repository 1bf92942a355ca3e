"""``fedcohort distance``, ``explain``, ``inspect`` and ``merge``: sketch files -> answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console

from fedcohort.cli.common import (
    ForceOption,
    Format,
    FormatOption,
    argument,
    console,
    option,
    plain,
    show,
    warn,
)
from fedcohort.exceptions import ConfigError, DataError, IncompatibleSketches
from fedcohort.progress import watched
from fedcohort.report.tables import UNLIMITED, Cell, Column, cells, fit_table

if TYPE_CHECKING:
    from fedcohort.files.marginals import ColumnGap
    from fedcohort.sketch.race import RaceSketch

Sketches = Annotated[list[Path], argument("Sketch files, or folders of them.")]


def distance(
    sketches: Sketches,
    kind: Annotated[
        Literal["frobenius", "mmd", "total-variation"],
        option(
            "frobenius (the paper's), mmd (squared, may be negative) or total-variation "
            "(0 to 1, an estimate with its 95% interval)."
        ),
    ] = "frobenius",
    errors: Annotated[bool, option("With standard errors (frobenius, mmd).", "--errors")] = False,
    format: FormatOption = "table",
) -> None:
    """Print the distance between every two sketches, less what is only sample size and noise.

    Example: `fedcohort distance site-a.sketch site-b.sketch --errors`
    """
    import numpy as np

    from fedcohort.sketch.distances import distance_matrix
    from fedcohort.sketch.uncertainty import total_variations

    paths, loaded = load_several(sketches, "a distance")
    names, few = _named(paths, loaded, "have no distance")
    more: dict[str, Any] = {}
    if kind == "total-variation":
        if errors:
            raise ConfigError("--kind total-variation has intervals already; leave out --errors")
        estimates = total_variations(loaded)
        matrix = np.array([[e.value for e in row] for row in estimates])
        more = {"intervals": [[[e.low, e.high] for e in row] for row in estimates]}
        cells = [[f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})" for e in r] for r in estimates]
    else:
        matrix = distance_matrix(loaded, kind)
        cells = [[f"{v:.4f}" for v in row] for row in matrix]
    if errors:
        more = {"errors": _errors(loaded, kind)}
        pairs = zip(cells, more["errors"], strict=True)
        cells = [[f"{c} ± {e:.4f}" for c, e in zip(*rows, strict=True)] for rows in pairs]
    for i, j in np.argwhere((few[:, None] | few) & ~np.eye(len(few), dtype=bool)):
        matrix[i, j], cells[i][j] = math.nan, "-"
    if format == "table":
        _show_matrix(names, cells, kind)
        return
    head = {"kind": kind, "clients": names, "n": [s.n for s in loaded]}
    show(format, {**head, "distances": matrix.tolist(), **more}, ())


def inspect(
    sketch: Annotated[Path, argument("Sketch file.")], format: FormatOption = "table"
) -> None:
    """Print what a sketch file says about itself: hash, preparation, records, privacy.

    Example: `fedcohort inspect site-a.sketch`
    """
    from fedcohort.files.sketching import load_sketch

    _show_sketch(load_sketch(sketch), sketch, format)


def _show_sketch(sketch: RaceSketch, path: Path, format: Format) -> None:
    from fedcohort.analysis.verdict import describe
    from fedcohort.privacy.release import signal_to_noise

    size = path.stat().st_size
    more = {"signal_to_noise": signal_to_noise(sketch), "privacy": sketch.claim()}
    value = {"file": str(path), **sketch.header(), "bytes": size, **more}
    show(format, value, {**describe(sketch), "size": f"{size / 1e3:,.1f} kB"}, str(path))


def merge(
    sketches: Sketches,
    out: Annotated[Path, option("Sketch file of all data together.", "--out", "-o")],
    force: ForceOption = False,
    format: FormatOption = "table",
) -> None:
    """Add up sketches: the result is the sketch of all their data together.

    Example: `fedcohort merge site-*.sketch -o all.sketch`
    """
    from fedcohort.files.sketching import check_output, load_alike, load_sketch, sketch_files

    files = sketch_files(sketches)
    check_output(out, [f for f in files if not load_sketch(f).origin.get("merged")], force)
    total: RaceSketch | None = None
    parts = 0
    for path, sketch in load_alike(sketches):
        parts += sketch.origin.get("merged", 1)
        try:
            total = sketch if total is None else total + sketch
        except IncompatibleSketches as error:
            raise IncompatibleSketches(f"{path}: {error}") from None
    if total is None:
        raise DataError("no sketches to merge")
    if parts > 1:
        total.origin = {"merged": parts}
    total.save(out)
    _show_sketch(total, out, format)


def explain(
    sketches: Sketches,
    all_columns: Annotated[
        bool, option("Show all columns, not only those beyond chance.", "--all")
    ] = False,
    format: FormatOption = "table",
) -> None:
    """Say which columns differ: two sites from each other, or each of several from all others.

    The sketches must have been made with `explain`, in a spec or by `--set explain=0.5`.

    Example: `fedcohort explain site-a.sketch site-b.sketch`
    """
    from fedcohort.files.marginals import column_gaps, visible_shares

    paths, loaded = load_several(sketches, "an explanation")
    names, few = _named(paths, loaded, "are left out")
    enough = [i for i, small in enumerate(few) if not small]
    kept, usable = [names[i] for i in enough], [loaded[i] for i in enough]
    if len(kept) < 2:
        raise DataError("an explanation needs two sites with enough records for their noise")
    others = "the rest" if len(kept) > 2 else kept[1]
    compared = [f"{name} against {others}" for name in (kept if len(kept) > 2 else kept[:1])]
    gaps = dict(zip(compared, column_gaps(usable), strict=False))
    if format == "table":
        _show_gaps(gaps, all_columns, visible_shares(usable))
    else:
        show(format, gaps, ())


def _show_gaps(compared_gaps: dict[str, list[ColumnGap]], all_columns: bool, shares: Any) -> None:
    """Print what differs, what cannot be judged, and which share of the records shows."""
    from fedcohort.analysis.verdict import with_hint

    def what(row: tuple[str, ColumnGap]) -> Cell:
        return Cell(with_hint(row[1]) if row[1].marked else row[1].unknown)

    by_chance = {n: sorted(gaps, key=lambda g: g.chance) for n, gaps in compared_gaps.items()}
    rows = [(name, gap) for name, gaps in by_chance.items() for gap in gaps]
    unknown = {gap.column: gap.unknown for _, gap in rows if gap.unknown}
    shown = [(name, gap) for name, gap in rows if gap.marked or all_columns]
    columns = [
        Column("compared", lambda row: Cell(row[0]), number=False),
        Column("column", lambda row: Cell(row[1].column), number=False),
        Column("chance", lambda row: Cell(f"{row[1].chance:.1g}")),
        Column("differs", lambda row: Cell(row[1].answer), number=False),
        Column("what", what, number=False, wraps=True),
    ]
    if shown:
        show("table", None, cells(shown, columns), "Columns that differ")
    lines = [f"Cannot tell whether {column} differs: {why}." for column, why in unknown.items()]
    if shares.min() == 1:
        lines += ["Cannot tell: of so few records, or under so much noise, no difference shows."]
    else:
        least, most = f"{shares.min():.0%}", f"{shares.max():.0%}"
        share = least if least == most else f"{least} to {most} (by site)"
        lines += [] if shown or unknown else ["No column differs by more than chance explains."]
        lines.append(f"Differences in about {share} of the records or more are marked.")
    show("table", None, lines)


def _named(
    paths: Sequence[Path], sketches: Sequence[RaceSketch], hence: str
) -> tuple[list[str], Any]:
    """Return the clients and who of them has too few records; warn of these, and of copies."""
    from fedcohort.files.sketching import client_names, same_data
    from fedcohort.sketch.uncertainty import too_few

    names, few = client_names(paths), too_few(sketches)
    messages = same_data(sketches, names)
    if few.any():
        listed = ", ".join(name for name, small in zip(names, few, strict=True) if small)
        messages.append(f"too few records, or too few for the noise, so they {hence}: {listed}")
    warn(messages)
    return names, few


def load_several(paths: Sequence[Path], what: str) -> tuple[list[Path], list[RaceSketch]]:
    """Load alike sketches, two or more."""
    from fedcohort.files.sketching import load_alike, sketch_files

    loaded = list(watched(load_alike(paths), "reading sketches", len(sketch_files(paths))))
    if len(loaded) < 2:
        raise ConfigError(f"{what} needs at least two sketches, not {len(loaded)}")
    return [path for path, _ in loaded], [sketch for _, sketch in loaded]


def _errors(sketches: Sequence[RaceSketch], kind: str) -> list[list[float]]:
    """Return the standard error of every distance, 0 on the diagonal and NaN where it has none."""
    from fedcohort.sketch.uncertainty import distance_with_error

    errors = [[0.0] * len(sketches) for _ in sketches]
    for i, a in enumerate(watched(sketches, "distances", len(sketches))):
        for j, b in enumerate(sketches[:i]):
            few = min(a.n, b.n) < 2
            error = math.nan if few else distance_with_error(a, b, cast("Any", kind))[1]
            errors[i][j] = errors[j][i] = error
    return errors


def _show_matrix(names: Sequence[str], texts: Sequence[Sequence[str]], kind: str) -> None:
    numbers = range(1, len(names) + 1)
    rows = [
        [Cell(str(number)), Cell(plain(name)), *map(Cell, own)]
        for number, name, own in zip(numbers, names, texts, strict=True)
    ]
    heads = ["", "client", *map(str, numbers)]
    columns = [Column(head, itemgetter(i), number=i != 1) for i, head in enumerate(heads)]
    table = fit_table(cells(rows, columns), f"{kind} distance", UNLIMITED)
    out, needed = console(), Console(width=UNLIMITED).measure(table).maximum
    if needed > out.width:
        if out.is_terminal:
            typer.echo(f"{len(names)} clients are wide; see also --format json", err=True)
        out = console(needed)  # truncated cells would be useless
    out.print(table)
