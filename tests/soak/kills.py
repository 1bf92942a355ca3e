"""Kill writers with SIGKILL, start them again, and compare with a calm run.

    python tests/soak/kills.py --seconds 60
    python tests/soak/kills.py --only run,registry --kills 100 --jobs 12 --out result.json

Each job is a process that can be started again after a kill: the command line (`run`, `compare`,
`sketch` on a budget, `registry add`), payments from a budget, and a Flower server with a
checkpoint. Three kills in five come at a moment of danger: the process counts its opens, renames,
removals and locks of files, its syncs (before and after) and its statements of SQLite, and ends
itself with SIGKILL at a random one of them. One kill in five comes before a sync and also cuts the
file to a random length between what was synced and what was written, as a power cut may. One kill
in five comes at a random time. After one to four kills the job is left to finish. Then:

- a difference: the result is not that of a calm run, or a temporary file is left;
- a loss: something that was there before a kill (a client, a payment) is gone after it;
- a double payment: a budget paid more than once for one release.

A kill counts if the process was alive; one that came too late counts as missed. Processes are
forked from one that has imported everything, so that a kill costs a fraction of a second. Jobs
whose packages are not installed are left out, and named in the result.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
LIMIT = 300  # seconds that one process may take
FORK = get_context("fork")
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}
BY_TIME = 0.2  # share of the kills at a random time
AT_SYNC = 0.2  # share of the kills that also cut the file that is about to be synced
CLI = "from fedcohort.cli import main; main()"

EXPERIMENT = """
rounds = 12
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
for i in range(60):  # three releases for each of twenty clients
    name, out = f"r{i}", folder / f"{i}.out"
    if not out.exists():
        content = ledger.pay_and_keep(f"c{i % 20}", [release], lambda: b"%d" % i, request=name)
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
strategy.start(digits.grid(), digits.arrays(), 6)
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
    imports : tuple of str
        Modules that are imported once, before processes are forked.
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
    imports: tuple[str, ...] = ()
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
    who = np.array([f"client {i % 20}" for i in range(1000)])
    np.savez(inputs / "records.npz", x=rng.normal(size=(1000, 8)), who=who)


def write_clients(inputs):
    from safetensors.numpy import save_file

    from fedcohort.sketch.race import RaceSketch

    (inputs / "clients").mkdir()
    for i in range(40):
        sketch = RaceSketch.srp(dim=4, rows=10, bits=3)
        sketch.add(np.random.default_rng(i).normal(size=(20, 4)))
        sketch.save(inputs / "clients" / f"c{i}.sketch")
        save_file({"w": np.full(100, float(i))}, inputs / "clients" / f"c{i}.safetensors")


def run_arguments(inputs, folder):
    return ["run", inputs / "run.toml", "--out", folder / "run", "--resume"]


def compare_arguments(inputs, folder):
    setting = ["--rounds", 6, "--seeds", 1, "--cohort-size", 3, "--clients", 12]
    setting += ["--device", "cpu", "--set", "checkpoint_every=2", "--local", "epochs=1"]
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
SIMULATION = ("fedcohort.cli", "fedcohort.experiments.folder", "sklearn.datasets")
JOBS = {
    "run": Job(CLI, run_arguments, rounds_of, (*CORE, "torch"), SIMULATION, write_experiment),
    "compare": Job(CLI, compare_arguments, rounds_of, (*CORE, "torch"), SIMULATION),
    "sketch": Job(
        CLI,
        sketch_arguments,
        sketches_of,
        CORE,
        ("fedcohort.cli", "fedcohort.files.sketching", "fedcohort.sketch.hashing"),
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
        ("fedcohort.cli", "fedcohort.personalize", "safetensors.numpy"),
        write_clients,
        held=clients_of,
        continues=False,
    ),
    "budget": Job(
        BUDGET,
        lambda inputs, folder: [folder],
        releases_of,
        imports=("fedcohort.privacy.budget", "fedcohort.privacy.release"),
        held=payments,
        paid=times_paid,
    ),
    "flower": Job(
        FLOWER,
        lambda inputs, folder: [folder, ROOT / "tests" / "flower"],
        server_of,
        ("flwr", "torch", "pytest"),
        ("fedcohort.flower", "flwr.serverapp.strategy", "fedcohort.simulate", "sklearn.datasets"),
    ),
}


