"""``fedcohort run``: one experiment from a TOML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.common import Format, FormatOption, RoundBars, show, show_json

if TYPE_CHECKING:
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
    format: FormatOption = Format.table,
) -> None:
    """Run an experiment; every round is on disk as soon as it is over.

    Example: `fedcohort run exp.toml`, and after an interruption `fedcohort run exp.toml --resume`
    """
    from fedcohort.experiments.config import read
    from fedcohort.experiments.run import run
    from fedcohort.experiments.tracking import tracker

    experiment = read(config)
    folder = out or Path("runs") / config.stem.removeprefix("paper:")
    parameters = dataclasses.asdict(experiment)
    with RoundBars(experiment.rounds) as bars, tracker(track, folder, parameters) as log:

        def on_round(records: Sequence[RoundRecord]) -> None:
            log(records)
            bars(experiment.policy.name, records)

        summaries = run(experiment, folder, resume=resume, on_round=on_round)
    if format is Format.json:
        show_json({"folder": str(folder), "seeds": summaries})
        return
    from fedcohort.report.terminal import summary_table

    show(summary_table(summaries, f"{experiment.policy.name}: {folder}"))
