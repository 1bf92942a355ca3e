"""How fast data are sketched, side by side with other ways, in one run.

OMP_NUM_THREADS=2 python benchmarks/sketching.py \
    --datasketch-python PATH --out benchmarks/results/sketching-cpu.json

CPU: MNIST, 1,000 rows of 6 bits, against the released code's way (one float32 product of all data,
then counting) and a blocked product with bincount; growth with the dimension; MinHash against
datasketch (in a Python of its own); the distance matrix of 1,000 sketches.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from provenance import write
from script import alone, arguments, clocks, peak_kb

from fedcohort.datasets import load
from fedcohort.sketch.distances import distance_matrix
from fedcohort.sketch.race import RaceSketch

ROWS, BITS, PERMUTATIONS = 1000, 6, 200


def seconds(*ways, repeats=3):
    """Best wall time and best CPU time (all threads) of each way, taken in turns."""
    taken = np.empty((repeats, len(ways), 2))
    for row in taken:
        for cell, way in zip(row, ways, strict=True):
            start = clocks()
            way()
            cell[:] = clocks() - start
    return [{"wall s": wall, "cpu s": cpu} for wall, cpu in taken.min(axis=0).tolist()]


def times_faster(ours, theirs):
    return {"wall": theirs["wall s"] / ours["wall s"], "cpu": theirs["cpu s"] / ours["cpu s"]}


def fedcohort_way(x):
    sketch = RaceSketch.srp(dim=x.shape[1], rows=ROWS, bits=BITS)
    sketch.add(x)
    return sketch.counts


def released_way(x):
    """What the paper's released code does, without its class: everything in one product."""
    import torch

    rng = np.random.default_rng(0)
    planes = torch.from_numpy(rng.standard_normal((ROWS * BITS, x.shape[1]), np.float32))
    weights = (2 ** torch.arange(BITS)).float()

    def go():
        signs = torch.sign(torch.from_numpy(x).float() @ planes.T)
        bits = torch.gt(signs, 0).float().reshape(-1, ROWS, BITS)
        codes = (bits @ weights).int().numpy()
        return np.stack([np.bincount(codes[:, r], minlength=2**BITS) for r in range(ROWS)])

    return go


def blocked_way(x, block=1000):
    """A product block by block, counted by one bincount each."""
    planes = np.random.default_rng(0).standard_normal((x.shape[1], ROWS * BITS), np.float32)
    weights = (1 << np.arange(BITS)).astype(np.uint8)
    cells = np.arange(ROWS) << BITS

    def go():
        counts = np.zeros(ROWS << BITS, np.int64)
        for lo in range(0, len(x), block):
            signs = (x[lo : lo + block].astype(np.float32) @ planes) > 0
            codes = signs.reshape(-1, ROWS, BITS) @ weights
            counts += np.bincount((codes + cells).ravel(), minlength=len(counts))
        return counts

    return go


def mnist_job(x, repeats):
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", x)
        above_data = alone(memory, f"{folder}/x.npy")
    fedcohort_way(x[:100])
    ways = {"blocked": blocked_way(x), "released": released_way(x)}
    ours, *theirs = seconds(lambda: fedcohort_way(x), *ways.values(), repeats=repeats)
    out = {"samples": len(x), "fedcohort": ours, "memory above data MB": above_data}
    for name, taken in zip(ways, theirs, strict=True):
        out |= {name: taken, f"times faster than {name}": times_faster(ours, taken)}
    return out


def memory(path):
    """Peak above the loaded data: hashing alone, and with the compiler; in a fresh process."""
    x, sketch = np.load(path), RaceSketch.srp(dim=784, rows=ROWS, bits=BITS)
    peaks = [peak_kb() / 1024]
    for part in (x[:16], x):
        sketch.add(part)
        peaks.append(peak_kb() / 1024)
    return {"hashing": peaks[2] - peaks[1], "hashing and compiler": peaks[2] - peaks[0]}


