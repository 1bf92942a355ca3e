"""Flower's own simulation, with its Ray backend and its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedcohort.policies import PowerOfChoice
from fedcohort.simulate import Simulation

pytest.importorskip("ray")

APP = Path(__file__).parent / "app"
SCRIPT = """
from flwr.simulation import run_simulation
from trial.client_app import app as client
from trial.server_app import app as server
backend = {
    "client_resources": {"num_cpus": 1},
    "init_args": {"address": "local", "num_cpus": 2},  # never another test's cluster
}
run_simulation(server, client, 8, backend_config=backend)
"""
COMMON = {"seed": 7, "timeout": 60}
PARTS = [
    {**COMMON, "policy": "power-of-choice", "options": {"d": 4}, "cohort_size": 3, "rounds": 3},
    {
        **COMMON,
        "policy": "race-softmax",
        "gate": "sketch-to-skip",
        "gate_options": {"threshold": 0.6, "k": 20, "max_skips": 1},
        "cohort_size": 8,
        "rounds": 2,
    },
]
LIMIT = 900  # seconds for what takes some twenty on a quiet machine
ATTEMPTS = 3  # Ray gives up if it cannot start in 30 seconds, which a busy machine may need
pytestmark = pytest.mark.timeout(2 * LIMIT)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run the plan in a process of its own: Ray takes over signals and standard streams."""
    folder = tmp_path_factory.mktemp("simulation")
    plan = {"parts": PARTS, "out": str(folder / "out.json")}
    paths = os.pathsep.join([str(APP), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "FEDCOHORT_TRIAL": json.dumps(plan),
        "PYTHONPATH": paths.rstrip(os.pathsep),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(folder / "home"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # with Ray's 15, other tests leave its workers hardly any time
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", SCRIPT]
    for _ in range(ATTEMPTS):
        with open(folder / "log.txt", "w") as log:
            subprocess.run(
                command,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=LIMIT,
                check=False,
                cwd=folder,
            )
        if "timed out during startup" not in (folder / "log.txt").read_text():
            break
    if not (folder / "out.json").exists():
        pytest.fail((folder / "log.txt").read_text()[-5000:])
    found = json.loads((folder / "out.json").read_text())
    assert not isinstance(found, str), found
    return found


def test_cohorts_accuracies_and_bytes_are_the_simulators(results, digits):
    part = PARTS[0]
    simulation = Simulation(
        digits.federation,
        digits.model(),
        PowerOfChoice(d=4),
        cohort_size=part["cohort_size"],
        local=digits.local,
        aggregation="size-weighted",
        seeds=(part["seed"],),
        device="cpu",
    )
    history, records = results[0]["history"], [simulation.step()[0] for _ in range(part["rounds"])]
    for name in ("selected", "finished", "bytes_up", "bytes_down"):
        assert [r[name] for r in history] == [_plain(getattr(r, name)) for r in records]
    assert results[0]["accuracies"] == pytest.approx([r.accuracy for r in records], abs=1e-4)


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_the_ledger_counts_what_crossed(results):
    for part in results:
        assert part["ledger"] == part["crossed"] and part["ledger"]["down"] > 0
        assert not part["refused"]
