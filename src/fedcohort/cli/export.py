"""``fedcohort export``: the rounds of runs as one table for other programs."""

from __future__ import annotations

import csv
import io
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.common import finite
from fedcohort.cli.results import RunFolders
from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from fedcohort.experiments.results import Results


class Kind(StrEnum):
    """A format to export to."""

    csv = "csv"
    parquet = "parquet"
    json = "json"


def command(
    runs: RunFolders,
    to: Annotated[Kind, typer.Option("--to", "--format", help="Format of the table.")] = Kind.csv,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write [standard output; not for parquet]."),
    ] = None,
) -> None:
    """Export one row per run, seed and round: accuracy, loss, cohorts, bytes, simulated time.

    Swept settings are columns. In CSV, cohorts are JSON lists.

    Example: `fedcohort export runs/compare --to parquet -o rounds.parquet`
    """
    from fedcohort.experiments.results import read
    from fedcohort.files.publish import writing
    from fedcohort.storage import write_atomically

    if out is None and to is Kind.parquet:
        raise ConfigError("export --to parquet: name the file to write with -o")
    results = read(*runs)
    content = _parquet(results) if to is Kind.parquet else _text(results, to).encode()
    if out is None:
        typer.echo(content.decode(), nl=False)
        return
    with writing(out):
        write_atomically(out, content)
    typer.echo(f"Wrote {out}")


def _text(results: Results, to: Kind) -> str:
    rows = [finite(row) for row in results.records()]
    if to is Kind.json:
        return json.dumps(rows, indent=1) + "\n"
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: json.dumps(v) if isinstance(v, list | dict | bool) else v for k, v in row.items()}
        )
    return file.getvalue()


def _parquet(results: Results) -> bytes:
    table = results.to_arrow()
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()
