"""``--ray``: which cluster a command spreads its work over.

What several commands share: the output format, tables, progress, options in a word.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from fedcohort.experiments.several import Runner
    from fedcohort.simulate.history import RoundRecord

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Spread the work over a Ray cluster: 'local' starts one on this machine, 'auto' "
        "finds the running one, or HOST:PORT of its head.",
    ),
]


def on_cluster(address: str | None) -> AbstractContextManager[None]:
    """Be connected to the cluster while the command works; without an address, to none."""
    if address is None:
        return nullcontext()
    from fedcohort.distribute.cluster import cluster

    return cluster(address)


def runner_on(address: str | None) -> Runner:
    """Return what runs several experiments: one after the other, or as tasks of the cluster."""
    if address is None:
        from fedcohort.experiments.several import in_turn

        return in_turn
    from fedcohort.distribute.runs import run_all

    return run_all


class Format(StrEnum):
    """How results are printed."""

    table = "table"
    json = "json"


FormatOption = Annotated[
    Format, typer.Option("--format", help="Print a table for people or JSON for machines.")
]


def console() -> Console:
    """Return the console on standard output; where it is no terminal, lines may be long."""
    from rich.console import Console

    return Console() if Console().is_terminal else Console(width=120)


def show(table: Table, width: int | None = None) -> None:
    """Print a table to standard output, `width` columns wide or as wide as the terminal."""
    console().print(table, width=width)


def show_json(value: Any) -> None:
    """Print a value as JSON; numbers that are not finite become null."""
    typer.echo(json.dumps(finite(value), indent=2))


def finite(value: Any) -> Any:
    """Replace NaN and infinity by None, all the way down; named tuples become mappings."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if hasattr(value, "_asdict"):
        return finite(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return finite(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


class RoundBars:
    """A progress bar a policy, shown from its first round on, so that mistakes come first."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._bars = rounds, progress()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> RoundBars:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tasks:
            self._bars.stop()

    def __call__(self, name: str, records: Sequence[RoundRecord]) -> None:
        """Show that a round is over."""
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=self._rounds, note="")
        known = [r.accuracy for r in records if r.accuracy is not None]
        note = f"accuracy {sum(known) / len(known):.3f}" if known else ""
        self._bars.update(self._tasks[name], completed=records[0].round + 1, note=note)


def progress() -> Progress:
    """Return a progress bar on standard error, so that standard output stays clean."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description:>18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def parse_named(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``name:key=value;key=value``.

    Examples
    --------
    >>> parse_named("power-of-choice:d=20")
    ('power-of-choice', {'d': 20})
    """
    name, _, rest = text.strip().partition(":")
    options = {}
    for part in filter(None, rest.split(";")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: write options as name:key=value;key=value")
        options[key.strip()] = parse_value(value.strip())
    return name.strip(), options


def parse_value(text: str) -> Any:
    """Read a number, true or false, and anything else as a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text
