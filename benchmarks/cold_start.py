"""Cold start: paper 0's Table 1 and Figure 3, with sketches doing the retrieval.

    python benchmarks/cold_start.py --dataset mnist --split twins --out runs/cold-start.json

Warm clients train a global model by FedAvg, then each fine-tunes it. Cold clients have no labels:
they get the global model, a random or the best personal model, or what their sketch retrieves.
Settings are the paper's (section 5.4). The optimizer is Adam, as in the released code: at the
paper's learning rate of 1e-4, SGD would hardly move.

Every retrieval goes through a registry (`fedcohort.personalize`). Limits are calibrated on warm
clients alone: "auto" by their distances, "gains" also by their accuracy on their training data.

Where there are many warm clients, `--finetune 20` fine-tunes only those that the exact sketches
retrieve, and 20 others, over which the averages of random, best and own personal models go. The
limit by gains, which needs the model of every warm client, is then left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import contextmanager

import numpy as np
import torch
from provenance import write

from fedcohort.datasets import Federation, federate, load
from fedcohort.partition import natural
from fedcohort.personalize import ColdStart, Record, Registry
from fedcohort.personalize.finetune import finetune
from fedcohort.privacy.release import sketch_size
from fedcohort.rounds import stream
from fedcohort.simulate import LocalTraining, Simulation, build
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

STRATEGIES = ("nearest", "plain", "match")
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
        warm, cold = parted(parts, some(parts, cold or len(parts) // 2, rng))
        return warm, cold, [tests[c] for c in warm], [tests[c] for c in cold]
    cold = cold or clients // 2
    count = clients - cold if name == "twins" else clients
    parts = federate(dataset, "skewness", clients=count, seed=seed, xi="H").parts
    if name == "twins":
        mixed = {c: rng.permutation(rows) for c, rows in parts.items()}
        warm = {c: np.sort(rows[: len(rows) // 2]) for c, rows in mixed.items()}
        cold = {c: np.sort(rows[len(rows) // 2 :]) for c, rows in list(mixed.items())[:cold]}
    elif name == "random":
        warm, cold = parted(parts, some(parts, cold, rng))
    else:
        warm, cold = without_twins(dataset, parts, cold, rng)
    # all test samples of the client's classes, which it has in about equal shares
    classes = [[np.unique(dataset.y[rows]) for rows in group.values()] for group in (warm, cold)]
    tests = [[np.flatnonzero(np.isin(dataset.y_test, c)) for c in group] for group in classes]
    return warm, cold, *tests


def some(parts, count, rng):
    return {list(parts)[i] for i in rng.choice(len(parts), count, replace=False)}


def without_twins(dataset, parts, cold, rng):
    """No warm client has both classes of a cold one."""
    by_pair = {}
    for client, rows in parts.items():
        by_pair.setdefault(tuple(np.unique(dataset.y[rows]).tolist()), []).append(client)
    pairs, chosen = list(by_pair), set()
    for i in rng.permutation(len(pairs)):
        if len(chosen) + len(by_pair[pairs[i]]) <= cold:
            chosen.update(by_pair[pairs[i]])
    return parted(parts, chosen)


def parted(parts, chosen):
    warm = {c: np.sort(rows) for c, rows in parts.items() if c not in chosen}
    return warm, {c: np.sort(rows) for c, rows in parts.items() if c in chosen}


def sketcher(dataset, rows, bits, seed, epsilon=None):
    """Return a function from a client's rows of the training set to its sketch, without labels."""
    if dataset.name == "shakespeare":
        empty, prepare = RaceSketch.minhash(rows=rows, buckets=2**bits, seed=seed), trigrams
    else:
        center = Transform(center=round(float(dataset.x.mean()), 2))
        dim = int(np.prod(dataset.sample_shape))
        empty = RaceSketch.srp(dim, rows=rows, bits=bits, seed=seed, transform=center)
        prepare = np.asarray

    def sketch(positions, *whose):
        one = empty.empty_like()
        one.add(prepare(dataset.x[positions]))
        noise = stream(seed, "privacy", *whose)
        return one if epsilon is None else one.privatize(epsilon, rng=noise)

    return sketch


def trigrams(windows):
    """Token sets as a sparse matrix: the runs of three characters in each window."""
    from scipy.sparse import csr_matrix

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


def train(dataset, setting, splits, args):
    """Return the simulation, and for each seed the personal models and whose they are."""
    model, _, _, cohort, rounds, local, exact_rows = setting
    simulation = Simulation(
        lambda seed: Federation(dataset, splits[seed][0]),
        lambda seed: build(model, dataset.sample_shape, dataset.classes, seed=seed),
        "uniform",
        cohort_size=min(cohort, *(len(warm) for warm, *_ in splits.values())),
        local=local,
        aggregation="size-weighted",
        seeds=tuple(splits),
        device=args.device,
        evaluate_every=0,
    )
    for _ in range(rounds):
        simulation.step()
    personal = {}
    for one in simulation.seeds:
        warm, cold, *_ = splits[one.seed]
        tuned = warm
        if args.finetune is not None:
            tuned = retrieved(
                sketcher(dataset, exact_rows, 6, one.seed), warm, cold, one.seed, args
            )
        trainer, data = simulation.trainer, simulation.train_data
        personal[one.seed] = finetune(trainer, one.model, tuned, data, seed=one.seed), tuned
    return simulation, personal


