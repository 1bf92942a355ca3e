"""``fedcohort plan``: sketches -> what choosing cohorts is worth, before any training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, plain, show, show_json
from fedcohort.cli.sketches import Sketches, load_several
from fedcohort.exceptions import ConfigError
from fedcohort.options import parse_named

if TYPE_CHECKING:
    from fedcohort.analysis.plan import Plan


def command(
    sketches: Sketches,
    cohort_size: Annotated[
        str, typer.Option("--cohort-size", "-k", help="Comma-separated cohort sizes to judge.")
    ] = "5",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy that selects by sketches, such as sketch-match:turns=1; may be given "
            "several times [sketch-match and sketch-match:turns=1].",
            show_default=False,
        ),
    ] = None,
    average: Annotated[
        str, typer.Option(help="How models are averaged: equal, or size (by records).")
    ] = "equal",
    present: Annotated[
        int | None,
        typer.Option(
            help="The random cohort size in use today: find the smallest matched cohort that is "
            "worth as much.",
            show_default=False,
        ),
    ] = None,
    model_bytes: Annotated[
        int | None, typer.Option(help="Bytes of a model, for what a smaller cohort saves.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Hours that a client trains per round, likewise.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the drawn cohorts and of the policies.")] = 0,
    format: FormatOption = Format.table,
) -> None:
    """Estimate, before any training, what choosing cohorts by sketches is worth.

    Example: `fedcohort plan sketches/ --cohort-size 5,10 --present 20`
    """
    from fedcohort.analysis.plan import plan
    from fedcohort.files.finding import client_names

    if average not in ("equal", "size"):
        raise ConfigError(f"--average {average}: write equal or size")
    wanted = policy or ["sketch-match", "sketch-match:turns=1"]
    paths, loaded = load_several(sketches, "a plan")
    found = plan(
        loaded,
        _sizes(cohort_size),
        [parse_named(text) for text in wanted],
        names=client_names(paths),
        average="size" if average == "size" else "equal",
        present=present,
        model_bytes=model_bytes,
        hours=hours,
        seed=seed,
    )
    if format is Format.json:
        show_json(found)
        return
    _show(found)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--cohort-size {text}: write whole numbers, such as 5,10") from None


def _show(found: Plan) -> None:
    from rich.table import Table

    table = Table(title="Worth of a cohort", title_justify="left", header_style="bold")
    for name in ("policy", "clients", "discrepancy", "worth (random clients)", "all used by round"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    table.add_column("picks, least to most", justify="right")
    for k, expected in found.uniform.items():
        table.add_row("uniform", str(k), f"{expected:.4f}", str(k), "-", "-")
    for w in found.worths:
        until = "-" if w.rounds_until_all is None else str(w.rounds_until_all)
        value = f"{w.discrepancy:.4f} ± {w.error:.4f}"
        shares = f"{w.fewest:.1f}x to {w.most:.1f}x"
        worth = f"{w.random_clients:.0f}"
        table.add_row(w.policy, str(w.cohort_size), value, worth, until, shares)
    show(table)
    for line in found.lines():
        typer.echo(plain(line))
