"""Sketch-to-Skip and Sketch-to-Select in paper 2's setting: overhead against accuracy.

python benchmarks/skipping.py --dataset mnist --out benchmarks/results/skipping-mnist.json

N = 50 clients, C = 10 a round, T = 1000 rounds of one SGD step, batch 100, learning rate 0.05
(CIFAR-10 0.01), re-selection every 100 rounds, sketches of 100 and 10
numbers; IID and one label a node. "select" is the paper's; "select by steps" is our default, which
compares the directions of steps by 100 numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

import numpy as np
from provenance import write

from fedcohort.datasets import federate, load
from fedcohort.experiments.summary import overhead
from fedcohort.gates import SketchToSkip
from fedcohort.policies import POLICIES
from fedcohort.simulate import History, LocalTraining, Simulation, build

CASES = {"iid": ("iid", {}), "one label a node": ("one-label", {})}
SETTINGS = {  # model, learning rate, thresholds (a smaller rate drifts less)
    "mnist": ("fcnn-300", 0.05, [0.02, 0.05, 0.1, 0.2]),
    "fashion-mnist": ("fcnn-300", 0.05, [0.02, 0.05, 0.1, 0.2]),
    "cifar10": ("lrn-cnn", 0.01, [0.002, 0.005, 0.01, 0.02, 0.05, 0.1]),
    "digits": ("mlp-64-30", 0.05, [0.02, 0.05, 0.1, 0.2]),
}


def variants(thresholds):
    """Name, policy and gate of every run; the first is the baseline."""
    select = partial(POLICIES["sketch-to-select"], interval=100, k=10, compare="models")
    long = partial(SketchToSkip, max_skips=200)
    middle, high = thresholds[1], thresholds[-2]
    yield "FedAvg, random", "uniform", None
    yield "select", select, None
    for t in thresholds:
        yield f"select, skip {t}", select, long(t)
    yield f"random, skip {middle}", "uniform", long(middle)
    for t in thresholds[:-1]:
        yield f"select, skip {t}, by client", select, SketchToSkip(t, mode="client")
    for most in (1, 2, 5, 10, 20):
        gate = SketchToSkip(high, max_skips=most)
        yield f"select, skip {high}, at most {most} in a row", select, gate
    yield "select, auto 0.8", select, SketchToSkip("auto", skip_rate=0.8, adaptive=False)
    yield "select, auto 0.8, adaptive", select, SketchToSkip("auto", skip_rate=0.8)
    yield "select, auto 0.5, adaptive", select, SketchToSkip("auto", skip_rate=0.5)
    yield f"select, skip {high}, literal reset", select, long(high, on_skip="reset")
    steps = partial(POLICIES["sketch-to-select"], interval=100)
    yield "select by steps", steps, None
    yield f"select by steps, skip {middle}", steps, long(middle)
    most = SketchToSkip(high, max_skips=5)
    yield f"select by steps, skip {high}, at most 5 in a row", steps, most
    yield "select by steps, auto 0.8, adaptive", steps, SketchToSkip("auto", skip_rate=0.8)
    finer = partial(select, k=100)
    yield "select by 100 numbers", finer, None
    yield f"select by 100 numbers, skip {middle}", finer, long(middle)


def run(federations, dataset, name, lr, policy, gate, args):
    simulation = Simulation(
        lambda seed: federations[seed],
        lambda seed: build(name, dataset.x.shape[1:], dataset.classes, seed=seed),
        policy,
        cohort_size=10,
        local=LocalTraining(steps=1, batch_size=100, lr=lr),
        gate=gate,
        seeds=tuple(federations),
        device=args.device,
        evaluate_every=args.evaluate_every,
    )
    histories = [History(seed) for seed in federations]
    for _ in range(args.rounds):
        for history, record in zip(histories, simulation.step(), strict=True):
            history.rounds.append(record)
    rows = []
    for history, seed in zip(histories, simulation.seeds, strict=True):
        accuracy = history.accuracy[np.isfinite(history.accuracy)]
        share = overhead(history, seed.session.ledger, len(seed.clients), seed.model_bytes)
        gate_state = seed.session.gate.state if gate is not None else None
        rows.append(
            {
                "seed": seed.seed,
                "final accuracy": float(accuracy[-10:].mean()),
                "spread": float(accuracy[-50:].std()),
                "accuracy": [round(float(a), 4) for a in accuracy],
                "threshold": None if gate_state is None else gate_state.threshold,
                "bytes": {w: seed.session.ledger.by_kind(w) for w in ("up", "down")},
                **share._asdict(),
            }
        )
    return rows


def before(path, stated):
    """Return the provenance and the runs of a result file, or nothing where there is none."""
    if not path.exists():
        return [], []
    held = json.loads(path.read_text())
    origin, result = held["provenance"], held["result"]
    other = {key: result.get(key) for key in stated if result.get(key, stated[key]) != stated[key]}
    if other:
        raise SystemExit(f"{path} holds runs with {other}, not {stated}: choose another --out")
    return origin if isinstance(origin, list) else [origin], result["runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="fashion-mnist", choices=SETTINGS)
    parser.add_argument("--root", default=None)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--thresholds", type=float, nargs="+")
    parser.add_argument("--model", help="In place of the paper's.")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--pixels", default="standardized", choices=["standardized", "raw"])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--only", nargs="*", help="Run only variants of these names.")
    parser.add_argument("--out", required=True, help="What it holds already is not run again.")
    args = parser.parse_args()
    dataset = load(args.dataset, args.root)
    if args.pixels == "standardized":
        dataset = dataset.standardized()
    name, lr, thresholds = SETTINGS[args.dataset]
    name, lr, thresholds = args.model or name, args.lr or lr, args.thresholds or thresholds
    stated = {"dataset": args.dataset, "pixels": args.pixels, "model": name, "lr": lr}
    earlier, results = before(Path(args.out), stated)
    own = []
    known = {(row["case"], row["variant"]): row["accuracy"] for row in results}
    for case in args.cases:
        partition, options = CASES[case]
        federations = {
            seed: federate(dataset, partition, clients=50, seed=seed, **options)
            for seed in range(args.seeds)
        }
        base = known.get((case, "FedAvg, random"))
        for label, policy, gate in variants(thresholds):
            if (case, label) in known or (args.only and label not in args.only):
                continue
            started = time.perf_counter()
            rows = run(federations, dataset, name, lr, policy, gate, args)
            final = np.mean([r["final accuracy"] for r in rows])
            base = final if base is None else base
            summary = {
                "case": case,
                "variant": label,
                "accuracy": float(final),
                "accuracy change %": float(100 * (final - base) / base),
                "spread": float(np.mean([r["spread"] for r in rows])),
                "up %": float(np.mean([r["up"] for r in rows])),
                "down %": float(np.mean([r["down"] for r in rows])),
                "down to all %": float(np.mean([r["down_to_all"] for r in rows])),
                "skipped %": float(np.mean([r["skipped"] for r in rows])),
                "seconds": time.perf_counter() - started,
            }
            results.append({**summary, "seeds": rows})
            own.append(f"{case}: {label}")
            print(
                f"{case:17} {label:38} acc {final:.3f} ± {summary['spread']:.3f} "
                f"({summary['accuracy change %']:+6.2f} %) "
                f"up {summary['up %']:6.2f} % down {summary['down %']:6.2f} % "
                f"(all {summary['down to all %']:6.2f} %) {summary['seconds']:.0f} s",
                flush=True,
            )
            write(args.out, {**stated, "runs": results}, earlier, rows=own)


if __name__ == "__main__":
    main()
