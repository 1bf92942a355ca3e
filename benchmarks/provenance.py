"""What a result file says about where it comes from.

An archive of a commit does not know whether its files were changed. `source` tells which code ran:
the same commit gives the same hash everywhere.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedcohort.experiments.provenance import cpu_name, source_digest, versions

STARTED = os.getloadavg()[0]
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ":(top,exclude)benchmarks/results"


def provenance() -> dict[str, Any]:
    """Command, commit, date, machine and versions of this process."""
    return {
        "command": shlex.join(["python", *map(_without_place, sys.argv)]),
        "commit": _commit(),
        "source": source_digest(Path(__file__).parent),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "gpu": _gpu(),
            "system": platform.system(),
            "python": platform.python_version(),
            "load at the start and at the end": [round(STARTED, 1), round(os.getloadavg()[0], 1)],
        },
        "versions": versions(("numpy", "scipy", "scikit-learn", "numba", "torch")),
    }


def write(
    path: str | os.PathLike[str], result: Any, earlier: Sequence[Any] = (), **about: Any
) -> None:
    """Write a result with its provenance, after that of `earlier` runs that it goes on from.

    `about` says more of this run, for example which rows are its own.
    """
    own = {**provenance(), **about}
    content = {"provenance": [*earlier, own] if earlier else own, "result": result}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n")


def _without_place(argument: str) -> str:
    """Leave out where on this machine something lies; results go to benchmarks/results."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return f"benchmarks/results/{path.name}" if path.suffix in (".json", ".svg") else path.name


def _commit(root: Path = ROOT) -> str:
    """Return the commit, "-dirty" if files differ from it; results are output and do not count.

    Without a checkout it is the commit that `git archive` wrote down, or "unknown".
    """
    git = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    try:
        name = _output([*git, "describe", "--always", "--exclude", "*"])
        changed = _output([*git, "diff", "--name-only", "HEAD", "--", ":(top)", RESULTS])
    except (OSError, subprocess.CalledProcessError):
        archived = (root / "benchmarks" / "commit.txt").read_text().strip()
        return "unknown" if archived.startswith("$") else archived
    return f"{name}-dirty" if changed else name


def _gpu() -> str | None:
    try:
        return _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    except (OSError, subprocess.CalledProcessError):
        return None


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
