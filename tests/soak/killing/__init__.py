"""Every job that is killed while it writes, and the process that does its work."""

from __future__ import annotations

from . import experiments, flower, registry, releases
from .job import Job
from .process import FORK, Process

JOBS = {
    "run": experiments.RUN,
    "compare": experiments.COMPARE,
    "sketch": releases.SKETCH,
    "registry": registry.REGISTRY,
    "budget": releases.BUDGET,
    "flower": flower.FLOWER,
}

__all__ = ["FORK", "JOBS", "Job", "Process"]
