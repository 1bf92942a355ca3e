"""Cold start: paper 0's Table 1 and Figure 3, with sketches doing the retrieval.

    python benchmarks/cold_start.py --dataset mnist --split twins --out runs/cold-start.json

Warm clients train a global model by FedAvg, then each fine-tunes it. Cold clients have no labels:
they get the global model, a random or the best personal model, or what their sketch retrieves from
a registry. Settings are the paper's (section 5.4), the optimizer is the released code's. Limits are
calibrated on warm clients alone: "auto" by their distances, "gains" also by their accuracy on their
training data.

`--finetune 20` fine-tunes only the warm clients that the exact sketches retrieve, and 20 others,
over which the averages of random, best and own personal models go; without the limit by gains,
which needs the model of every warm client.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import contextmanager

import numpy as np
import torch
from provenance import write
from scipy.sparse import csr_matrix
from script import arguments

from fedcohort.datasets import Federation, federate, load
from fedcohort.partition import natural
from fedcohort.personalize import ColdStart, Record, Registry
from fedcohort.personalize.finetune import finetune
from fedcohort.privacy.release import sketch_size
from fedcohort.rounds import stream
from fedcohort.simulate import LocalTraining, Simulation, build
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

IMAGES = LocalTraining(epochs=10, batch_size=32, lr=1e-4, optimizer="adam")
TEXT = LocalTraining(epochs=20, batch_size=10, lr=0.01, optimizer="adam")
# model, clients, cold clients (None: half), cohort, rounds, local training, rows of exact sketches
SETTINGS = {
    "mnist": ("mlp-512", 100, None, 10, 200, IMAGES, 200),
    "femnist": ("lenet5", None, None, 50, 200, IMAGES, 200),
    "shakespeare": ("char-lstm", None, 20, 3, 5, TEXT, 100),
}


def split(dataset, name, clients, cold, seed):
    """Rows of the warm and of the cold clients' training data, and of their test data.

    "natural" is by writer or role; else each client has two classes. Then a cold client is a
    "twin" of a warm one, with other samples, is drawn at "random", or has no twin.
    """
    rng = stream(seed, "cold-start")
    if name == "natural":
        federation = federate(dataset, "natural", clients=clients, seed=seed)
        tests = natural(dataset.test_client_ids)
        parts = {c: rows for c, rows in federation.parts.items() if c in tests}
        cold = some(parts, cold or len(parts) // 2, rng)
    else:
        cold = clients // 2
        count = clients - cold if name == "twins" else clients
        parts = federate(dataset, "skewness", clients=count, seed=seed, xi="H").parts
        classes = {c: tuple(np.unique(dataset.y[rows]).tolist()) for c, rows in parts.items()}
        if name == "no twins":
            cold = without_twins(classes, cold, rng)
        elif name == "random":
            cold = some(parts, cold, rng)
        # all test samples of the client's classes, which it has in about equal shares
        tests = {c: np.flatnonzero(np.isin(dataset.y_test, own)) for c, own in classes.items()}
    if name == "twins":
        halves = {
            c: np.array_split(rng.permutation(rows), [len(rows) // 2]) for c, rows in parts.items()
        }
        warm = {c: first for c, (first, _) in halves.items()}
        cold = {c: halves[c][1] for c in list(parts)[:cold]}
    else:
        warm = {c: rows for c, rows in parts.items() if c not in cold}
        cold = {c: rows for c, rows in parts.items() if c in cold}
    sides = [{c: np.sort(rows) for c, rows in side.items()} for side in (warm, cold)]
    return *sides, [tests[c] for c in warm], [tests[c] for c in cold]


def some(parts, count, rng):
    return {list(parts)[i] for i in rng.choice(len(parts), count, replace=False)}


def without_twins(classes, cold, rng):
    """Cold clients, of whom no warm client has both classes."""
    pairs, chosen = list(dict.fromkeys(classes.values())), set()
    for i in rng.permutation(len(pairs)):
        group = {client for client, pair in classes.items() if pair == pairs[i]}
        if len(chosen) + len(group) <= cold:
            chosen |= group
    return chosen


def sketcher(dataset, rows, bits, seed, epsilon=None):
    """A function from a client's rows of the training set to its sketch, without labels."""
    is_text = dataset.name == "shakespeare"
    if is_text:
        empty = RaceSketch.minhash(rows=rows, buckets=2**bits, seed=seed)
    else:
        center = Transform(center=round(float(dataset.x.mean()), 2))
        dim = int(np.prod(dataset.sample_shape))
        empty = RaceSketch.srp(dim, rows=rows, bits=bits, seed=seed, transform=center)

    def sketch(positions, *whose):
        one, x = empty.empty_like(), dataset.x[positions]
        one.add(trigrams(x) if is_text else x)
        noise = stream(seed, "privacy", *whose)
        return one if epsilon is None else one.privatize(epsilon, rng=noise)

    return sketch


