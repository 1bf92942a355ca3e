"""``fedcohort config``: what an experiment is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcohort.cli.common import (
    Format,
    FormatOption,
    SetOption,
    complete_settings,
    overrides,
    show,
    show_json,
)
from fedcohort.exceptions import ConfigError

app = typer.Typer(help="Configurations: show one, start one, list all keys.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Configurations: show one, start one, list all keys."""


@app.command("show")
def show_(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file or paper:NAME [all defaults].",
            autocompletion=complete_settings,
            show_default=False,
        ),
    ] = None,
    set_: SetOption = None,
    format: Annotated[Format, typer.Option("--format", help="Print TOML or JSON.")] = Format.table,
) -> None:
    """Print a configuration with every default filled in.

    Example: `fedcohort config show paper:fedcor-2spc`
    """
    from fedcohort.experiments.config import dump, parse, put, read_values, to_toml

    given = overrides({}, set_)
    values: dict[str, Any] = {} if config is None else read_values(config, given)
    if "sweep" in values:
        raise ConfigError(f"{config} is a sweep: remove its [sweep] table")
    for key, value in given.items():
        put(values, key, value)
    experiment = parse(values)
    if format is Format.json:
        show_json(dump(experiment))
    else:
        typer.echo(to_toml(experiment), nl=False)


@app.command("init")
def init(
    file: Annotated[
        Path | None,
        typer.Argument(help="The file to write [standard output].", show_default=False),
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="Print TOML or JSON.")] = Format.table,
) -> None:
    """Write a TOML file with every key, its default and what it means.

    Example: `fedcohort config init exp.toml`, then edit it and `fedcohort run exp.toml`
    """
    from fedcohort.experiments.config import Experiment, dump, template
    from fedcohort.files.publish import writing
    from fedcohort.storage import write_atomically

    if format is Format.json:
        show_json(dump(Experiment()))
    elif file is None:
        typer.echo(template(), nl=False)
    else:
        if file.exists():
            raise ConfigError(f"{file} exists already; choose another name")
        with writing(file):
            write_atomically(file, template().encode())
        typer.echo(f"Wrote {file}: edit it, then run it with: fedcohort run {file}")


@app.command("keys")
def keys(format: FormatOption = Format.table) -> None:
    """List every key of a configuration, its type, its default and what it means.

    Example: `fedcohort config keys`
    """
    from fedcohort.experiments.config import reference

    if format is Format.json:
        show_json(reference())
        return
    from rich.table import Table

    table = Table(header_style="bold")
    for name in ("key", "type", "default", "meaning"):
        table.add_column(name, no_wrap=name == "key")
    for key in reference():
        name = f"{key.table}.{key.name}" if key.table else key.name
        table.add_row(name, key.kind, "" if key.default is None else str(key.default), key.about)
    show(table)
