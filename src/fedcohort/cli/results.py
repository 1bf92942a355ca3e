"""``fedcohort show``, ``rank``, ``report`` and ``watch``: runs, once they have begun."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, console, show_json
from fedcohort.cli.common import show as print_table
from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from fedcohort.experiments.results import Results

RunFolders = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Folders of runs, comparisons or sweeps."),
]


def show(
    runs: RunFolders,
    width: Annotated[
        int | None, typer.Option(help="Columns of the table [those of the terminal].", min=1)
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Show the results in a folder, finished or not.

    Swept settings are columns. A table that is too wide becomes one block of lines per run, so
    no number is ever cut.

    Example: `fedcohort show runs/compare`
    """
    from fedcohort.analysis.comparison import comparison
    from fedcohort.experiments.results import read

    results = read(*runs)
    if format is Format.json:
        show_json({"runs": comparison(results)})
        return
    wide = width or console().width
    title = f"{results.state()}: {', '.join(map(str, runs))}"
    print_table(_table(results, title, wide), wide)


def _table(results: Results, title: str, width: int) -> Table:
    from fedcohort.analysis.comparison import comparison, curves
    from fedcohort.report.columns import setting_columns
    from fedcohort.report.tables import comparison_table, summary_table

    if len(results) == 1:
        return summary_table(results[0].summaries, f"{results[0].policy}, {title}", width)
    rows, lines = comparison(results), curves(results)
    return comparison_table(rows, lines, results.target, title, width, setting_columns(results))


def rank(
    run: Annotated[Path, typer.Argument(help="Folder of a run with the policy fedacs.")],
    seed: Annotated[int, typer.Option(help="Which of the run's seeds, from 1.", min=1)] = 1,
    format: FormatOption = Format.table,
) -> None:
    """Rank clients by how far their data are from the average, with 95 % intervals.

    FedACS learns this from duels between the clients of each round, without seeing any data.

    Example: `fedcohort rank runs/compare/fedacs`
    """
    from fedcohort.analysis.ranking import skew_ranks
    from fedcohort.report.columns import rank_cells
    from fedcohort.report.tables import fitting

    ranks = skew_ranks(run, seed - 1)
    if format is Format.json:
        show_json({"clients": ranks})
        return
    cells, title = rank_cells(ranks), f"{run}, the least skewed first"
    print_table(fitting([cells], cells, title, console().width))


class Kind(StrEnum):
    """A format of the report."""

    html = "html"
    md = "md"


def report(
    runs: RunFolders,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write [report.html or report.md].")
    ] = None,
    format: Annotated[
        Kind | None, typer.Option("--format", help="Format [by the ending of --out, or html].")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="Also write every figure to this folder, as SVG and PNG."),
    ] = None,
) -> None:
    """Report on runs: curves, costs, cohorts and clients on one interactive page.

    The page needs no network and opens from disk. With `--format md`, the report is Markdown,
    and its figures are SVG files beside it.

    Example: `fedcohort report runs/compare -o report.html`
    """
    from fedcohort.experiments.results import read
    from fedcohort.files.publish import writing
    from fedcohort.report.content import content
    from fedcohort.report.figures import rendered, run_figures
    from fedcohort.report.page import run_markdown, run_page
    from fedcohort.storage import write_atomically

    def write(target: Path, data: bytes) -> None:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, data)

    results = read(*runs)
    kind = format or (Kind.md if out is not None and out.suffix == ".md" else Kind.html)
    path = out or Path(f"report.{kind.value}")
    beside = path.with_name(f"{path.stem}-figures")
    targets = [] if figures is None else [(figures, ".svg"), (figures, ".png")]
    targets += [(beside, ".svg")] if kind is Kind.md else []
    drawn = run_figures(content(results)) if targets else []
    for folder, ending in targets:
        for figure in drawn:
            write(folder / f"{figure.name}{ending}", rendered(figure, ending))
    if kind is Kind.html:
        write(path, run_page(results).encode())
    else:
        names = {figure.name: f"{beside.name}/{figure.name}.svg" for figure in drawn}
        write(path, run_markdown(results, names).encode())
    typer.echo(f"Wrote {path}")


def watch(
    runs: RunFolders,
    port: Annotated[
        int, typer.Option(help="Port on this machine; 0 picks a free one.", min=0, max=65535)
    ] = 0,
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
