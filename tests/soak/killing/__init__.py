"""Processes that are killed while they write."""

from .jobs import JOBS, Job
from .process import FORK, Process

__all__ = ["FORK", "JOBS", "Job", "Process"]
