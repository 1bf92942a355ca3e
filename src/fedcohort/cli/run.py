"""``fedcohort run``: the experiment of a TOML file, or all those of its sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli.common import (
    Format,
    FormatOption,
    ImportOption,
    RayOption,
    RoundBars,
    SetOption,
    TrackOption,
    complete_settings,
    console,
    import_all,
    on_cluster,
    overrides,
    runner_on,
    show,
    show_json,
)
from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from fedcohort.experiments.several import Setting
    from fedcohort.simulate.history import RoundRecord


def command(
    config: Annotated[
        Path,
        typer.Argument(
            help="The experiment: a TOML file or paper:NAME.", autocompletion=complete_settings
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Run folder [runs/NAME].")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds, in place of the file's.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many seeds, in place of the file's.", min=1)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in the folder, also with more rounds."),
    ] = False,
    track: TrackOption = None,
    imports: ImportOption = None,
    set_: SetOption = None,
    ray: RayOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Run an experiment, or a sweep; every round is on disk as soon as it is over.

    Example: `fedcohort run exp.toml`, and after an interruption `fedcohort run exp.toml --resume`

    Example: `fedcohort run exp.toml --rounds 200 --resume` adds rounds to a finished run

    Example: `fedcohort run sweep.toml --ray local`, where the file has a `[sweep]` table
    """
    from fedcohort.experiments import several

    given = overrides({"rounds": rounds, "seeds": seeds}, set_)
    if imports:
        given["imports"] = import_all(imports)
    settings = several.read(config, given)
    folder = out or Path("runs") / config.stem.removeprefix("paper:")
    if settings is not None:
        _sweep(settings, folder, resume, track, ray, format)
    elif ray is not None:
        raise ConfigError(f"--ray spreads a sweep, and {config} has no [sweep] table")
    else:
        _run(config, given, folder, resume, track, format)


def _run(
    config: Path,
    given: dict[str, Any],
    folder: Path,
    resume: bool,
    track: str | None,
    format: Format,
) -> None:
    from fedcohort.experiments.config import parse, put, read_values
    from fedcohort.experiments.folder import run
    from fedcohort.experiments.tracking import track as tracked

    values = read_values(config)
    for key, value in given.items():
        put(values, key, value)
    try:
        experiment = parse(values)
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None
    name = experiment.policy.label
    with RoundBars({name: experiment}) as bars, tracked(track, folder, {".": experiment}) as log:

        def on_round(records: Sequence[RoundRecord]) -> None:
            log(".", records)
            bars(name, records)

        summaries = run(experiment, folder, resume=resume, on_round=on_round)
    if format is Format.json:
        show_json({"folder": str(folder), "seeds": summaries})
        return
    from fedcohort.report.tables import summary_table

    show(summary_table(summaries, f"{name}: {folder}", console().width))


def _sweep(
    settings: list[Setting],
    folder: Path,
    resume: bool,
    track: str | None,
    ray: str | None,
    format: Format,
) -> None:
    from fedcohort.experiments.several import run_several
    from fedcohort.experiments.tracking import track as tracked
    from fedcohort.report.tables import comparison, curves

    experiments = {setting.name: setting.experiment for setting in settings}
    with (
        on_cluster(ray),
        RoundBars(experiments) as bars,
        tracked(track, folder, experiments) as log,
    ):

        def on_round(name: str, records: Sequence[RoundRecord]) -> None:
            log(name, records)
            bars(name, records)

        results = run_several(
            settings, folder, "sweep.json", resume=resume, on_round=on_round, runner=runner_on(ray)
        )
    rows = comparison(results)
    if format is Format.json:
        show_json({"folder": str(folder), "runs": rows})
        return
    from fedcohort.report.tables import comparison_table, setting_columns

    targets = {setting.experiment.target for setting in settings}
    target = targets.pop() if len(targets) == 1 else None
    title = f"{len(settings)} settings: {folder}"
    columns = setting_columns(results)
    show(comparison_table(rows, curves(results), target, title, console().width, columns))
