"""What a result file says about where it comes from.

Where there is no git checkout, as on a machine that is lent for a while, `source` tells which code
ran: the same commit gives the same hash everywhere.
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
    root = Path(__file__).resolve().parent
    if path.is_relative_to(root.parent):
        return str(path.relative_to(root.parent))
    return f"benchmarks/results/{path.name}" if path.suffix in (".json", ".svg") else path.name


def _commit() -> str:
    """Return the commit, "-dirty" if files differ from it; results are output and do not count."""
    results = ":(top,exclude)benchmarks/results"
    try:
        name = _git("describe", "--always", "--exclude", "*")
        changed = _git("diff", "--name-only", "HEAD", "--", ":(top)", results)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FEDCOHORT_COMMIT", "unknown")
    return f"{name}-dirty" if changed else name


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _gpu() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
