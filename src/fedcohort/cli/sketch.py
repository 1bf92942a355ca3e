"""``fedcohort sketch``: data on disk -> sketch files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from click.core import ParameterSource

from fedcohort.cli.common import (
    Format,
    FormatOption,
    RayOption,
    on_cluster,
    plain,
    show_facts,
    show_json,
)
from fedcohort.cli.tables import (
    DATA,
    PRIVACY,
    BudgetDeltaOption,
    BudgetEpsilonOption,
    BudgetOption,
    DecimalOption,
    DelimiterOption,
    EncodingOption,
    ForceOption,
    HeaderOption,
    Neighbors,
    NeighborsOption,
    NullValuesOption,
    open_ledger,
    split,
)
from fedcohort.exceptions import ConfigError
from fedcohort.progress import rich_bars

if TYPE_CHECKING:
    from fedcohort.files.publish import Publisher
    from fedcohort.files.sketching import OnRows
    from fedcohort.files.source import Reading
    from fedcohort.files.spec import SketchSpec
    from fedcohort.sketch.race import RaceSketch
    from fedcohort.sketch.transforms import Tokenizer


class Hash(StrEnum):
    """Hash families."""

    srp = "srp"
    minhash = "minhash"
    pstable = "pstable"


class Nulls(StrEnum):
    """What a missing value does."""

    error = "error"
    drop = "drop"
    zero = "zero"


class Size(StrEnum):
    """Whether the number of records is published."""

    public = "public"
    private = "private"


class Analyzer(StrEnum):
    """What a token is."""

    word = "word"
    char = "char"
    char_wb = "char_wb"


HASH, LABELS = "How to hash", "Labels and preparation"


def command(
    data: Annotated[
        Path,
        typer.Argument(
            help="Parquet, CSV, Arrow, NPY, NPZ, IDX or text file, or a folder of one kind."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Sketch file; with --by, a folder.")],
    spec: Annotated[
        Path | None,
        typer.Option(help="How all sites make their sketches; see fedcohort spec init."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated columns or patterns (p*) [all columns of numbers].",
            rich_help_panel=DATA,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Column of texts, or of lists of tokens.", rich_help_panel=DATA),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="Column with the client: one sketch per client.", rich_help_panel=DATA),
    ] = None,
    nulls: Annotated[
        Nulls,
        typer.Option(
            help="A missing value: stop, drop its row, or count as zero.", rich_help_panel=DATA
        ),
    ] = Nulls.error,
    null_values: NullValuesOption = None,
    delimiter: DelimiterOption = None,
    decimal: DecimalOption = None,
    encoding: EncodingOption = None,
    header: HeaderOption = None,
    batch_rows: Annotated[
        int | None,
        typer.Option(help="Rows read at a time [about 16 MB].", min=1, rich_help_panel=DATA),
    ] = None,
    hash: Annotated[
        Hash | None,
        typer.Option(
            help="srp: angles; pstable: Euclidean distances; minhash: sets "
            "[srp for numbers, minhash for texts].",
            rich_help_panel=HASH,
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(help="Hash functions [200; planned with --epsilon].", rich_help_panel=HASH),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            help="srp: 2**bits buckets [6; planned with --epsilon].", rich_help_panel=HASH
        ),
    ] = None,
    buckets: Annotated[
        int | None,
        typer.Option(
            help="minhash, pstable: buckets [64; planned with --epsilon].", rich_help_panel=HASH
        ),
    ] = None,
    width: Annotated[
        float | None,
        typer.Option(
            help="pstable: width of a bucket in units of the data [2].", rich_help_panel=HASH
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the hash functions; the same at all sites.", rich_help_panel=HASH
        ),
    ] = 0,
    analyzer: Annotated[
        Analyzer, typer.Option(help="What a token of a text is.", rich_help_panel=HASH)
    ] = Analyzer.word,
    ngrams: Annotated[
        str, typer.Option(help="Words or characters per token, as 1 or 1-3.", rich_help_panel=HASH)
    ] = "1",
    center: Annotated[
        str | None,
        typer.Option(
            help="Public constants to subtract: a number, comma-separated numbers, or a JSON file.",
            rich_help_panel=LABELS,
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Public constants to divide by, in the same form.", rich_help_panel=LABELS
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="Column of classes from 0, hashed as well; for NPY and IDX a second file.",
            rich_help_panel=LABELS,
        ),
    ] = None,
    classes: Annotated[
        int | None,
        typer.Option(help="How many classes there are at all sites.", rich_help_panel=LABELS),
    ] = None,
    label_weight: Annotated[
        float,
        typer.Option(
            help="Weight of the label beside a vector of length 1.", rich_help_panel=LABELS
        ),
    ] = 1.0,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Add noise that protects single records.", rich_help_panel=PRIVACY),
    ] = None,
    delta: Annotated[
        float,
        typer.Option(
            help="Above 0 allows Gaussian noise, which is less for many rows.",
            rich_help_panel=PRIVACY,
        ),
    ] = 0.0,
    neighbors: NeighborsOption = Neighbors.added,
    n: Annotated[
        Size, typer.Option("--n", help="Publish the number of records?", rich_help_panel=PRIVACY)
    ] = Size.public,
    expect: Annotated[
        int,
        typer.Option(
            help="Records of a typical client, to plan rows and bits; the same at all sites.",
            min=2,
            rich_help_panel=PRIVACY,
        ),
    ] = 1000,
    explain: Annotated[
        float,
        typer.Option(
            help="Sketch single columns, too, with this share of epsilon, such as 0.5.",
            rich_help_panel=PRIVACY,
        ),
    ] = 0.0,
    budget: BudgetOption = None,
    budget_epsilon: BudgetEpsilonOption = None,
    budget_delta: BudgetDeltaOption = 0.0,
    force: ForceOption = False,
    ray: RayOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Sketch a data set of any size in one pass, or each client of a table.

    Example: `fedcohort sketch visits.parquet -o site-a.sketch --columns age,height --epsilon 1`

    Example: `fedcohort sketch visits.parquet -o sites --by hospital`

    Example: `fedcohort sketch visits.csv --spec heart.toml -o va.sketch`
    """
    from fedcohort.files import CsvOptions, open_source
    from fedcohort.files.publish import Publisher, Target
    from fedcohort.files.sketching import (
        sketch_clients,
        sketch_source,
        sketch_warnings,
    )

    made = _spec_of(click.get_current_context(), spec)
    target = Target(out, (data,), by is not None, force)
    publisher = Publisher(target, made.release, open_ledger(budget, budget_epsilon, budget_delta))
    want = made.want(by, nulls.value, batch_rows, CsvOptions(delimiter, decimal, encoding, header))
    source = open_source(data, want)
    made.settle(source)
    empty = made.empty_sketch(source)
    if spec is not None:
        empty.origin = {"spec": made.digest}
    by_label = made.label.column is not None and made.release.epsilon is None
    whole = partial(sketch_source, source, by_label=by_label)
    each = partial(sketch_clients, source, by_label=by_label)
    if ray is not None:
        from fedcohort.distribute.sketching import sketch_folder, sketch_folder_clients

        want = replace(want, columns=source.columns or want.columns)
        more: dict[str, Any] = {"by_label": by_label, "reading": source.reading}
        whole = partial(sketch_folder, data, want, **more)
        each = partial(sketch_folder_clients, data, want, **more)
    messages: list[str] = []
    with on_cluster(ray), _watching(data.name, source.rows) as on_rows:
        if by is None:
            sketch = whole(empty, on_rows)
            sketch.origin |= empty.origin
            messages += sketch_warnings(sketch, source)
            publisher.write(sketch)
        else:
            publisher.write_all(_with_origin(each(empty, on_rows), empty.origin))
            messages += source.reading.warnings()
    _report(publisher, source.reading, messages, format)


