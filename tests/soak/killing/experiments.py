"""`fedcohort run` and `fedcohort compare`, which continue from their checkpoints."""

from __future__ import annotations

import json

from .job import CLI, CLI_NEEDS, Job

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


def write_experiment(inputs):
    (inputs / "run.toml").write_text(EXPERIMENT)


def run_arguments(inputs, folder):
    return ["run", inputs / "run.toml", "--out", folder / "run", "--resume"]


def compare_arguments(inputs, folder):
    setting = ["--rounds", 6, "--seeds", 1, "--cohort-size", 3, "--clients", 12]
    setting += ["--device", "cpu", "--set", "checkpoint_every=2", "--local", "epochs=1"]
    policies = ["--policies", "uniform,active-fl"]
    return ["compare", *policies, *setting, "--out", folder / "compare", "--resume"]


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


NEEDS = (*CLI_NEEDS, "torch")
IMPORTS = ("fedcohort.cli", "fedcohort.experiments.run", "sklearn.datasets")
RUN = Job(CLI, run_arguments, rounds_of, NEEDS, IMPORTS, write_experiment)
COMPARE = Job(CLI, compare_arguments, rounds_of, NEEDS, IMPORTS)
