"""A round on one GPU: time per seed, and the plain loop, in one process.

python benchmarks/simulation_gpu.py --out benchmarks/results/simulation-gpu.json
python benchmarks/simulation_gpu.py --pfl-python ../venv-pfl/bin/python

Kernels are compiled first, in parallel. The plain loop is timed over `LOOP_STEPS` steps
of a client and multiplied by the steps of a round; evaluation is left out of it. pfl runs whole
rounds in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean, median

import numpy as np
import simulation
import torch
from provenance import write
from simulation_engines import WORKLOADS, module, simulation_of

LOOP_STEPS = 20
# seeds and precisions of each workload, and the rounds to time
RUNS = {
    "pfl-cifar10": ([(1, "float32"), (5, "float32"), (1, "tf32"), (5, "tf32")], 20),
    "fedcor": ([(1, "float32"), (20, "float32"), (1, "tf32"), (20, "tf32")], 5),
    "W1": ([(1, "float32"), (20, "float32")], 20),
    "char-lstm": ([(1, "float32")], 2),
    "resnet18": ([(1, "float32"), (1, "tf32")], 3),
    "vit-tiny": ([(1, "float32")], 3),
}


def make(name, seeds, precision):
    """A simulation of a workload on noise."""
    options = {"device": "cuda", "seeds": range(seeds), "precision": precision}
    return simulation_of(WORKLOADS[name], data(name), **options)


CACHE: dict[tuple, dict] = {}


def data(name):
    """The arrays of a workload; one after the other, because they are large."""
    work = WORKLOADS[name]
    key = (work.shape, work.classes)
    if key not in CACHE:
        CACHE.clear()
        CACHE[key] = simulation.arrays(work.shape, work.classes)[1]
    return CACHE[key]


def compile_kernels(name, seeds, precision):
    """Run until every kernel has been used once; they stay in Triton's cache."""
    held = make(name, seeds, precision)
    for _ in range(max(1, WORKLOADS[name].evaluate_every)):
        held.step()
    return name


def ours(name, seeds, precision, rounds):
    """Seconds per seed-round."""
    work = WORKLOADS[name]
    torch.cuda.reset_peak_memory_stats()
    held = make(name, seeds, precision)
    for _ in range(max(2, work.evaluate_every)):
        held.step()
    seconds = []
    for _ in range(rounds):
        seconds.append(timed(held.step) / seeds)
    return {
        "seeds": seeds,
        "precision": precision,
        "engine": held.trainer.engine,
        "mean_s": round(mean(seconds), 6),
        "median_s": round(median(seconds), 6),
        "min_s": round(min(seconds), 6),
        "rounds": rounds,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def timed(run):
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def loop(name, precision):
    """Seconds per round of a client after the other, without evaluation."""
    from torch.nn.functional import cross_entropy

    for switch in (torch.backends.cudnn, torch.backends.cuda.matmul):
        switch.allow_tf32 = precision == "tf32"
    work, arrays = WORKLOADS[name], data(name)
    size = len(arrays["y"]) // work.clients
    x, y = (torch.from_numpy(arrays[key][:size]).cuda() for key in ("x", "y"))
    model = module(work).cuda()
    params = list(model.parameters())
    batches = torch.randperm(size, device="cuda").split(work.batch)

    def steps(count):
        for i in range(count):
            batch = batches[i % len(batches)]
            grads = torch.autograd.grad(cross_entropy(model(x[batch]), y[batch]), params)
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p.sub_(g, alpha=work.lr)

    steps(5)
    each = timed(lambda: steps(LOOP_STEPS)) / LOOP_STEPS
    total = work.cohort * work.epochs * len(batches)
    return {
        "precision": precision,
        "step_s": round(each, 6),
        "steps": total,
        "median_s": round(each * total, 6),
    }


def pfl(python):
    """Seconds per round of pfl on its own workload."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npz"
        np.savez(path, **data("pfl-cifar10"))
        child = simulation.Child("pfl", "pfl-cifar10", path, python=python, device="cuda")
        for _ in range(14):
            child.round()
        child.end()
    seconds = child.seconds[4:]  # ten rounds, one of them with an evaluation
    return {"mean_s": round(mean(seconds), 6), "median_s": round(median(seconds), 6), "rounds": 10}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(RUNS), help="comma-separated names")
    parser.add_argument("--pfl-python", help="a Python with pfl 0.6 and the same torch")
    parser.add_argument("--out", default="benchmarks/results/simulation-gpu.json")
    args = parser.parse_args()
    names = args.workloads.split(",")
    todo = [(name, *run) for name in names for run in RUNS[name][0]]
    start = time.perf_counter()
    if todo:
        with ProcessPoolExecutor(len(todo), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_kernels, *zip(*todo, strict=True)))
    result = {"compile_s": round(time.perf_counter() - start, 1)}
    print("compiled", result["compile_s"], flush=True)
    for name in names:
        runs, rounds = RUNS[name]
        held = result[name] = {"fedcohort": [], "loop": []}
        for seeds, precision in runs:
            held["fedcohort"].append(ours(name, seeds, precision, rounds))
            print(name, held["fedcohort"][-1], flush=True)
        for precision in dict.fromkeys(precision for _, precision in runs):
            held["loop"].append(loop(name, precision))
            print(name, "loop", held["loop"][-1], flush=True)
        if name == "pfl-cifar10" and args.pfl_python:
            try:
                held["pfl"] = pfl(args.pfl_python)
            except RuntimeError as error:  # the result says so, and the rest is measured
                held["pfl_failed"] = str(error)
            print(name, "pfl", held.get("pfl", held.get("pfl_failed")), flush=True)
        write(args.out, result)


if __name__ == "__main__":
    main()
