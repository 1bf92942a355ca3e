"""A registry of many clients: time to fill and to query, memory, and which ranking finds whom.

    python benchmarks/registry.py --clients 200000 --out benchmarks/results/registry.json

Clients draw a label mixture from Dirichlet(0.3), a size (log-normal, median 200) and that many
MNIST images, whose hashes are counted. Each stage runs in a process of its own, whose peak memory
is read:

- fill, query: through `Registry` and `nearest`;
- ranking: total variation between the labels of a newcomer and of the client that is retrieved;
- twins: how often a client of the same two classes is retrieved, among 50 warm clients of the sizes
  of paper 0's released code, 20 + lognormal(0, 2).
"""

from __future__ import annotations

import json
import tempfile
import time
from itertools import combinations
from pathlib import Path

import numpy as np
from provenance import write
from script import alone, arguments, peak_kb

from fedcohort.datasets import load
from fedcohort.personalize import Record, Registry, nearest
from fedcohort.sketch.distances import error_variance
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform
from fedcohort.sketch.uncertainty import possible_luck

BUCKETS = 64
BLOCK = 20_000


class Population:
    """Draws clients, block by block; block b is the same whenever it is drawn."""

    def __init__(self, rows):
        data = load("mnist")
        transform = Transform(center=0.13)
        self.empty = RaceSketch.srp(784, rows=rows, bits=6, transform=transform)
        x = data.x[np.argsort(data.y, kind="stable")].reshape(-1, 784)
        parts = (self.empty.transform.apply(x[i : i + 2000]) for i in range(0, len(x), 2000))
        codes = [self.empty.family.codes(part.astype(np.float32)) for part in parts]
        self.codes, self.sizes = np.hstack(codes).T.astype(np.int16), np.bincount(data.y)

    def counts(self, per_label, rng):
        """Counts (clients, rows, buckets) of so many random images of each label."""
        n = per_label.sum(axis=1)
        labels = np.repeat(np.arange(n.size * 10) % 10, per_label.ravel())
        first = np.cumsum(self.sizes) - self.sizes
        images = first[labels] + rng.integers(0, self.sizes[labels])
        counts = np.empty((n.size, self.codes.shape[1], BUCKETS), np.int16)
        owner = np.repeat(np.arange(n.size), n) * BUCKETS
        for row in range(counts.shape[1]):
            cells = owner + self.codes[images, row]
            counts[:, row] = np.bincount(cells, minlength=n.size * BUCKETS).reshape(n.size, -1)
        return counts

    def block(self, number, clients=BLOCK):
        """Counts, sizes and label mixtures of a block of clients."""
        rng = np.random.default_rng([7, number])
        n = np.clip(np.exp(rng.normal(np.log(200), 0.6, clients)), 20, 5000).astype(int)
        mixture = rng.dirichlet(np.full(10, 0.3), clients)
        return self.counts(rng.multinomial(n, mixture), rng), n, mixture

    def sketches(self, number, clients=BLOCK):
        for counts, n, _ in zip(*self.block(number, clients), strict=True):
            one = self.empty.empty_like()
            one.counts, one.n = counts.astype(np.int64), int(n)
            yield one


def fill(folder, clients):
    population = Population(10)
    began = time.perf_counter()
    with Registry.create(folder) as registry:
        for number in range(clients // BLOCK):
            registry.add_many(
                Record(f"client {i}", sketch, reference=f"models/{i}")
                for i, sketch in enumerate(population.sketches(number), number * BLOCK)
            )
    size = (Path(folder) / "registry.sqlite").stat().st_size / 1e9
    return {"seconds": time.perf_counter() - began, "GB on disk": size}


def query(folder, _):
    sketches, seconds = list(Population(10).sketches(10_000, 50)), []
    with Registry(folder) as registry:
        for sketch in sketches:
            began = time.perf_counter()
            nearest(registry, sketch)
            seconds.append(time.perf_counter() - began)
    median, p95 = np.quantile(seconds, (0.5, 0.95)).tolist()
    return {"seconds": {"median": median, "p95": p95}, "peak memory GB": peak_kb() / 1e6}


def scores(warm, n, cold):
    """Squared distances (cold, warm) by each ranking, up to a constant per newcomer."""
    q, rows = warm / n[:, None, None], warm.shape[1]
    flat = q.reshape(len(q), -1).astype(np.float32)
    squares = np.einsum("ij,ij->i", flat, flat).astype(float)
    plain = squares - 2 * (cold.reshape(len(cold), -1).astype(np.float32) @ flat.T)
    errors = error_variance(squares, n.astype(float), np.zeros(len(n)), rows, BUCKETS)
    luck = possible_luck(warm[:4096], len(n))[0] / n
    return {
        "plain": plain,
        "unbiased": plain - errors,
        "half": plain - errors / 2,
        "debiased": plain - errors + luck,
    }


def ranking(_folder, _clients, queries=500):
    out = []
    for rows in (4, 10, 50):
        population = Population(rows)
        warm, n, mixture = population.block(0)
        cold, size, wanted = population.block(10_000, queries)
        cold = cold / size[:, None, None]
        for clients in (200, BLOCK):
            gaps = np.abs(wanted[:, None] - mixture[:clients]).sum(axis=2) / 2
            row = {"rows": rows, "clients": clients, "best": float(gaps.min(axis=1).mean())}
            for name, score in scores(warm[:clients], n[:clients], cold).items():
                row[name] = float(gaps[np.arange(queries), score.argmin(axis=1)].mean())
            out.append(row)
    return out


def twins(_folder, _clients, warm=50, seeds=20):
    """Share of newcomers whose nearest client has the same two classes."""
    population = Population(200)
    pairs = np.array([[k in pair for k in range(10)] for pair in combinations(range(10), 2)])
    found = {}
    for seed in range(seeds):
        rng = np.random.default_rng([11, seed])
        mixture = pairs[rng.integers(len(pairs), size=warm)]
        sizes = (20 + rng.lognormal(0, 2, (2, warm))).astype(int) // 2  # of each class
        known, new = (population.counts(mixture * half[:, None], rng) for half in sizes)
        n, size = 2 * sizes
        for name, score in scores(known, n, new / size[:, None, None]).items():
            hits = (mixture[score.argmin(axis=1)] == mixture).all(axis=1)
            found.setdefault(name, []).append(float(hits.mean()))
    return {name: {"mean": np.mean(x), "seeds": x} for name, x in found.items()}


def main():
    args = arguments(__doc__, clients=200_000, out=...)
    result = {"clients": args.clients, "rows": 10, "buckets": BUCKETS}
    with tempfile.TemporaryDirectory() as folder:
        for stage in (fill, query, ranking, twins):
            result[stage.__name__] = alone(stage, f"{folder}/warm", args.clients)
            print(stage.__name__, json.dumps(result[stage.__name__])[:400], flush=True)
    write(args.out, result)


if __name__ == "__main__":
    main()
