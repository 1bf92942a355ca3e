"""Cold start: paper 0's Table 1 and Figure 3, with sketches doing the retrieval.

    python benchmarks/cold_start.py --dataset mnist --out runs/cold-start.json

Warm clients train a global model by FedAvg, then each fine-tunes it. Cold clients have no labels:
they get the global model, a random or the best personal model, or what their sketch retrieves.
Settings are the paper's (section 5.4). The optimizer is Adam, as in the released code: at the
paper's learning rate of 1e-4, SGD would hardly move. `--optimizer sgd --lr ...` tries it.

Every retrieval goes through a registry (`fedcohort.personalize`). Limits are calibrated on warm
clients alone: "auto" by their distances, "gains" also by their accuracy on their training data.

Where there are many warm clients, `--finetune 20` fine-tunes only those that the exact sketches
retrieve, and 20 others, over which the averages of random, best and own personal models go. The
limit by gains, which needs the model of every warm client, is then left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from provenance import write

from fedcohort.datasets import Federation, federate, load
from fedcohort.personalize import ColdStart, Record, Registry
from fedcohort.personalize.finetune import finetune
from fedcohort.privacy.release import sketch_size
from fedcohort.rounds import stream
from fedcohort.simulate import LocalTraining, Simulation, build
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

PAPER = {
    "mnist": {"warm global": 0.8764, "warm local": 0.9784, "global": 0.8791, "nearest": 0.9702},
    "femnist": {"warm global": 0.6593, "warm local": 0.7336, "global": 0.6667, "nearest": 0.6937},
    "shakespeare": {
        "warm global": 0.3581,
        "warm local": 0.3645,
        "global": 0.3237,
        "nearest": 0.3455,
    },
}
STRATEGIES = ("nearest", "plain", "match")


@dataclass(frozen=True)
class Setting:
    model: str
    splits: tuple
    clients: int | None
    cold: int | None  # None: half
    cohort: int
    rounds: int
    local: LocalTraining
    rows: int = 200  # of the exact sketch
    epsilons: tuple = (4.0, 2.0, 1.0, 0.5)


IMAGES = LocalTraining(epochs=10, batch_size=32, lr=1e-4, optimizer="adam")
SETTINGS = {
    "mnist": Setting("mlp-512", ("twins", "no twins", "random"), 100, None, 10, 200, IMAGES),
    "femnist": Setting("lenet5", ("natural",), None, None, 50, 200, IMAGES),
    "shakespeare": Setting(
        "char-lstm",
        ("natural",),
        None,
        20,
        3,
        5,
        LocalTraining(epochs=20, batch_size=10, lr=0.01, optimizer="adam"),
        rows=100,
        epsilons=(),
    ),
    "digits": Setting(  # small: to try the script
        "mlp-64-30",
        ("twins", "no twins", "random"),
        40,
        None,
        10,
        30,
        replace(IMAGES, lr=1e-3),
        rows=50,
        epsilons=(4.0,),
    ),
}


@dataclass(frozen=True)
class Split:
    """Rows of the training and the test set by client."""

    warm: dict
    cold: dict
    warm_test: list
    cold_test: list


def make_split(dataset, name, clients, cold, seed):
    rng = stream(seed, "cold-start")
    if name == "natural":
        return _natural(dataset, clients, cold, seed, rng)
    cold = cold or clients // 2
    halves = {"twins": _twins, "no twins": _without_twins, "random": _at_random}[name]
    warm, cold = halves(dataset, clients, cold, seed, rng)
    return Split(warm, cold, _by_class(dataset, warm), _by_class(dataset, cold))


def _twins(dataset, clients, cold, seed, rng):
    """Two classes per client; each cold client shares a warm client's classes, not its samples."""
    parts = federate(dataset, "skewness", clients=clients - cold, seed=seed, xi="H").parts
    warm, twins = {}, {}
    for client, rows in parts.items():
        mixed = rng.permutation(rows)
        warm[client], twins[client] = np.split(mixed, [len(mixed) // 2])
    chosen = list(twins)[:cold]
    return _sorted(warm), _sorted({client: twins[client] for client in chosen})


def _at_random(dataset, clients, cold, seed, rng):
    """Two classes per client; who has a twin among the warm clients is left to chance."""
    parts = federate(dataset, "skewness", clients=clients, seed=seed, xi="H").parts
    return _drawn(parts, cold, rng)


def _without_twins(dataset, clients, cold, seed, rng):
    """Two classes per client; no warm client has both classes of a cold one."""
    parts = federate(dataset, "skewness", clients=clients, seed=seed, xi="H").parts
    by_pair = {}
    for client, rows in parts.items():
        by_pair.setdefault(tuple(np.unique(dataset.y[rows]).tolist()), []).append(client)
    pairs, chosen = list(by_pair), set()
    for i in rng.permutation(len(pairs)):
        if len(chosen) + len(by_pair[pairs[i]]) <= cold:
            chosen.update(by_pair[pairs[i]])
    warm = {c: rows for c, rows in parts.items() if c not in chosen}
    return _sorted(warm), _sorted({c: parts[c] for c in parts if c in chosen})


def _natural(dataset, clients, cold, seed, rng):
    federation = federate(dataset, "natural", clients=clients, seed=seed)
    tests = federation.test_parts()
    parts = {c: rows for c, rows in federation.parts.items() if c in tests}
    warm, cold = _drawn(parts, cold or len(parts) // 2, rng)
    return Split(warm, cold, [tests[c] for c in warm], [tests[c] for c in cold])


def _drawn(parts, cold, rng):
    names = list(parts)
    chosen = {names[i] for i in rng.choice(len(names), cold, replace=False)}
    warm = {c: rows for c, rows in parts.items() if c not in chosen}
    return _sorted(warm), _sorted({c: parts[c] for c in parts if c in chosen})


def _sorted(parts):
    return {client: np.sort(rows) for client, rows in parts.items()}


def _by_class(dataset, parts):
    """All test samples of the client's classes, which it has in about equal shares."""
    return [
        np.flatnonzero(np.isin(dataset.y_test, np.unique(dataset.y[rows])))
        for rows in parts.values()
    ]


def sketcher(dataset, rows, bits, seed):
    """Return a function from rows of the training set to their sketch, without labels."""
    if dataset.name == "shakespeare":
        empty = RaceSketch.minhash(rows=rows, buckets=2**bits, seed=seed)
        prepare = trigrams
    else:
        center = Transform(center=round(float(dataset.x.mean()), 2))
        dim = int(np.prod(dataset.sample_shape))
        empty = RaceSketch.srp(dim, rows=rows, bits=bits, seed=seed, transform=center)
        prepare = np.asarray

    def sketch(positions):
        made = empty.empty_like()
        made.add(prepare(dataset.x[positions]))
        return made

    return sketch


def trigrams(windows):
    """Token sets as a sparse matrix: the runs of three characters in each window."""
    from scipy.sparse import csr_matrix

    codes = windows[:, :-2] * 6400 + windows[:, 1:-1] * 80 + windows[:, 2:]
    ends = np.arange(0, codes.size + 1, codes.shape[1])
    made = csr_matrix((np.ones(codes.size, np.int8), codes.ravel(), ends), (len(codes), 80**3))
    made.sum_duplicates()
    return made


def train(dataset, setting, splits, args):
    """Return the trainer, its data, and for each seed the global and the personal models."""
    simulation = Simulation(
        lambda seed: Federation(dataset, splits[seed].warm),
        lambda seed: build(setting.model, dataset.sample_shape, dataset.classes, seed=seed),
        "uniform",
        cohort_size=min(setting.cohort, *(len(split.warm) for split in splits.values())),
        local=setting.local,
        aggregation="size-weighted",
        seeds=tuple(splits),
        device=args.device,
        evaluate_every=0,
    )
    for _ in range(setting.rounds):
        simulation.step()
    trainer, data = simulation.trainer, simulation.train_data
    models = {}
    for seed in simulation.seeds:
        tuned = tuned_clients(dataset, setting, splits[seed.seed], seed.seed, args)
        personal = finetune(trainer, seed.model, tuned, data, seed=seed.seed)
        models[seed.seed] = seed.model, personal, tuned
    return trainer, data, simulation.test_data, models


def tuned_clients(dataset, setting, split, seed, args):
    """The warm clients that fine-tune: all, or those that are retrieved and some more."""
    if args.finetune is None:
        return split.warm
    sketch = sketcher(dataset, setting.rows, 6, seed=seed)
    with registered(sketch, split.warm) as registry:
        start = ColdStart(registry, max_distance=None)
        cold = [sketch(rows) for rows in split.cold.values()]
        advices = [start.advise(s, "nearest") for s in cold]
        near = {client for advice in advices for client in advice.weights}
    others = [c for c in split.warm if c not in near]
    drawn = stream(seed, "fine-tuned").permutation(others)[: args.finetune].tolist()
    return {c: rows for c, rows in split.warm.items() if c in near or c in drawn}


@contextmanager
def registered(sketch, parts):
    """A registry of the clients' sketches, without models."""
    with tempfile.TemporaryDirectory() as folder, Registry.create(f"{folder}/warm") as registry:
        registry.add_many(
            Record(c, sketch(rows), reference=f"warm/{c}") for c, rows in parts.items()
        )
        yield registry


def accuracies(trainer, models, parts, data):
    """Accuracy of every model on every client's rows of `data`, (models, clients).

    Each model classifies each row once, even when several clients share it.
    """
    rows, place = np.unique(np.concatenate(parts), return_inverse=True)
    sizes = np.array([len(part) for part in parts])
    hits = trainer.hits(models, [rows] * len(models), data).reshape(-1, len(rows))
    first = np.cumsum(sizes) - sizes
    return np.array([np.add.reduceat(right[place], first, dtype=float) / sizes for right in hits])


def own_accuracies(trainer, models, parts, data):
    """Accuracy of model i on the rows of client i."""
    hits = trainer.hits(models, parts, data)
    ends = np.cumsum([len(part) for part in parts])
    return np.array([right.mean() for right in np.split(hits, ends[:-1])])


class Judge:
    """Scores advice for the cold clients of one seed, and for warm ones left out."""

    def __init__(self, trainer, data, test, split, models):
        self.trainer, self.data, self.test, self.split = trainer, data, test, split
        self.glob, self.personal, self.tuned = models
        self.order = {client: i for i, client in enumerate(self.tuned)}
        self.cold_global = accuracies(trainer, self.glob[None], split.cold_test, test)[0]
        self.tuned_test = [
            rows for c, rows in zip(split.warm, split.warm_test, strict=True) if c in self.tuned
        ]

    def baselines(self):
        split, test = self.split, self.test
        every = accuracies(self.trainer, self.personal, split.cold_test, test)
        own = own_accuracies(self.trainer, self.personal, self.tuned_test, test)
        first = accuracies(self.trainer, self.glob[None], self.tuned_test, test)[0]
        return {
            "warm global": first,
            "warm local": own,
            "global": self.cold_global,
            "random": every.mean(axis=0),
            "best": every.max(axis=0),
        }

    @cached_property
    def warm_global(self):
        """Accuracy of the global model on the training data of each warm client."""
        rows = list(self.split.warm.values())
        return accuracies(self.trainer, self.glob[None], rows, self.data)[0]

    def gains(self, advices):
        """How much better than the global model each warm client's advice is on its own data."""
        rows = list(self.split.warm.values())
        return self.score(advices, rows, self.data) - self.warm_global

    def score(self, advices, parts, data):
        """Accuracy of what is advised, client by client; the limit is not applied."""
        weights = np.zeros((len(advices), len(self.order)), np.float32)
        for row, advice in zip(weights, advices, strict=True):
            for client, share in advice.weights.items():
                row[self.order[client]] = share
        mixtures = torch.as_tensor(weights, device=self.personal.device) @ self.personal
        return own_accuracies(self.trainer, mixtures, parts, data)


def retrieve(judge, sketch, private, strategies):
    """Accuracy of every strategy, and how many cold clients each limit sends away."""
    split, out, away = judge.split, {}, {}
    warm = {c: private(sketch(rows), "warm", c) for c, rows in split.warm.items()}
    cold = [private(sketch(rows), "cold", c) for c, rows in split.cold.items()]
    with registered(lambda made: made, warm) as registry:
        start = ColdStart(registry, max_distance=None)
        limit = ColdStart(registry).limit
        every = len(judge.tuned) == len(warm)
        for strategy in strategies:
            advices = [start.advise(s, strategy) for s in cold]
            out[strategy] = judge.score(advices, split.cold_test, judge.test)
            squares = np.array([advice.squared for advice in advices])
            allowed = [max(limit, advice.neighbors[0].error) for advice in advices]
            _limited(out, away, judge, f"{strategy}, auto", strategy, squares <= allowed)
            if every:
                held = [start.advise(s, strategy, without=c) for c, s in warm.items()]
                gains = judge.gains(held)
                by_gains = gains_limit([advice.squared for advice in held], gains)
                good = squares <= by_gains
                _limited(out, away, judge, f"{strategy}, gains", strategy, good)
    return out, away


def gains_limit(squares, gains):
    """Return the limit under which the warm clients' gains sum to most."""
    order = np.argsort(squares, kind="stable")
    far = np.append(np.asarray(squares)[order], np.inf)
    kept = int(np.argmax(np.concatenate([[0.0], np.cumsum(gains[order])])))
    if kept in (0, len(order)):
        return far[kept - 1] if kept else -np.inf  # nothing is known beyond the last
    return (far[kept - 1] + far[kept]) / 2


def _limited(out, away, judge, name, strategy, near):
    out[name] = np.where(near, out[strategy], judge.cold_global)
    away[name] = float(1 - np.mean(near))


def sketch_settings(setting, n):
    """Rows, bits and epsilon: exact; the prototype's 10 x 64; what `plan` recommends."""
    yield setting.rows, 6, None
    for epsilon in setting.epsilons:
        if epsilon in (4.0, 1.0):
            yield 10, 6, epsilon
        planned = sketch_size(n, epsilon)
        yield planned.rows, planned.bits, epsilon


def run(dataset, setting, name, args):
    started = time.perf_counter()
    seeds, first = args.seeds, args.seeds[0]
    splits = {s: make_split(dataset, name, setting.clients, setting.cold, s) for s in seeds}
    trainer, data, test, models = train(dataset, setting, splits, args)
    trained = time.perf_counter() - started
    judges = {s: Judge(trainer, data, test, splits[s], models[s]) for s in seeds}
    base = {s: judges[s].baselines() for s in seeds}
    sizes = [len(rows) for rows in splits[first].warm.values()]
    report = {
        "split": name,
        "warm": len(splits[first].warm),
        "fine-tuned": len(models[first][2]),
        "cold": len(splits[first].cold),
        "median samples": float(np.median(sizes)),
        "baselines": summary(base),
        "by client, first seed": {k: np.round(v, 4).tolist() for k, v in base[first].items()},
        "retrieval": [],
    }
    show(name, report["baselines"])
    for rows, bits, epsilon in sketch_settings(setting, np.median(sizes)):
        found, away = {}, {}
        for s in seeds:
            sketch = sketcher(dataset, rows, bits, seed=s)

            def private(made, *whose, seed=s, epsilon=epsilon):
                if epsilon is None:
                    return made
                return made.privatize(epsilon, rng=stream(seed, "privacy", *whose))

            found[s], away[s] = retrieve(judges[s], sketch, private, args.strategies)
        shares = {k: float(np.mean([away[s][k] for s in seeds])) for k in away[first]}
        row = {"rows": rows, "bits": bits, "epsilon": epsilon, "accuracy": summary(found)}
        if epsilon is None:
            nearest = found[first]["nearest"]
            report["by client, first seed"]["nearest"] = np.round(nearest, 4).tolist()
        report["retrieval"].append({**row, "sent to the global model": shares})
        show(f"{rows} x {2**bits}, epsilon {epsilon}", row["accuracy"])
    report["seconds"] = {"training": trained, "all": time.perf_counter() - started}
    print(f"training {trained:.0f} s, all {report['seconds']['all']:.0f} s", flush=True)
    return report


def summary(by_seed):
    """Mean over clients; then mean and standard deviation over seeds."""
    names = next(iter(by_seed.values()))
    means = {k: [float(v[k].mean()) for v in by_seed.values()] for k in names}
    return {
        k: {"mean": float(np.mean(v)), "std": float(np.std(v, ddof=len(v) > 1)), "seeds": v}
        for k, v in means.items()
    }


def show(title, accuracy):
    values = "  ".join(f"{k} {v['mean']:.4f}±{v['std']:.4f}" for k, v in accuracy.items())
    print(f"{title}: {values}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="digits", choices=SETTINGS)
    parser.add_argument("--root", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--optimizer", choices=("adam", "sgd"))
    parser.add_argument("--lr", type=float)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--max-samples", type=int, help="of a role in Shakespeare")
    parser.add_argument("--finetune", type=int, help="how many warm clients beside the retrieved")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--split", dest="splits", nargs="+")
    parser.add_argument("--epsilons", type=float, nargs="*")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    setting = SETTINGS[args.dataset]
    for name in ("rounds", "clients", "splits", "epsilons"):
        if getattr(args, name) is not None:
            setting = replace(setting, **{name: getattr(args, name)})
    for name in ("optimizer", "lr", "epochs"):
        if getattr(args, name) is not None:
            setting = replace(setting, local=replace(setting.local, **{name: getattr(args, name)}))
    options = {} if args.max_samples is None else {"max_samples": args.max_samples}
    dataset = load(args.dataset, args.root, **options)
    torch.set_num_threads(min(4, torch.get_num_threads()))
    local = setting.local
    stated = {
        "dataset": args.dataset,
        "model": setting.model,
        "cohort": setting.cohort,
        "rounds": setting.rounds,
        "local": {k: getattr(local, k) for k in ("epochs", "batch_size", "lr", "optimizer")},
        "seeds": args.seeds,
        "paper": PAPER.get(args.dataset),
    }
    reports = []
    for name in setting.splits:
        reports.append(run(dataset, setting, name, args))
        write(args.out, {**stated, "splits": reports})


if __name__ == "__main__":
    main()
