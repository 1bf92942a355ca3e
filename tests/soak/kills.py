"""Kill writers with SIGKILL at random moments, start them again, and compare with a calm run.

    python tests/soak/kills.py --seconds 60
    python tests/soak/kills.py --only run,registry --kills 100 --jobs 12 --out result.json

Each job is a process that can be started again after a kill: the command line (`run`, `compare`,
`sketch` on a budget, `registry add`), payments from a budget, and a Flower server with a
checkpoint. A kill waits until the process writes, then for a random part of the time that a calm
process takes from there. After one to four kills the job is left to finish. Then:

- a difference: the result is not that of a calm run, or a temporary file is left;
- a loss: something that was there before a kill (a client, a payment) is gone after it;
- a double payment: a budget paid more than once for one release.

A kill counts if the process was alive; one that came too late counts as missed. Jobs whose
packages are not installed are left out, and named in the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
LIMIT = 300  # seconds that one process may take
CLI = "import sys; from fedcohort.cli import main; main()"

EXPERIMENT = """
rounds = 50
cohort_size = 3
device = "cpu"
checkpoint_every = 2
[policy]
name = "oort"
[local]
epochs = 1
[data]
dataset = "digits"
clients = 12
partition = "shards"
options = { per_client = 2 }
"""

BUDGET = """
import sys
from pathlib import Path
from fedcohort.atomic import remove_leftovers, write_atomically
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import noise_for
folder = Path(sys.argv[1])
ledger = BudgetLedger(folder / "budget.json", 100.0)
release = noise_for(10, 0.5, 0.0, "add-remove")
remove_leftovers(folder)
for i in range(240):  # six releases for each of forty clients
    name, out = f"r{i}", folder / f"{i}.out"
    if not out.exists():
        content = ledger.pay_and_keep(f"c{i % 40}", [release], lambda: b"%d" % i, request=name)
        write_atomically(out, content)
    ledger.delivered(name)
"""

FLOWER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import SUPERLINK, Digits
import torch
from flwr.serverapp.strategy import FedAdam
from fedcohort.flower import CohortStrategy
torch.set_num_threads(1)
try:
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:
    pass
else:
    TaskIdentity._task_id = TaskIdentity._run_id = TaskIdentity._node_id = SUPERLINK
digits = Digits()
inner = FedAdam(fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=0,
                min_available_nodes=1)
path = Path(sys.argv[1]) / "server.ckpt"
strategy = CohortStrategy(inner, "active-fl", cohort_size=3, seed=0, checkpoint=path)
strategy.start(digits.grid(), digits.arrays(), 25)
"""


@dataclass(frozen=True)
class Job:
    """A process that writes into a folder and can be started again.

    Parameters
    ----------
    script : str
        Python code; its arguments are those of `arguments`.
    arguments : callable
        From the folder of inputs and that of this trial to the arguments.
    result : callable
        What a finished folder holds, to compare with that of a calm run.
    needs : tuple of str
        Packages without which the job cannot run.
    prepare : callable, optional
        Writes inputs, once for all trials.
    held : callable, optional
        What must not be lost by a kill, as a set.
    paid : callable, optional
        How many releases were paid for.
    done : callable, optional
        Whether a killed process had delivered everything, so that nobody would start it again.
    continues : bool
        Whether a restart goes on where the kill was, or begins again.
    """

    script: str
    arguments: Callable[[Path, Path], list[Any]]
    result: Callable[[Path], Any]
    needs: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda inputs: None
    held: Callable[[Path], set[Any]] = lambda folder: set()
    paid: Callable[[Path], int] = lambda folder: 0
    done: Callable[[Path], bool] = lambda folder: False
    continues: bool = True

    @property
    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def rounds_of(folder):
    """Rounds and summaries of every run below a folder, without wall-clock seconds."""
    out = {}
    for path in sorted(folder.rglob("rounds.jsonl")):
        out[str(path.relative_to(folder))] = path.read_text()
    for path in sorted(folder.rglob("summary.json")):
        summary = json.loads(path.read_text())
        summary.pop("seconds")
        out[str(path.relative_to(folder))] = json.dumps(summary, sort_keys=True)
    return out


def write_experiment(inputs):
    (inputs / "run.toml").write_text(EXPERIMENT)


def write_records(inputs):
    rng = np.random.default_rng(0)
    who = np.array([f"client {i % 60}" for i in range(6000)])
    np.savez(inputs / "records.npz", x=rng.normal(size=(6000, 8)), who=who)


def write_clients(inputs):
    from safetensors.numpy import save_file

    from fedcohort.sketch.race import RaceSketch

    (inputs / "clients").mkdir()
    for i in range(150):
        sketch = RaceSketch.srp(dim=4, rows=10, bits=3)
        sketch.add(np.random.default_rng(i).normal(size=(20, 4)))
        sketch.save(inputs / "clients" / f"c{i}.sketch")
        save_file({"w": np.full(100, float(i))}, inputs / "clients" / f"c{i}.safetensors")


def run_arguments(inputs, folder):
    return ["run", inputs / "run.toml", "--out", folder / "run", "--resume"]


