"""``fedcohort run``: the experiment of a TOML file, or all those of its sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.common import (
    Format,
    FormatOption,
    RayOption,
    RoundBars,
    console,
    on_cluster,
    runner_on,
    show,
    show_json,
)
from fedcohort.exceptions import ConfigError

if TYPE_CHECKING:
    from fedcohort.experiments.several import Setting
    from fedcohort.simulate.history import RoundRecord


def command(
    config: Annotated[Path, typer.Argument(help="The experiment, a TOML file or paper:NAME.")],
    out: Annotated[Path | None, typer.Option(help="Run folder [runs/NAME].")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder.")
    ] = False,
    track: Annotated[
        str | None, typer.Option(help="Also log to 'tensorboard' or 'mlflow', if installed.")
    ] = None,
    ray: RayOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Run an experiment, or a sweep; every round is on disk as soon as it is over.

    Example: `fedcohort run exp.toml`, and after an interruption `fedcohort run exp.toml --resume`

    Example: `fedcohort run sweep.toml --ray local`, where the file has a `[sweep]` table
    """
    from fedcohort.experiments import several

    settings = several.read(config)
    folder = out or Path("runs") / config.stem.removeprefix("paper:")
    if settings is None and ray is not None:
        raise ConfigError(f"--ray spreads a sweep, and {config} has no [sweep] table")
    if settings is None:
        _run(config, folder, resume, track, format)
    elif track is not None:
        raise ConfigError("--track follows one run, not a sweep")
    else:
        _sweep(settings, folder, resume, ray, format)


def _run(config: Path, folder: Path, resume: bool, track: str | None, format: Format) -> None:
    from fedcohort.experiments.config import read
    from fedcohort.experiments.folder import run, tracker

    experiment = read(config)
    parameters = dataclasses.asdict(experiment)
    with RoundBars(experiment.rounds) as bars, tracker(track, folder, parameters) as log:

        def on_round(records: Sequence[RoundRecord]) -> None:
            log(records)
            bars(experiment.policy.name, records)

        summaries = run(experiment, folder, resume=resume, on_round=on_round)
    if format is Format.json:
        show_json({"folder": str(folder), "seeds": summaries})
        return
    from fedcohort.report.tables import summary_table

    show(summary_table(summaries, f"{experiment.policy.name}: {folder}", console().width))


def _sweep(
    settings: list[Setting], folder: Path, resume: bool, ray: str | None, format: Format
) -> None:
    from fedcohort.experiments.several import run_several
    from fedcohort.report.tables import comparison, curves

    rounds = max(setting.experiment.rounds for setting in settings)
    with on_cluster(ray), RoundBars(rounds) as bars:
        results = run_several(
            settings, folder, "sweep.json", resume=resume, on_round=bars, runner=runner_on(ray)
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
