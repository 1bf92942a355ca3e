"""A few kills of what `make soak` does for longer; the driver finds a job that loses data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kills

CARELESS = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
for i in range(40):
    with open(folder / "log", "a") as file:
        file.write("x")
"""

UNSYNCED = """
import os, sys
from pathlib import Path
path = Path(sys.argv[1]) / "log"
if not path.exists():
    with open(path, "w") as file:
        file.write("x" * 1000)
        file.flush()
        os.fsync(file.fileno())
"""


@pytest.mark.parametrize("job", ["sketch", "budget", "registry"])
def test_a_killed_job_ends_like_a_calm_one(tmp_path, job):
    """Restarts of `run` and of a Flower server are also tested where those are."""
    done = kills.trial(job, tmp_path, kills=3, seconds=200, seed=1)
    assert kills.failures(done) == 0, done
    assert done["kills"] >= 1


def log_of(folder):
    return (folder / "log").read_text()


def test_a_job_that_counts_twice_after_a_kill_would_be_seen(tmp_path, monkeypatch):
    arguments = lambda inputs, folder: [folder]  # noqa: E731
    careless = kills.Job(CARELESS, arguments, log_of, paid=lambda folder: len(log_of(folder)))
    monkeypatch.setitem(kills.JOBS, "careless", careless)
    done = kills.trial("careless", tmp_path, kills=3, seconds=200)
    assert done["kills"] >= 1
    assert done["differences"] >= 1
    assert done["double payments"] >= 1


def test_a_file_that_is_not_whole_before_its_sync_would_be_seen(tmp_path, monkeypatch):
    """The job believes a file that it finds, although a power cut may have come before its sync."""
    unsynced = kills.Job(UNSYNCED, lambda inputs, folder: [folder], log_of)
    monkeypatch.setitem(kills.JOBS, "unsynced", unsynced)
    done = kills.trial("unsynced", tmp_path, kills=20, seconds=200)
    assert done["torn"] >= 1
    assert done["differences"] >= 1


def test_a_job_without_its_packages_is_named(monkeypatch):
    monkeypatch.setattr(kills.importlib.util, "find_spec", lambda name: None)
    assert kills.JOBS["flower"].missing == ["flwr", "torch", "pytest"]
    assert kills.JOBS["budget"].missing == []