def compare_arguments(inputs, folder):
    setting = ["--rounds", 15, "--seeds", 1, "--cohort-size", 3, "--clients", 12]
    setting += ["--device", "cpu", "--set", "checkpoint_every=3", "--local", "epochs=1"]
    policies = ["--policies", "uniform,active-fl"]
    return ["compare", *policies, *setting, "--out", folder / "compare", "--resume"]


def sketch_arguments(inputs, folder):
    private = ["--epsilon", 0.5, "--budget", folder / "budget.json", "--budget-epsilon", 4]
    form = ["--columns", "x", "--by", "who", "--rows", 40, "--bits", 4]
    return ["sketch", inputs / "records.npz", *form, *private, "--force", "-o", folder / "out"]


def registry_arguments(inputs, folder):
    return ["registry", "add", folder / "warm", inputs / "clients", "--replace"]


def accounts(folder):
    path = folder / "budget.json"
    return json.loads(path.read_text())["clients"] if path.exists() else {}


def payments(folder):
    return {(c, i) for c, a in accounts(folder).items() for i in range(a["releases"])}


def times_paid(folder):
    return sum(account["releases"] for account in accounts(folder).values())


def undelivered(folder):
    return json.loads((folder / "budget.json").read_text()).get("undelivered", {})


def sketches_of(folder):
    """Noise is drawn anew in every trial: whose sketches there are, and what they claim."""
    from fedcohort.sketch.race import RaceSketch

    index = json.loads((folder / "out" / "clients.json").read_text())
    found = [RaceSketch.load(folder / "out" / name) for name in sorted(index)]
    strays = sorted(p.name for p in (folder / "out").iterdir() if p.name not in index)
    claims = [json.dumps(sketch.header()["release"], sort_keys=True) for sketch in found]
    return index, claims, strays, accounts(folder), undelivered(folder)


def sketches_delivered(folder):
    index = folder / "out" / "clients.json"
    if not index.exists() or not (folder / "budget.json").exists() or undelivered(folder):
        return False
    return all((index.parent / name).exists() for name in json.loads(index.read_text()))


def releases_of(folder):
    out = {p.name: p.read_bytes() for p in folder.glob("*.out")}
    return out, accounts(folder), undelivered(folder)


def clients_of(folder):
    from fedcohort.personalize import Registry

    if not (folder / "warm" / "registry.sqlite").exists():
        return set()
    with Registry(folder / "warm") as registry:
        return {entry.client for entry in registry.entries()}


def registry_of(folder):
    from fedcohort.personalize import Registry, check

    with Registry(folder / "warm") as registry:
        problems = [problem.kind for problem in check(registry) if problem.kind != "orphan"]
        entries = {
            e.client: (e.model, e.metadata, registry.sketch(e.client).to_bytes())
            for e in registry.entries()
        }
    return entries, problems


def server_of(folder):
    """The state of a finished server, without durations and the random name of its run."""
    from fedcohort import checkpoint

    state = checkpoint.load(folder / "server.ckpt")
    reports = [
        {k: v for k, v in report.items() if k != "seconds"} for report in state.pop("history")
    ]
    arrays = {"arrays": state["arrays"], "inner": state["inner"], "initial": state["initial"]}
    ledger = state["session"]["ledger"]
    return repr((reports, ledger)), repr_exact(arrays)


def repr_exact(value):
    """Return nested values with their arrays as bytes."""
    if isinstance(value, dict):
        return {k: repr_exact(v) for k, v in value.items()}
    if isinstance(value, list):
        return [repr_exact(v) for v in value]
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value)


CORE = ("typer", "rich")
JOBS = {
    "run": Job(CLI, run_arguments, rounds_of, (*CORE, "torch"), write_experiment),
    "compare": Job(CLI, compare_arguments, rounds_of, (*CORE, "torch")),
    "sketch": Job(
        CLI,
        sketch_arguments,
        sketches_of,
        CORE,
        write_records,
        held=payments,
        paid=times_paid,
        done=sketches_delivered,
        continues=False,
    ),
    "registry": Job(
        CLI,
        registry_arguments,
        registry_of,
        (*CORE, "safetensors"),
        write_clients,
        held=clients_of,
        continues=False,
    ),
    "budget": Job(
        BUDGET,
        lambda inputs, folder: [folder],
        releases_of,
        held=payments,
        paid=times_paid,
    ),
    "flower": Job(
        FLOWER,
        lambda inputs, folder: [folder, ROOT / "tests" / "flower"],
        server_of,
        ("flwr", "torch", "pytest"),
    ),
}


def start(job, inputs, folder):
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with open(folder.with_suffix(".log"), "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", job.script, *map(str, job.arguments(inputs, folder))],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )


