"""``--ray``: which cluster a command spreads its work over."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedcohort.experiments.several import Runner

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Spread the work over a Ray cluster: 'local' starts one on this machine, 'auto' "
        "finds the running one, or HOST:PORT of its head.",
    ),
]


def on_cluster(address: str | None) -> AbstractContextManager[None]:
    """Be connected to the cluster while the command works; without an address, to none."""
    if address is None:
        return nullcontext()
    from fedcohort.distribute.cluster import cluster

    return cluster(address)


def runner_on(address: str | None) -> Runner:
    """Return what runs several experiments: one after the other, or as tasks of the cluster."""
    if address is None:
        from fedcohort.experiments.several import in_turn

        return in_turn
    from fedcohort.distribute.runs import run_all

    return run_all
