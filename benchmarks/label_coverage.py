"""How many labels a cohort of Sketch-to-Select covers, by what is compared and by how many numbers.

python benchmarks/label_coverage.py --out benchmarks/results/label-coverage.json

Paper 2's setting with one label a node: 50 clients, 10 wanted, ten labels. A model trains with
random cohorts; at five times on the way all clients are clustered, with six projections each.
"""

from __future__ import annotations

import argparse
from itertools import product

import torch
from provenance import write

from fedcohort.datasets import federate, load
from fedcohort.policies import SketchToSelect
from fedcohort.rounds import Round, stream
from fedcohort.signals.table import Signals
from fedcohort.simulate import LocalTraining, Simulation, build

TIMES = (100, 300, 500, 700, 1000)
PROJECTIONS = range(6)


def covered(simulation, labels, k, compare, projection):
    """Return the number of labels in one cohort."""
    seed, number = simulation.seeds[0], simulation.round_number
    policy = SketchToSelect(k=k, compare=compare, seed=projection)
    collect = seed.collector
    collect.policy, collect.model, collect.round_number = policy, seed.model, number
    signals = Signals()
    signals.record("model_sketch", collect("model_sketch", seed.clients), 0)
    chosen = policy.select(Round(0, seed.clients, 10), signals, stream(projection)).clients
    return len({labels[c] for c in chosen})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=None)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for name, lr in product(("mnist", "fashion-mnist"), (0.05, 0.25)):
        dataset = load(name, args.root).standardized()
        federation = federate(dataset, "one-label", clients=50, seed=0)
        labels = {c: int(dataset.y[part[0]]) for c, part in federation.parts.items()}
        simulation = Simulation(
            federation,
            build("fcnn-300", dataset.x.shape[1:], dataset.classes, seed=0),
            "uniform",
            cohort_size=10,
            local=LocalTraining(steps=1, batch_size=100, lr=lr),
            device="cpu",
            evaluate_every=0,
        )
        found = {}
        for number in range(1, max(TIMES) + 1):
            simulation.step()
            if number in TIMES:
                for k, compare, p in product((10, 100), ("models", "steps"), PROJECTIONS):
                    labels_in = covered(simulation, labels, k, compare, p)
                    found.setdefault((k, compare), []).append(labels_in)
        for (k, compare), counts in found.items():
            row = {"data": name, "lr": lr, "k": k, "compare": compare, "labels": counts}
            share = counts.count(10) / len(counts)
            results.append({**row, "mean": sum(counts) / len(counts), "all ten": share})
            print(results[-1], flush=True)
        write(args.out, results)


if __name__ == "__main__":
    main()