def watch(folder, moments, last, tear):
    """Count the moments in which this process touches files of a folder; end it at the last one.

    Parameters
    ----------
    folder : Path
    moments : shared array of two numbers
        Moments so far, and those in which written data are about to be synced.
    last : int
        The moment to end at, or the sync if there is `tear`; 0 for never.
    tear : random.Random or None
        Draws where to cut the file that is about to be synced.
    """
    inside, synced, sync, connect = os.fspath(folder), {}, os.fsync, sqlite3.connect

    def moment():
        moments[0] += 1
        if moments[0] == last and tear is None:
            os.killpg(0, signal.SIGKILL)

    def hook(event, arguments):
        if event in FILE_EVENTS and not isinstance(arguments[0], int):
            path = os.fsdecode(arguments[0])
            if path.startswith(inside):
                if event == "open" and os.path.isfile(path):
                    about = os.stat(path)
                    synced.setdefault(about.st_ino, about.st_size)
                moment()
        elif event == "fcntl.flock":
            moment()

    def traced(*arguments, **options):
        made = connect(*arguments, **options)
        made.set_trace_callback(lambda statement: moment())
        return made

    def counted_sync(handle):
        moment()
        about = os.fstat(handle)
        low = synced.get(about.st_ino, 0)
        if stat.S_ISREG(about.st_mode) and low < about.st_size:
            moments[1] += 1
            if moments[1] == last and tear is not None:
                os.ftruncate(handle, tear.randrange(low, about.st_size))
                os.killpg(0, signal.SIGKILL)
        sync(handle)
        synced[about.st_ino] = about.st_size
        moment()

    os.fsync, sqlite3.connect = counted_sync, traced
    sys.addaudithook(hook)


def enter(job, inputs, folder, moments, last, tear):
    """Do the work of a job; this runs in a process of its own."""
    os.setsid()
    log = folder.with_suffix(".log").open("w")
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout = sys.stderr = log
    sys.argv = ["fedcohort", *map(str, job.arguments(inputs, folder))]
    watch(folder, moments, last, tear)
    exec(compile(job.script, "job", "exec"), {"__name__": "__main__"})


class Process:
    """A process that does the work of a job, and ends itself at its `last` moment."""

    def __init__(self, job, inputs, folder, last=0, tear=None):
        self.log, self.moments = folder.with_suffix(".log"), FORK.RawArray("q", 2)
        arguments = job, inputs, folder, self.moments, last, tear
        self.process = FORK.Process(target=enter, args=arguments)
        self.process.start()

    def killed(self, after=LIMIT):
        """Wait; return whether the process was killed, at the latest after some seconds."""
        self.process.join(after)
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.join()
        return self.process.exitcode == -signal.SIGKILL

    def finish(self):
        """Wait for the end of a process that nobody kills."""
        self.killed()
        if self.process.exitcode != 0:
            said = self.log.read_text(errors="replace")[-2000:]
            raise AssertionError(f"exit status {self.process.exitcode}: {said}")


@dataclass
class Calm:
    """An undisturbed run of a job: what comes out, how long it takes, how often it writes."""

    result: Any
    paid: int
    seconds: float
    moments: int
    syncs: int


def calm(job, inputs, folder):
    """Run a job twice: the first time compiles and fills caches."""
    found = []
    for number in range(2):
        place = folder.with_name(f"{folder.name}-{number}")
        place.mkdir()
        began = time.monotonic()
        process = Process(job, inputs, place)
        process.finish()
        seconds = time.monotonic() - began
        found.append(Calm(job.result(place), job.paid(place), seconds, *process.moments))
    assert found[0].result == found[1].result, "two calm runs differ: kills cannot be judged"
    return min(found, key=lambda one: one.seconds)


