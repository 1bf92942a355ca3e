"""Comparisons and sweeps on a cluster leave the files that one process leaves."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from fedcohort.distribute import run_all
from fedcohort.exceptions import ConfigError
from fedcohort.experiments import compare as local
from fedcohort.experiments.compare import Setting, expand, in_turn, run_several
from fedcohort.experiments.config import NamedConfig

SMALL = dataclasses.replace(
    local.DEFAULT_SETTING, rounds=4, seeds=(0, 1), checkpoint_every=2, device="cpu"
)
POLICIES = [NamedConfig("uniform"), NamedConfig("power-of-choice", {"d": 8}), NamedConfig("oort")]


def lines(folder, name):
    return (folder / name / "rounds.jsonl").read_bytes()


def test_compare_equals_a_local_run(connected, tmp_path):
    here, there, seen = tmp_path / "here", tmp_path / "there", []
    expected = local.compare(SMALL, POLICIES, here)

    def on_round(name, records):
        seen.append((name, records[0].round, len(records)))

    found = local.compare(SMALL, POLICIES, there, on_round=on_round, runner=run_all)
    for policy in POLICIES:
        assert lines(there, policy.name) == lines(here, policy.name)
    assert [(r.policy, r.summaries, r.histories) for r in found] == [
        (r.policy, r.summaries, r.histories) for r in expected
    ]
    assert sorted(seen) == sorted((p.name, n, 2) for p in POLICIES for n in range(1, 5))
    with pytest.raises(ConfigError, match="--resume"):
        local.compare(SMALL, POLICIES, there, runner=run_all)
    other = dataclasses.replace(SMALL, cohort_size=SMALL.cohort_size + 1)
    with pytest.raises(ConfigError, match="cohort_size"):  # raised on a worker, shown as here
        run_all([Setting("uniform", other)], there, resume=True)


HELD = """
import time
from pathlib import Path
from fedcohort.policies import Uniform

class Held(Uniform):
    \"\"\"Waits in its seventh round until a file is there.\"\"\"

    def select(self, round, signals, rng):
        while round.number == 6 and not Path(__file__).with_name("go").exists():
            time.sleep(0.02)
        return super().select(round, signals, rng)
"""


def test_a_node_killed_mid_job_changes_nothing(connected, tmp_path):
    """Both nodes are at work when one is killed, so one run is cut off and moves to the other."""
    (tmp_path / "held.py").write_text(HELD)
    go = tmp_path / "go"
    settings = expand(
        {
            "rounds": 12,
            "device": "cpu",
            "seeds": [0, 1],
            "checkpoint_every": 4,
            "policy": f"{tmp_path}/held.py:Held",
            "sweep": {"local.lr": [0.1, 0.2]},
        }
    )
    here, there = tmp_path / "here", tmp_path / "there"
    go.touch()
    in_turn(settings, here)
    go.unlink()
    at_death = {}

    def count(name):
        path = there / name / "rounds.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def kill():
        deadline = time.monotonic() + 200
        while min(count(name) for name, _ in settings) < 12 and time.monotonic() < deadline:
            time.sleep(0.02)
        at_death.update({name: count(name) for name, _ in settings})
        connected.remove_node(next(iter(connected.worker_nodes)), allow_graceful=False)
        go.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    results = run_several(settings, there, runner=run_all)
    killer.join()
    connected.add_node(num_cpus=1, object_store_memory=100 << 20)
    assert set(at_death.values()) == {12}  # six rounds of two seeds, in both runs
    assert all(result.finished for result in results)
    for name, _ in settings:
        assert lines(there, name) == lines(here, name)
