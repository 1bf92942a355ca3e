"""Sketching throughput and time of a sweep with 1 and 2 workers, beside one plain process.

OMP_NUM_THREADS=1 python benchmarks/ray_scaling.py --out benchmarks/results/ray-scaling.json

Workers are started before the clock; repeats alternate, and the best of each counts, as other
programs may use the same cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from provenance import write

from fedcohort.distribute import cluster, need_ray, run_all, sketch_folder
from fedcohort.experiments.compare import expand, in_turn
from fedcohort.files import Want, open_source
from fedcohort.files.sketching import ALL_ROWS, sketch_source
from fedcohort.sketch.race import RaceSketch

DIM, ROWS, BITS = 64, 500, 6
SWEEP = {
    "rounds": 60,
    "device": "cpu",
    "seeds": [0, 1],
    "local": {"epochs": 5, "batch_size": 8},
    "sweep": {"local.lr": [0.01, 0.02, 0.05, 0.1]},
}


def make_data(folder: Path, files: int, rows: int) -> None:
    rng = np.random.default_rng(0)
    for number in range(files):
        np.save(folder / f"{number:02d}.npy", rng.normal(size=(rows, DIM)).astype(np.float32))


def timed(work):
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def lines(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*/rounds.jsonl"))]


def one_pass(workers: int | None, data: Path, out: Path):
    """Return the seconds of a sketch and of a sweep, and what they made; None is no cluster."""
    empty, settings = RaceSketch.srp(DIM, ROWS, BITS), expand(SWEEP)
    if workers is None:
        sketching = timed(lambda: sketch_source(open_source(data, Want()), empty))
        sweeping = timed(lambda: in_turn(settings, out))
        return sketching, (sweeping[0], lines(out))
    with cluster("local", cpus=workers):
        warm(workers)
        sketching = timed(lambda: sketch_folder(data, Want(), empty)[ALL_ROWS])
        warm(workers)  # Ray may have ended idle ones
        sweeping = timed(lambda: run_all(settings, out))
        return sketching, (sweeping[0], lines(out))


def warm(workers: int) -> None:
    """Let every worker import and compile what it needs, by doing a little of each job."""
    settings = expand({**SWEEP, "rounds": 1})[:1]

    def load() -> None:
        RaceSketch.srp(DIM, ROWS, BITS).add(np.ones((2, DIM), np.float32))
        with tempfile.TemporaryDirectory() as place:
            in_turn(settings, place)
        time.sleep(2)  # so that no worker takes two of these tasks

    ray = need_ray()
    ray.get([ray.remote(load).remote() for _ in range(workers)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="ray-scaling.json")
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    ways = {"one process": None, "1 worker": 1, "2 workers": 2}
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    made = []
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        data.mkdir()
        make_data(data, options.files, options.rows)
        for repeat in range(options.repeats):
            for way, workers in ways.items():
                sketching, sweeping = one_pass(workers, data, Path(place) / f"{way} {repeat}")
                taken[way].append((sketching[0], sweeping[0]))
                made.append((sketching[1], sweeping[1]))
    assert all(sketch == made[0][0] and sweep == made[0][1] for sketch, sweep in made)
    total = options.files * options.rows
    result = {
        "threads a worker": os.environ.get("OMP_NUM_THREADS", "all"),
        "load of the machine (1 min)": round(os.getloadavg()[0], 1),
        "results equal": True,
        "sketch": f"{options.files} files of {options.rows} x {DIM}, {ROWS} rows of {BITS} bits",
        "sweep": "4 settings x 2 seeds x 60 rounds on digits",
    }
    for way, times in taken.items():
        sketching, sweeping = (min(column) for column in zip(*times, strict=True))
        result[way] = {"vectors/s": round(total / sketching), "sweep s": round(sweeping, 2)}
        print(way, result[way])
    write(options.out, result)


if __name__ == "__main__":
    main()
