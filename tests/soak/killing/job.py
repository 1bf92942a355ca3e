"""What every job has in common: a process that can be started again after a kill."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLI = "from fedcohort.cli import main; main()"
CLI_NEEDS = ("typer", "rich")


@dataclass(frozen=True)
class Job:
    """A process that writes into a folder and can be started again.

    Parameters
    ----------
    script : str
        Python code; its arguments are those of `arguments`.
    arguments : callable
        From the folder of inputs and that of this trial to the arguments.
    result : callable
        What a finished folder holds, to compare with that of a calm run.
    needs : tuple of str
        Packages without which the job cannot run.
    imports : tuple of str
        Modules that are imported once, before processes are forked.
    prepare : callable, optional
        Writes inputs, once for all trials.
    held : callable, optional
        What must not be lost by a kill, as a set.
    paid : callable, optional
        How many releases were paid for.
    done : callable, optional
        Whether a killed process had delivered everything, so that nobody would start it again.
    continues : bool
        Whether a restart goes on where the kill was, or begins again.
    """

    script: str
    arguments: Callable[[Path, Path], list[Any]]
    result: Callable[[Path], Any]
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda inputs: None
    held: Callable[[Path], set[Any]] = lambda folder: set()
    paid: Callable[[Path], int] = lambda folder: 0
    done: Callable[[Path], bool] = lambda folder: False
    continues: bool = True

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]
