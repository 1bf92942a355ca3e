"""``fedcohort data``: which data sets are here."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, show, show_json

app = typer.Typer(help="List data sets and verify their files.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """List data sets and verify their files."""


@app.command("list")
def list_(
    root: Annotated[str | None, typer.Option(help="Folder to look in.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """List the known data sets, check their files and say where they were looked for.

    Example: `fedcohort data list --root ~/data`
    """
    from fedcohort.datasets import available

    rows = available(root)
    if format is Format.json:
        show_json(rows)
        return
    from rich.table import Table

    table = Table(title="Data sets", title_justify="left", header_style="bold")
    for name in ("name", "status", "examples", "clients", "where", "detail"):
        table.add_column(name, justify="right" if name in ("examples", "clients") else "left")
    colors = {"ok": "green", "missing": "yellow", "damaged": "red"}
    for row in rows:
        status = f"[{colors[row.status]}]{row.status}[/]"
        counts = ["" if n is None else f"{n:,}" for n in (row.samples, row.clients)]
        table.add_row(row.name, status, *counts, row.where, row.detail)
    show(table)
