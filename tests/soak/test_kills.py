"""A few kills of what `make soak` does for longer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kills


@pytest.mark.parametrize("job", ["run", "sketch", "budget", "registry", "flower"])
def test_a_killed_job_ends_like_a_calm_one(tmp_path, job):
    if kills.JOBS[job].missing:
        pytest.skip(f"needs {kills.JOBS[job].missing}")
    done = kills.trial(job, tmp_path, kills=3, seconds=200, seed=1)
    assert kills.failures(done) == 0, done
    assert done["kills"] >= 1
