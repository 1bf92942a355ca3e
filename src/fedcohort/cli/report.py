"""``fedcohort report``: runs as one page, or as Markdown with figures."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.show import RunFolders

if TYPE_CHECKING:
    from fedcohort.experiments.results import Results


class Kind(StrEnum):
    """A format of the report."""

    html = "html"
    md = "md"


def command(
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

    kind = format or (Kind.md if out is not None and out.suffix == ".md" else Kind.html)
    path = out or Path(f"report.{kind.value}")
    write_report(read(*runs), path, kind, figures)
    typer.echo(f"Wrote {path}")


def write_report(
    results: Results, path: Path, kind: Kind = Kind.html, folder: Path | None = None
) -> None:
    """Write a report, and its figures to a folder if one is given; no file is left unfinished."""
    from fedcohort.files.publish import writing
    from fedcohort.report.content import content
    from fedcohort.report.figures import Figure, rendered, run_figures
    from fedcohort.report.page import run_markdown, run_page
    from fedcohort.storage import write_atomically

    def write(target: Path, data: bytes) -> None:
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, data)

    def write_figures(target: Path, figures: list[Figure], *endings: str) -> None:
        for figure in figures:
            for ending in endings:
                write(target / f"{figure.name}{ending}", rendered(figure, ending))

    drawn = run_figures(content(results)) if folder is not None or kind is Kind.md else []
    if folder is not None:
        write_figures(folder, drawn, ".svg", ".png")
    if kind is Kind.html:
        write(path, run_page(results).encode())
        return
    beside = path.with_name(f"{path.stem}-figures")
    write_figures(beside, drawn, ".svg")
    names = {figure.name: f"{beside.name}/{figure.name}.svg" for figure in drawn}
    write(path, run_markdown(results, names).encode())
