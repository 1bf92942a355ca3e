"""Flower's own simulation, with its Ray backend and its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedcohort.cli import invoke
from fedcohort.experiments.results import read
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
PARTS = [
    {
        "policy": "power-of-choice",
        "options": {"d": 4},
        "cohort_size": 3,
        "seed": 7,
        "rounds": 3,
        "timeout": 60,
    },
    {
        "policy": "race-softmax",
        "gate": "sketch-to-skip",
        "gate_options": {"threshold": 0.6, "k": 20, "max_skips": 1},
        "cohort_size": 8,
        "seed": 7,
        "rounds": 2,
        "timeout": 60,
    },
]
LIMIT = 900  # seconds for what takes some twenty on a quiet machine
ATTEMPTS = 3  # Ray gives up if it cannot start in 30 seconds, which a busy machine may need
pytestmark = pytest.mark.timeout(2 * LIMIT)
LIES = {"client-1": "nan", "client-3": "shape", "client-5": "huge", "client-6": "nan update"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run the plan in a process of its own: Ray takes over signals and standard streams."""
    folder = tmp_path_factory.mktemp("simulation")
    names = ("power-of-choice", "race-softmax")
    parts = [{**p, "out": str(folder / "runs" / n)} for p, n in zip(PARTS, names, strict=True)]
    plan = {"parts": parts, "lies": LIES, "out": str(folder / "out.json")}
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
    found[0]["runs"] = folder / "runs"
    return found


def test_a_flower_run_has_the_report_page_of_a_simulation(results, tmp_path):
    """The same command as for a simulation, on what ``CohortStrategy(out=...)`` left."""
    pytest.importorskip("altair")
    from fedcohort.report.content import content

    path = tmp_path / "report.html"
    assert invoke(["report", str(results[0]["runs"]), "-o", str(path)]) == 0
    page = path.read_text()
    for name in ("power-of-choice", "race-softmax", "client-3", "flwr"):
        assert name in page
    best = max(r["accuracy"] for r in results[0]["history"])
    page = content(read(results[0]["runs"]))
    accuracy = {row[0].text: row[1].value for row in page.table.rows}
    assert page.finished and sorted(accuracy) == ["power-of-choice", "race-softmax"]
    assert accuracy["power-of-choice"] == pytest.approx(100 * results[0]["accuracies"][-1])
    assert max(max(curve.mean) for curve in page.curves) >= best


def simulated(digits, policy, part, gate=None):
    simulation = Simulation(
        digits.federation,
        digits.model(),
        policy,
        cohort_size=part["cohort_size"],
        gate=gate,
        local=digits.local,
        aggregation="size-weighted",
        seeds=(part["seed"],),
        device="cpu",
    )
    return [simulation.step()[0] for _ in range(part["rounds"])]


def test_cohorts_accuracies_and_bytes_are_the_simulators(results, digits):
    records = simulated(digits, PowerOfChoice(d=4), PARTS[0])
    history = results[0]["history"]
    assert [tuple(r["selected"]) for r in history] == [r.selected for r in records]
    assert [tuple(r["finished"]) for r in history] == [r.finished for r in records]
    assert results[0]["accuracies"] == pytest.approx([r.accuracy for r in records], abs=1e-4)
    assert [r["bytes_up"] for r in history] == [r.bytes_up for r in records]
    assert [r["bytes_down"] for r in history] == [r.bytes_down for r in records]


def test_the_ledger_counts_what_crossed(results):
    assert results[0]["ledger"] == results[0]["crossed"]
    assert results[0]["ledger"]["down"] > 0
    # An update that was refused counts with its .npy headers, 128 bytes for each of six arrays.
    refused = results[1]["refused"]["invalid"]
    assert results[1]["ledger"]["down"] == results[1]["crossed"]["down"]
    assert results[1]["ledger"]["up"] == results[1]["crossed"]["up"] + refused * 6 * 128
    assert results[1]["ledger"]["up"] > 100_000_000  # the sketch of 100 MB did cross


def test_hostile_readings_and_updates_are_dropped_and_counted(results, digits):
    liars = {client for client, lie in LIES.items() if lie != "nan update"}
    assert results[1]["known"] == [c for c in digits.clients if c not in liars]
    assert results[1]["dropped"] == {"race_sketch": len(liars)}
    assert results[1]["refused"] == {"invalid": 1}
