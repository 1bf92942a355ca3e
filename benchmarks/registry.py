"""A registry of a million clients: time to fill, index and query, memory, and recall.

    python benchmarks/registry.py --clients 1000000 --compare 200000 \
        --out benchmarks/results/registry.json

Clients are as real as a million can be: each draws a label mixture from Dirichlet(0.3), a size
(log-normal, median 200) and that many MNIST images, whose hashes are counted. Three parts:

- scale: everything through `Registry` and `Search`, each stage in a process of its own, whose
  peak memory is read; recall@1 is against all clients' full sketches, compared exactly;
- engines: the same points in the libraries that could search them, for the choice of one;
- caution: which ranking retrieves clients with the most similar labels (`personalize.index`).

Other processes on the machine disturb seconds less than CPU seconds; both are given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from provenance import write

from fedcohort.datasets import load
from fedcohort.personalize import Record, Registry, Search
from fedcohort.personalize.index import (
    CANDIDATES,
    ENERGY_SHARE,
    Compressor,
    InvertedFile,
    SketchTable,
    SketchTableWriter,
    query_vector,
)
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

ROWS, BITS = 10, 6
BLOCK = 20_000


class Population:
    """Draws clients, block by block; block b is the same whenever it is drawn."""

    def __init__(self, rows: int = ROWS, root: str | None = None) -> None:
        data = load("mnist", root)
        self.empty = RaceSketch.srp(784, rows=rows, bits=BITS, transform=Transform(center=0.13))
        x = data.x.reshape(len(data.x), -1)
        parts = (self.empty.transform.apply(x[i : i + 2000]) for i in range(0, len(x), 2000))
        codes = [self.empty.family.codes(part.astype(np.float32)) for part in parts]
        order = np.argsort(data.y, kind="stable")
        self.codes = np.concatenate(codes, axis=1).T[order].astype(np.int16)
        self.sizes = np.bincount(data.y)

    def block(self, number: int, clients: int = BLOCK):
        """Return counts (clients, rows, buckets), sizes and label mixtures."""
        rng = np.random.default_rng([7, number])
        n = np.clip(np.exp(rng.normal(np.log(200), 0.6, clients)), 20, 5000).astype(int)
        mixture = rng.dirichlet(np.full(len(self.sizes), 0.3), clients)
        labels = np.repeat(np.arange(n.size * 10) % 10, rng.multinomial(n, mixture).ravel())
        first = np.cumsum(self.sizes) - self.sizes
        images = first[labels] + rng.integers(0, self.sizes[labels])
        buckets = 2**BITS
        counts = np.empty((clients, self.codes.shape[1], buckets), np.int16)
        owner = np.repeat(np.arange(clients), n) * buckets
        for row in range(counts.shape[1]):
            cells = owner + self.codes[images, row]
            counts[:, row] = np.bincount(cells, minlength=clients * buckets).reshape(clients, -1)
        return counts, n, mixture

    def sketches(self, number: int, clients: int = BLOCK):
        counts, n, _ = self.block(number, clients)
        for own, size in zip(counts, n.tolist(), strict=True):
            made = self.empty.empty_like()
            made.counts, made.n = own.astype(np.int64), size
            yield made


def stage(function):
    """Run as a process of its own; print seconds, CPU seconds, peak memory and the result."""
    started, cpu = time.perf_counter(), time.process_time()
    result = function()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    stated = {
        "seconds": time.perf_counter() - started,
        "cpu seconds": time.process_time() - cpu,
        "peak memory GB": int(status["VmHWM"].split()[0]) / 1e6,
        **(result or {}),
    }
    print(json.dumps(stated))


def fill(args):
    population = Population(root=args.root)
    with Registry.create(args.folder) as registry:
        for number in range(args.clients // BLOCK):
            made = population.sketches(number)
            ids = range(number * BLOCK, (number + 1) * BLOCK)
            registry.add_many(
                Record(f"client {i}", sketch, reference=f"models/{i}")
                for i, sketch in zip(ids, made, strict=True)
            )
        return {"database GB": (Path(args.folder) / "registry.sqlite").stat().st_size / 1e9}


def build(args):
    with Registry(args.folder) as registry:
        Search(registry)
    size = sum(p.stat().st_blocks * 512 for p in Path(args.folder, "index").rglob("*"))
    return {"index GB": size / 1e9}


def query(args):
    """Latency of `Search.nearest` and recall@1 against the full sketches of everybody."""
    queries = list(Population(root=args.root).sketches(10_000, args.queries))
    with Registry(args.folder) as registry:
        opened = time.perf_counter()
        search = Search(registry)
        opened = time.perf_counter() - opened
        search.nearest(queries[0])
        found, seconds, cpu = [], [], []
        for sketch in queries:
            start, own = time.perf_counter(), time.thread_time()
            found.append(search.nearest(sketch)[0])
            seconds.append(time.perf_counter() - start)
            cpu.append(time.thread_time() - own)
        status = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
        table = search.index.table
        truth = exact(table, queries)
    names = [f"client {number - 1}" for number in table.numbers[truth]]
    hits = [near.client == name for near, name in zip(found, names, strict=True)]
    return {
        "opening seconds": opened,
        "recall@1": float(np.mean(hits)),
        "milliseconds": quantiles(seconds),
        "cpu milliseconds": quantiles(cpu),
        "memory while querying GB": int(status) / 1e6,
        "candidates": CANDIDATES,
        "lists searched": search.index.engine.index.nprobe,
        "lists": search.index.engine.index.nlist,
    }


def quantiles(seconds):
    return {
        name: 1e3 * float(np.quantile(seconds, q))
        for name, q in (("median", 0.5), ("p95", 0.95), ("p99", 0.99))
    }


def exact(table: SketchTable, queries, caution=ENERGY_SHARE):
    """Position of the best client of each query, over all of them."""
    wanted = np.stack([query_vector(sketch) for sketch in queries])
    best, where = np.full(len(queries), np.inf), np.zeros(len(queries), int)
    for lo in range(0, len(table), BLOCK):
        part = slice(lo, min(lo + BLOCK, len(table)))
        vectors = table.vectors(part)
        own = np.einsum("ij,ij->i", vectors, vectors) - (1 - caution) * table.energy[part]
        scores = own - 2 * (wanted @ vectors.T)
        first = scores.argmin(axis=1)
        value = scores[np.arange(len(queries)), first]
        where = np.where(value < best, first + lo, where)
        best = np.minimum(value, best)
    return where


def stacked(population, clients):
    writer = SketchTableWriter(clients, population.empty)
    for number in range(clients // BLOCK):
        writer.add(enumerate(population.sketches(number), number * BLOCK + 1))
    return writer.done()


def engines(args):
    """Build time, latency and recall of what could search the points."""
    population = Population(root=args.root)
    table = stacked(population, args.compare)
    compressor = Compressor(table.cells, float(np.quantile(table.energy, 0.99)))
    points = np.concatenate(
        [
            compressor.points(table.vectors(slice(lo, lo + BLOCK)), table.energy[lo : lo + BLOCK])
            for lo in range(0, len(table), BLOCK)
        ]
    )
    sketches = list(population.sketches(10_000, args.queries))
    wanted = np.stack([query_vector(sketch) for sketch in sketches])
    truth = exact(table, sketches)
    rows = []
    for name, make in ENGINES.items():
        started, cpu = time.perf_counter(), time.process_time()
        nearest = make(points, table, compressor)
        row = {
            "engine": name,
            "build seconds": time.perf_counter() - started,
            "build cpu seconds": time.process_time() - cpu,
        }
        seconds, hits = [], []
        for full, best in zip(wanted, truth, strict=True):
            start = time.thread_time()
            near = nearest(compressor.points(full[None])[0])
            seconds.append(time.thread_time() - start)
            hits.append(int(table.best(full, 1, np.sort(near))[0]) == best)
        row |= {"recall@1": float(np.mean(hits)), "cpu milliseconds": quantiles(seconds)}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return {"clients": len(table), "dimension": points.shape[1], "engines": rows}


def _scan(points, table, compressor):
    from fedcohort.personalize.index import Scan

    scan = Scan(points)
    return lambda point: scan.nearest(point, CANDIDATES)


def _inverted(points, table, compressor):
    import faiss

    index = InvertedFile(points, *InvertedFile.cluster(points))
    faiss.omp_set_num_threads(1)
    return lambda point: index.nearest(point, CANDIDATES)


def _faiss_graph(points, table, compressor):
    import faiss

    faiss.omp_set_num_threads(2)
    index = faiss.IndexHNSWFlat(points.shape[1], 16)
    index.hnsw.efConstruction = 64
    index.add(points)
    index.hnsw.efSearch = CANDIDATES
    faiss.omp_set_num_threads(1)
    return lambda point: index.search(point[None], CANDIDATES)[1][0]


def _usearch_graph(points, table, compressor):
    from usearch.index import Index

    options = {"connectivity": 16, "expansion_add": 64, "expansion_search": CANDIDATES}
    index = Index(ndim=points.shape[1], metric="l2sq", dtype="f32", **options)
    index.add(np.arange(len(points)), points, threads=2)
    return lambda point: index.search(point, CANDIDATES).keys.astype(np.int64)


ENGINES = {
    "scan (NumPy)": _scan,
    "inverted file (faiss IVFFlat)": _inverted,
    "graph (usearch HNSW, 16 links)": _usearch_graph,
    "graph (faiss HNSWFlat, 16 links)": _faiss_graph,
}


def caution(args):
    """Total variation between the labels of a query and of the client that is retrieved."""
    out = []
    for rows in (4, 10, 50):
        population = Population(rows, args.root)
        table = stacked(population, BLOCK)
        mixtures, queried = population.block(0)[2], population.block(10_000, args.queries)[2]
        sketches = list(population.sketches(10_000, args.queries))
        for clients in (200, BLOCK):
            part = SketchTable(
                *(a[:clients] for a in (table.counts, table.n, table.energy, table.numbers))
            )
            row = {"rows": rows, "clients": clients}
            gaps = np.abs(queried[:, None] - mixtures[:clients]).sum(axis=2) / 2
            row["best possible"] = float(gaps.min(axis=1).mean())
            for share in (0.0, 0.1, 0.2, 0.3, 0.5, 1.0):
                near = exact(part, sketches, share)
                row[f"caution {share}"] = float(gaps[np.arange(len(near)), near].mean())
            out.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    return {"rows": out}


STAGES = {"fill": fill, "build": build, "query": query, "engines": engines, "caution": caution}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--compare", type=int, default=200_000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--root", default=None)
    parser.add_argument("--folder", help="where the registry is made [a temporary folder]")
    parser.add_argument("--stages", nargs="+", default=list(STAGES))
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.stage:
        stage(lambda: STAGES[args.stage](args))
        return
    folder = args.folder or tempfile.mkdtemp()
    result = {"clients": args.clients, "rows": ROWS, "buckets": 2**BITS, "threads": os.cpu_count()}
    if Path(args.out).exists():
        result = json.loads(Path(args.out).read_text())["result"]
    try:
        for name in args.stages:
            given = ["--stage", name, "--folder", f"{folder}/warm", "--queries", str(args.queries)]
            given += ["--clients", str(args.clients), "--compare", str(args.compare)]
            given += ["--root", args.root] if args.root else []
            command = [sys.executable, __file__, *given]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            result[name] = json.loads(done.stdout)
            print(name, done.stdout.strip(), flush=True)
            write(args.out, result)
    finally:
        if args.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
