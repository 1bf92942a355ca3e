"""How long policies take per round, as federations grow.

    python benchmarks/selection.py --out benchmarks/results/selection-speed.json

A round is `candidates`, `select` and `observe`; signals are made up beforehand and not timed. Each
policy and size runs in a process of its own, so that its peak memory is known.
"""

from __future__ import annotations

import json
import os
from collections import Counter

import numpy as np
from provenance import write
from script import alone, arguments, clocks, peak_kb

from fedcohort.policies import POLICIES, ClusteredSampling, Policy
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.signals.forms import sketch_dtype
from fedcohort.signals.table import Signals

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
SCALARS = ("num_examples", "loss", "loss_rms", "duration", "update_distance")
WIDTHS = {"feature_profile": 64, "gradient_sketch": 50, "update_sketch": 50, "model_sketch": 100}
OPTIONS = {
    "power-of-choice": {"d": 200},
    "race-softmax": {"rows": 10},
    "sketch-to-select": {"interval": 8},
    "fedcor": {"warmup": 16, "interval": 100},
}
SIMILARITY = "clustered-sampling (similarity)"
NAMES = (*sorted(POLICIES), SIMILARITY)


def policy_of(name: str, clients: int) -> Policy:
    if name == SIMILARITY:
        signal = "feature_profile" if clients <= 1000 else "update_sketch"
        return ClusteredSampling("similarity", signal)
    return POLICIES[name](**OPTIONS.get(name, {}))


def readings(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Made-up readings of `count` clients: skewed sketches and profiles of ten kinds."""
    if name == "num_examples":
        return rng.integers(20, 200, count)
    if name in SCALARS:
        return rng.gamma(2.0, size=count)
    kinds = rng.integers(0, 10, count)
    if name == "label_histogram":
        shapes = np.random.default_rng(0).dirichlet(np.full(10, 0.3), size=10)
        return np.round(100 * shapes[kinds] + rng.random((count, 10)))
    if name == "race_sketch":
        out = np.zeros(count, sketch_dtype(10, 64, "i2"))
        shapes = np.random.default_rng(0).dirichlet(np.full(64, 0.1), size=(10, 10))
        out["n"] = n = rng.integers(50, 200, count)
        for part in (slice(first, first + 50_000) for first in range(0, count, 50_000)):
            mean = shapes[kinds[part]] * n[part, None, None]
            out["counts"][part] = np.round(mean + rng.random(mean.shape) - 0.5)
        return out
    width = WIDTHS.get(name, 10)
    centers = 3 * np.random.default_rng(1).normal(size=(10, width)).astype(np.float32)
    return centers[kinds] + rng.standard_normal((count, width), dtype=np.float32)


def time_policy(name: str, clients: int, cohort: int, rounds: int) -> dict:
    policy, signals = policy_of(name, clients), Signals()
    everyone = tuple(f"{i:07d}" for i in range(clients))

    def put(names, asked, number):
        """Record made-up readings as one array: a dict of a million would be the slowest part."""
        for signal in sorted(names):
            column, _ = signals._column_for(signal, Counter())
            column.put(asked, readings(signal, len(asked), stream(number, signal)), number)

    put(policy.needs.profile, everyone, 0)
    before, taken = peak_kb(), np.zeros((rounds, 2))

    def timed(number, call, *arguments):
        start = clocks()
        result = call(*arguments)
        taken[number] += clocks() - start
        return result

    for number in range(rounds):
        round = Round(number, everyone, cohort)
        draws = [stream(0, number, phase) for phase in ("candidates", "select")]
        asked = tuple(timed(number, policy.candidates, round, signals, draws[0]))
        put(policy.needs.query, asked, number)
        chosen = timed(number, policy.select, round, signals, draws[1]).clients
        put(policy.needs.reply, chosen, number)
        timed(number, policy.observe, round, Outcome(chosen, chosen), signals)
    wall, cpu = taken.T
    return {
        "policy": name,
        "clients": clients,
        "cohort": cohort,
        "first_round_s": wall[0],
        "median_round_s": float(np.median(wall[1:][-10:])),  # after any warm-up
        "median_round_cpu_s": float(np.median(cpu[-10:])),
        "slowest_later_round_s": wall[1:].max(),
        "signals_mb": before / 1024,
        "peak_mb": peak_kb() / 1024,
    }


def main() -> None:
    args = arguments(__doc__, out=str, sizes=list(SIZES), policies=list(NAMES))
    rounds = []
    for clients in args.sizes:
        cohort = 100 if clients >= 1_000_000 else 50
        for name in args.policies:
            rounds.append(alone(time_policy, name, clients, cohort, 30))
            print(json.dumps(rounds[-1]), flush=True)
    if args.out:
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        write(args.out, {"rounds": rounds, "threads": threads})


if __name__ == "__main__":
    main()
