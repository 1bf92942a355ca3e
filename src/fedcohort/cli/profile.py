"""``fedcohort profile``: sketches -> a page that shows how different the clients are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, finite, show_facts, show_json
from fedcohort.cli.sketches import Sketches, load_several
from fedcohort.cli.tables import ForceOption
from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from fedcohort.analysis.plan import Plan
    from fedcohort.sketch.race import RaceSketch


def command(
    sketches: Sketches,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="The page; its numbers go beside it as JSON."),
    ] = Path("heterogeneity.html"),
    title: Annotated[
        str, typer.Option(help="Title of the page.")
    ] = "How different are the clients?",
    cohort_size: Annotated[
        int, typer.Option(min=0, help="Clients per round that the page plans for; 0 for no plan.")
    ] = 5,
    force: ForceOption = False,
    format: FormatOption = Format.table,
) -> None:
    """Show how different the clients are: distances, a map, outliers, clusters.

    Example: `fedcohort profile site-*.sketch -o heterogeneity.html`
    """
    from fedcohort.analysis.heterogeneity import measure
    from fedcohort.files.finding import client_names
    from fedcohort.files.publish import check_output, writing
    from fedcohort.report.page import page
    from fedcohort.storage import write_atomically

    if out.suffix == ".json":
        raise ConfigError(f"-o {out}: name the page, such as {out.with_suffix('.html')}")
    beside = out.with_suffix(".json")
    paths, loaded = load_several(sketches, "a profile")
    for path in (out, beside):
        check_output(path, paths, force)
    names = client_names(paths)
    found = measure(loaded, names)
    cohorts = _plan(loaded, names, cohort_size)
    numbers = finite({**found.as_dict(cohorts), "plan": cohorts})
    with writing(out):
        html = page(found, title, plan=cohorts)
        write_atomically(out, html.encode())
    with writing(beside):
        write_atomically(beside, json.dumps(numbers).encode())
    if format is Format.json:
        show_json({"page": str(out), "numbers": str(beside), **found.summary(cohorts)})
        return

    show_facts({**found.facts(cohorts), "page": str(out), "numbers": str(beside)}, title)


def _plan(sketches: Sequence[RaceSketch], names: Sequence[str], cohort_size: int) -> Plan | None:
    """Return what choosing cohorts is worth, None where the sketches cannot tell."""
    from fedcohort.analysis.plan import plan

    filled = [(sketch, name) for sketch, name in zip(sketches, names, strict=True) if sketch.n > 1]
    if not cohort_size or len(filled) <= cohort_size or sketches[0].rows < 2:
        return None
    return plan([s for s, _ in filled], [cohort_size], names=[n for _, n in filled])
