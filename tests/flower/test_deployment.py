"""A deployment on this machine: one SuperLink, SuperNodes that die and join, real connections.

Nothing here depends on the speed of the machine: what happens next waits for a file or for a line
of a log, and the app's server waits for every client that will answer (`trial.server_app`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tests.flower.app.trial import task

from fedcohort.simulate import Simulation

APP = Path(__file__).parent / "app"
BIN = Path(sys.executable).parent
TIMEOUT = 5  # seconds that a client that never answers costs
DEADLINE = 4  # seconds, which are over before the late client is let go
SLACK = 60  # seconds; looking for replies takes time on a busy machine
LIMIT = 900  # seconds for what takes some twenty on a quiet machine
NODES, SIZE = 3, 2  # few: each node is two processes, and each message starts another
# With this seed the victim trains in round 2 and the newcomer in round 3, whether or not the
# SuperLink has noticed by then that the victim is gone, which takes a minute.
SEED, VICTIM = 4, "client-0"
pytestmark = pytest.mark.timeout(3 * LIMIT)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def save(folder):
    """Write the clients' data to a file and return its name."""
    whole, arrays = task.federation(), {}
    for client, part in whole.parts.items():
        arrays[f"{client}.x"], arrays[f"{client}.y"] = whole.dataset.x[part], whole.dataset.y[part]
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


