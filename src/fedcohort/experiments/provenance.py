"""Where a result comes from: the code, its commit, the data, the machine and the versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import fedcohort
from fedcohort.datasets import Dataset
from fedcohort.exceptions import ConfigError, DataError

COMPARED = (
    *("numpy", "scipy", "scikit-learn", "numba", "torch"),
    *("flwr", "ray", "pfl", "dppy", "datasketch"),
)


def checkout() -> Path:
    """Return the folder of the checkout that this code runs from."""
    root = Path(fedcohort.__file__).resolve().parents[2]
    if not (root / "benchmarks").is_dir():
        raise ConfigError(
            f"{root} has no folder benchmarks: this suite runs scripts that are not part of the "
            "package; run it in a checkout"
        )
    return root


@cache
def source_digest(scripts: Path | None = None) -> str:
    """Return a hash of the package's code and settings, the same on every machine.

    `scripts` is a folder whose Python files count too.
    """
    root = Path(fedcohort.__file__).parent
    files = [(p.relative_to(root), p) for p in root.rglob("*") if p.suffix in (".py", ".toml")]
    if scripts is not None:
        files += [(Path("benchmarks", p.name), p) for p in scripts.glob("*.py")]
    digest = hashlib.blake2b(digest_size=16)
    for name, path in sorted(files):
        digest.update(name.as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def data_digest(dataset: Dataset) -> str:
    """Return a hash of a data set's arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (dataset.x, dataset.y, dataset.x_test, dataset.y_test):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def provenance(device: str = "auto", scripts: Path | None = None) -> dict[str, Any]:
    """Return the command, the code, the machine and the versions behind a result."""
    import torch

    from fedcohort.simulate.local import device_name

    cuda = device_name(device).startswith("cuda")
    return {
        "command": shlex.join(["fedcohort", *map(_without_folder, sys.argv[1:])]),
        "source": source_digest(scripts),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": "cuda" if cuda else "cpu",
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "versions": {"python": platform.python_version(), **versions(COMPARED)},
    }


def _without_folder(word: str) -> str:
    """Leave out where on this machine a file lies."""
    return Path(word).name if Path(word).is_absolute() else word


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each package, or "absent"."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def cpu_name() -> str:
    """Return the model of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def commit() -> str:
    """Return the commit of the checkout that this code runs from; DataError unless it is clean."""
    root = Path(fedcohort.__file__).resolve().parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            raise DataError(
                f"{root} is not in a git checkout: results are joined in one, so that they can "
                "name their commit"
            ) from None
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", str(root))
    if changed:
        raise DataError(f"the code differs from its commit: {changed.splitlines()[0].strip()}")
    return git("rev-parse", "HEAD")
