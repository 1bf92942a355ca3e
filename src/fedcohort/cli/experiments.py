"""``fedcohort run``, ``compare``, ``config`` and ``data``: experiments and their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli.common import (
    Format,
    FormatOption,
    ImportOption,
    RayOption,
    argument,
    import_all,
    on_cluster,
    option,
    parsed_pairs,
    show,
    write_file,
)
from fedcohort.cli.results import show_results
from fedcohort.exceptions import ConfigError
from fedcohort.progress import Progress
from fedcohort.registry import load_installed
from fedcohort.report.tables import Cell, Column, cells, number

if TYPE_CHECKING:
    from fedcohort.experiments.compare import OnRound, Runner, Setting
    from fedcohort.experiments.config import Experiment, NamedConfig
    from fedcohort.rounds import RoundRecord

SetOption = Annotated[
    list[str] | None,
    option(
        "Set any key of the configuration, such as local.lr=0.1. May be repeated; "
        "`fedcohort config init` shows the keys.",
        "--set",
        metavar="KEY=VALUE",
    ),
]
RoundsOption = Annotated[int | None, option("Rounds of training [those of the setting].")]
SeedsOption = Annotated[int | None, option("How many seeds [those of the setting].", min=1)]
ResumeOption = Annotated[
    bool, option("Continue in the folder, also with more rounds, seeds or policies.", "--resume")
]


def overrides(given: Mapping[str, Any], texts: Sequence[str] | None) -> dict[str, Any]:
    """Return dotted keys and values: the options that were given, then those of ``--set``."""
    values = {key: value for key, value in given.items() if value is not None}
    if "seeds" in values:
        values["seeds"] = list(range(values["seeds"]))
    return values | parsed_pairs("--set", texts)


@contextmanager
def round_bars(
    settings: Mapping[str, Experiment], done: Mapping[str, int] | None = None
) -> Iterator[OnRound]:
    """Show the progress of runs by name: one bar per run, and one for all of them."""
    rounds = {name: experiment.rounds for name, experiment in settings.items()}
    with Progress(sum(rounds.values()), done) as show:

        def on_round(name: str, records: Sequence[RoundRecord]) -> None:
            measured = [r.accuracy for r in records if r.accuracy is not None]
            note = f"accuracy {sum(measured) / len(measured):.3f}" if measured else ""
            show(name, records[0].round, rounds[name], note)

        yield on_round


def run_command(
    config: Annotated[Path, argument("The experiment: a TOML file or paper:NAME.")],
    out: Annotated[Path | None, option("Run folder [runs/NAME].")] = None,
    rounds: RoundsOption = None,
    seeds: SeedsOption = None,
    resume: ResumeOption = False,
    imports: ImportOption = None,
    set_: SetOption = None,
    ray: RayOption = None,
    format: FormatOption = "table",
) -> None:
    """Run an experiment, or a sweep; every round is on disk as soon as it is over.

    Example: `fedcohort run exp.toml`, and after an interruption `fedcohort run exp.toml --resume`

    Example: `fedcohort run exp.toml --rounds 200 --resume` adds rounds to a finished run

    Example: `fedcohort run sweep.toml --ray local`, where the file has a `[sweep]` table
    """
    from fedcohort.experiments.compare import read

    given = overrides({"rounds": rounds, "seeds": seeds}, set_)
    experiment = read(config, given, imports=import_all(imports))
    folder = out or Path("runs") / config.stem.removeprefix("paper:")
    if isinstance(experiment, list):
        _run_several(experiment, folder, resume, ray, format)
        return
    if ray is not None:
        raise ConfigError(f"--ray spreads a sweep, and {config} has no [sweep] table")
    from fedcohort.experiments.results import Results
    from fedcohort.experiments.run import run

    name = experiment.policy.label
    with round_bars({name: experiment}) as on_round:
        finished = run(experiment, folder, resume=resume, on_round=partial(on_round, name))
    show_results(Results([finished]), [folder], format)


def compare(
    config: Annotated[
        Path | None, option("Setting from a TOML file or paper:NAME; other options override it.")
    ] = None,
    dataset: Annotated[str | None, option("Data set, or FILE.py:FUNCTION [digits].")] = None,
    partition: Annotated[
        str | None, option("Split over clients, as name:key=value [shards].")
    ] = None,
    clients: Annotated[int | None, option("Clients in the federation [60; natural: all].")] = None,
    model: Annotated[str | None, option("Reference model, or FILE.py:CLASS [mlp-64-30].")] = None,
    policies: Annotated[
        str,
        option("Comma-separated names, each with options as name:key=value,key=value; or 'all'."),
    ] = "all",
    gate: Annotated[str | None, option("Hold models back, as name:key=value [none].")] = None,
    cohort_size: Annotated[int | None, option("Clients per round [5].")] = None,
    target: Annotated[float | None, option("Accuracy to reach [0.8].")] = None,
    rounds: RoundsOption = None,
    seeds: SeedsOption = None,
    out: Annotated[Path, option("Result folder.")] = Path("runs/compare"),
    resume: ResumeOption = False,
    imports: ImportOption = None,
    set_: SetOption = None,
    ray: RayOption = None,
    format: FormatOption = "table",
) -> None:
    """Compare selection policies on one setting, by default on label-skewed digits.

    Example: `fedcohort compare --policies uniform,power-of-choice:d=15 --rounds 40 --seeds 3`

    Example: `fedcohort compare --gate sketch-to-skip:threshold=0.1 --set local.lr=0.05`

    Example: `fedcohort compare --import my_policy.py --policies uniform,my-policy`
    """
    from fedcohort.experiments.compare import DEFAULT_SETTING, read, settings_of

    given = {
        "data.dataset": dataset,
        "data.partition": partition,
        "data.clients": clients,
        "model": model,
        "rounds": rounds,
        "seeds": seeds,
        "cohort_size": cohort_size,
        "target": target,
        "gate": gate,
    }
    imported, default = import_all(imports), DEFAULT_SETTING
    setting = read(config, overrides(given, set_), imports=imported, default=default)
    if isinstance(setting, list):
        raise ConfigError(f"{config} is a sweep: `fedcohort run {config}` runs it")
    _run_several(settings_of(setting, _policies(policies)), out, resume, ray, format)
    if format == "table":
        typer.echo(f"Rounds are in {out}; `fedcohort report {out}` makes a page of them")


def _policies(text: str) -> list[NamedConfig]:
    from fedcohort.experiments.config import NamedConfig, parse_list
    from fedcohort.policies import POLICIES

    if text == "all":
        load_installed("policy", POLICIES)
        return [NamedConfig(name) for name in POLICIES]
    chosen = parse_list(text)
    if not chosen:
        raise ConfigError(f"--policies {text!r}: name at least one policy")
    return chosen


def _run_several(
    settings: list[Setting], folder: Path, resume: bool, ray: str | None, format: Format
) -> None:
    from fedcohort.experiments.compare import in_turn, run_several
    from fedcohort.experiments.results import read_histories

    done = {}
    for name in (name for name, _ in settings if resume):
        if (folder / name / "rounds.jsonl").exists():
            done[name] = min((len(h.rounds) for h in read_histories(folder / name)), default=0)
    runner: Runner = in_turn
    if ray is not None:
        from fedcohort.distribute import run_all as runner
    with on_cluster(ray), round_bars(dict(settings), done) as on_round:
        results = run_several(settings, folder, resume=resume, on_round=on_round, runner=runner)
    show_results(results, [folder], format)


config_app = typer.Typer(help="Show a configuration, or start one.", no_args_is_help=True)


@config_app.command("show")
def config_show(
    config: Annotated[Path | None, argument("A TOML file or paper:NAME [all defaults].")] = None,
    set_: SetOption = None,
    format: Annotated[Format, option("Print TOML or JSON.", "--format")] = "table",
) -> None:
    """Print a configuration with every default filled in.

    Example: `fedcohort config show paper:fedcor-2spc`
    """
    from fedcohort.experiments.compare import read
    from fedcohort.experiments.config import dump, to_toml

    experiment = read(config, overrides({}, set_))
    if isinstance(experiment, list):
        raise ConfigError(f"{config} is a sweep: remove its [sweep] table")
    show(format, dump(experiment), to_toml(experiment).splitlines())


@config_app.command("init")
def config_init(
    file: Annotated[Path | None, argument("The file to write [standard output].")] = None,
    format: FormatOption = "table",
) -> None:
    """Write a TOML file with every key, its default and what it means.

    Example: `fedcohort config init exp.toml`, then edit it and `fedcohort run exp.toml`
    """
    from fedcohort.experiments.config import Experiment, reference, to_toml

    template = to_toml(Experiment(), comments=True)
    if file is None:
        show(format, reference(), template.splitlines())
        return
    if file.exists():
        raise ConfigError(f"{file} exists already; choose another name")
    write_file(file, template.encode())
    show(format, {"file": str(file)}, [f"Wrote {file}: edit it, then: fedcohort run {file}"])


data_app = typer.Typer(help="List data sets and verify their files.", no_args_is_help=True)


@data_app.command("list")
def data_list(
    root: Annotated[str | None, option("Folder to look in.")] = None, format: FormatOption = "table"
) -> None:
    """List the known data sets, check their files and say where they were looked for.

    Example: `fedcohort data list --root ~/data`
    """
    from fedcohort.datasets import available

    columns = [
        Column("name", lambda r: Cell(r.name), number=False),
        Column("status", lambda r: Cell(r.status), number=False),
        Column("examples", lambda r: number(r.samples, 0)),
        Column("clients", lambda r: number(r.clients, 0)),
        Column("where", lambda r: Cell(r.where), number=False),
        Column("detail", lambda r: Cell(r.detail), number=False, wraps=True),
    ]
    rows = available(root)
    show(format, rows, cells(rows, columns), "Data sets")
