"""A few seconds of what `make soak` does for longer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import kills
import load

FUZZ = Path(__file__).with_name("fuzz.py")


def test_only_our_errors_come_out_of_damaged_files(tmp_path):
    command = [sys.executable, str(FUZZ), "--seconds", "240", "--count", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) > 15, done.stderr[-2000:]
    assert {r["target"]: r["errors"] for r in results if r["errors"]} == {}
    assert min(result["trials"] for result in results) > 0


@pytest.mark.parametrize("job", ["run", "flower"])
def test_a_killed_job_ends_like_a_calm_one(job):
    """Releases and registries are killed at every step in tests/files and tests/personalize."""
    done = kills.trial(job, kills=3, seconds=200, seed=1)
    assert kills.failures(done) == 0, done
    assert done["kills"] >= 1


@pytest.mark.parametrize("case", ["policy sketch-match", "gate sketch-to-skip"])
def test_a_session_stays_right_under_load(case):
    """Every policy meets the same contract in tests/policies; here are many clients."""
    done = load.soak(case, clients=3000, rounds=16, seconds=60)
    assert (done["error"], done["rounds"]) == (None, 16)