def trigrams(windows):
    """Token sets as a sparse matrix: the runs of three characters in each window."""
    codes = windows[:, :-2] * 6400 + windows[:, 1:-1] * 80 + windows[:, 2:]
    ends = np.arange(0, codes.size + 1, codes.shape[1])
    marks = csr_matrix((np.ones(codes.size, np.int8), codes.ravel(), ends), (len(codes), 80**3))
    marks.sum_duplicates()
    return marks


@contextmanager
def registered(sketches):
    """A registry of the clients' sketches, without models."""
    with tempfile.TemporaryDirectory() as folder, Registry.create(f"{folder}/warm") as registry:
        registry.add_many(Record(c, s, reference=f"warm/{c}") for c, s in sketches.items())
        yield registry


def retrieved(sketch, warm, cold, seed, count):
    """The warm clients that are the nearest of a cold one, and some more."""
    with registered({c: sketch(rows) for c, rows in warm.items()}) as registry:
        start = ColdStart(registry, max_distance=None)
        near = {c for rows in cold.values() for c in start.advise(sketch(rows), "nearest").weights}
    others = stream(seed, "fine-tuned").permutation([c for c in warm if c not in near])
    more = others[:count].tolist()
    return {c: rows for c, rows in warm.items() if c in near or c in more}


class Judge:
    """Scores the global and the personal models for the clients of one seed."""

    def __init__(self, simulation, one, split, sketch, count):
        self.trainer, self.glob = simulation.trainer, one.model
        self.data, self.test = simulation.train_data, simulation.test_data
        self.warm, self.cold, self.warm_test, self.cold_test = split
        tuned = self.warm
        if count is not None:
            tuned = retrieved(sketch, self.warm, self.cold, one.seed, count)
        self.personal = finetune(self.trainer, one.model, tuned, self.data, seed=one.seed)
        self.order = {client: i for i, client in enumerate(tuned)}

    def of_global(self, parts, data):
        return self.every(self.glob[None], parts, data)[0]

    def every(self, models, parts, data):
        """Accuracy of every model on every client's rows, (models, clients)."""
        mine = (data._make(values[part] for values in data) for part in parts)
        return np.stack([self.trainer.evaluate(models, rows)[0] for rows in mine], axis=1)

    def own(self, models, parts, data):
        """Accuracy of model i on the rows of client i."""
        pairs = zip(models, parts, strict=True)
        return np.array([self.every(model[None], [part], data)[0, 0] for model, part in pairs])

    def baselines(self):
        pairs = zip(self.warm, self.warm_test, strict=True)
        tests = [rows for c, rows in pairs if c in self.order]
        every = self.every(self.personal, self.cold_test, self.test)
        return {
            "warm global": self.of_global(tests, self.test),
            "warm local": self.own(self.personal, tests, self.test),
            "global": self.of_global(self.cold_test, self.test),
            "random": every.mean(axis=0),
            "best": every.max(axis=0),
        }

    def advised(self, advices, parts, data):
        """Accuracy of what is advised, client by client; the limit is not applied."""
        weights = np.zeros((len(advices), len(self.order)), np.float32)
        for row, advice in zip(weights, advices, strict=True):
            for client, share in advice.weights.items():
                row[self.order[client]] = share
        mixtures = torch.as_tensor(weights, device=self.personal.device) @ self.personal
        return self.own(mixtures, parts, data)

    def retrieval(self, sketch, strategies):
        """Accuracy of every strategy, and with each limit."""
        warm = {c: sketch(rows, "warm", c) for c, rows in self.warm.items()}
        cold = [sketch(rows, "cold", c) for c, rows in self.cold.items()]
        glob, out = self.of_global(self.cold_test, self.test), {}
        with registered(warm) as registry:
            start, limit = ColdStart(registry, max_distance=None), ColdStart(registry).limit
            for strategy in strategies:
                advices = [start.advise(s, strategy) for s in cold]
                out[strategy] = self.advised(advices, self.cold_test, self.test)
                squares = np.array([a.squared for a in advices])
                allowed = {"auto": [max(limit, a.neighbors[0].error) for a in advices]}
                if len(self.order) == len(warm):
                    held = [start.advise(s, strategy, without=c) for c, s in warm.items()]
                    rows = list(self.warm.values())
                    gains = self.advised(held, rows, self.data) - self.of_global(rows, self.data)
                    allowed["gains"] = gains_limit([a.squared for a in held], gains)
                for name, most in allowed.items():
                    near = squares <= most
                    out[f"{strategy}, {name}"] = np.where(near, out[strategy], glob)
        return out


