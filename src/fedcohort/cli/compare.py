"""``fedcohort compare``: policies x seeds on one setting."""

from __future__ import annotations

import dataclasses
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
    complete_datasets,
    complete_gates,
    complete_models,
    complete_partitions,
    complete_policies,
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
    from fedcohort.experiments.config import Experiment, NamedConfig


def command(
    config: Annotated[
        Path | None,
        typer.Option(
            help="Setting from a TOML file or paper:NAME; other options override it.",
            autocompletion=complete_settings,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Data set, or FILE.py:FUNCTION [digits].", autocompletion=complete_datasets
        ),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="Split over clients, as name:key=value [shards].",
            autocompletion=complete_partitions,
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Clients in the federation [60; natural: all].")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Reference model, or FILE.py:CLASS [mlp-64-30].", autocompletion=complete_models
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            help="Comma-separated names, each with options as name:key=value,key=value; or 'all'.",
            autocompletion=complete_policies,
        ),
    ] = "all",
    rounds: Annotated[int | None, typer.Option(help="Rounds of training [60].")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds [3].", min=1)] = None,
    cohort_size: Annotated[int | None, typer.Option(help="Clients per round [5].")] = None,
    target: Annotated[float | None, typer.Option(help="Accuracy to reach [0.8].")] = None,
    local: Annotated[
        str | None, typer.Option(help="Local training, as key=value,key=value.")
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            help="Hold models back, as name:key=value [none].", autocompletion=complete_gates
        ),
    ] = None,
    threshold: Annotated[
        str | None, typer.Option(help="The gate's threshold: a number or 'auto'.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="'cpu', 'cuda' or 'auto'.")] = None,
    out: Annotated[Path, typer.Option(help="Result folder.")] = Path("runs/compare"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue in the folder, also with more rounds, seeds or policies.",
        ),
    ] = False,
    imports: ImportOption = None,
    set_: SetOption = None,
    ray: RayOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Compare selection policies on one setting, by default on label-skewed digits.

    Example: `fedcohort compare --policies uniform,power-of-choice:d=15 --rounds 40 --seeds 3`

    Example: `fedcohort compare --import my_policy.py --policies uniform,my-policy`
    """
    given: dict[str, Any] = {
        "data.dataset": dataset,
        "data.partition": partition,
        "data.clients": clients,
        "model": model,
        "rounds": rounds,
        "seeds": seeds,
        "cohort_size": cohort_size,
        "target": target,
        "local": local,
        "gate": gate,
        "gate.options.threshold": threshold,
        "device": device,
    }
    setting = make_setting(config, overrides(given, set_), import_all(imports))
    _compare(setting, make_policies(policies), out, resume, ray, format)


def make_setting(config: Path | None, given: dict[str, Any], imports: list[str]) -> Experiment:
    """Return the setting of a file, or the default one, with the given keys on top."""
    from fedcohort.experiments.compare import DEFAULT_SETTING
    from fedcohort.experiments.config import dump, parse, put, read
    from fedcohort.options import parse_value

    values = dump(DEFAULT_SETTING if config is None else read(config))
    if "data.partition" in given:
        values["data"]["options"] = {}  # those of another partition
    if imports:
        values["imports"] = [*values["imports"], *imports]
    for key, value in given.items():
        put(values, key, parse_value(value) if key == "gate.options.threshold" else value)
    return parse(values)


def make_policies(text: str) -> list[NamedConfig]:
    """Read a list of policies with their options."""
    from fedcohort.experiments.config import NamedConfig, parse_list
    from fedcohort.policies import POLICIES
    from fedcohort.registry import load_installed

    if text == "all":
        load_installed("policy", POLICIES)
        return [NamedConfig(name) for name in POLICIES]
    chosen = parse_list(text)
    if not chosen:
        raise ConfigError(f"--policies {text!r}: name at least one policy")
    return chosen


def _compare(
    setting: Experiment,
    policies: list[NamedConfig],
    out: Path,
    resume: bool,
    ray: str | None,
    format: Format,
) -> None:
    from fedcohort.analysis.comparison import comparison, curves
    from fedcohort.experiments.compare import compare, settings_of

    experiments = dict(settings_of(setting, policies))
    with on_cluster(ray), RoundBars(experiments) as bars:
        results = compare(
            setting, policies, out, resume=resume, on_round=bars, runner=runner_on(ray)
        )
    rows, lines = comparison(results), curves(results)
    data = setting.data
    title = f"{data.dataset}, {data.num_clients or 'all'} clients, {data.partition}"
    if format is Format.json:
        show_json({"folder": str(out), "setting": dataclasses.asdict(setting), "policies": rows})
        return
    from fedcohort.report.tables import comparison_table

    title = f"{title}, {len(setting.seeds)} seeds"
    show(comparison_table(rows, lines, setting.target, title, console().width))
    typer.echo(f"Rounds and summaries are in {out}; `fedcohort report {out}` makes a page of them")
