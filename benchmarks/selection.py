"""How long policies take per round, as federations grow.

    python benchmarks/selection.py --out benchmarks/results/selection-speed.json \
        --plot docs/images/selection-speed.svg

A round is `candidates`, `select` and `observe`; signals are made up beforehand and not timed. Each
policy and size runs in a process of its own, so that its peak memory is known.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from provenance import write

from fedcohort.policies import (
    DELTA,
    FLIPS,
    HACCS,
    KDPP,
    REFL,
    ActiveFL,
    ClusteredSampling,
    DCFedAvg,
    DivFL,
    FedACS,
    FedCBS,
    FedCor,
    FedSAE,
    HiCSFL,
    LabelMatch,
    Oort,
    PowerOfChoice,
    RaceSoftmax,
    SketchMatch,
    SketchToSelect,
    TiFL,
    Uniform,
)
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.signals.forms import sketch_dtype
from fedcohort.signals.table import Signals

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
SCALARS = ("num_examples", "loss", "loss_rms", "duration", "update_distance")
POLICIES = {
    "uniform": lambda n: Uniform(),
    "power-of-choice": lambda n: PowerOfChoice(d=200),
    "active-fl": lambda n: ActiveFL(),
    "oort": lambda n: Oort(),
    "race-softmax": lambda n: RaceSoftmax(rows=10),
    "fedacs": lambda n: FedACS(),
    "sketch-to-select": lambda n: SketchToSelect(interval=8),
    "fedcor": lambda n: FedCor(warmup=16, interval=100),
    "kdpp": lambda n: KDPP(),
    "divfl": lambda n: DivFL(),
    "clustered-sampling (size)": lambda n: ClusteredSampling(),
    "clustered-sampling (similarity)": lambda n: ClusteredSampling(
        "similarity", "feature_profile" if n <= 1000 else "update_sketch"
    ),
    "delta": lambda n: DELTA(),
    "fedsae": lambda n: FedSAE(),
    "hics-fl": lambda n: HiCSFL(),
    "fed-cbs": lambda n: FedCBS(),
    "flips": lambda n: FLIPS(),
    "label-match": lambda n: LabelMatch(),
    "dc-fedavg": lambda n: DCFedAvg(),
    "haccs": lambda n: HACCS(),
    "refl": lambda n: REFL(),
    "tifl": lambda n: TiFL(),
    "sketch-match": lambda n: SketchMatch(),
}


def ids(count: int) -> tuple[str, ...]:
    return tuple(f"{i:07d}" for i in range(count))


def readings(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Made-up readings of `count` clients: skewed sketches and profiles of ten kinds."""
    if name == "num_examples":
        return rng.integers(20, 200, count)
    if name in SCALARS:
        return rng.gamma(2.0, size=count)
    kinds = rng.integers(0, 10, count)
    if name == "label_histogram":
        shapes = np.random.default_rng(0).dirichlet(np.full(10, 0.3), size=10)
        return np.round(100 * shapes[kinds] + rng.random((count, 10)))
    if name == "race_sketch":
        out = np.zeros(count, sketch_dtype(10, 64, "i2"))
        shapes = np.random.default_rng(0).dirichlet(np.full(64, 0.1), size=(10, 10))
        out["n"] = n = rng.integers(50, 200, count)
        for first in range(0, count, 50_000):
            part = slice(first, first + 50_000)
            mean = shapes[kinds[part]] * n[part, None, None]
            out["counts"][part] = np.round(mean + rng.random(mean.shape) - 0.5)
        return out
    widths = {
        "feature_profile": 64,
        "gradient_sketch": 50,
        "update_sketch": 50,
        "model_sketch": 100,
    }
    width = widths.get(name, 10)
    centers = 3 * np.random.default_rng(1).normal(size=(10, width)).astype(np.float32)
    return centers[kinds] + rng.standard_normal((count, width), dtype=np.float32)


def put(signals: Signals, name: str, asked: tuple[str, ...], number: int) -> None:
    """Record made-up readings as one array: a dict of a million would be the slowest part."""
    column, _ = signals._column_for(name, Counter())
    column.put(asked, readings(name, len(asked), stream(number, name)), number)


class Watch:
    """Wall and processor time of each round; the latter tells when others used the machine."""

    def __init__(self) -> None:
        self.laps: list[tuple[float, float]] = []
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        self.wall -= time.perf_counter()
        self.cpu -= time.process_time()

    def stop(self) -> None:
        self.wall += time.perf_counter()
        self.cpu += time.process_time()

    def lap(self) -> None:
        self.laps.append((self.wall, self.cpu))
        self.wall = self.cpu = 0.0


