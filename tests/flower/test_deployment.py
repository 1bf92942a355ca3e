"""A deployment on this machine: one SuperLink, SuperNodes that die and join, real connections.

Nothing here depends on the speed of the machine: what happens next waits for a file or for a line
of a log, and the app's server waits for every client that will answer (`trial.server_app`).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from flwr.cli.build import build_fab_from_disk

from fedcohort.policies import Uniform
from fedcohort.session import Session
from fedcohort.simulate import Simulation

APP = Path(__file__).parent / "app"
BIN = Path(sys.executable).parent
TIMEOUT = 5  # seconds that a client that never answers costs
SLACK = 60  # seconds; looking for replies takes time on a busy machine
LIMIT = 900  # seconds for what takes some twenty on a quiet machine
NODES, SIZE = 3, 2  # few: each node is two processes, and each message starts another
pytestmark = pytest.mark.timeout(3 * LIMIT)


def cohorts(seed, available):
    """The cohorts that uniform selection will pick, for the clients of each round."""
    session = Session(Uniform(), cohort_size=SIZE, seed=seed)
    picked = []
    for clients in available:
        picked.append(session.begin(clients, lambda name, clients: {}).clients)
        session.finish({}, picked[-1])
    return picked


class Foreseen(NamedTuple):
    """Who does what: the victim is killed in round 2, the slow one never answers in round 3."""

    seed: int
    victim: str
    slow: str


def foreseen(clients):
    """Find a seed under which the newcomer trains in round 3 without the victim of round 2.

    The SuperLink takes a minute to notice that a node is gone, so that round 3 may still be drawn
    from all four clients; the seed works either way.
    """
    before, everybody, newcomer = clients[:NODES], clients[: NODES + 1], clients[NODES]
    for seed in itertools.count():
        for victim in cohorts(seed, [before] * 2)[1]:
            rest = [c for c in everybody if c != victim]
            last = [set(cohorts(seed, [before, before, on])[2]) for on in (everybody, rest)]
            always = set.intersection(*last) - {newcomer}
            if always and all(newcomer in picked and victim not in picked for picked in last):
                return Foreseen(seed, victim, min(always))


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

    def start_node(self, number, *further):
        options = ["--insecure", "--superlink", f"127.0.0.1:{self.port}", *further]
        config = f"partition-id={number} num-partitions=8"
        ports = ["--port", str(free_port()), "--node-config", config]
        self.start(f"client-{number}", str(BIN / "flower-supernode"), *options, *ports)

    def start_run(self, app=APP):
        self.start("run", str(BIN / "flwr"), "run", str(app), "here")

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, condition, failure):
        end = time.monotonic() + LIMIT
        while not condition():
            ended = [n for n, process in self.processes.items() if process.poll() not in (None, 0)]
            if ended or time.monotonic() > end:
                pytest.fail(f"{failure}; ended: {ended}\n{self.logs()}")
            time.sleep(0.1)

    def result(self, path, failure):
        """Wait for the results of a run and return those of its one part."""
        self.wait_for(path.exists, failure)
        results = json.loads(path.read_text())
        if isinstance(results, str):
            pytest.fail(f"{failure}: {results}")
        return results[0]

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


AUTHOR = ed25519.Ed25519PrivateKey.generate()


@pytest.fixture(scope="module")
def found(tmp_path_factory, trial):
    """What happened in three runs, the first of them before everything was killed.

    Three clients. In the second round one is killed while it trains; a fourth then joins, and in
    the third round one never answers. A fifth node trusts one author only.

    Then all processes are killed. With a new SuperLink and two restarted nodes, of which one trusts
    one author only, a second run continues from the checkpoint, and one client fails. Its app is
    the first one, signed by the author. A third run's app was changed after it was signed.
    """
    folder = tmp_path_factory.mktemp("deployment")
    (folder / "seen").mkdir()
    who = foreseen([f"client-{i}" for i in range(8)])
    part = {"policy": "with-losses", "cohort_size": SIZE, "seed": who.seed, "timeout": TIMEOUT}
    part |= {"rounds": 3, "nodes": NODES, "checkpoint": str(folder / "run.ckpt")}
    part |= {"joined": {"after": 2, "nodes": NODES + 2}}
    marker = folder / "training"
    faults = [
        {"client": who.victim, "round": 2, "does": "hang", "file": str(marker)},
        {"client": who.slow, "round": 3, "does": "hang", "file": str(folder / "slow")},
    ]
    plan = {"parts": [part], "faults": faults, "out": str(folder / "first.json")}
    plan |= {"data": save(folder, trial), "seen": str(folder / "seen")}
    (folder / "trusted.yaml").write_text(f"fpk_author: {public_key(AUTHOR)}\n")
    trusting = "--trusted-entities", str(folder / "trusted.yaml")
    found = {"who": who}
    first = Deployment(folder, plan)
    try:
        first.start_link()
        for number in range(NODES):
            first.start_node(number)
        first.start_node(NODES + 1, *trusting)
        first.start_run()
        first.wait_for(marker.exists, "the second round does not come")
        first.kill(who.victim)
        first.start_node(NODES)
        found["first"] = first.result(folder / "first.json", "the first run does not end")
        untrusting = f"client-{NODES + 1}"
        first.wait_for(lambda: REFUSED["unsigned"] in first.log(untrusting), "not refused")
    finally:
        first.close()
    found["seen"] = sorted(p.name for p in (folder / "seen").iterdir())
    part = {**part, "rounds": 4, "nodes": 2}
    faults = [{"client": "client-0", "round": 4, "does": "raise"}]
    plan = {**plan, "parts": [part], "faults": faults, "out": str(folder / "second.json")}
    (folder / "second").mkdir()
    second = Deployment(folder / "second", plan)
    with hub(folder) as address:
        second.environment["FLWR_SUPERGRID_API_URL"] = address
        try:
            second.start_link()
            second.start_node(0)
            second.start_node(1, *trusting)
            second.start_run("@fedcohort/trial==1.0.0")
            found["second"] = second.result(folder / "second.json", "the second run does not end")
            (folder / "run.ckpt").unlink()  # or the third run would have nothing left to do
            second.start_run("@fedcohort/trial==1.0.1")
            second.wait_for((folder / "altered").exists, "the altered app does not run at all")
            second.wait_for(lambda: REFUSED["altered"] in second.log("client-1"), "not refused")
        finally:
            second.close()
    found["altered"] = (folder / "altered").read_text().split()
    return found


REFUSED = {
    "unsigned": "The FAB could not be verified",
    "altered": "FAB verification failed",
}


def public_key(private):
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return private.public_key().public_bytes(*form).decode()


@contextlib.contextmanager
def hub(folder):
    """Serve two versions of the app as Flower Hub does, both with the signature of the first.

    A signature is Ed25519, over the seconds since 1970 (8 bytes) and the SHA-256 of the app's
    archive, as ``flwr app review`` makes it. In the second version, the clients' code writes their
    data to a file.
    """
    altered = folder / "app"
    shutil.copytree(APP, altered, ignore=shutil.ignore_patterns("__pycache__"))
    project = altered / "pyproject.toml"
    project.write_text(project.read_text().replace("1.0.0", "1.0.1"))
    with open(altered / "trial" / "client_app.py", "a") as code:
        code.write(STEALING.format(str(folder / "altered")))
    archives = {"1.0.0": build_fab_from_disk(APP), "1.0.1": build_fab_from_disk(altered)}
    signed_at = int(time.time())
    message = signed_at.to_bytes(8, "big") + hashlib.sha256(archives["1.0.0"]).digest()
    signature = base64.urlsafe_b64encode(AUTHOR.sign(message)).rstrip(b"=").decode()
    verification = {"public_key_id": "fpk_author", "signature": signature, "signed_at": signed_at}

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            url = f"{address}/{asked['app_version']}"
            self.send(json.dumps({"fab_url": url, "verifications": [verification]}).encode())

        def do_GET(self):
            self.send(archives[self.path.strip("/")])

        def send(self, content):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()


STEALING = """