def none_yet():
    counts = ("kills", "torn", "by time", "missed", "finished", "differences", "losses")
    return {**dict.fromkeys(counts, 0), "double payments": 0, "examples": []}


def disturbed(job, undisturbed, left, inputs, folder, rng):
    """Start a job and kill it in the `left` part of its work; return counts and the part done."""
    draw, syncs = rng.random(), round(left * undisturbed.syncs)
    by_time, torn = draw < BY_TIME, draw > 1 - AT_SYNC and syncs > 0
    if by_time:
        process = Process(job, inputs, folder)
        killed = process.killed(rng.uniform(0, left * undisturbed.seconds))
    else:
        last = rng.randint(1, syncs if torn else round(left * undisturbed.moments))
        process = Process(job, inputs, folder, last, rng if torn else None)
        killed = process.killed()
    if not killed:
        process.finish()
    found = {"kills": killed, "missed": not killed, "by time": killed and by_time}
    found["torn"] = killed and torn
    return found, process.moments[0] / undisturbed.moments


def chain(job, undisturbed, inputs, folder, rng, most):
    """Kill a job up to `most` times, let it finish, and return what was counted."""
    done, left, held, ended = none_yet(), 1.0, set(), False
    folder.mkdir()
    while done["kills"] < most and round(left * undisturbed.moments) >= 1 and not ended:
        found, part = disturbed(job, undisturbed, left, inputs, folder, rng)
        add_up(done, found)
        left -= part if job.continues else 0
        now = job.held(folder)
        done["losses"] += len(held - now)
        held = now
        ended = not found["kills"] or job.done(folder)
    if not ended:
        Process(job, inputs, folder).finish()
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


def chains(name, undisturbed, root, numbers, until, enough, seed, out):
    """Run chains until the time is over or the kills are enough; put what was counted into `out`.

    This runs in a process of its own, which forks those that are killed.
    """
    inputs = root / f"{name}-inputs"
    try:
        for number in numbers:
            if number and (enough.value <= 0 or time.monotonic() > until):
                break
            rng, folder = random.Random(f"{seed} {name} {number}"), root / f"{name}-{number}"
            try:
                part = chain(JOBS[name], undisturbed, inputs, folder, rng, rng.randint(1, 4))
            except Exception as error:  # a job that cannot go on after a kill is a difference
                part = {"differences": 1, "examples": [f"{type(error).__name__}: {error}"[:2000]]}
            with enough.get_lock():
                enough.value -= part.get("kills", 0)
            out.put(part)
            shutil.rmtree(folder)
    finally:
        out.put(None)


def trial(name, root, *, kills, seconds, seed=0, jobs=1):
    """Run chains of one job until one of `kills` or `seconds` is spent, and count."""
    job, root = JOBS[name], Path(root)
    inputs = root / f"{name}-inputs"
    inputs.mkdir(parents=True)
    job.prepare(inputs)
    until = time.monotonic() + seconds
    for module in job.imports:
        importlib.import_module(module)
    undisturbed = calm(job, inputs, root / f"{name}-calm")
    about = {"moments": undisturbed.moments, "syncs": undisturbed.syncs}
    about["calm seconds"] = round(undisturbed.seconds, 2)
    total, out = {"job": name, **none_yet(), **about}, FORK.SimpleQueue()
    enough = FORK.Value("q", kills)
    for j in range(jobs):
        numbers = range(j, 10**9, jobs)
        shared = (name, undisturbed, root, numbers, until, enough, seed, out)
        FORK.Process(target=chains, args=shared).start()
    working = jobs
    while working:
        part = out.get()
        if part is None:
            working -= 1
        else:
            add_up(total, part)
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
        if args.out:  # after each job, so that an interruption leaves what there is
            write(args.out, {"jobs": results, "left out": left_out})
    sys.exit(any(map(failures, results)) or not results)


if __name__ == "__main__":
    main()
