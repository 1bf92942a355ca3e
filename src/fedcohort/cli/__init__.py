"""The command line: each command parses its arguments and calls one function.

Heavy imports happen inside the commands, so that ``fedcohort --help`` is quick.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from typing import Annotated

import click
import typer

from fedcohort import __version__
from fedcohort.cli import experiments, planning, registry, results, sketch, sketches, spec
from fedcohort.cli.common import option, plain
from fedcohort.exceptions import FedcohortError

INTERRUPTED = 130  # what shells report for Ctrl-C, and Typer returns

#: The extra that installs an optional package.
EXTRAS = {
    "torch": "simulate",
    "safetensors": "simulate",
    "pyarrow": "files",
    "openpyxl": "files",
    "pandas": "frames",
    "altair": "plots",
    "vl_convert": "plots",
    "jinja2": "plots",
    "flwr": "flower",
    "ray": "ray",
}

app = typer.Typer(
    name="fedcohort",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compare")(experiments.compare)
app.command("run")(experiments.run_command)
app.command("report")(results.report)
app.command("watch")(results.watch)
app.command("show")(results.show_command)
app.command("rank")(results.rank)
app.command("export")(results.export)
app.command("policies")(planning.policies)
app.command("sketch")(sketch.command)
app.command("distance")(sketches.distance)
app.command("inspect")(sketches.inspect)
app.command("merge")(sketches.merge)
app.command("explain")(sketches.explain)
app.command("profile")(planning.profile)
app.command("plan")(planning.plan)
app.command("nearest")(registry.nearest)
app.add_typer(registry.app, name="registry")
app.add_typer(spec.app, name="spec")
app.add_typer(experiments.data_app, name="data")
app.add_typer(experiments.config_app, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fedcohort {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, option("Print the version.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Measure how different federated clients are, and pick better cohorts."""


def main() -> None:
    """Run the command line: 0 on success, 2 and one line on a user's mistake."""
    for stream in (sys.stdout, sys.stderr):  # names that are not UTF-8 are shown escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run one command and return its exit code.

    This is the one place where a user's mistake becomes one line. With FEDCOHORT_DEBUG=1 the
    traceback is shown as well.
    """
    try:
        code = app(arguments, standalone_mode=False, prog_name="fedcohort")
        return _interrupted(arguments) if code == INTERRUPTED else int(code or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return 2
    except click.ClickException as error:
        # Both Typer and Click may add the same hint.
        return _fail(re.sub(r"( Did you mean .*\?)\1", r"\1", error.format_message()))
    except (click.Abort, KeyboardInterrupt):
        return _interrupted(arguments)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # else the interpreter complains at exit
        return 0
    except (FedcohortError, ValueError, OSError, ImportError, MemoryError) as error:
        message = _message(error)
        if message is None or os.environ.get("FEDCOHORT_DEBUG"):
            raise
        return _fail(message)


def _message(error: Exception) -> str | None:
    """Return one line for a mistake or a machine's refusal; None for what must be our bug."""
    if isinstance(error, ImportError):
        package = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(package)
        remedy = f"this needs {package}, which is not installed: pip install 'fedcohort[{extra}]'"
        return None if extra is None else remedy
    if isinstance(error, MemoryError):
        return f"not enough memory{f': {error}' if str(error) else ''}"
    if isinstance(error, UnicodeDecodeError):
        return f"a file or a name in it is not UTF-8 ({error.reason}); convert it first"
    if isinstance(error, UnicodeEncodeError):  # the name of a file, in undecodable bytes
        near = error.object[max(0, error.start - 20) : error.end + 20]
        return f"a name is not UTF-8 (near {near!a}); rename the file or folder"
    if isinstance(error, OSError) and not isinstance(error, FedcohortError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _interrupted(arguments: list[str]) -> int:
    hint = ""
    if arguments[:1] in (["run"], ["compare"]):
        again = [*arguments, *([] if "--resume" in arguments else ["--resume"])]
        hint = f". Resume with: fedcohort {shlex.join(again)}"
    print(f"Interrupted{hint}", file=sys.stderr)
    return INTERRUPTED


def _fail(message: str) -> int:
    line = " ".join(message.split())
    print(f"error: {plain(line)}", file=sys.stderr)
    return 2