_honest = app._registered_funcs["query.fedcohort"]


def stealing(message, context):
    with open({!r}, "a") as stolen:
        stolen.write(f"{{own_id(context)}}\\n")
    return _honest(message, context)


app._registered_funcs["query.fedcohort"] = stealing
"""


def test_cohorts_and_accuracies_are_the_simulators(found, trial):
    result = found["first"]
    simulation = Simulation(
        trial.federation(NODES),
        trial.model(),
        trial.WithLosses(),
        cohort_size=SIZE,
        local=trial.local(),
        aggregation="size-weighted",
        seeds=(found["who"].seed,),
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
    result, who = found["first"], found["who"]
    second = result["history"][1]
    assert set(second["selected"]) - set(second["finished"]) == {who.victim}
    assert second["failed"] == {who.victim: "no reply"}
    assert TIMEOUT <= second["seconds"] < TIMEOUT + result["waited"][1] + SLACK


def test_a_client_that_never_answers_costs_its_timeout_and_is_named(found):
    result, who = found["first"], found["who"]
    third = result["history"][2]
    assert set(third["selected"]) - set(third["finished"]) == {who.slow}
    assert third["failed"] == {who.slow: "no reply"}
    assert TIMEOUT <= third["seconds"] < TIMEOUT + result["waited"][2] + SLACK
    assert f"failed: {who.slow}" in result["lines"][2]
    assert result["refused"] == {"no reply": 2}


def test_a_new_node_is_selected_in_a_later_round(found):
    third = found["first"]["history"][2]
    assert f"client-{NODES}" in third["finished"]
    assert found["who"].victim not in third["selected"]
    assert len(third["finished"]) == SIZE - 1


def test_the_ledger_counts_what_crossed(found):
    result = found["first"]
    assert result["ledger"] == result["crossed"] and result["ledger"]["up"] > 0


def test_a_node_that_trusts_one_author_runs_no_app_without_a_signature(found):
    """Whoever submits an app ships the clients' code; --trusted-entities is the defense."""
    assert found["seen"] == [f"client-{i}" for i in range(NODES + 1)]


def test_a_run_continues_after_the_superlink_was_killed(found):
    """Restarted nodes are the clients that they were: nobody sends a sketch again."""
    first, second = found["first"], found["second"]
    assert [r["round"] for r in second["history"]] == [0, 1, 2, 3]
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


def test_a_signed_app_runs_where_its_author_is_trusted(found):
    assert "client-1" in found["second"]["history"][3]["finished"]


def test_an_app_that_was_changed_after_it_was_signed_is_refused(found):
    """A node that trusts anybody ran the changed code; the other one did not."""
    assert set(found["altered"]) == {"client-0"}
