"""A deployment on this machine: one SuperLink, SuperNodes that die and join, real connections."""

from __future__ import annotations

import contextlib
import itertools
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

from fedcohort.policies import Uniform
from fedcohort.session import Session
from fedcohort.simulate import Simulation

APP = Path(__file__).parent / "app"
BIN = Path(sys.executable).parent
TIMEOUT = 30  # seconds; a round on two busy cores takes about ten
LIMIT = 240
SIZE = 3


def cohorts(seed, available):
    """The cohorts that uniform selection will pick, for the clients of each round."""
    session = Session(Uniform(), cohort_size=SIZE, seed=seed)
    picked = []
    for clients in available:
        picked.append(session.begin(clients, lambda name, clients: {}).clients)
        session.finish({}, picked[-1])
    return picked


def foreseen(clients):
    """Find a seed under which the victim trains in round 3, and the newcomer without it in 4.

    The SuperLink takes a minute to notice that a node is gone, so that round 4 may still be drawn
    from all five clients; the seed works either way.
    """
    before, everybody = clients[:4], clients[:5]
    for seed in itertools.count():
        *_, third = cohorts(seed, [before] * 3)
        for victim in third:
            rest = [c for c in everybody if c != victim]
            last = [cohorts(seed, [*[before] * 3, online])[3] for online in (everybody, rest)]
            if all(clients[4] in picked and victim not in picked for picked in last):
                return seed, victim


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def save(folder, trial):
    """Write the clients' data to a file and return its name."""
    whole, arrays = trial.federation(), {}
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
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
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

    def start_node(self, number, *further):
        options = ["--insecure", "--superlink", f"127.0.0.1:{self.port}", *further]
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
            if time.monotonic() > end:
                pytest.fail(f"{failure}\n{self.logs()}")
            time.sleep(0.2)

    def kill(self, name):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes.pop(name).wait(timeout=20)

    def close(self):
        for name in list(self.processes):
            self.kill(name)

    def logs(self):
        parts = [f"--- {p.name}\n{p.read_text()[-1500:]}" for p in self.folder.glob("*.log")]
        return "\n".join(parts)


@pytest.fixture(scope="module")
def run(tmp_path_factory, trial):
    """Four clients; one is killed while it trains in the third round, a fifth then joins."""
    folder = tmp_path_factory.mktemp("deployment")
    clients = [f"client-{i}" for i in range(8)]
    seed, victim = foreseen(clients)
    marker, out = folder / "training", folder / "out.json"
    part = {"policy": "with-losses", "cohort_size": SIZE, "seed": seed}
    part |= {"rounds": 4, "timeout": TIMEOUT, "nodes": 4}
    hang = {"client": victim, "round": 3, "file": str(marker)}
    plan = {"parts": [part], "hang": hang, "out": str(out), "data": save(folder, trial)}
    deployment = Deployment(folder, plan)
    try:
        deployment.start_link()
        for number in range(4):
            deployment.start_node(number)
        deployment.start_run()
        deployment.wait_for(marker.exists, "the third round does not come")
        deployment.kill(victim)
        deployment.start_node(4)
        deployment.wait_for(out.exists, "the run does not end")
    finally:
        deployment.close()
    return json.loads(out.read_text())[0], seed, victim


@pytest.mark.timeout(600)
def test_cohorts_and_accuracies_are_the_simulators(run, trial):
    result, seed, _ = run
    simulation = Simulation(
        trial.federation(4),
        trial.model(),
        trial.WithLosses(),
        cohort_size=SIZE,
        local=trial.LOCAL,
        aggregation="size-weighted",
        seeds=(seed,),
        device="cpu",
    )
    records = [simulation.step()[0] for _ in range(2)]
    for report, record in zip(result["history"], records, strict=False):
        assert tuple(report["selected"]) == record.selected
        assert tuple(report["finished"]) == record.finished
        assert (report["bytes_up"], report["bytes_down"]) == (record.bytes_up, record.bytes_down)
    assert result["accuracies"][:2] == pytest.approx([r.accuracy for r in records], abs=1e-4)


def test_a_node_killed_while_it_trains_costs_at_most_its_timeout(run):
    result, _, victim = run
    third = result["history"][2]
    assert set(third["selected"]) - set(third["finished"]) == {victim}
    assert sum(result["refused"].values()) == 1
    assert result["seconds"][2] < TIMEOUT + 5


