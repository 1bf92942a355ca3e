"""``fedcohort benchmark``: run published suites, or some of their parts, and join the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli.common import Format, FormatOption, show_json

if TYPE_CHECKING:
    from rich.table import Table

    from fedcohort.experiments.repeated import Repetition
    from fedcohort.experiments.suite import Part


def command(
    suite: Annotated[
        list[str] | None,
        typer.Option(help="A suite of the package, or a TOML file. May be repeated."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results of each part.")] = Path(
        "benchmark"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Minutes instead of hours; not for publication.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run only what the folder does not hold yet.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(help="Only parts whose 'SUITE: SETTING, VARIANT' this expression finds."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where models train: auto, cpu or cuda.")] = "auto",
    workers: Annotated[
        str | None,
        typer.Option(help="Processes by device, such as cuda=5,cpu=9; this replaces --device."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Begin no part after this many seconds; workers stop and save."),
    ] = None,
    list_parts: Annotated[bool, typer.Option("--list", help="Print the parts, run none.")] = False,
    join: Annotated[
        Path | None, typer.Option(help="Write all parts of the suite into this one result file.")
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="With --join: run nothing, join what there is of the chosen parts."
        ),
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Only the first seeds of each part, for a check.")
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="Compare with this published result file, seed by seed. May be repeated."
        ),
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Run settings x variants x seeds, and keep the results with their provenance.

    Parts run in the order of their importance. With --workers, a GPU runs light parts first, and
    then a few heavy ones at a time; CPU workers run the parts that need no GPU. What the time limit
    cuts off continues with --resume. With --against, the exit status is 1 if a result differs from
    the published one by more than rounding and the spread over seeds.

    Example: `fedcohort benchmark --suite selection --quick --out trial`

    Example: `fedcohort benchmark --suite selection --out parts --resume --join selection.json`

    Example: `fedcohort benchmark --out parts --resume --workers cuda=12,cpu=2 --seconds 540`

    Example: `fedcohort benchmark --only ', uniform$' --seeds 1 --against selection.json`
    """
    import json
    from dataclasses import asdict

    from rich.console import Console

    from fedcohort.exceptions import ConfigError
    from fedcohort.experiments import benchmark
    from fedcohort.experiments.repeated import DIFFERS, read_published, repetitions, twins
    from fedcohort.experiments.suite import read_suite
    from fedcohort.experiments.workers import parse_workers, run_parts
    from fedcohort.storage import write_atomically

    names = suite or ["selection"]
    every = [part for name in names for part in read_suite(name, quick=quick)]
    if seeds is not None:
        every = [part.first(seeds) for part in every]
    chosen = _chosen(every, only)
    if list_parts and format is Format.json:
        show_json([_row(part) for part in chosen])
        return
    if list_parts:
        for part in chosen:
            print(part.name)
        return
    pairs = twins(chosen, read_published(against)) if against else []
    if join is not None and len(names) > 1:
        raise ConfigError("--join writes one suite: give --suite once")
    console = Console(stderr=True, highlight=False)
    failed: dict[str, str] = {}
    left: list[Part] = []
    stopped: list[str] = []
    if join is not None and partial:
        console.print("joining what there is")
    elif workers is None:
        left = benchmark.run_suite(
            [part.on(device) for part in chosen],
            out,
            resume=resume,
            seconds=seconds,
            progress=True,
            on_part=lambda part, fresh: console.print(
                f"{'done' if fresh else 'kept'}: {part.name}"
            ),
        )
    else:
        outcome = run_parts(
            chosen,
            out,
            parse_workers(workers),
            resume=resume,
            seconds=float("inf") if seconds is None else seconds,
            on_part=lambda part, where, took: console.print(f"{took:6.1f} s, {where}: {part.name}"),
            on_stop=lambda reason: console.print(reason, markup=False),
        )
        left, failed, stopped = outcome.left, outcome.failed, outcome.stopped
    for name, error in failed.items():
        console.print(f"failed: {name}\n{error}", markup=False)
    if left:
        console.print(f"{len(left)} of {len(chosen)} parts are left: continue with --resume")
    if join is not None:
        result = benchmark.join(
            chosen if quick or partial else every,
            out,
            Path(names[0]).stem,
            quick=quick,
            partial=partial,
        )
        write_atomically(join, (json.dumps(result) + "\n").encode())
        console.print(f"wrote {join}")
    repeated = repetitions(pairs, out)
    if format is Format.json:
        unfinished = {part.file_name for part in left}
        done = [
            p.file_name for p in chosen if p.file_name not in unfinished and p.name not in failed
        ]
        written = None if join is None else str(join)
        told = {"done": done, "left": len(left), "failed": failed, "joined": written}
        print(json.dumps(told | {"repeated": [asdict(row) for row in repeated]}))
    elif repeated:
        Console(highlight=False).print(_beside_published(repeated))
    if failed or (left and stopped) or any(row.verdict == DIFFERS for row in repeated):
        raise typer.Exit(1)


def _chosen(parts: list[Part], only: str | None) -> list[Part]:
    """Return the parts whose name the expression finds, the important ones first."""
    from fedcohort.exceptions import ConfigError

    try:
        wanted = re.compile(only or "", re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"--only {only!r} is not a regular expression: {error}") from None
    found = [part for part in parts if wanted.search(part.name)]
    if not found:
        raise ConfigError(f"--only {only!r} matches none of {len(parts)} parts; --list shows them")
    return sorted(found, key=lambda part: part.rank)


def _row(part: Part) -> dict[str, Any]:
    """Return what --list tells machines about a part."""
    names = ("name", "suite", "setting", "variant", "runs_on", "rank", "targets", "file_name")
    return {name: getattr(part, name) for name in names} | {"seeds": part.experiment.seeds}


def _beside_published(rows: list[Repetition]) -> Table:
    """Return how each part compares with the published one, as a table."""
    from rich.table import Table

    table = Table(title="Beside the published results")
    table.add_column("part", overflow="fold")
    for name in ("seeds", "here %", "published %", "apart"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        accuracies = (row.accuracy, row.published_accuracy, row.largest)
        cells = (f"{100 * value:.2f}" for value in accuracies)
        table.add_row(f"{row.setting}, {row.variant}", str(row.seeds), *cells, row.verdict)
    return table
