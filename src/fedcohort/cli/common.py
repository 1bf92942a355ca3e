"""What several commands share: options, the output format, tables, progress."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.exceptions import ConfigError
from fedcohort.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.table import Table

    from fedcohort.experiments.compare import Runner
    from fedcohort.experiments.config import Experiment
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


Completion = Callable[[str], list[str]]


def completing(names: Callable[[], Iterable[str]]) -> Completion:
    """Return a completion of names; after a comma, of the last one."""

    def complete(incomplete: str) -> list[str]:
        start, comma, last = incomplete.rpartition(",")
        return [start + comma + name for name in names() if name.startswith(last)]

    return complete


def _registered(module: str, registry: str, *more: str) -> Completion:
    return completing(lambda: [*more, *getattr(import_module(f"fedcohort.{module}"), registry)])


def _settings() -> list[str]:
    from fedcohort.experiments.config import papers

    return [f"paper:{name}" for name in papers()] + [str(p) for p in Path().glob("*.toml")]


complete_policies = _registered("policies", "POLICIES", "all")
complete_gates = _registered("gates", "GATES", "none")
complete_datasets = _registered("datasets", "DATASETS")
complete_partitions = _registered("partition", "PARTITIONS", "natural")
complete_models = _registered("simulate.models", "MODELS")
complete_settings = completing(_settings)

ImportOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        metavar="FILE.py",
        help="Run this Python file first: it may register policies, signals, gates and models. "
        "May be repeated.",
        show_default=False,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the configuration, such as local.lr=0.1. May be repeated; "
        "`fedcohort config keys` lists the keys.",
        show_default=False,
    ),
]


def on_cluster(address: str | None) -> AbstractContextManager[None]:
    """Connect to the cluster while the command works; without an address, to none."""
    if address is None:
        return nullcontext()
    from fedcohort.distribute.ray import cluster

    return cluster(address)


def runner_on(address: str | None) -> Runner:
    """Return what runs several experiments: one after another, or as tasks of the cluster."""
    if address is None:
        from fedcohort.experiments.compare import in_turn

        return in_turn
    from fedcohort.distribute.ray import run_all

    return run_all


class Format(StrEnum):
    """How results are printed."""

    table = "table"
    json = "json"


FormatOption = Annotated[
    Format, typer.Option("--format", help="Print a table for people or JSON for machines.")
]


def console(width: int | None = None) -> Console:
    """Return the console on standard output; lines may be long where it is not a terminal.

    Control characters in what it prints, such as the escape codes that a client's name may hold,
    are shown and not sent to the terminal.
    """
    from rich.console import Console, RenderHook

    class Harmless(RenderHook):
        def process_renderables(self, renderables: list[Any]) -> list[Any]:
            return [_Harmless(one) for one in renderables]

    plain_width = None if Console().is_terminal else 120
    made = Console(width=width or plain_width)
    made.push_render_hook(Harmless())
    return made


class _Harmless:
    """What Rich renders, with the control characters of its texts shown as `plain` does."""

    def __init__(self, renderable: Any) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        for segment in console.render(self.renderable, options):
            if segment.control:
                yield segment
            else:
                text = "\n".join(map(plain, segment.text.split("\n")))
                yield Segment(text, segment.style)


def plain(text: str) -> str:
    r"""Show the control characters of a text, which could command a terminal.

    Examples
    --------
    >>> print(plain("ann\x1b[2J"))
    ann\x1b[2J
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def show(table: Table, width: int | None = None) -> None:
    """Print a table to standard output, `width` columns wide or as wide as the terminal."""
    console(width).print(table)


def show_facts(facts: Mapping[str, str], title: str) -> None:
    """Print facts line by line; names may hold what Rich takes for markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, value in facts.items():
        table.add_row(key, Text(value))
    show(table)


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
    """The progress of runs by name: one bar per run, and one for all of them."""

    def __init__(self, settings: Mapping[str, Experiment]) -> None:
        self._rounds = {name: experiment.rounds for name, experiment in settings.items()}
        self._show = Progress(whole=sum(self._rounds.values()))

    def __enter__(self) -> RoundBars:
        return self

    def __exit__(self, *error: Any) -> None:
        self._show.__exit__(*error)

    def __call__(self, name: str, records: Sequence[RoundRecord]) -> None:
        """Show that a round is over."""
        known = [r.accuracy for r in records if r.accuracy is not None]
        note = f"accuracy {sum(known) / len(known):.3f}" if known else ""
        rounds = self._rounds.get(name, max(self._rounds.values()))
        self._show(name, records[0].round + 1, rounds, note)


def overrides(given: Mapping[str, Any], pairs: Sequence[str] | None) -> dict[str, Any]:
    """Return dotted keys and values: the options that were given, then those of ``--set``."""
    from fedcohort.options import parse_options, parse_value

    found = {key: value for key, value in given.items() if value is not None}
    if "seeds" in found:
        found["seeds"] = list(range(found["seeds"]))
    if "local" in found:
        found |= {f"local.{k}": v for k, v in parse_options(found.pop("local")).items()}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {pair!r} must be written as key=value, such as local.lr=0.1")
        found[key.strip()] = parse_value(value.strip())
    return found


def import_all(files: Sequence[Path] | None) -> list[str]:
    """Run the files of ``--import`` and return their absolute names."""
    from fedcohort.registry import import_file

    for file in files or ():
        import_file(str(file))
    return [str(file.resolve()) for file in files or ()]
