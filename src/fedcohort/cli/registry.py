"""``fedcohort registry``: warm clients, their sketches and models."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli.common import Format, FormatOption, plain, show, show_json
from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from fedcohort.personalize import Entry, Registry

app = typer.Typer(
    help="Warm clients: their sketches and personal models, in a folder.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Argument(help="The registry's folder.", show_default=False)]
Client = Annotated[str, typer.Argument(help="The client's id: any text.", show_default=False)]
ModelOption = Annotated[
    Path | None, typer.Option("--model", help="Safetensors file; it is copied.", show_default=False)
]
ReferenceOption = Annotated[
    str | None,
    typer.Option(help="Path or URI of a model kept elsewhere; never opened.", show_default=False),
]


@app.callback()
def _group() -> None:
    """Warm clients: their sketches and personal models, in a folder."""


@app.command("add")
def add(
    folder: Folder,
    client: Annotated[
        str,
        typer.Argument(help="The client's id, or a folder of sketch files.", show_default=False),
    ],
    sketch: Annotated[
        Path | None,
        typer.Argument(
            help="The client's sketch file; leave it out to add a folder.", show_default=False
        ),
    ] = None,
    model: ModelOption = None,
    reference: ReferenceOption = None,
    metadata: Annotated[str, typer.Option(help="A JSON object.")] = "{}",
    replace: Annotated[bool, typer.Option("--replace", help="Replace a known client.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """Register a client, or a folder of clients; the registry is made if it does not exist.

    Without a model, a client is found by searches but never advised. In a folder, the model of
    NAME.sketch is NAME.safetensors.

    Examples: `fedcohort registry add warm/ ann ann.sketch --model ann.safetensors`,
    `fedcohort registry add warm/ clients/`
    """
    from fedcohort.files.sketching import load_sketch
    from fedcohort.personalize import Registry
    from fedcohort.personalize.registry import is_new

    loaded, known = None if sketch is None else load_sketch(sketch), _object(metadata)
    with Registry.create(folder) if is_new(folder) else Registry(folder) as registry:
        if loaded is None:
            _add_folder(registry, Path(client), replace, format)
            return
        registry.add(client, loaded, model, reference=reference, metadata=known, replace=replace)
        _say(format, {"client": client, "clients": len(registry)}, f"{len(registry)} clients")


def _add_folder(registry: Registry, source: Path, replace: bool, format: Format) -> None:
    from fedcohort.personalize.transfer import add_folder

    count, skipped = add_folder(registry, source, replace=replace)
    for name, reason in skipped.items():
        typer.echo(f"skipped {name!r}: {plain(reason)}", err=True)
    result = {"added": count, "skipped": skipped, "clients": len(registry)}
    _say(format, result, f"{count} clients added, {len(skipped)} skipped; {len(registry)} in all")
    if skipped:
        raise typer.Exit(1)


@app.command("show")
def show_client(folder: Folder, client: Client, format: FormatOption = Format.table) -> None:
    """Show all that is known about a client.

    Example: `fedcohort registry show warm/ ann`
    """
    from fedcohort.personalize import Registry
    from fedcohort.personalize.models import shapes_of

    with Registry(folder) as registry:
        entry, sketch = registry.get(client), registry.sketch(client)
        path = None if entry.model is None else registry.models.path(entry.model)
        arrays = None if path is None else shapes_of(path)
    known = {**asdict(entry), "sketch": sketch.spec, "arrays": arrays}
    if format is Format.json:
        show_json(known)
        return
    for name, value in known.items():
        text = value if isinstance(value, str) else json.dumps(value)
        typer.echo(f"{name:<12}{plain(text)}")


@app.command("export")
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="A new or empty folder.", show_default=False)],
    format: FormatOption = Format.table,
) -> None:
    """Write all clients' sketches and models as files, with a list of them.

    Example: `fedcohort registry export warm/ clients/`
    """
    from fedcohort.personalize import Registry, transfer

    with Registry(folder) as registry:
        count = transfer.export(registry, out)
    _say(format, {"clients": count, "folder": str(out)}, f"{count} clients written to {out}")


@app.command("global")
def global_(
    folder: Folder,
    model: ModelOption = None,
    reference: ReferenceOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Keep the global model, for newcomers that are far from every client.

    Example: `fedcohort registry global warm/ --model global.safetensors`
    """
    from fedcohort.personalize import Registry

    with Registry(folder) as registry:
        registry.set_global(model, reference=reference)
        _say(format, registry.fact("global"), "the global model is set")


