"""What several commands share: options, the output format, tables."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcohort.exceptions import ConfigError
from fedcohort.options import parse_value
from fedcohort.registry import import_file
from fedcohort.report.tables import Cells, fit_table


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option; `panel` is its heading in the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def argument(help: str, **more: Any) -> Any:
    """Return an argument."""
    return typer.Argument(help=help, **more)


Format = Literal["table", "json"]
RayOption = Annotated[
    str | None,
    option(
        "Spread the work over a Ray cluster: 'local' starts one on this machine, 'auto' "
        "finds the running one, or HOST:PORT of its head.",
        "--ray",
        metavar="ADDRESS",
    ),
]
ImportOption = Annotated[
    list[Path] | None,
    option(
        "Run this Python file first: it may register policies, signals, gates and models. "
        "May be repeated.",
        "--import",
        metavar="FILE.py",
    ),
]
ForceOption = Annotated[
    bool, option("Replace files that exist; an input is never replaced.", "--force")
]
FormatOption = Annotated[
    Format, option("Print a table for people or JSON for machines.", "--format")
]


def import_all(files: Sequence[Path] | None) -> list[str]:
    """Run the files of ``--import`` and return their absolute names."""
    for file in files or ():
        import_file(str(file))
    return [str(file.resolve()) for file in files or ()]


def parsed_pairs(option: str, texts: Sequence[str] | None) -> dict[str, Any]:
    """Read ``KEY=VALUE``, as often as the option was given; values may be numbers or lists."""
    given = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option} {text!r} must be written as key=value")
        given[key.strip()] = parse_value(value.strip())
    return given


def on_cluster(address: str | None) -> AbstractContextManager[None]:
    """Connect to the cluster while the command works; without an address, to none."""
    if address is None:
        return nullcontext()
    from fedcohort.distribute import cluster

    return cluster(address)


def console(width: int | None = None) -> Console:
    """Return the console on standard output; lines may be long where it is not a terminal."""
    sized = Console().is_terminal or "COLUMNS" in os.environ
    return Console(width=width or (None if sized else 120))


def plain(text: str) -> str:
    """Show the control characters of a text, which could command a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and make its folder."""
    from fedcohort.storage import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def warn(messages: Iterable[str]) -> None:
    """Print what a person should know to standard error."""
    for message in messages:
        typer.echo(f"warning: {plain(message)}", err=True)


def show(
    format: Format, value: Any, shown: Cells | Mapping[str, str] | Sequence[str], title: str = ""
) -> None:
    """Print JSON, or what people read: a table (its title if empty), facts, or sentences."""
    if format == "json":
        typer.echo(json.dumps(plain_values(value), indent=2))
    elif isinstance(shown, Mapping):
        _show_facts(shown, plain(title))
    elif not isinstance(shown, Cells):
        typer.echo("\n".join(map(plain, shown)))
    elif not shown.rows:
        typer.echo(plain(title))
    else:
        columns = [dataclasses.replace(c, header=plain(c.header)) for c in shown.columns]
        rows = [[cell._replace(text=plain(cell.text)) for cell in row] for row in shown.rows]
        out = console()
        out.print(fit_table(Cells(columns, rows), plain(title), out.width))


def _show_facts(facts: Mapping[str, str], title: str) -> None:
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, value in facts.items():
        table.add_row(key, Text("\n".join(map(plain, value.split("\n")))))
    out = console()
    out.print(Text(title, "italic"))  # as a title of the table it would be as narrow
    out.print(table)


def plain_values(value: Any) -> Any:
    """Replace NaN and infinity by None, all the way down; named tuples become mappings."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if hasattr(value, "_asdict"):
        return plain_values(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_values(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {k: plain_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(v) for v in value]
    return value
