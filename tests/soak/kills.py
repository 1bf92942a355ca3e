"""Kill writers with SIGKILL at random moments, resume them, and compare with a calm run.

    python tests/soak/kills.py --seconds 60
    python tests/soak/kills.py --jobs run registry --kills 100

Each job is a script that can be started again after a kill. Its result, after as many restarts as
it takes, must equal that of the same job left alone: nothing lost, nothing twice.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RUN = """
import sys
from fedcohort.experiments import config, folder
experiment = config.parse({"rounds": 30, "cohort_size": 3, "device": "cpu", "checkpoint_every": 2,
    "policy": {"name": "oort"}, "local": {"epochs": 1},
    "data": {"dataset": "digits", "clients": 12, "partition": "shards",
             "options": {"per_client": 2}}})
print("ready", flush=True)
folder.run(experiment, sys.argv[1], resume=True)
"""

COMPARE = """
import sys
from fedcohort.experiments import config, several
from fedcohort.experiments.config import NamedConfig
setting = config.parse({"rounds": 12, "cohort_size": 3, "device": "cpu", "checkpoint_every": 3,
    "local": {"epochs": 1},
    "data": {"dataset": "digits", "clients": 12, "partition": "shards",
             "options": {"per_client": 2}}})
print("ready", flush=True)
policies = [NamedConfig("uniform"), NamedConfig("active-fl")]
several.compare(setting, policies, sys.argv[1], resume=True)
"""

SKETCHES = """
import sys
from pathlib import Path
import numpy as np
from fedcohort.atomic import remove_leftovers
from fedcohort.sketch.race import RaceSketch
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
empty = RaceSketch.srp(dim=8, rows=20, bits=4)
print("ready", flush=True)
remove_leftovers(folder)
for i in range(150):
    path = folder / f"{i}.sketch"
    if not path.exists():
        made = empty.empty_like()
        made.add(np.random.default_rng(i).normal(size=(50, 8)))
        made.save(path)
"""

REGISTRY = """
import sys
from pathlib import Path
import numpy as np
from fedcohort.personalize import Registry, remove_orphans
from fedcohort.sketch.race import RaceSketch
folder = Path(sys.argv[1])
empty = RaceSketch.srp(dim=4, rows=10, bits=3)
if not (folder / "registry.sqlite").exists():
    import shutil
    shutil.rmtree(folder, ignore_errors=True)
    Registry.create(folder).close()
print("ready", flush=True)
with Registry(folder) as registry:
    remove_orphans(registry)
    for i in range(len(registry), 80):
        made = empty.empty_like()
        made.add(np.random.default_rng(i).normal(size=(20, 4)))
        registry.add(f"c{i}", made, {"w": np.full(100, float(i))}, metadata={"i": i})
"""

BUDGET = """
import sys
from pathlib import Path
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import noise_for
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
ledger = BudgetLedger(folder / "budget.json", 100.0)
release = noise_for(10, 0.5, 0.0, "add-remove")
print("ready", flush=True)
for i in range(80):  # what was paid is in the ledger, so it is not paid again
    if ledger.spent(f"c{i}") == 0:
        ledger.spend(f"c{i}", release)
"""

CHECKPOINT = """
import sys
from pathlib import Path
import numpy as np
from fedcohort import POLICIES, Session, checkpoint
from fedcohort.atomic import remove_leftovers
from fedcohort.testing import drive
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
session = Session(POLICIES["fedacs"](), cohort_size=3, seed=0)
if (folder / "server").exists():
    session.load_state_dict(checkpoint.load(folder / "server"))
print("ready", flush=True)
remove_leftovers(folder)
while session.round_number < 60:
    drive(session, [f"c{i}" for i in range(20)])
    checkpoint.save(folder / "server", session.state_dict())
"""


def lines_of(folder):
    """Rounds and summaries of every run below a folder, without wall-clock seconds."""
    out = {}
    for path in sorted(folder.rglob("rounds.jsonl")):
        out[str(path.relative_to(folder))] = path.read_text()
    for path in sorted(folder.rglob("summary.json")):
        summary = json.loads(path.read_text())
        summary.pop("seconds")
        out[str(path.relative_to(folder))] = json.dumps(summary, sort_keys=True)
    return out


def files_of(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def registry_of(folder):
    from fedcohort.personalize import Registry, check

    with Registry(folder) as registry:
        assert [p for p in check(registry) if p.kind != "orphan"] == []
        return {
            e.client: (e.model, e.metadata, registry.sketch(e.client).to_bytes())
            for e in registry.entries()
        }


def budget_of(folder):
    return json.loads((folder / "budget.json").read_text())["clients"]


def server_of(folder):
    from fedcohort import checkpoint

    return checkpoint.load(folder / "server")["ledger"], (folder / "server").read_bytes()


JOBS = {
    "run": (RUN, lines_of),
    "compare": (COMPARE, lines_of),
    "sketches": (SKETCHES, files_of),
    "registry": (REGISTRY, registry_of),
    "budget": (BUDGET, budget_of),
    "checkpoint": (CHECKPOINT, server_of),
}


def start(script, folder):
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def trial(name, root, *, kills, seconds, seed=0):
    """Run a job under kills until one of `kills` or `seconds` is spent, then let it finish.

    A job that finishes meanwhile starts over in a new folder. Returns the number of kills, the
    number of finished jobs, and the differences from a calm run.
    """
    script, result_of = JOBS[name]
    rng = np.random.default_rng(seed)
    calm = Path(root) / f"{name}-calm"
    began = time.monotonic()
    with start(script, calm) as process:
        process.stdout.readline()
        ready = time.monotonic()
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    length = time.monotonic() - ready  # of the part that writes
    expected = result_of(calm)
    done = {"job": name, "kills": 0, "finished": 0, "differences": 0}
    while True:
        folder = Path(root) / f"{name}-{done['finished']}"
        last = False
        while True:
            last = done["kills"] >= kills or time.monotonic() - began > seconds
            with start(script, folder) as process:
                process.stdout.readline()
                try:
                    wait = None if last else float(rng.uniform(0, 0.7 * length))
                    _, errors = process.communicate(timeout=wait)
                except subprocess.TimeoutExpired:
                    os.kill(process.pid, signal.SIGKILL)
                    process.communicate()
                    done["kills"] += 1
                    continue
            assert process.returncode == 0, errors
            break
        done["finished"] += 1
        done["differences"] += result_of(folder) != expected
        strays = [p for p in folder.rglob(".*") if p.name.endswith("fedcohort-tmp")]
        done["differences"] += len(strays)
        shutil.rmtree(folder)
        if last:
            return done


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--kills", type=int, default=10**9, help="per job, at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all jobs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="append results as JSON lines")
    args = parser.parse_args()
    failed = False
    for name in args.jobs:
        share = args.seconds / len(args.jobs)
        with tempfile.TemporaryDirectory() as root:
            done = trial(name, root, kills=args.kills, seconds=share, seed=args.seed)
        line = json.dumps(done)
        print(line, flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(line + "\n")
        failed |= bool(done["differences"])
    sys.exit(failed)


if __name__ == "__main__":
    main()
