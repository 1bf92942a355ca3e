"""Where a result comes from: versions and machine.

The command is never stored: its arguments may hold secrets, such as Flower's access token.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable
from typing import Any

PACKAGES = ("fedcohort", "numpy", "scipy", "scikit-learn", "torch")


def provenance(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Return what a run's folder says about how it was made."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {"versions": versions, "machine": platform.machine()}
