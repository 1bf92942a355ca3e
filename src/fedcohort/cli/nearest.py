"""``fedcohort nearest``: a model for a newcomer."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedcohort.cli.common import Format, FormatOption, show, show_json
from fedcohort.cli.registry import printable, where
from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from fedcohort.personalize import Advice, Registry


class Strategy(StrEnum):
    """What a newcomer starts from."""

    nearest = "nearest"
    k_nearest = "k-nearest"
    match = "match"
    cluster = "cluster"


def command(
    sketch: Annotated[Path, typer.Argument(help="The newcomer's sketch.", show_default=False)],
    registry: Annotated[
        Path, typer.Option("--registry", help="The registry's folder.", show_default=False)
    ],
    k: Annotated[int | None, typer.Option(help="Clients to consider.", min=1)] = None,
    strategy: Annotated[
        Strategy,
        typer.Option(
            help="The nearest client's model; the k nearest averaged by distance; averaged so "
            "that their sketches match the newcomer's; or the nearest group's."
        ),
    ] = Strategy.match,
    max_distance: Annotated[
        str, typer.Option(help="Beyond it no client is near enough: a number, 'auto' or 'none'.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Write the advised model there.", show_default=False)
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Print from which model a client with unlabeled data should start.

    Example: `fedcohort nearest new.sketch --registry warm/ --k 5 --format json`
    """
    from fedcohort.files.sketching import load_sketch
    from fedcohort.personalize import ColdStart, Registry
    from fedcohort.personalize.models import pack
    from fedcohort.personalize.search import EXACT
    from fedcohort.storage import write_atomically

    with Registry(registry) as known:
        if known.fact("index") is None and len(known) > EXACT and not known.db.read_only:
            typer.echo("building the index once; this takes a while", err=True)
        start = ColdStart(known, max_distance=_limit(max_distance))
        advice = start.advise(load_sketch(sketch), strategy.value, k)
        if out is not None:
            write_atomically(out, pack(start.model(advice)))
        _show_advice(known, advice, format)
    if out is not None and format is not Format.json:
        typer.echo(f"wrote {out}")


def _show_advice(registry: Registry, advice: Advice, format: Format) -> None:
    entries = [registry.get(near.client) for near in advice.neighbors]
    if format is Format.json:
        rows = [
            {**near._asdict(), "model": e.model, "reference": e.reference, "metadata": e.metadata}
            for near, e in zip(advice.neighbors, entries, strict=True)
        ]
        show_json({**asdict(advice), "near": advice.near, "neighbors": rows})
        return
    from rich.table import Table

    table = Table(header_style="bold")
    for name in ("client", "distance", "weight", "model"):
        table.add_column(name, justify="right" if name in ("distance", "weight") else "left")
    for near, entry in zip(advice.neighbors, entries, strict=True):
        weight = advice.weights.get(near.client)
        share = "" if weight is None else f"{weight:.3f}"
        table.add_row(printable(near.client), f"{near.distance:.4f}", share, where(entry))
    show(table)
    far = f"distance {advice.distance:.4g}, limit {advice.max_distance:.4g}"
    typer.echo(
        f"near: {far}" if advice.near else f"no client is close enough: {far}; use the global model"
    )


def _limit(text: str) -> float | Literal["auto"] | None:
    if text == "auto":
        return "auto"
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--max-distance {text!r} is not a number, 'auto' or 'none'") from None
