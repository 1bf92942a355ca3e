"""``fedcohort watch``: the report of a run in a browser, while the run goes on."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcohort.cli.show import RunFolders
from fedcohort.exceptions import ConfigError


def command(
    runs: RunFolders,
    port: Annotated[
        int, typer.Option(help="Port on this machine; 0 picks a free one.", min=0, max=65535)
    ] = 0,
) -> None:
    """Show the report of runs in a browser and update it while they go on.

    Only this machine can open it, and nothing can be changed through it. Ctrl-C stops it.

    Example: `fedcohort watch runs/compare`
    """
    from fedcohort.experiments.results import run_folders
    from fedcohort.report.watch import ADDRESS, server

    for folder in runs:
        run_folders(folder)  # a wrong folder is reported before anything starts
    try:
        serving = server(runs, port)
    except OSError as error:
        raise ConfigError(f"watch --port {port}: {error.strerror}; choose another port") from None
    typer.echo(f"Open http://{ADDRESS}:{serving.server_port}/ (Ctrl-C stops)")
    try:
        serving.serve_forever()
    except KeyboardInterrupt:
        typer.echo("Stopped.")
    finally:
        serving.server_close()
