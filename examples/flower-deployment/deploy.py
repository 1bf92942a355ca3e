"""Start a SuperLink and five SuperNodes on this machine, run the app, and stop everything.

Connections are encrypted by a certificate authority made for this run. Nodes are authenticated:
each has a key of its own, registered at the SuperLink under the name of its hospital.

    python deploy.py [--rounds 3] [--folder FOLDER] [--trusted-entities FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keys import make_authority, make_node_key

HERE = Path(__file__).parent.resolve()
BIN = Path(sys.executable).parent
HOSPITALS = ("aachen", "bergen", "como", "delft", "evora")


class Processes:
    """What was started, to be stopped in any case."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: str, *options: str, home: Path | None = None) -> None:
        extra = {} if home is None else {"HOME": str(home)}
        with open(self.folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [str(BIN / command), *options],
                env={**self.environment, **extra},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running.append(process)

    def call(self, command: str, *options: str) -> None:
        subprocess.run(
            [str(BIN / command), *options], env=self.environment, check=True, timeout=600
        )

    def stop(self) -> None:
        for process in reversed(self.running):
            try:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_port(port: int, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port} after {seconds} s")


def start_superlink(processes: Processes, folder: Path, port: int) -> None:
    processes.start(
        "superlink",
        "flower-superlink",
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--ssl-ca-certfile", str(folder / "ca.crt")),
        *("--ssl-certfile", str(folder / "server.crt")),
        *("--ssl-keyfile", str(folder / "server.key")),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    )
    wait_for_port(port)


def start_supernode(
    processes: Processes, folder: Path, number: int, port: int, trusted: Path | None
) -> None:
    """Register a hospital's key and start its node; the key never leaves its folder."""
    name = HOSPITALS[number]
    own = folder / name
    own.mkdir(exist_ok=True)
    make_node_key(own / "key")
    processes.call("flwr", "supernode", "register", str(own / "key.pub"), "here", "--name", name)
    # The operator's own settings, which win over the app's: what may leave, and its budget.
    limits = f"fedcohort-signals='race_sketch' fedcohort-folder='{own / 'privacy'}'"
    config = f"partition-id={number} num-partitions={len(HOSPITALS)} {limits}"
    processes.start(
        name,
        "flower-supernode",
        *("--superlink", f"127.0.0.1:{port}"),
        *("--root-certificates", str(folder / "ca.crt")),
        *("--auth-supernode-private-key", str(own / "key")),
        *("--port", str(free_port())),
        *("--node-config", config),
        # Run only apps signed by these keys: whoever submits an app ships the clients' code.
        *(() if trusted is None else ("--trusted-entities", str(trusted.resolve()))),
        home=own,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for keys, logs and results; new by default")
    parser.add_argument(
        "--trusted-entities",
        type=Path,
        help="YAML file of the authors' public keys; apps without their signature are refused",
    )
    parser.add_argument("--limit", type=float, default=1800, help="seconds for the whole run")
    options = parser.parse_args()
    # Not inside the app, which is packed and sent to the nodes.
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="hospitals-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"keys, logs and results: {folder}")
    port, out = free_port(), folder / "run"
    if out.exists():
        raise SystemExit(f"{out} holds a run already: choose another --folder")
    make_authority(folder)
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{folder / "ca.crt"}"\n'
    )
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    processes = Processes(folder, {**os.environ, "PATH": path, "FLWR_HOME": str(folder)})
    try:
        start_superlink(processes, folder, port)
        for number in range(len(HOSPITALS)):
            start_supernode(processes, folder, number, port, options.trusted_entities)
        settings = f"num-server-rounds={options.rounds} out='{out}'"
        processes.call("flwr", "run", str(HERE), "here", "--run-config", settings)
        wait_for(out / "federation.json", options.limit)  # the last file of a run
        report(out)
    finally:
        processes.stop()


def wait_for(file: Path, limit: float) -> None:
    end = time.monotonic() + limit
    while not file.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no results after {limit} s; see the logs beside {file.parent}")
        time.sleep(0.5)


def report(out: Path) -> None:
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for done in rounds:
        uploads = f"{len(done['finished'])} uploads" if done["finished"] else "no uploads"
        cohort, accuracy = ", ".join(done["selected"]), done["accuracy"]
        print(f"round {done['round']}: {cohort}: {uploads}, accuracy {accuracy:.3f}")
    print("bytes up:", sum(done["bytes_up"] for done in rounds))
    print(f"fedcohort report {out} makes a page of it")


if __name__ == "__main__":
    main()