def snapshot(folder):
    """Return what a folder holds, to see that something was written."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                about = os.stat(os.path.join(root, name))
            except FileNotFoundError:
                continue
            found.append((root, name, about.st_mtime_ns, about.st_size))
    return sorted(found)


def first_write(process, folder):
    """Wait until a process changes a folder; return whether it did before it ended."""
    before = snapshot(folder)
    while process.poll() is None:
        if snapshot(folder) != before:
            return True
        time.sleep(0.005)
    return False


def finish(job, process, folder):
    """Wait for the end of a process that nobody kills."""
    try:
        code = process.wait(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if code != 0:
        said = folder.with_suffix(".log").read_text(errors="replace")[-2000:]
        raise AssertionError(f"exit status {code}: {said}")


@dataclass
class Calm:
    """An undisturbed run of a job: what comes out, and how long it writes."""

    result: Any
    paid: int
    seconds: float


def calm(job, inputs, folder):
    """Run a job twice: the first time compiles and fills caches."""
    found = []
    for number in range(2):
        place = folder.with_name(f"{folder.name}-{number}")
        place.mkdir()
        process = start(job, inputs, place)
        first_write(process, place)
        began = time.monotonic()
        finish(job, process, place)
        seconds = time.monotonic() - began
        found.append(Calm(job.result(place), job.paid(place), seconds))
    assert found[0].result == found[1].result, "two calm runs differ: kills cannot be judged"
    return min(found, key=lambda one: one.seconds)


def chain(job, undisturbed, inputs, folder, rng, most):
    """Kill a job up to `most` times, let it finish, and return what was counted."""
    done = {"kills": 0, "missed": 0, "finished": 0, "differences": 0, "losses": 0}
    done |= {"double payments": 0, "examples": []}
    folder.mkdir()
    left, held = undisturbed.seconds, set()
    ended = False
    while done["kills"] < most and left > 0.05 * undisturbed.seconds and not ended:
        process = start(job, inputs, folder)
        wait = rng.uniform(0, 0.95 * left)
        if first_write(process, folder):
            try:
                process.wait(timeout=wait)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            done["kills"] += 1
            left -= wait if job.continues else 0
        else:
            done["missed"] += 1
            finish(job, process, folder)
            ended = True
        now = job.held(folder)
        done["losses"] += len(held - now)
        held = now
        ended = ended or job.done(folder)
    if not ended:
        finish(job, start(job, inputs, folder), folder)
    done["finished"] = 1
    done["double payments"] = max(0, job.paid(folder) - undisturbed.paid)
    found = job.result(folder)
    strays = [p.name for p in folder.rglob(".*") if p.name.endswith("fedcohort-tmp")]
    if found != undisturbed.result or strays:
        done["differences"] = 1
        done["examples"] = [strays[:3] or "another result"]
    return done


def add_up(total, part):
    for key, value in part.items():
        total[key] = (total[key] + value)[:5] if key == "examples" else total[key] + value


def trial(name, root, *, kills, seconds, seed=0, jobs=1):
    """Run chains of one job until one of `kills` or `seconds` is spent, and count."""
    job, root = JOBS[name], Path(root)
    inputs = root / f"{name}-inputs"
    inputs.mkdir(parents=True)
    job.prepare(inputs)
    until = time.monotonic() + seconds
    undisturbed = calm(job, inputs, root / f"{name}-calm")
    total = {"job": name, "kills": 0, "missed": 0, "finished": 0, "differences": 0, "losses": 0}
    total |= {"double payments": 0, "calm seconds": round(undisturbed.seconds, 2), "examples": []}
    lock, numbers = threading.Lock(), iter(range(10**9))

    def work():
        while True:
            with lock:
                number, left = next(numbers), kills - total["kills"]
            if number > 0 and (left <= 0 or time.monotonic() > until):
                return
            rng, folder = random.Random(f"{seed} {name} {number}"), root / f"{name}-{number}"
            try:
                part = chain(job, undisturbed, inputs, folder, rng, rng.randint(1, 4))
            except Exception as error:  # a job that cannot go on after a kill is a difference
                part = {"differences": 1, "examples": [f"{type(error).__name__}: {error}"[:2000]]}
            with lock:
                add_up(total, part)
            shutil.rmtree(folder)

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work) for _ in range(jobs)]:
            future.result()
    return total


def failures(result):
    return sum(result[key] for key in ("differences", "losses", "double payments"))


def main():
    from provenance import write

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"comma-separated jobs of {', '.join(JOBS)} [all]")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time [1]")
    parser.add_argument("--kills", type=int, default=10**9, help="per job, at least [no end]")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all jobs together [60]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the counts and where they come from, as JSON")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(JOBS)
    if unknown := set(wanted) - set(JOBS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {', '.join(JOBS)}")
    left_out = {name: JOBS[name].missing for name in wanted if JOBS[name].missing}
    for name, missing in left_out.items():
        print(f"left out: {name} needs {', '.join(missing)}", file=sys.stderr)
    names = [name for name in wanted if name not in left_out]
    results, began = [], time.monotonic()
    for at, name in enumerate(names):
        share = (args.seconds - (time.monotonic() - began)) / (len(names) - at)
        with tempfile.TemporaryDirectory() as root:
            limits = {"kills": args.kills, "seconds": share}
            done = trial(name, root, **limits, seed=args.seed, jobs=args.jobs)
        print(json.dumps(done), flush=True)
        results.append(done)
    if args.out:
        write(args.out, {"jobs": results, "left out": left_out})
    sys.exit(any(map(failures, results)) or not results)


if __name__ == "__main__":
    main()
