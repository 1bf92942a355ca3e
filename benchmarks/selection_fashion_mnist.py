"""Every policy on Fashion-MNIST in FedCor's setting: how many rounds to a target accuracy.

python benchmarks/selection_fashion_mnist.py --out benchmarks/results/selection-fashion-mnist.json

100 clients, MLP 784-64-30-10, 3 epochs, batch 64, SGD 0.005 halved at rounds 150 and 300, 500
rounds, plain mean, pixels standardized as in the authors' code. --setting runs one of the four
splits, so that they can share a machine; --join puts the parts together.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from provenance import write

from fedcohort.datasets import federate, load
from fedcohort.experiments.summary import spread, summarize
from fedcohort.numerics.herding import match
from fedcohort.policies import (
    KDPP,
    ActiveFL,
    ClusteredSampling,
    DivFL,
    FedACS,
    FedCor,
    Oort,
    Policy,
    PowerOfChoice,
    RaceSoftmax,
    SketchMatch,
    SketchToSelect,
    Uniform,
)
from fedcohort.rounds import Selection
from fedcohort.signals.catalog import Needs
from fedcohort.simulate import History, LocalTraining, Schedule, Simulation, build

SETTINGS = {
    "two shards": ("shards", {"per_client": 2}, 5, 0.69),
    "one shard": ("shards", {"per_client": 1}, 10, 0.62),
    "dirichlet 0.2": ("dirichlet-per-client", {"alpha": 0.2}, 5, 0.72),
    "dirichlet 0.5": ("dirichlet-per-client", {"alpha": 0.5}, 5, 0.76),
}


class Oracle(Policy):
    """Knows every client's label counts, which no federation does: the bound for set matching."""

    needs = Needs(profile=frozenset({"insight"}))

    def select(self, round, signals, rng):
        counts = signals.values("insight", round.available)
        pool = np.sort(rng.choice(len(counts), max(len(counts) // 2, round.size), replace=False))
        sizes = counts.sum(axis=1)
        shares = counts / sizes[:, None]
        target = counts.sum(axis=0) / sizes.sum()
        chosen = match(shares, sizes, target, round.size, pool=pool)
        return Selection(tuple(round.available[i] for i in chosen))


VARIANTS = {
    "uniform": Uniform,
    "power-of-choice (d=10)": lambda: PowerOfChoice(d=10),
    "power-of-choice (d=20)": lambda: PowerOfChoice(d=20),
    "active-fl": ActiveFL,
    "oort": Oort,
    "race-softmax": RaceSoftmax,
    "race-softmax (released distance)": lambda: RaceSoftmax(distance="row-l2", center="pooled"),
    "fedacs": FedACS,
    "sketch-to-select (every 10 rounds)": lambda: SketchToSelect(interval=10),
    "sketch-to-select (models)": lambda: SketchToSelect(interval=10, k=10, compare="models"),
    "sketch-to-select (literal)": lambda: SketchToSelect(interval=10, k=10, fresh=False),
    "fedcor": FedCor,
    "fedcor (gradient fit)": lambda: FedCor(fit="gradient"),
    "k-dpp": KDPP,
    "k-dpp (race sketch)": lambda: KDPP(signal="race_sketch"),
    "divfl": DivFL,
    "clustered (size)": lambda: ClusteredSampling(by="size"),
    "clustered (similarity)": lambda: ClusteredSampling(by="similarity"),
    "sketch-match": SketchMatch,
    "sketch-match (epsilon 1)": lambda: SketchMatch(epsilon=1.0),
    "sketch-match (no labels)": lambda: SketchMatch(label_weight=0.0),
    "sketch-match (no labels, epsilon 1)": lambda: SketchMatch(label_weight=0.0, epsilon=1.0),
    "sketch-match (no labels, 300 x 1024)": lambda: SketchMatch(
        label_weight=0.0, rows=300, bits=10
    ),
    "sketch-match (random pool)": lambda: SketchMatch(pool="random"),
    "sketch-match (greedy only)": lambda: SketchMatch(sweeps=0),
    "oracle (knows all labels)": Oracle,
}


def run(name, federations, dataset, cohort_size, target, args):
    counts = dataset.classes
    started = time.perf_counter()
    simulation = Simulation(
        lambda seed: federations[seed],
        lambda seed: build("mlp-64-30", dataset.x.shape[1:], dataset.classes, seed=seed),
        VARIANTS[name],
        cohort_size=cohort_size,
        local=LocalTraining(epochs=3, batch_size=64, lr=0.005, schedule=Schedule(0.5, (150, 300))),
        seeds=tuple(federations),
        device=args.device,
        insight=lambda x, y: np.bincount(y, minlength=counts).astype(float),
    )
    histories = [History(seed) for seed in federations]
    for _ in range(args.rounds):
        for history, record in zip(histories, simulation.step(), strict=True):
            history.rounds.append(record)
    seconds = time.perf_counter() - started
    rows = []
    for history, seed in zip(histories, simulation.seeds, strict=True):
        summary = summarize(
            history, seed.federation, seed.session.ledger, target, seed.model_bytes
        )._asdict()
        summary.pop("overhead")
        curve = [round(float(a), 4) for a in history.accuracy[4::5]]
        rows.append({**summary, "accuracy every 5 rounds": curve})
    return rows, seconds


def table(rows, key):
    return spread([row[key] for row in rows])._asdict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", default="all", choices=[*SETTINGS, "all"])
    parser.add_argument("--policies", nargs="*", default=list(VARIANTS))
    parser.add_argument("--root", default=None)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--join", nargs="*", help="Result files to put together, in place of runs.")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.join:
        parts = [json.loads(Path(p).read_text()) for p in args.join]
        runs = [run for part in parts for run in part["result"]]
        origins = [part["provenance"] for part in parts]
        Path(args.out).write_text(json.dumps({"provenance": origins, "result": runs}, indent=1))
        return
    dataset = load("fashion-mnist", args.root).standardized()
    chosen = list(SETTINGS) if args.setting == "all" else [args.setting]
    results = []
    for setting in chosen:
        partition, options, cohort_size, target = SETTINGS[setting]
        federations = {
            seed: federate(dataset, partition, clients=100, seed=seed, **options)
            for seed in range(args.seeds)
        }
        for name in args.policies:
            rows, seconds = run(name, federations, dataset, cohort_size, target, args)
            keys = ("rounds_to_target", "accuracy", "accuracy_deviation", "gemd")
            keys += ("participation_entropy", "bytes_up", "bytes_down")
            shown = {key: table(rows, key) for key in keys}
            results.append(
                {
                    "setting": setting,
                    "target": target,
                    "policy": name,
                    **shown,
                    "seconds": seconds,
                    "seeds": rows,
                }
            )
            rounds = shown["rounds_to_target"]
            print(
                f"{setting:14} {name:38} rounds {rounds['mean']:6.1f} ± {rounds['std']:5.1f} "
                f"(missing {rounds['missing']}) acc {shown['accuracy']['mean']:.3f} "
                f"gemd {shown['gemd']['mean']:.2f} {seconds:.0f} s",
                flush=True,
            )
            write(args.out, results)


if __name__ == "__main__":
    main()
