"""``fedcohort report``: runs as one page, or as Markdown with figures."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.show import RunFolders
from fedcohort.exceptions import ConfigError, DataError

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
    """Write a report, and its figures to a folder if there is one."""
    try:
        from fedcohort.report.content import content
        from fedcohort.report.figures import save
        from fedcohort.report.run_figures import run_figures
        from fedcohort.report.run_page import markdown, page
    except ImportError as error:
        raise ConfigError(
            f"report: {error.name} is not installed; pip install altair vl-convert-python"
        ) from None
    names: dict[str, str] = {}
    try:
        if kind is Kind.md:
            beside = path.with_name(f"{path.stem}-figures")
            beside.mkdir(parents=True, exist_ok=True)
            for figure in run_figures(content(results)):
                save(figure, beside / f"{figure.name}.svg")
                names[figure.name] = f"{beside.name}/{figure.name}.svg"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for figure in run_figures(content(results)):
                for ending in ("svg", "png"):
                    save(figure, folder / f"{figure.name}.{ending}")
        text = page(results) if kind is Kind.html else markdown(results, names)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be written ({error.strerror})") from None
