"""What a result file says about where it comes from; `source` is a hash of the code that ran."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from fedcohort import provenance as package
from fedcohort.exceptions import DataError

STARTED = os.getloadavg()[0]
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ":(top,exclude)benchmarks/results"
COMPARED = (
    *("numpy", "scipy", "scikit-learn", "numba", "torch"),
    *("flwr", "ray", "pfl", "dppy", "datasketch"),
)


def provenance(device: str = "auto", scripts: bool = True) -> dict[str, Any]:
    """The command, the code, the machine and the versions behind a result.

    `device` is where it was made; `scripts` is whether scripts of this folder ran.
    """
    torch = sys.modules.get("torch")  # of which some scripts do without
    has_gpu = torch is not None and device != "cpu" and torch.cuda.is_available()
    return {
        "command": shlex.join(["python", *map(_without_place, sys.argv)]),
        "commit": _commit(),
        "source": source_digest(scripts),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": None if torch is None else torch.get_num_threads(),
        "device": "cuda" if has_gpu else "cpu",
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "cuda": torch.version.cuda if has_gpu else None,
        "versions": package.provenance(COMPARED)["versions"],
    }


def write(path: str | os.PathLike[str], result: Any) -> None:
    """Write a result with its provenance."""
    load = [round(STARTED, 1), round(os.getloadavg()[0], 1)]
    made = {**provenance(), "load at the start and at the end": load}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"provenance": made, "result": result}, indent=1) + "\n")


def _without_place(argument: str) -> str:
    """A word of the command, without where on this machine things lie."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return f"benchmarks/results/{path.name}" if path.suffix in (".json", ".svg") else path.name


@cache
def source_digest(scripts: bool = True, root: Path = ROOT) -> str:
    """A hash of the code that makes a result: the package, and of `benchmarks` what runs it."""
    names = "*.py" if scripts else "parts.py"
    files = [*(root / "src").rglob("*"), *(root / "benchmarks").glob(names)]
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in files if p.suffix in (".py", ".toml")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def cpu_name() -> str:
    """The model of this machine's processor."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    return found[1] if found else platform.processor()


def clean_commit() -> str:
    """The commit of this checkout; DataError unless its code is that of the commit."""
    name = _commit()
    if name == "unknown" or name.endswith("-dirty"):
        raise DataError(
            f"the code differs from its commit ({name}): results are joined in a clean "
            "checkout, so that they can name their commit"
        )
    return _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])


def _commit(root: Path = ROOT) -> str:
    """The commit, "-dirty" if files differ from it; results are output and do not count.

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


def _output(words: list[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
