"""A few kills of what `make soak` does for longer; the driver finds a job that loses data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kills


@pytest.mark.parametrize("job", ["run", "registry", "budget", "checkpoint"])
def test_a_killed_job_ends_like_a_calm_one(tmp_path, job):
    done = kills.trial(job, tmp_path, kills=2, seconds=30, seed=1)
    assert done["differences"] == 0
    assert done["finished"] >= 1


def test_a_job_that_counts_twice_after_a_kill_would_be_seen(tmp_path, monkeypatch):
    script = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
print("ready", flush=True)
for i in range(20):
    with open(folder / "log", "a") as file:
        file.write("x")
    time.sleep(0.05)
"""
    monkeypatch.setitem(kills.JOBS, "careless", (script, kills.files_of))
    done = kills.trial("careless", tmp_path, kills=3, seconds=60)
    assert done["kills"] >= 1
    assert done["differences"] >= 1
