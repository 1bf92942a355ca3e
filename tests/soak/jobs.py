"""The jobs that are killed while they write: what each does, and what must not be lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# All of it is imported here, once, before processes are forked.
import flwr.serverapp.strategy  # noqa: F401
import numpy as np
import sklearn.datasets  # noqa: F401
from safetensors.numpy import save_file

import fedcohort.cli
import fedcohort.experiments.run
import fedcohort.files.arrays
import fedcohort.files.sketching
import fedcohort.flower  # noqa: F401
from fedcohort import storage
from fedcohort.personalize import Registry, check
from fedcohort.sketch.race import RaceSketch

RaceSketch.srp(dim=2).add(np.eye(2))  # and compiled
CLI = "from fedcohort.cli import main; main()"


@dataclass(frozen=True)
class Job:
    """A process that writes into a folder and can be started again."""

    script: str  # Python code
    arguments: Callable[[Path, Path], list[Any]]  # from the folders of inputs and of this trial
    result: Callable[[Path], Any]  # what a finished folder holds, to compare with a calm run's
    prepare: Callable[[Path], None] = lambda inputs: None  # writes inputs, once for all trials
    held: Callable[[Path], set[Any]] = lambda folder: set()  # what a kill must not lose
    paid: Callable[[Path], int] = lambda folder: 0  # how many releases were paid for
    done: Callable[[Path], bool] = lambda folder: False  # whether a killed one had delivered all


def compare_arguments(inputs, folder):
    setting = "--rounds 6 --seeds 1 --cohort-size 3 --clients 12 --policies oort,active-fl"
    options = "--set device=cpu --set checkpoint_every=2 --set local.epochs=1 --resume"
    return ["compare", *setting.split(), *options.split(), "--out", folder / "compare"]


def rounds_of(folder):
    """The rounds of every run below a folder."""
    found = sorted(folder.rglob("rounds.jsonl"))
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def write_clients(inputs):
    (inputs / "clients").mkdir()
    for i in range(40):
        sketch = RaceSketch.srp(dim=4, rows=10, bits=3)
        sketch.add(np.random.default_rng(i).normal(size=(20, 4)))
        sketch.save(inputs / "clients" / f"c{i}.sketch")
        save_file({"w": np.full(100, float(i))}, inputs / "clients" / f"c{i}.safetensors")


def registry_arguments(inputs, folder):
    return ["registry", "add", folder / "warm", inputs / "clients", "--replace"]


def clients_of(folder):
    if not (folder / "warm" / "registry.sqlite").exists():
        return set()
    with Registry(folder / "warm") as registry:
        return {entry.client for entry in registry.entries()}


def registry_of(folder):
    with Registry(folder / "warm") as registry:
        problems = [problem.kind for problem in check(registry)]
        entries = {
            e.client: (e.model, e.metadata, registry.sketch(e.client).to_bytes())
            for e in registry.entries()
        }
    return entries, problems


def ledger(folder):
    path = folder / "budget.json"
    return json.loads(path.read_text()) if path.exists() else {"spent": {"releases": 0}}


def times_paid(folder):
    return ledger(folder)["spent"]["releases"]


def write_records(inputs, clients=20):
    rng = np.random.default_rng(0)
    who = np.array([f"client {i % clients}" for i in range(50 * clients)])
    np.savez(inputs / "records.npz", x=rng.normal(size=(len(who), 8)), who=who)


def sketch_arguments(inputs, folder):
    private = ["--epsilon", 0.5, "--budget", folder / "budget.json", "--budget-epsilon", 4]
    form = ["--columns", "x", "--set", "rows=40", "--set", "bits=4", *private, "--force"]
    return ["sketch", inputs / "records.npz", *form, "--by", "who", "-o", folder / "out"]


def one_sketch_arguments(inputs, folder):
    form = [a for a in sketch_arguments(inputs, folder) if a not in ("--by", "who")]
    return [*form[:-1], folder / "one.sketch"]


def sketches_of(folder):
    """Noise is drawn anew in every trial: which files there are, and what they claim."""
    release = lambda path: json.dumps(RaceSketch.load(path).header()["release"])  # noqa: E731
    claims = {path.relative_to(folder): release(path) for path in folder.rglob("*.sketch")}
    index = [path.read_text() for path in folder.rglob("clients.json")]
    return claims, index, ledger(folder)["spent"], ledger(folder).get("undelivered")


def sketches_delivered(folder):
    """Whether a killed job had ended but for its exit: started again, it pays again."""
    names = [json.loads(path.read_text()) for path in folder.rglob("clients.json")]
    wanted = [folder / "out" / name for name in names[0]] if names else [folder / "one.sketch"]
    paid = times_paid(folder) and not ledger(folder).get("undelivered")
    return bool(paid) and all(path.exists() for path in wanted)


TESTS = Path(__file__).resolve().parents[1]
SERVER_SCRIPT = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
helpers = runpy.run_path(sys.argv[2] + "/conftest.py")
import torch
from flwr.serverapp.strategy import FedAdam
from fedcohort.flower import CohortStrategy
torch.set_num_threads(1)
helpers["identify_process"]()
digits = helpers["Digits"]()
inner = FedAdam(fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=0,
                min_available_nodes=1)
path = Path(sys.argv[1]) / "server.ckpt"
strategy = CohortStrategy(inner, "active-fl", cohort_size=3, seed=0, checkpoint=path)
strategy.start(digits.grid(), digits.arrays(), 6)
"""


def server_of(folder):
    """The state of a finished server, without durations and the random name of its run."""
    state = storage.load(folder / "server.ckpt")
    times = ("seconds", "elapsed", "working", "waiting", "slowest")
    reports = [
        {k: v for k, v in report.items() if k not in times} for report in state.pop("history")
    ]
    kept = {name: state[name] for name in ("arrays", "inner", "initial")}
    kept["ledger"] = state["session"]["ledger"]
    storage.save(folder / "result", {**kept, "reports": reports})
    return (folder / "result").read_bytes()


PAID = Job(
    CLI,
    sketch_arguments,
    sketches_of,
    write_records,
    held=lambda folder: set(range(times_paid(folder))),
    paid=times_paid,
    done=sketches_delivered,
)
JOBS = {
    "compare": Job(CLI, compare_arguments, rounds_of),
    "sketch": PAID,
    "registry": Job(CLI, registry_arguments, registry_of, write_clients, held=clients_of),
    "flower": Job(SERVER_SCRIPT, lambda inputs, folder: [folder, TESTS / "flower"], server_of),
}