@app.command("list")
def list_(
    folder: Folder,
    limit: Annotated[
        int | None, typer.Option(help="Show at most this many.", min=1, show_default=False)
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """List the registered clients.

    Example: `fedcohort registry list warm/`
    """
    from fedcohort.personalize import Registry

    with Registry(folder) as registry:
        entries, count = list(islice(registry.entries(), limit)), len(registry)
    if format is Format.json:
        show_json({"clients": count, "entries": [asdict(entry) for entry in entries]})
        return
    from rich.table import Table

    table = Table(title=f"{count:,} clients", title_justify="left", header_style="bold")
    for name in ("client", "samples", "epsilon", "model", "metadata", "registered"):
        table.add_column(name, justify="right" if name in ("samples", "epsilon") else "left")
    for entry in entries:
        epsilon = "" if entry.epsilon is None else f"{entry.epsilon:g}"
        known = printable(json.dumps(entry.metadata)) if entry.metadata else ""
        row = printable(entry.client), f"{entry.n:,.0f}", epsilon, where(entry), known
        table.add_row(*row, printable(entry.registered))
    show(table)


@app.command("check")
def check(
    folder: Folder,
    remove_orphans: Annotated[
        bool, typer.Option("--remove-orphans", help="Delete model files that no client has.")
    ] = False,
    format: FormatOption = Format.table,
) -> None:
    """Check every file against its hash; exit with 1 if something is wrong.

    Example: `fedcohort registry check warm/ --remove-orphans`
    """
    from fedcohort.personalize import Registry, integrity

    with Registry(folder) as registry:
        removed = integrity.remove_orphans(registry) if remove_orphans else []
        problems, count = integrity.check(registry), len(registry)
    if format is Format.json:
        show_json(
            {"clients": count, "problems": problems, "removed": [str(path) for path in removed]}
        )
    else:
        for path in removed:
            typer.echo(f"removed {plain(str(path))}")
        for problem in problems:
            typer.echo(f"{problem.kind}: {problem.subject!r}: {plain(problem.detail)}")
        typer.echo(f"{count:,} clients, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


@app.command("remove")
def remove(folder: Folder, client: Client, format: FormatOption = Format.table) -> None:
    """Remove a client, and its model unless another client has the same.

    Example: `fedcohort registry remove warm/ ann`
    """
    from fedcohort.personalize import Registry

    with Registry(folder) as registry:
        registry.remove(client)
        _say(format, {"client": client, "clients": len(registry)}, f"{len(registry)} clients left")


@app.command("index")
def index(folder: Folder, format: FormatOption = Format.table) -> None:
    """Build the index (for more than 10,000 clients) and store the distance limit.

    Example: `fedcohort registry index warm/`
    """
    from fedcohort.personalize import Registry, Search, limits

    with Registry(folder) as registry:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the index is rebuilt below
            search = Search(registry)
        search.rebuild()
        limit = limits.calibrated(search)
        limits.store_limit(registry, limit)
        distance = max(limit.squared, 0.0) ** 0.5
        what = {"clients": len(registry), "max_distance": distance}
        _say(format, what, f"{len(registry):,} clients; near is up to a distance of {distance:.4g}")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--metadata {text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--metadata {text!r} is not a JSON object")
    return value


def _say(format: Format, value: Any, sentence: str) -> None:
    if format is Format.json:
        show_json(value)
    else:
        typer.echo(sentence)


def where(entry: Entry) -> str:
    """Return the hash of a stored model, shortened, or the reference to one elsewhere."""
    if entry.model is not None:
        return printable(entry.model[:12])
    return printable(entry.reference or "")


def printable(text: str) -> str:
    r"""Return text that a terminal shows as it is: no markup, no control characters.

    Examples
    --------
    >>> printable("ann"), printable("[red]x")
    ('ann', '\\[red]x')
    """
    from rich.markup import escape

    return escape(plain(text))
