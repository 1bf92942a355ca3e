"""``fedcohort profile``: sketches -> a page that shows how different the clients are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, finite, show, show_json
from fedcohort.cli.sketch import ForceOption
from fedcohort.cli.sketches import Sketches, load_several
from fedcohort.exceptions import ConfigError


def command(
    sketches: Sketches,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The page; its numbers go beside it as JSON."),
    ] = Path("heterogeneity.html"),
    title: Annotated[
        str, typer.Option(help="Title of the page.")
    ] = "How different are the clients?",
    force: ForceOption = False,
    format: FormatOption = Format.table,
) -> None:
    """Show how different the clients are: distances, a map, outliers, clusters.

    Example: `fedcohort profile site-*.sketch -o heterogeneity.html`
    """
    from fedcohort.files.finding import client_names
    from fedcohort.files.publish import check_output, writing
    from fedcohort.report.heterogeneity import measure
    from fedcohort.report.page import page

    if out.suffix == ".json":
        raise ConfigError(f"-o {out}: name the page, such as {out.with_suffix('.html')}")
    beside = out.with_suffix(".json")
    paths, loaded = load_several(sketches, "a profile")
    for path in (out, beside):
        check_output(path, paths, force)
    found = measure(loaded, client_names(paths))
    numbers = finite(found.as_dict())
    with writing(out):
        out.write_text(page(found, title), "utf-8")
    with writing(beside):
        beside.write_text(json.dumps(numbers), "utf-8")
    if format is Format.json:
        show_json({"page": str(out), "numbers": str(beside), **found.summary()})
        return
    from fedcohort.report.sketches import facts_table

    show(facts_table({**found.facts(), "page": str(out), "numbers": str(beside)}, title))
