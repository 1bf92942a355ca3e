"""Seconds per round of simulated FedAvg: fedcohort, plain PyTorch, Flower and pfl side by side.

python benchmarks/simulation.py --pfl-python ../venv-pfl/bin/python
python benchmarks/simulation.py --gpu --pfl-python ../venv-pfl/bin/python

--workloads and --engines are lists with commas; the Python of pfl 0.6 has what fedcohort needs too.
Each engine runs in a process of its own, and they take turns, so that a busy moment of the machine
affects all alike. Peers that are not installed are listed as absent. On a GPU, fedcohort is timed
with one seed and with several, and its seconds are per seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, median

import numpy as np
from provenance import write
from script import arguments
from simulation_engines import ENGINES, WORKLOADS

from fedcohort.datasets import load
from fedcohort.exceptions import DataError

HERE = Path(__file__).parent


class Child:
    """An engine in a process of its own."""

    def __init__(self, python, engine, workload, data, device="cpu", seeds=1, precision="float32"):
        paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
        env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": path}
        words = [python, HERE / "simulation_engines.py", engine, workload, data, device, seeds]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read if the child fails)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen([*map(str, words), precision], env=env, text=True, **pipes)
        self.answer()
        self.seconds: list[float] = []
        self.accuracy, self.peak = None, 0.0

    def answer(self):
        for line in self.process.stdout:
            if line.startswith("@@ "):
                return json.loads(line[3:])
        self.log.seek(0)
        raise RuntimeError(f"{self.process.args[2:4]} stopped:\n{self.log.read()[-2000:]}")

    def turn(self):
        """Run rounds for at least a quarter of a second."""
        end = time.perf_counter() + 0.25
        self.round()
        while time.perf_counter() < end:
            self.round()
        self.peak = max(self.peak, peak_memory(self.process.pid))

    def round(self):
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        answer = self.answer()
        self.seconds.append(answer["seconds"])
        self.accuracy = answer["accuracy"]

    def end(self):
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def peak_memory(pid):
    """Sum the peak resident sizes of a process and its descendants, in MB."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            peak = int(fields.get("VmHWM", "0 kB").split()[0]) / 1024
            parents[int(status.parent.name)] = (int(fields["PPid"]), peak)
        except (OSError, ValueError):
            continue
    family, grown = {pid}, True
    while grown:
        more = {p for p, (parent, _) in parents.items() if parent in family} - family
        grown = bool(more)
        family |= more
    return sum(parents[p][1] for p in family if p in parents)


def stored(work, folder):
    """Fashion-MNIST if it is installed, else noise of the wanted shape; and the file with it."""
    rng, path = np.random.default_rng(0), folder / f"{'x'.join(map(str, work.shape))}.npz"
    if len(work.shape) == 1:  # windows of characters, 400 per client
        source, sizes = "random characters", (40_000, 1000)
        x, x_test = (rng.integers(0, work.classes, (n, *work.shape)) for n in sizes)
    else:
        source, sizes = "noise of the same shape", (50_000, 10_000)
        x, x_test = (rng.random((n, *work.shape), dtype=np.float32) for n in sizes)
    y, y_test = (rng.integers(0, work.classes, n) for n in sizes)
    arrays = {"x": x, "y": y, "x_test": x_test, "y_test": y_test}
    if work.shape == (1, 28, 28):
        with suppress(DataError):
            data = load("fashion-mnist")
            source, arrays = data.name, {name: getattr(data, name) for name in arrays}
    np.savez(path, **arrays)
    return source, path


def measure(name, engines, turns, folder):
    """Let all engines take turns on one workload."""
    source, path = stored(WORKLOADS[name], folder)
    children, absent, rows = {}, {}, {}
    for label, python in engines.items():
        try:
            children[label] = Child(python, label, name, path)
        except (RuntimeError, OSError) as error:
            absent[label] = str(error).strip().splitlines()[-1]
    for child in children.values():
        child.round()
        child.round()
        child.seconds.clear()
    for _ in range(turns):
        for child in children.values():
            child.turn()
    for label, child in children.items():
        child.end()
        row = {"median_s": round(median(child.seconds), 6), "rounds": len(child.seconds)}
        rows[label] = row | {"peak_mb": round(child.peak), "accuracy": child.accuracy}
    return {"data": source, "absent": absent, "engines": rows}


ON_CPU = {"W1": 20, "W2": 10, "W3": 20}  # turns of each workload

# On a GPU: seeds and precisions of each workload, and the rounds to time.
ON_GPU = {
    "pfl-cifar10": ([(1, "float32"), (5, "float32"), (1, "tf32"), (5, "tf32")], 20),
    "fedcor": ([(1, "float32"), (20, "float32"), (1, "tf32"), (20, "tf32")], 5),
    "W1": ([(1, "float32"), (20, "float32")], 20),
    "char-lstm": ([(1, "float32")], 2),
    "resnet18": ([(1, "float32"), (1, "tf32")], 3),
    "vit-tiny": ([(1, "float32")], 3),
}


def measure_gpu(name, pfl_python, folder):
    """Seconds per round of every engine on a GPU, one after the other."""
    (runs, rounds), work = ON_GPU[name], WORKLOADS[name]
    _, path = stored(work, folder)

    def timed(engine, seeds, precision, python=sys.executable):
        child = Child(python, engine, name, path, "cuda", seeds, precision)
        for _ in range(max(2, work.evaluate_every) + rounds):  # the first compile kernels
            child.round()
        child.end()
        seconds = [value / seeds for value in child.seconds[-rounds:]]
        about = {"seeds": seeds, "precision": precision, "rounds": rounds}
        return about | {"mean_s": round(mean(seconds), 6), "median_s": round(median(seconds), 6)}

    result = {"fedcohort": [timed("fedcohort", *run) for run in runs]}
    result["loop"] = [timed("loop", 1, p) for p in dict.fromkeys(p for _, p in runs)]
    if name == "pfl-cifar10" and pfl_python != sys.executable:
        result["pfl"] = timed("pfl", 1, "float32", pfl_python)
    return result


def main():
    names = {"workloads": str, "engines": ",".join(ENGINES), "pfl_python": sys.executable}
    args = arguments(__doc__, **names, gpu=False, out=str)
    python = {"pfl": args.pfl_python}
    engines = {name: python.get(name, sys.executable) for name in args.engines.split(",")}
    place = "gpu" if args.gpu else "cpu"
    names = args.workloads.split(",") if args.workloads else ON_GPU if args.gpu else ON_CPU
    results = {}
    with tempfile.TemporaryDirectory() as place_of_data:
        folder = Path(place_of_data)
        for name in names:
            on_gpu = args.gpu and measure_gpu(name, args.pfl_python, folder)
            results[name] = on_gpu or measure(name, engines, ON_CPU[name], folder)
            print(name, json.dumps(results[name], indent=1), flush=True)
            write(args.out or f"benchmarks/results/simulation-{place}.json", results)


if __name__ == "__main__":
    main()
