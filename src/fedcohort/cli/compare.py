"""``fedcohort compare``: policies x seeds on one setting."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli.common import (
    Format,
    FormatOption,
    RayOption,
    RoundBars,
    console,
    on_cluster,
    parse_named,
    parse_value,
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
        typer.Option(help="Setting from a TOML file or paper:NAME; options override it."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Data set [digits].")] = None,
    partition: Annotated[
        str | None, typer.Option(help="Split over clients, as name:key=value [shards].")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in the federation [60].")] = None,
    model: Annotated[str | None, typer.Option(help="Reference model [mlp-64-30].")] = None,
    policies: Annotated[
        str, typer.Option(help="Names, by comma, each with options as name:key=value; or 'all'.")
    ] = "all",
    rounds: Annotated[int | None, typer.Option(help="Rounds of training [60].")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds [3].", min=1)] = None,
    cohort_size: Annotated[int | None, typer.Option(help="Clients a round [5].")] = None,
    target: Annotated[float | None, typer.Option(help="Accuracy to reach [0.8].")] = None,
    local: Annotated[
        str | None, typer.Option(help="Local training, as key=value;key=value.")
    ] = None,
    gate: Annotated[
        str | None, typer.Option(help="Hold models back, as name:key=value [none].")
    ] = None,
    threshold: Annotated[
        str | None, typer.Option(help="The gate's threshold: a number or 'auto'.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="'cpu', 'cuda' or 'auto'.")] = None,
    out: Annotated[Path, typer.Option(help="Result folder.")] = Path("runs/compare"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    ray: RayOption = None,
    format: FormatOption = Format.table,
) -> None:
    """Compare selection policies on one setting, by default on label-skewed digits.

    Example: `fedcohort compare --policies uniform,power-of-choice:d=15 --rounds 40 --seeds 3`
    """
    given: dict[str, Any] = {
        "dataset": dataset,
        "partition": partition,
        "clients": clients,
        "model": model,
        "rounds": rounds,
        "seeds": seeds,
        "cohort_size": cohort_size,
        "target": target,
        "local": local,
        "gate": gate,
        "threshold": threshold,
        "device": device,
    }
    setting = make_setting(config, {k: v for k, v in given.items() if v is not None})
    chosen = make_policies(policies)
    _compare(setting, chosen, out, resume, ray, format)


def make_setting(config: Path | None, given: dict[str, Any]) -> Experiment:
    """Return the setting of a file, or the default one, with the given options on top."""
    from fedcohort.experiments.config import dump, parse, read
    from fedcohort.experiments.several import DEFAULT_SETTING

    values = dump(DEFAULT_SETTING if config is None else read(config))
    for key, value in given.items():
        if key in ("dataset", "clients"):
            values["data"][key] = value
        elif key == "partition":
            name, options = parse_named(value)
            values["data"] |= {"partition": name, "options": options}
        elif key == "model":
            values["model"]["name"] = value
        elif key == "seeds":
            values["seeds"] = list(range(value))
        elif key == "gate":
            name, options = parse_named(value)
            values["gate"] = {"name": name, "options": options}
        elif key == "threshold":
            values["gate"]["options"]["threshold"] = parse_value(value)
        elif key == "local":
            values["local"] |= parse_named(f":{value}")[1]
        else:
            values[key] = value
    return parse(values)


def make_policies(text: str) -> list[NamedConfig]:
    """Read a list of policies with their options."""
    from fedcohort.experiments.config import NamedConfig
    from fedcohort.policies import POLICIES

    if text == "all":
        return [NamedConfig(name) for name in POLICIES]
    chosen = [NamedConfig(*parse_named(part)) for part in text.split(",") if part.strip()]
    names = [policy.name for policy in chosen]
    if not chosen or len(set(names)) < len(names):
        raise ConfigError(f"--policies {text!r}: name each policy once")
    return chosen


def _compare(
    setting: Experiment,
    policies: list[NamedConfig],
    out: Path,
    resume: bool,
    ray: str | None,
    format: Format,
) -> None:
    from fedcohort.experiments.several import compare
    from fedcohort.report.plots import draw_curves
    from fedcohort.report.tables import comparison, curves

    with on_cluster(ray), RoundBars(setting.rounds) as bars:
        results = compare(
            setting, policies, out, resume=resume, on_round=bars, runner=runner_on(ray)
        )
    rows, lines = comparison(results), curves(results)
    title = f"{setting.data.dataset}, {setting.data.clients} clients, {setting.data.partition}"
    draw_curves(lines, out / "curves.png", target=setting.target, title=title)
    draw_curves(lines, out / "bytes.png", over="megabytes", target=setting.target, title=title)
    if format is Format.json:
        show_json({"folder": str(out), "setting": dataclasses.asdict(setting), "policies": rows})
        return
    from fedcohort.report.tables import comparison_table

    title = f"{title}, {len(setting.seeds)} seeds"
    show(comparison_table(rows, lines, setting.target, title, console().width))
    typer.echo(f"Curves, rounds and summaries are in {out}")
