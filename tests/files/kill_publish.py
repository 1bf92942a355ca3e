"""Kill a private release at every step that changes a file, then ask for it again.

Run by `test_publish.py` as a process of its own: python kill_publish.py FOLDER one|by
Prints, for every step, whether the sketches are there and what was spent.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path

from fedcohort.cli import invoke

STEPS = ("replace", "unlink", "mkdir", "fsync")


def die_at(step: int) -> None:
    """End the process, as kill -9 does, before the given one of the calls that change files."""
    left = [step]

    def wrap(real):
        def call(*arguments, **options):
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1
            return real(*arguments, **options)

        return call

    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))
    Path.unlink = wrap(Path.unlink)
    Path.mkdir = wrap(Path.mkdir)


def command(folder: Path, by: bool, force: bool) -> list[str]:
    where = ["-o", str(folder / "out"), "--by", "who"] if by else ["-o", str(folder / "a.sketch")]
    budget = ["--budget", str(folder / "b.json"), "--budget-epsilon", "1", "--epsilon", "0.7"]
    data = [
        str(folder.parent / "data.csv"),
        "--columns",
        "u,v",
        "--set=rows=20",
        "--format",
        "json",
    ]
    return ["sketch", *data, *where, *budget, *(["--force"] if force else [])]


def run(arguments: list[str], step: int | None = None) -> int:
    """Run a command in a child, killed at a step."""
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        if step is not None:
            die_at(step)
        os._exit(invoke(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _undelivered(ledger: Path) -> int:
    return len(json.loads(ledger.read_text()).get("undelivered", [])) if ledger.exists() else 0


def main(root: str, mode: str) -> None:
    by, step = mode == "by", 0
    run_once = Path(root) / f"{mode}-loaded"
    run_once.mkdir()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        invoke(command(run_once, by, force=False))  # imported and compiled here for the children
    while True:
        folder = Path(root) / f"{mode}-{step}"
        folder.mkdir()
        killed = run(command(folder, by, force=False), step)
        there = len(list(folder.rglob("*.sketch")))
        owed = _undelivered(folder / "b.json")
        again = run(command(folder, by, force=True))
        if killed == 0:
            break
        found = sorted(p.name for p in folder.rglob("*.sketch"))
        held = json.loads((folder / "b.json").read_text())
        spent = held["spent"]["epsilon"]
        kept = len(list(folder.glob("b.json.undelivered/*")))
        print(json.dumps([step, killed, there, again, found, spent, kept, owed]), flush=True)
        step += 3 if by else 1


if __name__ == "__main__":
    main(*sys.argv[1:])
