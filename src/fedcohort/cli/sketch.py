"""``fedcohort sketch``: data on disk -> sketch files; options that it shares with ``spec``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fedcohort.cli.common import (
    ForceOption,
    Format,
    FormatOption,
    RayOption,
    argument,
    on_cluster,
    option,
    parsed_pairs,
    show,
    warn,
)
from fedcohort.exceptions import ConfigError
from fedcohort.options import checked_options
from fedcohort.progress import PATIENCE, Progress

if TYPE_CHECKING:
    from fedcohort.files.sketching import OnRows, Publisher
    from fedcohort.files.source import CsvOptions, Reading
    from fedcohort.privacy.budget import BudgetLedger
    from fedcohort.sketch.race import RaceSketch

FILES = "CSV, Parquet, Arrow, JSON Lines, Excel or SQLite file, a folder of one kind, or a URL"
to_read, how, privacy = (
    partial(option, panel=panel) for panel in ("What to read", "How to sketch", "Privacy")
)
NullValuesOption = Annotated[
    str | None,
    to_read("Comma-separated markers of missing values, besides ?, NA and the empty text."),
]
CsvOption = Annotated[
    list[str] | None,
    to_read(
        "CSV: delimiter, decimal, encoding (such as cp1252) or header (true or false; without "
        "one, columns are c1, c2, ...), where they are not detected. May be repeated.",
        "--csv",
        metavar="KEY=VALUE",
    ),
]
TableOption = Annotated[
    str | None,
    to_read("The sheet of an Excel file; the table, or a SELECT, of a SQLite file [the only one]."),
]
SiteOption = Annotated[
    Path | None,
    to_read("How this site writes the columns of the spec: names, codes, dates, units."),
]
BudgetOption = Annotated[
    Path | None, privacy("Ledger that adds up private releases and refuses more than the budget.")
]
BudgetEpsilonOption = Annotated[
    float | None, privacy("Budget of a new ledger, over all its releases.")
]
BudgetDeltaOption = Annotated[float, privacy("Delta of that budget.")]


def command(
    data: Annotated[
        str, argument(f"{FILES}; NPY, NPZ, IDX or text; or - for CSV from standard input.")
    ],
    out: Annotated[Path, option("Sketch file; with --by, a folder.", "--out", "-o")],
    spec: Annotated[
        Path | None, how("How all sites make their sketches; see fedcohort spec init.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        how(
            "Without a spec, any key of its [sketch] and [privacy], such as rows=100, "
            "seed=1, hash=pstable, center=0.5, ngrams=[1,3], explain=0.5. May be repeated.",
            "--set",
            metavar="KEY=VALUE",
        ),
    ] = None,
    columns: Annotated[
        str | None, how("Comma-separated columns or patterns (p*) [all columns of numbers].")
    ] = None,
    text: Annotated[str | None, how("Column of texts.")] = None,
    label: Annotated[str | None, how("Column of classes from 0, hashed as well.")] = None,
    classes: Annotated[int | None, how("How many classes there are at all sites.")] = None,
    by: Annotated[str | None, to_read("Column with the client: one sketch per client.")] = None,
    site: SiteOption = None,
    nulls: Annotated[
        Literal["error", "drop"], to_read("A missing value: stop, or drop its row.")
    ] = "error",
    null_values: NullValuesOption = None,
    csv: CsvOption = None,
    table: TableOption = None,
    epsilon: Annotated[float | None, privacy("Add noise that protects single records.")] = None,
    budget: BudgetOption = None,
    budget_epsilon: BudgetEpsilonOption = None,
    budget_delta: BudgetDeltaOption = 0.0,
    force: ForceOption = False,
    ray: RayOption = None,
    format: FormatOption = "table",
) -> None:
    """Sketch a data set of any size in one pass, or each client of a table.

    Example: `fedcohort sketch visits.parquet -o site-a.sketch --columns age,height --epsilon 1`

    Example: `fedcohort sketch visits.parquet -o sites --by hospital --set rows=100`

    Example: `fedcohort sketch visits.csv --spec heart.toml -o va.sketch`
    """
    from fedcohort.analysis.verdict import few
    from fedcohort.files.sketching import Publisher, sketch_clients
    from fedcohort.files.source import kind_of, local_copy, open_source
    from fedcohort.files.spec import LabelOptions, load_spec, spec_from_settings

    if spec is not None:
        options: dict[str, Any] = {"--set": settings, "--columns": columns, "--text": text}
        options |= {"--label": label, "--classes": classes, "--null-values": null_values}
        options["--epsilon"] = epsilon
        for option in (name for name, value in options.items() if value is not None):
            raise ConfigError(f"{option} and --spec: {spec} says it for all sites")
        recipe = load_spec(spec)
    else:
        if site is not None:
            raise ConfigError(f"--site {site}: needs --spec, whose columns it maps")
        texts = text is not None or kind_of(Path(data)) == "text"
        given: dict[str, Any] = {"hash": "minhash"} if texts else {}
        given |= {"epsilon": epsilon, **parsed_pairs("--set", settings)}
        recipe = spec_from_settings(
            given,
            label=LabelOptions(label, classes),
            columns=split(columns),
            text=text,
            null_values=split(null_values),
        )
    ledger = open_ledger(budget, budget_epsilon, budget_delta)
    many = by is not None
    publisher = Publisher(out, Path(data), recipe.release, ledger, many=many, force=force)
    want = recipe.want(site, by=by, nulls=nulls, csv=csv_options(csv), table=table)
    path = local_copy(data)
    source = open_source(path, want)
    empty = recipe.empty_sketch(source)
    if spec is not None:
        empty.origin = {"spec": recipe.digest}
    if ray is not None:
        from fedcohort.distribute import sketch_folder

        if recipe.person is not None:
            raise ConfigError("--ray: people are counted in one pass over all rows, without --ray")
        want = replace(want, columns=source.columns or want.columns)
    problems: dict[str, list[str]] = {}
    with on_cluster(ray), Progress(patience=PATIENCE) as progress:
        on_rows = _row_counter(progress, path.name[:18], source.rows)
        if ray is None:
            each = sketch_clients(source, empty, on_rows)
        else:
            each = iter(sketch_folder(path, want, empty, on_rows, source.reading).items())
        each = _looked_at(each, empty.origin, problems)
        publisher.write(each)
    messages = source.reading.warnings()
    for message, clients in problems.items():
        messages.append(f"{few(clients)}: {message}" if many else message)
    _report(publisher, source.reading, messages, format)


def csv_options(texts: Sequence[str] | None) -> CsvOptions:
    """Read how CSV files are written from ``--csv key=value``."""
    from fedcohort.files.source import CsvOptions

    return CsvOptions(**checked_options("--csv", CsvOptions, parsed_pairs("--csv", texts)))


def split(names: str | None) -> tuple[str, ...]:
    """Read comma-separated names."""
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


def open_ledger(path: Path | None, epsilon: float | None, delta: float) -> BudgetLedger | None:
    """Open the ledger with the budget that it holds, or begin one with the budget given."""
    from fedcohort.privacy.budget import BudgetLedger

    if path is None:
        if epsilon is not None:
            raise ConfigError("--budget-epsilon needs --budget")
        return None
    if epsilon is None and not path.exists():
        raise ConfigError(f"--budget {path}: a new ledger needs --budget-epsilon")
    return BudgetLedger.open(path) if epsilon is None else BudgetLedger(path, epsilon, delta)


def _looked_at(
    sketches: Iterable[tuple[str, RaceSketch]],
    origin: dict[str, Any],
    problems: dict[str, list[str]],
) -> Iterator[tuple[str, RaceSketch]]:
    """State the origin of each sketch, and collect whose sketches have which problem."""
    from fedcohort.files.sketching import sketch_warnings

    for client, sketch in sketches:
        sketch.origin |= origin
        for message in sketch_warnings(sketch):
            problems.setdefault(message, []).append(client)
        yield client, sketch


def _report(
    publisher: Publisher, reading: Reading, warnings: Sequence[str], format: Format
) -> None:
    """Say what was written and what was left out; warnings go to standard error."""
    from fedcohort.analysis.verdict import describe

    last, written = publisher.last, publisher.written
    noisy = [w.signal_to_noise for w in written if w.signal_to_noise < 1]
    if noisy:
        remedy = "use fewer rows, a larger epsilon, a delta above 0, or more records"
        which = f"{len(noisy)} of {len(written)} sketches (worst signal to noise {min(noisy):.2g})"
        warn([f"the noise exceeds the signal in {which}: {remedy}"])
    warn(warnings)
    if last is None:
        return
    value = {"sketches": written, **last.spec, "release": last.header()["release"]}
    value |= {"privacy": last.claim(), "read": reading.facts(), "warnings": list(warnings)}
    facts = {**describe(last), **reading.facts()}
    if len(written) > 1:
        sizes = sorted(w.n for w in written)
        each = f"to {sizes[-1]:,.0f}" if sizes[0] < sizes[-1] else "each"
        facts["records"] = f"{sizes[0]:,.0f} {each}, {sum(sizes):,.0f} in all"
        if "signal to noise" in facts:
            ratios = [w.signal_to_noise for w in written]
            facts["signal to noise"] = f"{min(ratios):.2g} to {max(ratios):.2g}"
    facts["size"] = f"{sum(w.bytes for w in written) / 1e3:,.1f} kB"
    out = publisher.out
    show(format, value, facts, f"{len(written)} sketches in {out}" if out.is_dir() else str(out))


def _row_counter(progress: Progress, name: str, rows: int | None) -> OnRows:
    """Return what shows how many rows were read; a further pass starts again."""
    done = 0

    def on_rows(count: int) -> None:
        nonlocal done
        done = count if rows is not None and done + count > rows else done + count
        progress(name, done, rows, "rows")

    return on_rows
