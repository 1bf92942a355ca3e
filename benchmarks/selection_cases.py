"""SketchMatch where it is special: large cohorts, joiners, long tails, drift, sizes, embeddings.

python benchmarks/selection_cases.py --seeds 1000 10 --out benchmarks/results/selection-cases.json

The seeds are the first and how many; those below 1000 are for development. The data are
Fashion-MNIST (FEMNIST in one case); the model is an MLP 784-64-30-10. Sketches of 2 x 8 are what
`fedcohort.privacy.release.sketch_size` gives for 157 records at epsilon 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from provenance import write
from script import arguments

from fedcohort.datasets import Dataset, Federation, federate, load
from fedcohort.metrics import gemd, participation, participation_entropy
from fedcohort.partition import PARTITIONS
from fedcohort.policies import Policy, SketchMatch
from fedcohort.rounds import History, stream
from fedcohort.simulate import LocalTraining, Simulation, Trace, build
from fedcohort.sketch.federation import UniformLabels
from fedcohort.sketch.race import RaceSketch, empty_sketch

FASHION = LocalTraining(epochs=3, batch_size=64, lr=0.005)
PUBLIC = 100  # images of the test set that stand for public data; the simulator takes as many
JOIN, MOVE = 40, 25  # rounds


@dataclass(frozen=True)
class Case:
    """One situation; `window` are the rounds whose mean accuracy is reported, to the last one."""

    about: str
    federation: Callable[[int], Federation]
    variants: dict[str, str | Callable[[], Policy]]
    window: tuple[int, int]
    cohort_size: int = 5
    local: LocalTraining = FASHION
    options: dict[str, Any] = field(default_factory=dict)
    before_round: Callable[[Simulation, int], None] = lambda simulation, number: None


@cache
def fashion() -> Dataset:
    return load("fashion-mnist").standardized()


def two_shards(seed: int, clients: int = 100) -> Federation:
    return federate(fashion(), "shards", clients=clients, seed=seed, per_client=2)


def halves_of_labels(seed: int) -> Federation:
    """Clients 00 to 49 hold labels 0 to 4 and clients 50 to 99 the others, two shards each."""
    parts = []
    for name, late in (("early", False), ("late", True)):
        rows = np.flatnonzero((fashion().y >= 5) == late)
        rng = stream(seed, "partition", name)
        split = PARTITIONS["shards"](fashion().y[rows], 50, rng, per_client=2)
        parts += [rows[part] for part in split]
    return federate(fashion(), parts)


def joining() -> Trace:
    names = [f"client-{i:02d}" for i in range(100)]
    return Trace({1: names[:50], JOIN + 1: names})


@cache
def long_tail() -> Dataset:
    """Label c keeps 50^(-c / 9) of its images. The test set begins with 10 images per label."""
    data = fashion()

    def first(labels: np.ndarray, counts: list[int]) -> np.ndarray:
        return np.concatenate([np.flatnonzero(labels == c)[:n] for c, n in enumerate(counts)])

    at = np.sort(first(data.y, [round(6000 * 50 ** (-c / 9)) for c in range(10)]))
    public = first(data.y_test, [PUBLIC // 10] * 10)
    order = np.concatenate([public, np.setdiff1d(np.arange(len(data.y_test)), public)])
    train, test = (data.x[at], data.y[at]), (data.x_test[order], data.y_test[order])
    return replace(data, x=train[0], y=train[1], x_test=test[0], y_test=test[1])


def long_tailed(seed: int) -> Federation:
    return federate(long_tail(), "shards", clients=100, seed=seed, per_client=2)


def like_clients(rows: int = 10, bits: int = 6) -> RaceSketch:
    """An empty sketch, made as the simulator makes the clients'."""
    data = long_tail()
    public = data.x_test[:PUBLIC]
    options = SketchMatch(rows=rows, bits=bits).signal_options["race_sketch"]
    center = public.reshape(PUBLIC, -1).mean(axis=0)
    return empty_sketch(options, public, classes=data.classes, center=center)


def balanced(rows: int = 10, bits: int = 6, **options: Any) -> SketchMatch:
    """SketchMatch with the sketch of 100 public, balanced images as its target."""
    target, data = like_clients(rows, bits), long_tail()
    target.add(data.x_test[:PUBLIC].reshape(PUBLIC, -1), data.y_test[:PUBLIC])
    return SketchMatch(target=target, pool="random", rows=rows, bits=bits, **options)


def unequal_sizes(seed: int) -> Federation:
    """Two shards per client, of which a log-normal number is kept: 10 to 600, median about 60."""
    whole, rng = two_shards(seed), stream(seed, "sizes")
    sizes = np.clip(np.exp(rng.normal(np.log(60), 1.2, len(whole.parts))), 10, 600).astype(int)
    pairs = zip(whole.parts.items(), sizes, strict=True)
    parts = {c: np.sort(rng.permutation(part)[:n]) for (c, part), n in pairs}
    return Federation(whole.dataset, parts)


def exchange_data(simulation: Simulation, number: int) -> None:
    """In one round, every client's data move to another client."""
    for seed in simulation.seeds if number == MOVE else ():
        parts = seed.federation.parts
        order = stream(seed.seed, "drift").permutation(len(parts))
        held = list(parts.values())
        parts.update(zip(parts, [held[i] for i in order], strict=True))


