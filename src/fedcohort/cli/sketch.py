"""``fedcohort sketch``: data on disk -> sketch files."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, RayOption, on_cluster


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


class Neighbors(StrEnum):
    """Data sets that a private sketch must not tell apart."""

    added = "add-remove"
    replaced = "replace"


class Size(StrEnum):
    """Whether the number of records is published."""

    public = "public"
    private = "private"


class Analyzer(StrEnum):
    """What a token is."""

    word = "word"
    char = "char"
    char_wb = "char_wb"


DATA, HASH, LABELS = "What to read", "How to hash", "Labels and preparation"
PRIVACY = "Privacy"


def command(
    data: Annotated[
        Path,
        typer.Argument(
            help="Parquet, CSV, Arrow, NPY, NPZ, IDX or text file, or a folder of one kind."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Sketch file; with --by, a folder.")],
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns or patterns (p*), by comma [all of numbers].", rich_help_panel=DATA
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Column of texts, or of lists of tokens.", rich_help_panel=DATA),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(help="Column with the client: one sketch each.", rich_help_panel=DATA),
    ] = None,
    nulls: Annotated[
        Nulls,
        typer.Option(
            help="A missing value: stop, drop its row, or count as zero.", rich_help_panel=DATA
        ),
    ] = Nulls.error,
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
        typer.Option(help="Of the hash functions; the same at all sites.", rich_help_panel=HASH),
    ] = 0,
    analyzer: Annotated[
        Analyzer, typer.Option(help="What a token of a text is.", rich_help_panel=HASH)
    ] = Analyzer.word,
    ngrams: Annotated[
        str, typer.Option(help="Words or characters a token, as 1 or 1-3.", rich_help_panel=HASH)
    ] = "1",
    center: Annotated[
        str | None,
        typer.Option(
            help="Public constants to subtract: a number, numbers by comma, or a JSON file.",
            rich_help_panel=LABELS,
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Public constants to divide by, likewise.", rich_help_panel=LABELS),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="Column of classes from 0, hashed too; for NPY and IDX a second file.",
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
            help="Above 0 allows Gaussian noise: less, for many rows.", rich_help_panel=PRIVACY
        ),
    ] = 0.0,
    neighbors: Annotated[
        Neighbors,
        typer.Option(help="A record added or removed, or replaced.", rich_help_panel=PRIVACY),
    ] = Neighbors.added,
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
    budget: Annotated[
        Path | None,
        typer.Option(
            help="Ledger that adds up releases and refuses more.", rich_help_panel=PRIVACY
        ),
    ] = None,
    budget_epsilon: Annotated[
        float | None,
        typer.Option(help="Budget of each client; names a new ledger's.", rich_help_panel=PRIVACY),
    ] = None,
    budget_delta: Annotated[float, typer.Option(help="Likewise.", rich_help_panel=PRIVACY)] = 0.0,
    client: Annotated[
        str | None,
        typer.Option(help="Whose budget it is [the name of the sketch].", rich_help_panel=PRIVACY),
    ] = None,
    ray: RayOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Sketch a data set of any size in one pass, or one sketch for each client of a table.

    Example: `fedcohort sketch visits.parquet -o site-a.sketch --columns age,height --epsilon 1`

    Example: `fedcohort sketch visits.parquet -o sites --by hospital`
    """
    from fedcohort.cli import release
    from fedcohort.cli import sketch_options as made
    from fedcohort.files import Want
    from fedcohort.files.sketching import sketch_clients, sketch_source
    from fedcohort.files.source import Form
    from fedcohort.files.source import Nulls as Missing

    kind = made.choose_hash(data, hash, text)
    shape = made.Shape(kind, rows, bits, buckets, width, seed)
    labels = made.Labels(label is not None, classes, label_weight)
    preparation = made.Preparation(center, scale, labels, analyzer, ngrams)
    privacy = made.Privacy(epsilon, delta, neighbors, n, expect)
    wanted = made.split(columns), text, label, by, nulls, batch_rows
    source = made.open_data(data, kind, *wanted)
    empty = made.empty_sketch(source, shape, preparation, privacy)
    publisher = release.Publisher(
        out, by is not None, privacy, release.Budget(budget, budget_epsilon, budget_delta, client)
    )
    whole, each = partial(sketch_source, source), partial(sketch_clients, source)
    if ray is not None:
        from fedcohort.distribute.sketching import sketch_folder, sketch_folder_clients

        form: Form = "sets" if kind == "minhash" else "vectors"
        chosen: Missing = nulls.value
        want = Want(form, made.split(columns), text, label, by, chosen, batch_rows)
        whole, each = partial(sketch_folder, data, want), partial(sketch_folder_clients, data, want)
    with on_cluster(ray), release.watching(data.name, source.rows) as on_rows:
        if by is None:
            publisher.write(whole(empty, on_rows))
        else:
            publisher.write_all(each(empty, on_rows))
    publisher.report(format)
