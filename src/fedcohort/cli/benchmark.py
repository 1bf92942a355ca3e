"""``fedcohort benchmark``: run a published suite, or a part of it, and join its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedcohort.cli.common import Format, FormatOption


def command(
    suite: Annotated[
        str, typer.Option(help="A suite of the package, or a TOML file.")
    ] = "selection",
    out: Annotated[Path, typer.Option(help="Folder for the results of each part.")] = Path(
        "benchmark"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Minutes instead of hours; not for publication.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run only what the folder does not hold yet.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option(help="Only settings whose name contains this.")
    ] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Only these variants.")] = None,
    device: Annotated[str, typer.Option(help="Where models train: auto, cpu or cuda.")] = "auto",
    seconds: Annotated[
        float | None, typer.Option(help="Begin no further part after this many seconds.")
    ] = None,
    join: Annotated[
        Path | None, typer.Option(help="Write all parts into this one result file.")
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Run settings x variants x seeds, and keep the results with their provenance.

    Example: `fedcohort benchmark --suite selection --quick --out trial`

    Example: `fedcohort benchmark --suite selection --out parts --resume --join selection.json`
    """
    import dataclasses
    import json

    from rich.console import Console

    from fedcohort.atomic import write_atomically
    from fedcohort.experiments import benchmark
    from fedcohort.registry import lookup

    parts = benchmark.read_suite(suite, quick=quick)
    for label in variant or ():
        lookup("variant", label, {p.variant: p for p in parts})
    chosen = [
        dataclasses.replace(p, experiment=dataclasses.replace(p.experiment, device=device))
        for p in parts
        if (not setting or any(s in p.setting for s in setting))
        and (not variant or p.variant in variant)
    ]
    console = Console(stderr=True)

    def report(part: benchmark.Part, fresh: bool) -> None:
        console.print(f"{'done' if fresh else 'kept'}: {part.setting}, {part.variant}")

    left = benchmark.run_suite(chosen, out, resume=resume, seconds=seconds, on_part=report)
    if left:
        console.print(f"{len(left)} of {len(chosen)} parts are left: continue with --resume")
    if join is not None:
        name = Path(suite).stem
        result = benchmark.join(chosen if quick else parts, out, name, quick=quick)
        write_atomically(join, (json.dumps(result) + "\n").encode())
    if format is Format.json:
        done = [p.file_name for p in chosen if p not in left]
        written = None if join is None else str(join)
        print(json.dumps({"done": done, "left": len(left), "joined": written}))
    elif join is not None:
        console.print(f"wrote {join}")