BOTH = {name: name for name in ("uniform", "sketch-match")}
MATCH = {**BOTH, "sketch-match, epsilon 1": "sketch-match:epsilon=1"}
TWO_SHARDS = "two shards per client"

CASES = {
    "planned epochs": Case(
        f"10 of 20 clients, {TWO_SHARDS}: all clients are divided into cohorts at once",
        lambda seed: two_shards(seed, 20),
        MATCH,
        (0, 50),
        cohort_size=10,
    ),
    "late joiners": Case(
        "clients with half of the labels join at round 40; accuracy over the next 20 rounds",
        halves_of_labels,
        MATCH,
        (JOIN, 60),
        options={"availability": joining()},
    ),
    "long tail": Case(
        "imbalance 50, balanced test set; the target is 100 public images, or uniform labels",
        long_tailed,
        {
            **MATCH,
            **{name: name for name in ("oort", "fed-cbs")},
            "sketch-match, public target": balanced,
            "sketch-match, public target, epsilon 1": lambda: balanced(epsilon=1.0),
            "sketch-match, public target, epsilon 1, 2 x 8": lambda: balanced(2, 3, epsilon=1.0),
            "sketch-match, uniform labels": lambda: SketchMatch(
                target=UniformLabels(like_clients()), pool="random"
            ),
        },
        (180, 200),
    ),
    "drift": Case(
        f"all data move to other clients at round {MOVE}; accuracy over the next 50 rounds",
        two_shards,
        {**MATCH, "sketch-match, refresh": f"sketch-match:refresh={MOVE}"},
        (MOVE, 75),
        before_round=exchange_data,
    ),
    "quantity skew": Case(
        f"{TWO_SHARDS}, of which 10 to 600 records are kept",
        unequal_sizes,
        {**MATCH, "sketch-match, epsilon 1, records=150": "sketch-match:epsilon=1,records=150"},
        (0, 150),
    ),
    "FEMNIST": Case(
        "293 writers, cohorts of 10",
        lambda seed: federate(load("femnist"), "natural", seed=seed),
        {**MATCH, "sketch-match, epsilon 1, 2 x 8": "sketch-match:rows=2,bits=3,epsilon=1"},
        (0, 150),
        cohort_size=10,
        local=LocalTraining(epochs=2, batch_size=20, lr=0.05),
    ),
    "embeddings": Case(
        f"{TWO_SHARDS}, sketches without labels: of pixels, or of the current model's first layer",
        two_shards,
        {
            "uniform": "uniform",
            "sketch-match, pixels": "sketch-match:label_weight=0",
            "sketch-match, model of every 10th round": (
                "sketch-match:label_weight=0,embed=model,refresh=10"
            ),
            "sketch-match, initial model": "sketch-match:label_weight=0,embed=model",
        },
        (0, 100),
    ),
    "turns": Case(
        f"{TWO_SHARDS}: what it costs that everybody takes part",
        two_shards,
        BOTH | {f"sketch-match, turns={n}": f"sketch-match:turns={n}" for n in (1, 2)},
        (0, 100),
    ),
}


def run(case: Case, variant: str, seeds: list[int], device: str) -> list[dict[str, Any]]:
    federations = {seed: case.federation(seed) for seed in seeds}
    data, policy = federations[seeds[0]].dataset, case.variants[variant]
    simulation = Simulation(
        federations.__getitem__,
        lambda seed: build("mlp-64-30", data.sample_shape, data.classes, seed=seed),
        policy() if callable(policy) else policy,
        cohort_size=case.cohort_size,
        local=case.local,
        seeds=seeds,
        device=device,
        **case.options,
    )
    rounds = []
    for number in range(case.window[1]):
        case.before_round(simulation, number)
        rounds.append(simulation.step())
    of_seeds = zip(seeds, zip(*rounds, strict=True), simulation.seeds, strict=True)
    return [row_of(History(s, [*rs]), one.federation, case.window) for s, rs, one in of_seeds]


def row_of(history: History, federation: Federation, window: tuple[int, int]) -> dict[str, Any]:
    place = {client: i for i, client in enumerate(federation.parts)}
    chosen = [[place[c] for c in cohort] for cohort in history.selections[slice(*window)]]
    picks, counts = participation(history.selections, [*place]), federation.label_counts()
    seen = itertools.accumulate(map(set, history.selections), set.union)
    return {
        "seed": history.seed,
        "accuracy": float(np.mean(history.accuracy[slice(*window)])),
        "gemd": float(np.mean([gemd(counts, cohort) for cohort in chosen])),
        "participation_entropy": participation_entropy(picks),
        "never_picked": int((picks == 0).sum()),
        "all_used_by": next((n for n, used in enumerate(seen, 1) if len(used) == len(place)), None),
    }


def main() -> None:
    args = arguments(__doc__, seeds=[0, 1], cases=list(CASES), device="auto", out=...)
    torch.set_num_threads(1)
    seeds, rows = list(range(args.seeds[0], sum(args.seeds))), []
    for name in args.cases:
        case = CASES[name]
        for variant in case.variants:
            found = run(case, variant, seeds, args.device)
            about = {"case": name, "variant": variant, "about": case.about, "seeds": found}
            about |= {"rounds": case.window[1], "window": case.window}
            rows.append(about | {"cohort_size": case.cohort_size})
            write(args.out, rows)
            print(
                f"{name}: {variant}: {np.mean([row['accuracy'] for row in found]):.4f}", flush=True
            )


if __name__ == "__main__":
    main()
