"""``fedcohort run``: the experiment of a TOML file, or all those of its sweep."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli.common import (
    Format,
    FormatOption,
    ImportOption,
    RayOption,
    RoundBars,
    SetOption,
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
    from fedcohort.experiments.compare import Setting
    from fedcohort.experiments.config import Experiment


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
    from fedcohort.experiments.compare import read

    given = overrides({"rounds": rounds, "seeds": seeds}, set_)
    if imports:
        given["imports"] = import_all(imports)
    wanted = read(config, given)
    folder = out or Path("runs") / config.stem.removeprefix("paper:")
    if isinstance(wanted, list):
        _sweep(wanted, folder, resume, ray, format)
    elif ray is not None:
        raise ConfigError(f"--ray spreads a sweep, and {config} has no [sweep] table")
    else:
        _run(wanted, folder, resume, format)


def _run(experiment: Experiment, folder: Path, resume: bool, format: Format) -> None:
    from fedcohort.experiments.run import run
    from fedcohort.report.tables import summary_table

    name = experiment.policy.label
    with RoundBars({name: experiment}) as bars:
        summaries = run(experiment, folder, resume=resume, on_round=partial(bars, name)).summaries
    if format is Format.json:
        show_json({"folder": str(folder), "seeds": summaries})
    else:
        show(summary_table(summaries, f"{name}: {folder}", console().width))


def _sweep(
    settings: list[Setting], folder: Path, resume: bool, ray: str | None, format: Format
) -> None:
    from fedcohort.analysis.comparison import comparison, curves
    from fedcohort.experiments.compare import run_several
    from fedcohort.report.columns import setting_columns
    from fedcohort.report.tables import comparison_table

    with on_cluster(ray), RoundBars(dict(settings)) as bars:
        results = run_several(settings, folder, resume=resume, on_round=bars, runner=runner_on(ray))
    rows = comparison(results)
    if format is Format.json:
        show_json({"folder": str(folder), "runs": rows})
        return
    title, columns = f"{len(settings)} settings: {folder}", setting_columns(results)
    lines, width = curves(results), console().width
    show(comparison_table(rows, lines, results.target, title, width, columns))