class Deployment:
    """Processes of a federation, each with its children in a group that can be ended."""

    def __init__(self, folder, plan):
        self.folder, self.port = folder, free_port()
        self.processes = {}
        home = folder / "home"
        home.mkdir()
        connection = f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{connection}'
        )
        self.environment = {
            **os.environ,
            "FEDCOHORT_TRIAL": json.dumps(plan),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, name, *command):
        with open(self.folder / f"{name}.log", "w") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                start_new_session=True,
            )

    def start_link(self):
        options = ["--insecure", "--port", str(self.port)]
        disabled = "--disable-runtime-dependency-installation"
        self.start("link", str(BIN / "flower-superlink"), *options, disabled)
        self.wait_for(self._healthy, "the SuperLink does not start")

    def _healthy(self):
        with contextlib.suppress(OSError):
            address = f"http://127.0.0.1:{self.port}/health"
            return urllib.request.urlopen(address, timeout=2).status == 200
        return False

    def start_node(self, number):
        options = ["--insecure", "--superlink", f"127.0.0.1:{self.port}"]
        config = f"partition-id={number} num-partitions=8"
        ports = ["--port", str(free_port()), "--node-config", config]
        self.start(f"client-{number}", str(BIN / "flower-supernode"), *options, *ports)

    def start_run(self):
        self.start("run", str(BIN / "flwr"), "run", str(APP), "here")

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, condition, failure):
        end = time.monotonic() + LIMIT
        while not condition():
            ended = [n for n, process in self.processes.items() if process.poll() not in (None, 0)]
            if ended or time.monotonic() > end:
                pytest.fail(f"{failure}; ended: {ended}\n{self.logs()}")
            time.sleep(0.1)

    def wait_for_fault(self, fault):
        self.wait_for(Path(fault["file"]).exists, f"it does not come to {fault}")

    def results(self, path, failure):
        """Wait for the results of a run's parts."""
        self.wait_for(path.exists, failure)
        results = json.loads(path.read_text())
        if isinstance(results, str):
            pytest.fail(f"{failure}: {results}")
        return results

    def kill(self, name):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes.pop(name).wait(timeout=LIMIT)

    def close(self):
        for name in list(self.processes):
            self.kill(name)

    def logs(self):
        parts = [f"--- {p.name}\n{p.read_text()[-1500:]}" for p in self.folder.glob("*.log")]
        return "\n".join(parts)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What happened in two runs, the first of them before everything was killed.

    Three clients. In the second round one is killed while it trains; a fourth then joins. Then all
    processes are killed. With a new SuperLink and two restarted nodes, a second run continues from
    the checkpoint, and one client fails. A third node joins for rounds that do not wait: in the
    first, one client sleeps until it is over, and one is killed.
    """
    folder = tmp_path_factory.mktemp("deployment")
    part = {"policy": "with-losses", "cohort_size": SIZE, "seed": SEED, "timeout": TIMEOUT}
    part |= {"rounds": 3, "nodes": NODES, "checkpoint": str(folder / "run.ckpt")}
    part |= {"joined": {"after": 2, "nodes": NODES + 1}}

    def fault(client, number, does):
        file = str(folder / f"{client} {number} {does}")
        return {"client": client, "round": number, "does": does, "file": file}

    faults = [fault(VICTIM, 2, "hang")]
    plan = {"parts": [part], "faults": faults, "out": str(folder / "first.json")}
    plan["data"] = save(folder)
    found = {}
    first = Deployment(folder, plan)
    try:
        first.start_link()
        for number in range(NODES):
            first.start_node(number)
        first.start_run()
        first.wait_for_fault(faults[0])
        first.kill(VICTIM)
        first.start_node(NODES)
        (found["first"],) = first.results(folder / "first.json", "the first run does not end")
    finally:
        first.close()
    until = str(folder / "let go")
    parts = [{**part, "rounds": 4, "nodes": 2}, {
        "policy": "uniform", "cohort_size": 2, "seed": 0, "timeout": LIMIT, "rounds": 6, "nodes": 3,
        "pace": {"over_select": 1.5, "deadline": DEADLINE, "late": "next"}, "late until": until,
    }]  # fmt: skip
    faults = [fault("client-0", 4, "raise"), {**fault("client-1", 1, "late"), "until": until}]
    faults += [fault("client-2", 1, "hang")]
    plan |= {"parts": parts, "faults": faults, "out": str(folder / "second.json")}
    (folder / "second").mkdir()
    second = Deployment(folder / "second", plan)
    try:
        second.start_link()
        second.start_node(0)
        second.start_node(1)
        second.start_run()
        second.wait_for_fault(faults[0])
        second.start_node(2)
        second.wait_for_fault(faults[2])
        second.kill("client-2")
        results = second.results(folder / "second.json", "the second run does not end")
        found["second"], found["paced"] = results
    finally:
        second.close()
    return found


def test_cohorts_and_accuracies_are_the_simulators(found):
    result = found["first"]
    simulation = Simulation(
        task.federation(NODES),
        task.model(),
        task.WithLosses(),
        cohort_size=SIZE,
        local=task.local(),
        aggregation="size-weighted",
        seeds=(SEED,),
        device="cpu",
    )
    records = [simulation.step()[0] for _ in range(2)]
    for report, record in zip(result["history"], records, strict=False):
        assert tuple(report["selected"]) == record.selected
    report, record = result["history"][0], records[0]  # a client is killed in the second round
    assert tuple(report["finished"]) == record.finished
    assert (report["bytes_up"], report["bytes_down"]) == (record.bytes_up, record.bytes_down)
    assert result["accuracies"][0] == pytest.approx(record.accuracy, abs=1e-4)


def test_a_node_killed_while_it_trains_costs_at_most_the_timeout(found):
    result = found["first"]
    second = result["history"][1]
    assert set(second["selected"]) - set(second["finished"]) == {VICTIM}
    assert second["failed"] == {VICTIM: "no reply"} and result["refused"] == {"no reply": 1}
    assert f"failed: {VICTIM}" in result["lines"][1]
    assert TIMEOUT <= second["seconds"] < TIMEOUT + result["waited"][1] + SLACK


def test_a_new_node_is_selected_in_a_later_round(found):
    third = found["first"]["history"][2]
    assert f"client-{NODES}" in third["finished"]
    assert VICTIM not in third["selected"]


def test_the_ledger_counts_what_crossed(found):
    result = found["first"]
    assert result["ledger"] == result["crossed"] and result["ledger"]["up"] > 0


def test_a_run_continues_after_the_superlink_was_killed(found):
    """Restarted nodes are the clients that they were: nobody sends a sketch again."""
    first, second = found["first"], found["second"]
    assert [r["round"] for r in second["history"]] == [1, 2, 3, 4]
    assert second["history"][:3] == first["history"]
    assert sorted(second["history"][3]["selected"]) == ["client-0", "client-1"]
    numbers = 64 * 64 + 64 + 64 * 30 + 30 + 30 * 10 + 10
    assert second["history"][3]["bytes_up"] == 4 * numbers + 8  # one model and one loss


def test_a_client_that_fails_is_named_with_its_reason(found):
    fourth = found["second"]["history"][3]
    assert fourth["finished"] == ["client-1"]
    assert "the disk is full" in fourth["failed"]["client-0"]
    assert found["second"]["refused"]["error"] == 1
    assert "failed: client-0" in found["second"]["lines"][3]


def test_rounds_do_not_wait_and_a_late_update_enters_the_one_in_which_it_arrives(found):
    """Two were wanted and three asked: one answered, one slept until the round was over, one died.

    Until it has arrived, the late client is not selected again.
    """
    first, *rest = found["paced"]["history"]
    assert len(first["selected"]) == 3 and first["finished"] == ["client-0"]
    assert sorted(first["cut"]) == ["client-1", "client-2"] and not first["failed"]
    assert DEADLINE <= first["seconds"] < LIMIT / 2
    waiting, arrived = True, 0  # it may be too slow once more, on a busy machine
    for report in rest:
        is_late = "client-1" in report["late"]
        assert set(report["finished"]) <= set(report["selected"])
        assert not (waiting and "client-1" in report["selected"]) and (waiting or not is_late)
        arrived += is_late
        waiting = (waiting and not is_late) or "client-1" in report["cut"]
    assert arrived > 0
