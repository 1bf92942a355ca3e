"""``fedcohort registry``: warm clients, their sketches and models; ``nearest``: a newcomer's."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedcohort.cli.common import Format, FormatOption, argument, option, show, warn, write_file
from fedcohort.exceptions import ConfigError
from fedcohort.options import parse_value, typed
from fedcohort.report.tables import Cell, Column, cells, number

if TYPE_CHECKING:
    from fedcohort.personalize import Advice, Entry, Registry

app = typer.Typer(
    help="Warm clients: their sketches and personal models, in a folder.", no_args_is_help=True
)
Folder = Annotated[Path, argument("The registry's folder.")]


def _open(folder: Path) -> Registry:
    from fedcohort.personalize import Registry

    return Registry(folder)


@app.command("add")
def add(
    folder: Folder,
    client: Annotated[str, argument("The client's id, or a folder of sketch files.")],
    sketch: Annotated[
        Path | None, argument("The client's sketch file; leave it out to add a folder.")
    ] = None,
    model: Annotated[Path | None, option("Safetensors file; it is copied.")] = None,
    reference: Annotated[
        str | None, option("Path or URI of a model kept elsewhere; never opened.")
    ] = None,
    metadata: Annotated[str, option("A JSON object.")] = "{}",
    replace: Annotated[bool, option("Replace a known client.", "--replace")] = False,
    format: FormatOption = "table",
) -> None:
    """Register a client, or a folder of clients; the registry is made if it does not exist.

    Without a model, a client is found by searches but never advised. A folder may be what `sketch
    --by` or `registry export` wrote; the model of NAME.sketch is NAME.safetensors.

    Examples: `fedcohort registry add warm/ ann ann.sketch --model ann.safetensors`,
    `fedcohort registry add warm/ clients/`
    """
    from fedcohort.files.sketching import load_sketch
    from fedcohort.personalize import Registry
    from fedcohort.personalize.registry import FILE

    facts = parse_value(metadata)
    if not isinstance(facts, dict):
        raise ConfigError(f"--metadata {metadata!r} is not a JSON object")
    loaded = None if sketch is None else load_sketch(sketch)
    opened = Registry if (folder / FILE).exists() else Registry.create
    with opened(folder) as registry:
        if loaded is None:
            _add_folder(registry, Path(client), replace, format)
            return
        registry.add(client, loaded, model, reference=reference, metadata=facts, replace=replace)
        show(format, {"client": client, "clients": len(registry)}, [f"{len(registry)} clients"])


def _add_folder(registry: Registry, source: Path, replace: bool, format: Format) -> None:
    from fedcohort.personalize.maintenance import add_folder

    count, skipped = add_folder(registry, source, replace=replace)
    warn(f"skipped {name!r}: {reason}" for name, reason in skipped.items())
    result = {"added": count, "skipped": skipped, "clients": len(registry)}
    show(format, result, [f"{count} clients added, {len(skipped)} skipped; {len(registry)} in all"])
    if skipped:
        raise typer.Exit(1)


@app.command("export")
def export(
    folder: Folder,
    out: Annotated[Path, argument("A new or empty folder.")],
    format: FormatOption = "table",
) -> None:
    """Write all clients' sketches and models as files, with a list of them.

    Example: `fedcohort registry export warm/ clients/`
    """
    from fedcohort.personalize import maintenance

    with _open(folder) as registry:
        count = maintenance.export(registry, out)
    show(format, {"clients": count, "folder": str(out)}, [f"{count} clients written to {out}"])


@app.command("global")
def global_(
    folder: Folder,
    model: Annotated[Path, option("Safetensors file; it is copied.")],
    format: FormatOption = "table",
) -> None:
    """Keep the global model, for newcomers that are far from every client.

    Example: `fedcohort registry global warm/ --model global.safetensors`
    """
    with _open(folder) as registry:
        registry.set_global(model)
        show(format, {"model": registry.global_digest()}, ["the global model is set"])


@app.command("list")
def list_(folder: Folder, format: FormatOption = "table") -> None:
    """List the registered clients.

    Example: `fedcohort registry list warm/`
    """
    with _open(folder) as registry:
        entries = list(registry.entries())
    columns = [
        Column("client", lambda e: Cell(e.client), number=False),
        Column("samples", lambda e: number(e.n, 0)),
        Column("privacy", lambda e: Cell(e.privacy or ""), number=False),
        Column("model", lambda e: Cell(_model(e)), number=False),
        Column("metadata", lambda e: Cell(json.dumps(e.metadata) if e.metadata else ""), False),
        Column("registered", lambda e: Cell(e.registered), number=False, detail=1),
    ]
    value = {"clients": len(entries), "entries": entries}
    show(format, value, cells(entries, columns), f"{len(entries):,} clients")


@app.command("check")
def check(folder: Folder, format: FormatOption = "table") -> None:
    """Check every model against its hash and every sketch; exit with 1 if something is wrong.

    Example: `fedcohort registry check warm/`
    """
    from fedcohort.personalize import maintenance

    with _open(folder) as registry:
        problems, count = maintenance.check(registry), len(registry)
    lines = [f"{kind}: {subject!r}: {detail}" for kind, subject, detail in problems]
    lines.append(f"{count:,} clients, {len(problems)} problems")
    show(format, {"clients": count, "problems": problems}, lines)
    if problems:
        raise typer.Exit(1)


@app.command("remove")
def remove(
    folder: Folder,
    client: Annotated[str, argument("The client's id.")],
    format: FormatOption = "table",
) -> None:
    """Remove a client, and its model unless another client has the same.

    Example: `fedcohort registry remove warm/ ann`
    """
    with _open(folder) as registry:
        registry.remove(client)
        left = len(registry)
    show(format, {"client": client, "clients": left}, [f"{left} clients left"])


def nearest(
    sketch: Annotated[Path, argument("The newcomer's sketch.")],
    registry: Annotated[Path, option("The registry's folder.", "--registry")],
    k: Annotated[int | None, option("Clients to consider [match: 20, else 1].", min=1)] = None,
    strategy: Annotated[
        Literal["match", "nearest", "plain"],
        option(
            "Average the models of clients whose sketches add up to the newcomer's; take the "
            "nearest client's; or that by the paper's plain distance."
        ),
    ] = "match",
    max_distance: Annotated[
        str, option("Beyond it no client is near enough: a number, 'auto' or 'none'.")
    ] = "auto",
    out: Annotated[Path | None, option("Write the advised model there.")] = None,
    format: FormatOption = "table",
) -> None:
    """Print from which model a client with unlabeled data should start.

    Example: `fedcohort nearest new.sketch --registry warm/ --k 5 --format json`
    """
    from fedcohort.files.sketching import load_sketch
    from fedcohort.personalize import ColdStart
    from fedcohort.personalize.models import content_of

    limit = typed(Literal["auto"] | float | None, parse_value(max_distance), "--max-distance")
    with _open(registry) as warm:
        start = ColdStart(warm, max_distance=limit)
        advice = start.advise(load_sketch(sketch), strategy, k)
        if out is not None:
            write_file(out, content_of(start.model(advice)))
        _show_advice(warm, advice, format)
    if out is not None and format != "json":
        typer.echo(f"wrote {out}")


def _show_advice(registry: Registry, advice: Advice, format: Format) -> None:
    entries = [registry.get(near.client) for near in advice.neighbors]
    pairs = list(zip(advice.neighbors, entries, strict=True))
    rows = [
        {**near._asdict(), "model": e.model, "reference": e.reference, "metadata": e.metadata}
        for near, e in pairs
    ]
    columns = [
        Column("client", lambda p: Cell(p[0].client), number=False),
        Column("distance", lambda p: number(p[0].distance, 4)),
        Column("weight", lambda p: number(advice.weights.get(p[0].client), 3)),
        Column("model", lambda p: Cell(_model(p[1])), number=False),
    ]
    value = {**asdict(advice), "near": advice.near, "neighbors": rows}
    show(format, value, cells(pairs, columns), "Nearest clients")
    if format == "json":
        return
    limit = f", limit {advice.max_distance:.4g}" if advice.max_distance < math.inf else ""
    far = f"distance {advice.distance:.4g}{limit}"
    if advice.near:
        typer.echo(f"near: {far}")
    elif not any(entry.model or entry.reference for entry in entries):
        typer.echo(f"no registered client has a model; the nearest: {far}; use the global model")
    else:
        typer.echo(f"no client is close enough: {far}; use the global model")


def _model(entry: Entry) -> str:
    """Return the hash of a stored model, shortened, or the reference to one elsewhere."""
    return entry.model[:12] if entry.model is not None else entry.reference or ""
