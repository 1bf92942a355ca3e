"""A few seconds of what `make soak` does for longer, and a release killed at every moment."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import jobs
import kills
import load
from killed import Process

FUZZ = Path(__file__).with_name("fuzz.py")


def test_only_our_errors_come_out_of_damaged_files(tmp_path):
    command = [sys.executable, str(FUZZ), "--seconds", "240", "--count", "150"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) > 15, done.stderr[-2000:]
    assert {r["target"]: r["errors"] for r in results if r["errors"]} == {}
    assert min(result["trials"] for result in results) > 0


@pytest.mark.parametrize("job", ["compare", "flower"])
def test_a_killed_job_ends_like_a_calm_one(job):
    """Registries are killed at every step in tests/personalize, releases below."""
    done = kills.trial(job, kills=3, seconds=200, seed=1)
    assert kills.failures(done) == 0, done
    assert done["kills"] >= 1


@pytest.mark.parametrize("arguments", [jobs.sketch_arguments, jobs.one_sketch_arguments])
def test_a_release_killed_at_every_second_moment_is_paid_for_once_and_delivered(
    arguments, tmp_path
):
    """Before, 130 of 152 kills lost what was paid."""
    job = dataclasses.replace(jobs.PAID, arguments=arguments)
    jobs.write_records(tmp_path, clients=2)
    calm = kills.calm(job, tmp_path, tmp_path / "calm")
    for moment in range(1, calm.moments + 1, 2):
        folder = tmp_path / f"killed-{moment}"
        folder.mkdir()
        assert Process(job, tmp_path, folder, moment).killed()
        if not job.done(folder):
            Process(job, tmp_path, folder).finish()
            assert not [*folder.glob("*.undelivered/*")]
        assert job.result(folder) == calm.result, moment


@pytest.mark.parametrize("case", ["policy sketch-match", "gate sketch-to-skip"])
def test_a_session_stays_right_under_load(case):
    """Every policy meets the same contract in tests/policies; here are many clients."""
    done = load.soak(case, clients=3000, rounds=16, seconds=60)
    assert (done["error"], done["rounds"]) == (None, 16)