def time_policy(name: str, clients: int, cohort: int, rounds: int) -> dict:
    policy, signals, everyone = POLICIES[name](clients), Signals(), ids(clients)
    for signal in sorted(policy.needs.profile):
        put(signals, signal, everyone, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    watch = Watch()
    for number in range(rounds):
        round = Round(number, everyone, cohort)
        watch.start()
        asked = tuple(policy.candidates(round, signals, stream(0, number, "candidates")))
        watch.stop()
        for signal in sorted(policy.needs.query):
            put(signals, signal, asked, number)
        watch.start()
        chosen = policy.select(round, signals, stream(0, number, "select")).clients
        watch.stop()
        for signal in sorted(policy.needs.reply):
            put(signals, signal, chosen, number)
        watch.start()
        policy.observe(round, Outcome(chosen, chosen), signals)
        watch.stop()
        watch.lap()
    first, *later = (wall for wall, _ in watch.laps)
    return {
        "policy": name,
        "clients": clients,
        "cohort": cohort,
        "first_round_s": first,
        "median_round_s": float(np.median(later[-10:])),  # after any warm-up
        "median_round_cpu_s": float(np.median([cpu for _, cpu in watch.laps[-10:]])),
        "slowest_later_round_s": max(later),
        "signals_mb": before / 1024,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_process(*arguments: str) -> dict:
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def median_seconds(call, repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def time_fedcor_fit(clients: int = 1000, samples: int = 16, steps: int = 3) -> dict:
    """Closed form against Adam on one Cholesky factor of clients x clients a sample and step."""
    import torch

    from fedcohort.numerics.gp import fit_low_rank

    changes = np.random.default_rng(0).normal(size=(samples, clients)) * 0.1
    weights = 0.95 ** np.arange(samples)
    ours = median_seconds(lambda: fit_low_rank(changes, weights, 15, 0.01), 50)
    x = torch.randn(15, clients, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.01)
    data = torch.tensor(changes, dtype=torch.float32)
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = 0.0
        for row, weight in zip(data, weights, strict=True):
            covariance = x.T @ x + 1e-2 * torch.eye(clients)
            law = torch.distributions.MultivariateNormal(torch.zeros(clients), covariance)
            loss = loss - weight * law.log_prob(row)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    step = float(np.median(times[1:]))
    return {
        "clients": clients,
        "samples": samples,
        "closed_form_s": ours,
        "adam_step_s": step,
        "adam_100_steps_s (extrapolated)": 100 * step,
        "ratio": 100 * step / ours,
    }


def time_projection() -> list[dict]:
    """Projections to 100 numbers; extra memory as the growth of the process's peak."""
    from fedcohort.signals.projection import Projection

    rows = []
    for kind, dim in (("uniform", 555_178), ("sparse", 555_178),
                      ("sparse", 100_000_000)):  # fmt: skip
        model = np.random.default_rng(0).standard_normal(dim, dtype=np.float32)
        projection = Projection(dim, 100, kind)
        Projection(1000, 100, kind).apply(model[:1000])  # compiled before memory is read
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = median_seconds(lambda p=projection, m=model: p.apply(m), 3)
        extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        rows.append({"kind": kind, "parameters": dim, "k": 100, "s": seconds,
                     "extra_mb": extra / 1024})  # fmt: skip
    return rows


def plot(rows: list[dict], path: str) -> None:
    """Draw seconds per round over clients; only the labeled policies have colors."""
    import altair as alt

    from fedcohort.report.figures import COLORS, GREY, Figure, save

    known = [row for row in rows if row["policy"] in POLICIES]
    largest = max(row["clients"] for row in known)
    ends = {row["policy"]: row["median_round_s"] for row in known if row["clients"] == largest}
    colors = {"uniform": GREY, max(ends, key=lambda name: ends[name]): COLORS["light"][1]}
    colors |= {"sketch-match": COLORS["light"][0], "fedcor": COLORS["light"][2]}
    data = [
        {"policy": r["policy"], "clients": r["clients"], "seconds": r["median_round_s"]}
        for r in known
    ]
    named = alt.FieldOneOfPredicate("policy", list(colors)).to_dict()
    x = alt.X("clients:Q", axis=alt.Axis(grid=False, format="~s"), scale=alt.Scale(type="log"))
    y = alt.Y("seconds:Q", title="seconds per round (median)", axis=alt.Axis(format="~g"))
    base = alt.Chart(alt.NamedData("rows")).encode(x=x, y=y.scale(type="log"), detail="policy:N")
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    color = alt.Color("policy:N", scale=scale, legend=None)
    marked = base.transform_filter(named)
    label = marked.transform_filter(f"datum.clients == {largest}")
    chart = alt.layer(
        base.mark_line(style="faint"),
        marked.mark_line(strokeWidth=2.2, point=True).encode(color=color),
        label.mark_text(align="left", dx=8, fontWeight=600).encode(text="policy:N", color=color),
    ).properties(height=380)
    title = "Selection time as the federation grows; grey: the other policies"
    save(Figure("selection-speed", title, "", chart, {"rows": data}), Path(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--plot")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, *numbers = args.one
        print(json.dumps(time_policy(name, *map(int, numbers))))
        return
    rounds, result = [], {}
    for clients in args.sizes:
        cohort = 100 if clients >= 1_000_000 else 50
        for name in args.policies:
            row = in_process("--one", name, str(clients), str(cohort), "30")
            rounds.append(row)
            print(
                f"{clients:8d} {name:32} first {row['first_round_s']:.4f} s, then "
                f"{row['median_round_s']:.5f} s (processor {row['median_round_cpu_s']:.5f}), "
                f"slowest {row['slowest_later_round_s']:.4f} s, "
                f"peak {row['peak_mb']:.0f} MB",
                flush=True,
            )
    result["rounds"] = rounds
    for key, call in (
        ("fedcor_fit", time_fedcor_fit),
        ("projection", time_projection),
    ):
        result[key] = call()
        print(key, json.dumps(result[key]), flush=True)
    result["threads"] = os.environ.get("OMP_NUM_THREADS", "all")
    if args.plot:
        Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
        plot(rounds, args.plot)
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