def test_a_new_node_is_selected_in_a_later_round(run):
    result, _, victim = run
    assert "client-4" in result["history"][3]["finished"]
    assert victim not in result["history"][3]["selected"]
    assert len(result["history"][3]["finished"]) == SIZE


def test_the_ledger_counts_what_crossed(run):
    result, _, _ = run
    assert result["ledger"] == result["crossed"] and result["ledger"]["up"] > 0


# --- other faults -------------------------------------------------------------------------------

LIES = {"client-2": "huge, nan", "client-3": "wrong shape", "client-4": "raise", "client-5": "slow"}
PATIENCE = 60  # seconds; the slow client costs all of them once


@pytest.fixture(scope="module")
def faults(tmp_path_factory, trial):
    """Two honest clients, four with faults, and a seventh that trusts other authors only.

    After a round the SuperLink is killed. With a new one, and nodes that were restarted, a second
    run continues from the checkpoint.
    """
    folder = tmp_path_factory.mktemp("faults")
    (folder / "seen").mkdir()
    part = {"policy": "race-softmax", "cohort_size": 6, "seed": 1, "rounds": 1, "nodes": 6}
    part |= {"timeout": PATIENCE, "checkpoint": str(folder / "run.ckpt")}
    plan = {"parts": [part], "lies": LIES, "out": str(folder / "first.json")}
    plan |= {"data": save(folder, trial), "seen": str(folder / "seen")}
    (folder / "trusted.yaml").write_text(f"fpk_other: {author_key()}\n")
    first = Deployment(folder, plan)
    try:
        first.start_link()
        for number in range(6):
            first.start_node(number)
        first.start_node(6, "--trusted-entities", str(folder / "trusted.yaml"))
        first.start_run()
        first.wait_for((folder / "first.json").exists, "the first run does not end")
        refused = first.log("client-6")
    finally:
        first.close()
    part = {**part, "rounds": 2, "cohort_size": 6, "nodes": 2}
    plan = {**plan, "parts": [part], "lies": {}, "out": str(folder / "second.json")}
    (folder / "second").mkdir()
    second = Deployment(folder / "second", plan)
    try:
        second.start_link()
        for number in range(2):
            second.start_node(number)
        second.start_run()
        second.wait_for((folder / "second.json").exists, "the second run does not end")
    finally:
        second.close()
    results = [json.loads((folder / f"{n}.json").read_text())[0] for n in ("first", "second")]
    return *results, sorted(p.name for p in (folder / "seen").iterdir()), refused


def author_key():
    """The public key of an author that the node trusts."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    public = ed25519.Ed25519PrivateKey.generate().public_key()
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return public.public_bytes(*form).decode()


@pytest.mark.timeout(900)
def test_slow_failing_and_lying_clients_cost_a_timeout_and_are_named(faults):
    first = faults[0]
    (report,) = first["history"]
    assert sorted(report["selected"]) == [f"client-{i}" for i in range(6)]
    assert sorted(report["finished"]) == ["client-0", "client-1"]
    assert first["refused"] == {"invalid": 2, "error": 1, "no reply": 1}
    failed = report["failed"]
    assert "not finite" in failed["client-2"] and "of shape (1,)" in failed["client-3"]
    assert "the disk is full" in failed["client-4"] and failed["client-5"] == "no reply"
    # Identities, sketches and training are three exchanges, each of at most its timeout.
    assert PATIENCE <= first["seconds"][0] < 3 * PATIENCE + 30
    assert first["dropped"] == {"race_sketch": 1}  # the reading of 100 MB
    assert "failed: client-" in first["lines"][0]


def test_a_node_that_trusts_other_authors_runs_nothing_of_the_app(faults):
    """Whoever submits an app ships the clients' code; --trusted-entities is the defense."""
    _, _, seen, log = faults
    assert seen == [f"client-{i}" for i in range(6)]
    assert "could not be verified" in log


def test_a_run_continues_after_the_superlink_was_killed(faults):
    first, second = faults[:2]
    assert [r["round"] for r in second["history"]] == [0, 1]
    assert second["history"][0] == first["history"][0]
    assert sorted(second["history"][1]["finished"]) == ["client-0", "client-1"]
