"""``fedcohort show``: the table of a run, a comparison or a sweep, once more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, console, show, show_json

if TYPE_CHECKING:
    from rich.table import Table

    from fedcohort.experiments.results import Results

RunFolders = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Folders of runs, comparisons or sweeps."),
]


def command(
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
    from fedcohort.experiments.results import read
    from fedcohort.report.tables import comparison

    results = read(*runs)
    if format is Format.json:
        show_json({"runs": comparison(results)})
        return
    wide = width or console().width
    show(_table(results, f"{results.state()}: {', '.join(map(str, runs))}", wide), wide)


def _table(results: Results, title: str, width: int) -> Table:
    from fedcohort.report.columns import setting_columns
    from fedcohort.report.tables import (
        comparison,
        comparison_table,
        curves,
        summary_table,
    )

    if len(results) == 1:
        return summary_table(results[0].summaries, f"{results[0].policy}, {title}", width)
    columns = setting_columns(results)
    rows, lines = comparison(results), curves(results)
    return comparison_table(rows, lines, results.target, title, width, columns)