def growth(repeats):
    out = []
    for dim in (784, 100_000):
        n = max(64, 2_000_000 // dim // 16 * 16)
        x = np.random.default_rng(0).standard_normal((n, dim)).astype(np.float32)
        fedcohort_way(x[:16])
        (ours,) = seconds(partial(fedcohort_way, x), repeats=repeats)
        out.append({"dim": dim, "fedcohort cpu us a sample": ours["cpu s"] / n * 1e6})
    return out


def passages(lines=5):
    """Word sets of consecutive lines of Shakespeare."""
    folder = Path(os.environ["FEDCOHORT_DATA"]) / "shakespeare"
    with gzip.open(folder / "plays.tsv.gz", "rt", encoding="utf-8") as file:
        texts = [line.rstrip("\n").split("\t")[3] for line in file][1:]
    joined = (" ".join(texts[i : i + lines]) for i in range(0, len(texts), lines))
    return [sorted(set(re.findall(r"\w\w+", text.lower()))) for text in joined]


DATASKETCH = """
import json, sys, time
from datasketch import MinHash
sets, permutations = json.load(open(sys.argv[1])), int(sys.argv[2])
sets = [[w.encode() for w in s] for s in sets] if isinstance(sets[0][0], str) else sets
options = {} if isinstance(sets[0][0], bytes) else {"hashfunc": lambda token: token}
out = []
for _ in range(int(sys.argv[3])):
    wall, cpu = time.perf_counter(), time.process_time()
    MinHash.bulk(sets, num_perm=permutations, **options)
    out.append((time.perf_counter() - wall, time.process_time() - cpu))
print(json.dumps(dict(zip(("wall s", "cpu s"), map(min, zip(*out))))))
"""


def minhash(python, repeats):
    texts = passages()
    vocabulary = {w: i for i, w in enumerate(sorted({w for s in texts for w in s}))}
    numbers = [np.array([vocabulary[w] for w in s], np.int64) for s in texts]
    out = {"sets": len(texts), "tokens": sum(map(len, texts)), "permutations": PERMUTATIONS}

    def ours(sets):
        RaceSketch.minhash(rows=PERMUTATIONS, buckets=64).add(sets)

    for name, sets in (("words", texts), ("integers", numbers)):
        ours(sets[:10])
        (taken,) = seconds(partial(ours, sets), repeats=repeats)
        out[name] = {"fedcohort": taken}
        if python:
            theirs = run_datasketch(python, [np.asarray(s).tolist() for s in sets], repeats)
            out[name] |= {"datasketch": theirs, "times faster": times_faster(taken, theirs)}
    return out


def run_datasketch(python, sets, repeats):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(sets, file)
        file.flush()
        command = [python, "-c", DATASKETCH, file.name, str(PERMUTATIONS), str(repeats)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def matrix(repeats):
    rng = np.random.default_rng(0)
    sketches = [RaceSketch.srp(dim=784, rows=1000, bits=6) for _ in range(1000)]
    for sketch in sketches:
        sketch.counts, sketch.n = rng.multinomial(600, np.full(64, 1 / 64), 1000), 600
    ways = {f"sketches, {kind}": partial(distance_matrix, sketches, kind)
            for kind in ("frobenius", "mmd")}  # fmt: skip
    taken = seconds(*ways.values(), repeats=repeats)
    return {"sketches": 1000, "size": "1000 x 64", **dict(zip(ways, taken, strict=True))}


def main():
    args = arguments(__doc__, out=..., datasketch_python=str, repeats=3)
    x = np.rint(load("mnist").x.reshape(-1, 784) * 255).astype(np.uint8)
    result = {"threads": os.environ.get("OMP_NUM_THREADS"), "mnist": mnist_job(x, args.repeats)}
    result["growth with dim"] = growth(args.repeats)
    result["minhash"] = minhash(args.datasketch_python, args.repeats)
    result["distance matrix"] = matrix(args.repeats)
    write(args.out, result)


if __name__ == "__main__":
    main()