def retrieved(sketch, warm, cold, seed, args):
    """The warm clients that are the nearest of a cold one, and some more."""
    with registered({c: sketch(rows) for c, rows in warm.items()}) as registry:
        start = ColdStart(registry, max_distance=None)
        near = {c for rows in cold.values() for c in start.advise(sketch(rows), "nearest").weights}
    others = stream(seed, "fine-tuned").permutation([c for c in warm if c not in near])
    more = others[: args.finetune].tolist()
    return {c: rows for c, rows in warm.items() if c in near or c in more}


class Judge:
    """Scores models for the clients of one seed."""

    def __init__(self, simulation, one, split, personal):
        self.trainer, self.glob = simulation.trainer, one.model
        self.data, self.test = simulation.train_data, simulation.test_data
        self.warm, self.cold, self.warm_test, self.cold_test = split
        self.personal, self.tuned = personal
        self.order = {client: i for i, client in enumerate(self.tuned)}

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
        tests = [rows for c, rows in pairs if c in self.tuned]
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
                allowed = [max(limit, a.neighbors[0].error) for a in advices]
                out[f"{strategy}, auto"] = np.where(squares <= allowed, out[strategy], glob)
                if len(self.tuned) == len(warm):
                    held = [start.advise(s, strategy, without=c) for c, s in warm.items()]
                    rows = list(self.warm.values())
                    gains = self.advised(held, rows, self.data) - self.of_global(rows, self.data)
                    allowed = gains_limit([a.squared for a in held], gains)
                    out[f"{strategy}, gains"] = np.where(squares <= allowed, out[strategy], glob)
        return out


def gains_limit(squares, gains):
    """Return the limit under which the warm clients' gains sum to most."""
    order = np.argsort(squares, kind="stable")
    far = np.append(np.asarray(squares)[order], np.inf)
    kept = int(np.argmax(np.concatenate([[0.0], np.cumsum(gains[order])])))
    if kept in (0, len(order)):
        return far[kept - 1] if kept else -np.inf  # nothing is known beyond the last
    return (far[kept - 1] + far[kept]) / 2


def run(dataset, setting, name, args):
    started, seeds = time.perf_counter(), args.seeds
    splits = {s: split(dataset, name, *setting[1:3], s) for s in seeds}
    simulation, personal = train(dataset, setting, splits, args)
    trained = time.perf_counter() - started
    judges = {
        one.seed: Judge(simulation, one, splits[one.seed], personal[one.seed])
        for one in simulation.seeds
    }
    base, retrieval = {s: judge.baselines() for s, judge in judges.items()}, []
    records = float(np.median([len(rows) for rows in splits[seeds[0]][0].values()]))
    sizes = [(setting[-1], 6, None)]  # exact; then the released code's size, and the recommended
    for epsilon in args.epsilons:
        planned = sketch_size(records, epsilon)
        sizes += [(10, 6, epsilon), (planned.rows, planned.bits, epsilon)]
    first = {k: np.round(v, 4).tolist() for k, v in base[seeds[0]].items()}
    for rows, bits, epsilon in sizes:
        by_seed = {
            s: judge.retrieval(sketcher(dataset, rows, bits, s, epsilon), args.strategies)
            for s, judge in judges.items()
        }
        if epsilon is None:
            first["nearest"] = np.round(by_seed[seeds[0]]["nearest"], 4).tolist()
        row = {"rows": rows, "bits": bits, "epsilon": epsilon, "accuracy": summary(by_seed)}
        print(json.dumps(row), flush=True)
        retrieval.append(row)
    warm, cold, *_ = splits[seeds[0]]
    about = {"split": name, "warm": len(warm), "fine-tuned": len(personal[seeds[0]][1])}
    about |= {"cold": len(cold), "median samples": records, "baselines": summary(base)}
    about |= {"by client, first seed": first, "retrieval": retrieval}
    about["seconds"] = {"training": trained, "all": time.perf_counter() - started}
    return about


def summary(by_seed):
    """Mean over clients; then mean and standard deviation over seeds."""
    names = next(iter(by_seed.values()))
    means = {k: [float(v[k].mean()) for v in by_seed.values()] for k in names}
    return {
        k: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=len(v) > 1)), "seeds": v}
        for k, v in means.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="mnist", choices=SETTINGS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--finetune", type=int, help="how many warm clients beside the retrieved")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument(
        "--split", choices=("twins", "random", "no twins", "natural"), required=True
    )
    parser.add_argument("--epsilons", type=float, nargs="*", default=[])
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    setting = SETTINGS[args.dataset]
    torch.set_num_threads(min(4, torch.get_num_threads()))
    model, _, _, cohort, rounds, local, _ = setting
    stated = {"dataset": args.dataset, "model": model, "cohort": cohort, "rounds": rounds}
    stated["local"] = {k: getattr(local, k) for k in ("epochs", "batch_size", "lr", "optimizer")}
    split = run(load(args.dataset), setting, args.split, args)
    write(args.out, {**stated, "seeds": args.seeds, "splits": [split]})


if __name__ == "__main__":
    main()
