"""A few kills of what `make soak` does for longer; the driver finds a job that loses data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kills

CARELESS = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
for i in range(40):
    with open(folder / "log", "a") as file:
        file.write("x")
    time.sleep(0.025)
"""


@pytest.mark.parametrize("job", ["sketch", "budget"])
def test_a_killed_job_ends_like_a_calm_one(tmp_path, job):
    """Restarts of `run` and of a Flower server are also tested where those are."""
    done = kills.trial(job, tmp_path, kills=1, seconds=10, seed=1)
    assert kills.failures(done) == 0, done
    assert done["finished"] >= 1


def test_a_job_that_counts_twice_after_a_kill_would_be_seen(tmp_path, monkeypatch):
    careless = kills.Job(
        CARELESS,
        lambda inputs, folder: [folder],
        lambda folder: (folder / "log").read_text(),
        paid=lambda folder: len((folder / "log").read_text()),
    )
    monkeypatch.setitem(kills.JOBS, "careless", careless)
    done = kills.trial("careless", tmp_path, kills=3, seconds=60)
    assert done["kills"] >= 1
    assert done["differences"] >= 1
    assert done["double payments"] >= 1


def test_a_job_without_its_packages_is_named(monkeypatch):
    monkeypatch.setattr(kills.importlib.util, "find_spec", lambda name: None)
    assert kills.JOBS["flower"].missing == ["flwr", "torch", "pytest"]
    assert kills.JOBS["budget"].missing == []
