"""The command line: each command parses its arguments and calls one function.

Heavy imports happen inside the commands, so that ``fedcohort --help`` is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated

import click
import typer

from fedcohort import __version__
from fedcohort.cli import (
    benchmark,
    compare,
    data,
    export,
    nearest,
    policies,
    profile,
    registry,
    run,
    show,
    sketch,
    sketches,
)
from fedcohort.exceptions import FedcohortError

app = typer.Typer(
    name="fedcohort",
    help="Measure how different federated clients are, and pick better cohorts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("compare")(compare.command)
app.command("run")(run.command)
app.command("show")(show.command)
app.command("export")(export.command)
app.command("policies")(policies.command)
app.command("benchmark")(benchmark.command)
app.command("sketch")(sketch.command)
app.command("distance")(sketches.distance)
app.command("inspect")(sketches.inspect)
app.command("merge")(sketches.merge)
app.command("profile")(profile.command)
app.command("nearest")(nearest.command)
app.add_typer(registry.app, name="registry")
app.add_typer(data.app, name="data")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedcohort {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Measure how different federated clients are, and pick better cohorts."""


def main() -> None:
    """Run the command line: 0 on success, 2 and one line on a user's mistake."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = app(arguments, standalone_mode=False, prog_name="fedcohort")
        return int(code or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except click.ClickException as error:
        return _fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    except FedcohortError as error:
        return _fail(str(error))
    except BrokenPipeError:
        return 0


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2
