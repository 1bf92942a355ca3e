"""Eight rounds in Flower's simulation engine, ten seeds: FedAvg alone, and inside two policies.

python benchmarks/flower_cohorts.py

Ten clients hold handwritten digits by a Dirichlet draw each (0.3), four train per round. A seed
decides the partition, the model, the batches and the cohorts. Writes the accuracy after each round
to benchmarks/results/flower-cohorts.json.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from provenance import write
from script import arguments

from fedcohort.datasets import federate, load
from fedcohort.flower import CohortStrategy, attach, own_id
from fedcohort.simulate import LocalTraining, build

CLIENTS, SIZE, ROUNDS = 10, 4, 8
POLICIES = ("uniform", "sketch-match:centered=false")
ALONE = "FedAvg alone"
RESULT = Path(__file__).parent / "results" / "flower-cohorts.json"
SETTINGS = "FEDCOHORT_FLOWER_COHORTS"  # seed and output, which Flower's workers inherit
RUN = """
from flower_cohorts import CLIENTS, client, server
from flwr.simulation import run_simulation
backend = {"client_resources": {"num_cpus": 1}, "init_args": {"address": "local", "num_cpus": 2}}
run_simulation(server, client, CLIENTS, backend_config=backend)
"""

client, server = ClientApp(), ServerApp()


def settings():
    """Seed and output of this run."""
    return json.loads(os.environ[SETTINGS])


def model():
    return build("mlp-64-30", (1, 8, 8), classes=10, seed=settings()["seed"])


def data(context):
    """One client's images and labels."""
    digits, seed = load("digits"), settings()["seed"]
    part = federate(digits, "dirichlet-per-client", CLIENTS, seed=seed, alpha=0.3).parts[
        own_id(context)
    ]
    return digits.x[part], digits.y[part]


attach(client, data, model, local=LocalTraining(epochs=2, batch_size=16, lr=0.1))


def accuracy(arrays):
    """The accuracy on the test set."""
    network, dataset = model(), load("digits")
    network.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        right = network(torch.from_numpy(dataset.x_test)).argmax(1).numpy() == dataset.y_test
    return float(right.mean())


@server.main()
def main_of_server(grid, context):
    """Run all strategies from the same model."""
    seed, curves = settings()["seed"], {}
    for name in (ALONE, *POLICIES):
        random.seed(seed)  # of which Flower's own sampling draws
        strategy = FedAvg(fraction_train=SIZE / CLIENTS, fraction_evaluate=0.0)
        if name != ALONE:
            strategy = CohortStrategy(strategy, name, cohort_size=SIZE, seed=seed)
        curve = []

        def evaluate(number, arrays, curve=curve):
            curve.append(accuracy(arrays))
            return MetricRecord({"accuracy": curve[-1]})

        strategy.start(grid, ArrayRecord(model().state_dict()), ROUNDS, evaluate_fn=evaluate)
        curves[name] = curve[1:]
    Path(settings()["out"]).write_text(json.dumps(curves))


def run(seed):
    """Run one seed in a process of its own: Ray takes over signals and streams."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "curves.json"
        environment = {
            **os.environ,
            SETTINGS: json.dumps({"seed": seed, "out": str(out)}),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]]),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_HOME": str(Path(folder) / "home"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        log, command = Path(folder) / "log.txt", [sys.executable, "-c", RUN]
        with log.open("w") as stream:
            subprocess.run(command, env=environment, stdout=stream, stderr=stream, cwd=folder)
        if not out.exists():
            raise SystemExit(log.read_text()[-3000:])
        return json.loads(out.read_text())


def main() -> None:
    seeds = []
    for seed in range(arguments(__doc__, seeds=10).seeds):
        seeds.append(run(seed))
        print(seed, {name: round(curve[-1], 3) for name, curve in seeds[-1].items()}, flush=True)
    about = {"clients": CLIENTS, "cohort size": SIZE, "rounds": ROUNDS}
    write(RESULT, {**about, "accuracy": {n: [s[n] for s in seeds] for n in seeds[0]}})


if __name__ == "__main__":
    main()