def _with_origin(
    sketches: Iterable[tuple[str, RaceSketch]], origin: dict[str, Any]
) -> Iterator[tuple[str, RaceSketch]]:
    for client, sketch in sketches:
        sketch.origin |= origin
        yield client, sketch


FREE = (
    "data",
    "out",
    "spec",
    "by",
    "nulls",
    "batch_rows",
    "delimiter",
    "decimal",
    "encoding",
    "header",
)
OWN = ("budget", "budget_epsilon", "budget_delta", "force", "ray", "format")


def _spec_of(context: click.Context, path: Path | None) -> SketchSpec:
    """Read the spec, or gather the options that say how all sites make their sketches."""
    if path is None:
        return _spec_of_options(context)
    from fedcohort.files.spec import load_spec

    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in (*FREE, *OWN) and source is ParameterSource.COMMANDLINE:
            raise ConfigError(
                f"--{name.replace('_', '-')} and --spec: {path} says it for all sites"
            )
    return load_spec(path)


def _spec_of_options(context: click.Context) -> SketchSpec:
    from fedcohort.files.finding import kind_of
    from fedcohort.files.spec import (
        HashOptions,
        LabelOptions,
        ReleaseOptions,
        SketchSpec,
        read_constants,
    )

    given: dict[str, Any] = {k: getattr(v, "value", v) for k, v in context.params.items()}
    texts = given["text"] is not None or kind_of(Path(given["data"])) == "text"
    family: Any = given["hash"] or ("minhash" if texts else "srp")
    size = (given[key] for key in ("rows", "bits", "buckets", "width", "seed"))
    release = (given[key] for key in ("epsilon", "delta", "neighbors", "n", "expect", "explain"))
    return SketchSpec(
        HashOptions(family, *size),
        LabelOptions(given["label"], given["classes"], given["label_weight"]),
        ReleaseOptions(*release),
        split(given["columns"]),
        given["text"],
        _tokenizer(given["analyzer"], given["ngrams"]),
        split(given["null_values"]),
        read_constants("--center", given["center"], 0.0),
        read_constants("--scale", given["scale"], 1.0),
    )


