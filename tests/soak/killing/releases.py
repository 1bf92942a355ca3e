"""Private releases on a budget: `fedcohort sketch`, and payments by the library."""

from __future__ import annotations

import json

import numpy as np

from .job import CLI, CLI_NEEDS, Job

PAY_SCRIPT = """
import sys
from pathlib import Path
from fedcohort.storage import remove_leftovers, write_atomically
from fedcohort.privacy.budget import BudgetLedger
from fedcohort.privacy.release import noise_for
folder = Path(sys.argv[1])
ledger = BudgetLedger(folder / "budget.json", 100.0)
release = noise_for(10, 0.5, 0.0, "add-remove")
remove_leftovers(folder)
for i in range(60):
    name, out = f"r{i}", folder / f"{i}.out"
    if not out.exists():
        content = ledger.charge_and_store([release], lambda: b"%d" % i, request=name)
        write_atomically(out, content)
    ledger.delivered(name)
"""


def account(folder):
    path = folder / "budget.json"
    return json.loads(path.read_text())["spent"] if path.exists() else {"releases": 0}


def payments(folder):
    return set(range(times_paid(folder)))


def times_paid(folder):
    return account(folder)["releases"]


def undelivered(folder):
    return json.loads((folder / "budget.json").read_text()).get("undelivered", [])


def write_records(inputs):
    rng = np.random.default_rng(0)
    who = np.array([f"client {i % 20}" for i in range(1000)])
    np.savez(inputs / "records.npz", x=rng.normal(size=(1000, 8)), who=who)


def sketch_arguments(inputs, folder):
    private = ["--epsilon", 0.5, "--budget", folder / "budget.json", "--budget-epsilon", 4]
    form = ["--columns", "x", "--by", "who", "--rows", 40, "--bits", 4]
    return ["sketch", inputs / "records.npz", *form, *private, "--force", "-o", folder / "out"]


def sketches_of(folder):
    """Noise is drawn anew in every trial: whose sketches there are, and what they claim."""
    from fedcohort.sketch.race import RaceSketch

    index = json.loads((folder / "out" / "clients.json").read_text())
    found = [RaceSketch.load(folder / "out" / name) for name in sorted(index)]
    strays = sorted(p.name for p in (folder / "out").iterdir() if p.name not in index)
    claims = [json.dumps(sketch.header()["release"], sort_keys=True) for sketch in found]
    return index, claims, strays, account(folder), undelivered(folder)


def sketches_delivered(folder):
    index = folder / "out" / "clients.json"
    if not index.exists() or not (folder / "budget.json").exists() or undelivered(folder):
        return False
    return all((index.parent / name).exists() for name in json.loads(index.read_text()))


def releases_of(folder):
    out = {p.name: p.read_bytes() for p in folder.glob("*.out")}
    return out, account(folder), undelivered(folder)


SKETCH = Job(
    CLI,
    sketch_arguments,
    sketches_of,
    CLI_NEEDS,
    ("fedcohort.cli", "fedcohort.files.sketching", "fedcohort.sketch.hashing"),
    write_records,
    held=payments,
    paid=times_paid,
    done=sketches_delivered,
    continues=False,
)
BUDGET = Job(
    PAY_SCRIPT,
    lambda inputs, folder: [folder],
    releases_of,
    imports=("fedcohort.privacy.budget", "fedcohort.privacy.release"),
    held=payments,
    paid=times_paid,
)