def gains_limit(squares, gains):
    """The limit under which the warm clients' gains sum to most."""
    order = np.argsort(squares, kind="stable")
    far = np.append(np.asarray(squares)[order], np.inf)
    kept = int(np.argmax(np.concatenate([[0.0], np.cumsum(gains[order])])))
    if kept in (0, len(order)):
        return far[kept - 1] if kept else -np.inf  # nothing is known beyond the last
    return (far[kept - 1] + far[kept]) / 2


def run(dataset, setting, name, args):
    model, clients, cold, cohort, rounds, local, exact_rows = setting
    started, seeds = time.perf_counter(), args.seeds
    splits = {s: split(dataset, name, clients, cold, s) for s in seeds}
    options = {"aggregation": "size-weighted", "device": args.device, "evaluate_every": 0}
    simulation = Simulation(
        lambda seed: Federation(dataset, splits[seed][0]),
        lambda seed: build(model, dataset.sample_shape, dataset.classes, seed=seed),
        "uniform",
        cohort_size=min(cohort, *(len(warm) for warm, *_ in splits.values())),
        local=local,
        seeds=seeds,
        **options,
    )
    for _ in range(rounds):
        simulation.step()
    judges = {}
    for one in simulation.seeds:
        sketch = sketcher(dataset, exact_rows, 6, one.seed)
        judges[one.seed] = Judge(simulation, one, splits[one.seed], sketch, args.finetune)
    trained = time.perf_counter() - started
    base, retrieval = [judge.baselines() for judge in judges.values()], []
    warm, cold, *_ = splits[seeds[0]]
    records = float(np.median([len(rows) for rows in warm.values()]))
    sizes = [(exact_rows, 6, None)]  # exact; then the released code's size, and the recommended
    for epsilon in args.epsilons:
        planned = sketch_size(records, epsilon)
        sizes += [(10, 6, epsilon), (planned.rows, planned.bits, epsilon)]
    first = base[0]
    for rows, bits, epsilon in sizes:
        by_seed = [
            judge.retrieval(sketcher(dataset, rows, bits, s, epsilon), args.strategies)
            for s, judge in judges.items()
        ]
        if epsilon is None:
            first = first | {"nearest": by_seed[0]["nearest"]}
        row = {"rows": rows, "bits": bits, "epsilon": epsilon, "accuracy": summary(by_seed)}
        print(json.dumps(row), flush=True)
        retrieval.append(row)
    return {
        "split": name,
        "warm": len(warm),
        "fine-tuned": len(judges[seeds[0]].order),
        "cold": len(cold),
        "median samples": records,
        "baselines": summary(base),
        "by client, first seed": {k: np.round(v, 4).tolist() for k, v in first.items()},
        "retrieval": retrieval,
        "seconds": {"training": trained, "all": time.perf_counter() - started},
    }


def summary(by_seed):
    """Mean over clients; then mean and standard deviation over seeds."""
    means = {k: [float(one[k].mean()) for one in by_seed] for k in by_seed[0]}
    return {
        k: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=len(v) > 1)), "seeds": v}
        for k, v in means.items()
    }


def main():
    options = {"dataset": "mnist", "split": ..., "device": "auto", "seeds": [0, 1, 2], "out": ...}
    strategies = ["nearest", "plain", "match"]
    args = arguments(__doc__, **options, finetune=int, strategies=strategies, epsilons=[float])
    torch.set_num_threads(min(4, torch.get_num_threads()))
    setting = model, _, _, cohort, rounds, local, _ = SETTINGS[args.dataset]
    stated = {"dataset": args.dataset, "model": model, "cohort": cohort, "rounds": rounds}
    stated["local"] = {k: getattr(local, k) for k in ("epochs", "batch_size", "lr", "optimizer")}
    split = run(load(args.dataset), setting, args.split, args)
    write(args.out, {**stated, "seeds": args.seeds, "splits": [split]})


if __name__ == "__main__":
    main()
