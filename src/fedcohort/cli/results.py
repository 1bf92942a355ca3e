"""``fedcohort show``, ``rank``, ``report``, ``watch`` and ``export``: runs that have begun."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedcohort.cli.common import (
    Format,
    FormatOption,
    argument,
    option,
    plain_values,
    show,
    write_file,
)
from fedcohort.exceptions import ConfigError
from fedcohort.report.tables import comparison_cells, rank_cells, seed_cells

if TYPE_CHECKING:
    from fedcohort.experiments.results import Results

RunFolders = Annotated[
    list[Path], argument("Folders of runs, comparisons or sweeps.", metavar="RUN...")
]


def show_results(results: Results, folders: Sequence[Path], format: Format) -> None:
    """Print a table of runs, or of the seeds of one run."""
    from fedcohort.analysis.comparison import comparison

    names, rows = ", ".join(map(str, folders)), comparison(results)
    title = f"{results.state()}: {names}"
    if len(results) == 1:
        title, cells = f"{results[0].policy}, {title}", seed_cells(results[0].summaries)
    else:
        cells = comparison_cells(results, rows, sparklines=True)
    show(format, {"folder": names, "runs": [row.as_dict() for row in rows]}, cells, title)


def show_command(runs: RunFolders, format: FormatOption = "table") -> None:
    """Show the results in a folder, finished or not.

    Swept settings are columns. A table that is too wide becomes one block of lines per run, so
    no number is ever cut.

    Example: `fedcohort show runs/compare`
    """
    from fedcohort.experiments.results import read

    show_results(read(*runs), runs, format)


def rank(
    run: Annotated[Path, argument("Folder of a run with the policy fedacs.")],
    seed: Annotated[int, option("Which of the run's seeds, from 1.", min=1)] = 1,
    format: FormatOption = "table",
) -> None:
    """Rank clients by how far their data are from the average, with 95% intervals.

    FedACS learns this from duels between the clients of each round, without seeing any data.

    Example: `fedcohort rank runs/compare/fedacs`
    """
    from fedcohort.report.content import skew_ranks

    ranks = skew_ranks(run, seed - 1)
    show(format, {"clients": ranks}, rank_cells(ranks), f"{run}, the least skewed first")


def report(
    runs: RunFolders,
    out: Annotated[Path, option("File to write; FILE.md is Markdown.", "--out", "-o")] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None, option("Also write every figure to this folder, as SVG and PNG.")
    ] = None,
) -> None:
    """Report on runs: curves, costs, cohorts and clients on one interactive page.

    The page needs no network and opens from disk. A report in Markdown has its figures as SVG
    files beside it.

    Example: `fedcohort report runs/compare -o report.html`
    """
    from fedcohort.experiments.results import read
    from fedcohort.report.content import Content
    from fedcohort.report.figures import render, run_figures
    from fedcohort.report.page import run_markdown, run_page
    from fedcohort.storage import make_folder

    shown = Content(read(*runs))
    markdown, beside = out.suffix == ".md", out.with_name(f"{out.stem}-figures")
    targets = [] if figures is None else [(figures, ".svg"), (figures, ".png")]
    targets += [(beside, ".svg")] if markdown else []
    drawn = run_figures(shown) if targets else []
    for folder, ending in targets:
        make_folder(folder)
        for figure in drawn:
            write_file(folder / f"{figure.name}{ending}", render(figure, ending))
    page = run_markdown(shown, beside.name) if markdown else run_page(shown)
    write_file(out, page.encode())
    typer.echo(f"Wrote {out}")


def watch(
    runs: RunFolders,
    port: Annotated[int, option("Port on this machine; 0 picks a free one.", min=0, max=65535)] = 0,
) -> None:
    """Show the report of runs in a browser and update it while they go on.

    Only this machine can open it, and nothing can be changed through it. Ctrl-C stops it.

    Example: `fedcohort watch runs/compare`
    """
    from fedcohort.experiments.results import run_folders
    from fedcohort.report.watch import ADDRESS, server

    for folder in runs:
        run_folders(folder)  # a wrong folder is reported before anything starts
    try:
        serving = server(runs, port)
    except OSError as error:
        raise ConfigError(f"watch --port {port}: {error.strerror}; choose another port") from None
    typer.echo(f"Open http://{ADDRESS}:{serving.server_port}/ (Ctrl-C stops)")
    try:
        serving.serve_forever()
    except KeyboardInterrupt:
        typer.echo("Stopped.")
    finally:
        serving.server_close()


def export(
    runs: RunFolders,
    format: Annotated[
        Literal["csv", "parquet", "json"] | None,
        option("Format of the table [by the name of the file, else csv]."),
    ] = None,
    out: Annotated[
        Path | None, option("File to write [standard output; not for parquet].", "--out", "-o")
    ] = None,
) -> None:
    """Export one row per run, seed and round: accuracy, loss, cohorts, bytes, simulated time.

    Swept settings are columns. In CSV, cohorts are JSON lists.

    Example: `fedcohort export runs/compare --format parquet -o rounds.parquet`
    """
    from fedcohort.experiments.results import read

    results, ending = read(*runs), "" if out is None else out.suffix.removeprefix(".")
    kind = format or (ending if ending in ("parquet", "json") else "csv")
    if kind == "parquet" and out is None:
        raise ConfigError("export --format parquet: name the file to write with -o")
    if kind == "parquet":
        table, file = results.to_arrow(), io.BytesIO()
        import pyarrow.parquet as pq

        pq.write_table(table, file)
        content = file.getvalue()
    else:
        content = _text(results, kind).encode()
    if out is None:
        typer.echo(content.decode(), nl=False)
        return
    write_file(out, content)
    typer.echo(f"Wrote {out}")


def _text(results: Results, format: str) -> str:
    rows = [plain_values(row) for row in results.records()]
    if format == "json":
        return json.dumps(rows, indent=1) + "\n"
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: json.dumps(v) if isinstance(v, list | dict | bool) else v for k, v in row.items()}
        )
    return file.getvalue()
