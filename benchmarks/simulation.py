"""Seconds per round of simulated FedAvg: fedcohort, plain PyTorch, Flower and pfl side by side.

python benchmarks/simulation.py --pfl-python ../venv-pfl/bin/python
python benchmarks/simulation.py --gpu --pfl-python ../venv-pfl/bin/python

Each engine runs in a process of its own. The engines take turns of at least a quarter of a second
and one round, so that a busy moment of the machine affects all alike. Peers that are not installed
are listed as absent in the result. On a GPU, fedcohort is timed with one seed and with several,
and its seconds are per seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import numpy as np
from provenance import write
from simulation_engines import WORKLOADS

HERE = Path(__file__).parent


class Child:
    """An engine in a process of its own."""

    def __init__(
        self, engine, workload, data, *, python, device="cpu", seeds=1, precision="float32"
    ):
        paths = [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
        env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": path}
        command = [python, str(HERE / "simulation_engines.py"), engine, workload, str(data)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read if the child fails)
        self.process = subprocess.Popen(
            [*command, device, str(seeds), precision], env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self._answer()
        self.seconds: list[float] = []
        self.accuracy = None
        self.peak = 0.0

    def _answer(self):
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
        answer = self._answer()
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


def arrays(shape, classes):
    """Fashion-MNIST if it is installed, else noise of the wanted shape."""
    from fedcohort.datasets import load
    from fedcohort.exceptions import DataError

    if shape == (1, 28, 28):
        try:
            data = load("fashion-mnist")
            return data.name, {k: getattr(data, k) for k in ("x", "y", "x_test", "y_test")}
        except DataError:
            pass
    rng = np.random.default_rng(0)
    if len(shape) == 1:  # windows of characters, 400 per client
        x, x_test = (rng.integers(0, classes, (n, *shape)) for n in (40_000, 1000))
        y, y_test = (rng.integers(0, classes, n) for n in (40_000, 1000))
        return "random characters", {"x": x, "y": y, "x_test": x_test, "y_test": y_test}
    n, m = (60_000, 10_000) if shape == (1, 28, 28) else (50_000, 10_000)
    return "noise of the same shape", {
        "x": rng.random((n, *shape), dtype=np.float32), "y": rng.integers(0, 10, n),
        "x_test": rng.random((m, *shape), dtype=np.float32), "y_test": rng.integers(0, 10, m),
    }  # fmt: skip


def stored(work, folder):
    """Where the data of a workload come from, and the file that holds them."""
    source, data = arrays(work.shape, work.classes)
    path = folder / f"{'x'.join(map(str, work.shape))}.npz"
    if not path.exists():
        np.savez(path, **data)
    return source, path


def measure(name, engines, turns, folder):
    """Let all engines take turns on one workload."""
    work = WORKLOADS[name]
    source, path = stored(work, folder)
    children, absent = {}, {}
    for label, python in engines.items():
        try:
            children[label] = Child(label, name, path, python=python)
        except (RuntimeError, OSError) as error:
            absent[label] = str(error).strip().splitlines()[-1]
    for child in children.values():
        child.round()
        child.round()
        child.seconds.clear()
    for _ in range(turns):
        for child in children.values():
            child.turn()
    result = {"data": source, "absent": absent, "engines": {}}
    for label, child in children.items():
        child.end()
        result["engines"][label] = summary(child)
    return result


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


def measure_gpu(name, pfl_python, folder, device="cuda"):
    """Seconds per round of every engine on a GPU, one after the other."""
    (runs, rounds), work = ON_GPU[name], WORKLOADS[name]
    _, path = stored(work, folder)

    def timed(engine, python, seeds, precision):
        how = {"device": device, "seeds": seeds, "precision": precision}
        child = Child(engine, name, path, python=python, **how)
        for _ in range(max(2, work.evaluate_every) + rounds):  # the first compile kernels
            child.round()
        child.end()
        seconds = [value / seeds for value in child.seconds[-rounds:]]
        about = {"seeds": seeds, "precision": precision, "rounds": rounds}
        return about | {"mean_s": round(mean(seconds), 6), "median_s": round(median(seconds), 6)}

    precisions = dict.fromkeys(precision for _, precision in runs)
    result = {"fedcohort": [timed("fedcohort", sys.executable, *run) for run in runs]}
    result["loop"] = [timed("loop", sys.executable, 1, precision) for precision in precisions]
    if name == "pfl-cifar10" and pfl_python:
        result["pfl"] = timed("pfl", pfl_python, 1, "float32")
    return result


def summary(child):
    seconds = child.seconds
    times = {"median_s": round(median(seconds), 6), "rounds": len(seconds)}
    return times | {"peak_mb": round(child.peak), "accuracy": child.accuracy}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", help="comma-separated names [all]")
    parser.add_argument("--engines", default="fedcohort,loop,flower,pfl")
    parser.add_argument("--pfl-python", help="a Python with pfl 0.6 and what fedcohort needs")
    parser.add_argument("--gpu", action="store_true", help="measure on a GPU")
    parser.add_argument("--out")
    args = parser.parse_args()
    pythons = {"pfl": args.pfl_python or sys.executable}
    engines = {name: pythons.get(name, sys.executable) for name in args.engines.split(",")}
    names = args.workloads.split(",") if args.workloads else ON_GPU if args.gpu else ON_CPU
    out = args.out or f"benchmarks/results/simulation-{'gpu' if args.gpu else 'cpu'}.json"
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if args.gpu:
                results[name] = measure_gpu(name, args.pfl_python, Path(folder))
            else:
                results[name] = measure(name, engines, ON_CPU[name], Path(folder))
            print(name, json.dumps(results[name], indent=1), flush=True)
            write(out, results)


if __name__ == "__main__":
    main()