def _tokenizer(analyzer: Any, ngrams: str) -> Tokenizer:
    from fedcohort.files.spec import user_values
    from fedcohort.sketch.transforms import Tokenizer

    found = re.fullmatch(r"(\d+)(?:-(\d+))?", ngrams)
    if not found:
        raise ConfigError(f"--ngrams {ngrams}: write 2, or 1-3")
    with user_values():
        return Tokenizer(analyzer, (int(found[1]), int(found[2] or found[1])))


def _report(
    publisher: Publisher, reading: Reading, warnings: Sequence[str], format: Format
) -> None:
    """Say what was written and what was left out; warnings go to standard error."""
    from fedcohort.analysis.sketches import describe

    last, written = publisher.last, publisher.written
    for line in [*_noise_warning(publisher), *_columns_warning(last), *warnings]:
        typer.echo(f"warning: {plain(line)}", err=True)
    if last is None:
        return
    if format is Format.json:
        more = {"read": reading.facts(), "warnings": list(warnings)}
        release = last.header()["release"]
        show_json({"sketches": written, **last.spec, "release": release, **more})
        return
    facts = {**describe(last), **reading.facts()}
    if len(written) > 1:
        sizes = sorted(w.n for w in written)
        facts["records"] = f"{sizes[0]:,.0f} to {sizes[-1]:,.0f}, {sum(sizes):,.0f} in all"
        if "signal to noise" in facts:
            ratios = [w.signal_to_noise for w in written]
            facts["signal to noise"] = f"{min(ratios):.2g} to {max(ratios):.2g}"
    facts["size"] = f"{sum(w.bytes for w in written) / 1e3:,.1f} kB"
    out = publisher.target.out
    show_facts(facts, f"{len(written)} sketches in {out}" if out.is_dir() else str(out))


def _noise_warning(publisher: Publisher) -> list[str]:
    ratios = [w.signal_to_noise for w in publisher.written]
    noisy = [ratio for ratio in ratios if ratio < 1]
    if not noisy:
        return []
    return [
        f"the noise exceeds the signal in {len(noisy)} of {len(ratios)} sketches (worst signal to "
        f"noise {min(noisy):.2g}): use fewer --rows, a larger --epsilon, a --delta above 0, or "
        "more records"
    ]


def _columns_warning(sketch: RaceSketch | None) -> list[str]:
    """Say if Gaussian noise would tell much more about many single columns."""
    from fedcohort.privacy.release import noise_for

    made = None if sketch is None or sketch.marginals is None else sketch.marginals.release
    if sketch is None or made is None or made.delta:
        return []
    other = noise_for(len(sketch.columns), made.epsilon, 1e-6, made.neighbors)
    times = (made.variance / other.variance) ** 0.5
    if times < 1.5:
        return []
    return [
        f"the budget of --explain is divided by {len(sketch.columns)} columns: with a delta of "
        f"1e-6 their noise would be {times:.1f} times less"
    ]


@contextmanager
def _watching(name: str, rows: int | None) -> Iterator[OnRows]:
    """Show on standard error how many rows were read; a further pass starts again."""
    bar = rich_bars()
    task = bar.add_task(name[:18], total=rows, note="rows")

    def on_rows(count: int) -> None:
        bar.start()
        done = bar.tasks[task].completed + count
        bar.update(task, completed=count if rows is not None and done > rows else done)

    try:
        yield on_rows
    except BaseException:
        bar.live.transient = True  # the only thing to read is what went wrong
        bar.live.stop()
        raise
    bar.stop()
