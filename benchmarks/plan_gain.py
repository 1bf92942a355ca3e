"""Fit the measured speed-ups of SketchMatch on the discrepancy of uniform cohorts.

python benchmarks/plan_gain.py

Reads benchmarks/results/benchmark-*.json (needs the data sets, see $FEDCOHORT_DATA), and writes
src/fedcohort/analysis/plan_gain.json, the fit that `fedcohort plan` uses, and
benchmarks/results/plan-gain.json, predicted against measured. Settings on Fashion-MNIST and MNIST
are fitted; all others are held out. --seeds is how many partitions are sketched per setting.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import torch
from docs_tables.results import RESULTS, missing, parts, result, rounds_to
from parts import loaded
from provenance import provenance, write
from script import arguments

from fedcohort.analysis.plan import FITTED, BetweenClients, GainFit, plan
from fedcohort.experiments import config
from fedcohort.experiments.run import simulation_of

FIT_ON = ("fashion-mnist", "mnist")
VARIANT = "sketch-match, epsilon 1"
TOKENS = ("shakespeare",)  # hashed by MinHash: their discrepancy has another scale
NOT_FITTED = ("time", "grid")  # suites that repeat settings of others


def measured_settings():
    """File and setting wherever uniform and SketchMatch were measured, with the most seeds."""
    found = {}
    left_out = {f"benchmark-{suite}.json" for suite in NOT_FITTED}
    for path in (p for p in sorted(RESULTS.glob("benchmark-*.json")) if p.name not in left_out):
        for setting in dict.fromkeys(p["setting"] for p in result(path.name).get("parts", ())):
            held = parts(path.name, setting)
            if not {"uniform", VARIANT} <= set(held):
                continue
            if held["uniform"]["experiment"]["data"]["dataset"] not in TOKENS:
                seeds = min(len(held[v]["seeds"]) for v in ("uniform", VARIANT))
                found[setting] = max(found.get(setting, (0, "")), (seeds, path.name))
    return [(file, setting) for setting, (_, file) in found.items()]


def curve_step(part):
    """Rounds from one point of the curves to the next; the last round is always a point."""
    return round(part["experiment"]["rounds"] / len(part["seeds"][0]["curve"]))


def curve_rounds(part, target):
    """Rounds to a target that every seed reaches, from the curve with a point every few rounds."""
    curves = np.array([row["curve"] for row in part["seeds"]], float)
    after = curves.shape[1] - 1 - (curves >= target).argmax(axis=1)  # points after the first hit
    return part["experiment"]["rounds"] - curve_step(part) * after


def speed_up(base, ours):
    """Mean log ratio of rounds over targets that all seeds of both reach, and those targets."""
    reached = [t for t in base["targets"] if not (missing(base, t) or missing(ours, t))]
    if reached:
        logs = [np.log(rounds_to(base, t) / rounds_to(ours, t)) for t in reached]
        return np.mean(logs, axis=0), reached, "rounds"
    best = min(max(filter(None, row["curve"])) for part in (base, ours) for row in part["seeds"])
    target = np.floor(20 * best) / 20  # every seed of both reaches it
    logs = np.log(curve_rounds(base, target) / curve_rounds(ours, target))
    return logs, [float(target)], f"curve, every {curve_step(base)} rounds"


def sketches(part, seeds):
    """The sketches that the measured policy was sent, for some of its seeds."""
    values = {**part["experiment"], "device": "cpu"}
    values["seeds"] = values["seeds"][:seeds]
    values["policy"] = {"name": "sketch-match", "options": {"epsilon": 1.0}}
    experiment = config.parse(values)
    found = []
    for seed in simulation_of(experiment, loaded(experiment)[0]).seeds:
        readings = seed.collect("race_sketch", seed.clients)
        found.append(np.array([readings[c] for c in seed.clients]))
    return found


def fit_of(discrepancies, log_ratios):
    """Fit measured settings: uniform's discrepancy and the log of the speed-up of each."""
    slopes = np.asarray(log_ratios) / np.asarray(discrepancies)
    if len(slopes) < 3 or not np.isfinite(slopes).all():
        raise ValueError(f"{len(slopes)} settings, at least 3 with D > 0 are needed")
    return GainFit(slopes.mean(), slopes.std(ddof=1), len(slopes), max(discrepancies))


def row_of(file, setting, seeds):
    found = parts(file, setting)
    base, ours = found["uniform"], found[VARIANT]
    logs, targets, read = speed_up(base, ours)
    seen, size = sketches(ours, seeds), ours["experiment"]["cohort_size"]
    (worth,) = plan(seen[0], [size], ["sketch-match"]).worths
    return {
        "setting": setting,
        "dataset": ours["experiment"]["data"]["dataset"],
        "cohort_size": size,
        "targets": targets,
        "read from": read,
        "seeds": len(logs),
        "measured": float(np.exp(np.mean(logs))),
        "log_ratios": [float(v) for v in logs],
        "discrepancy": float(np.mean([BetweenClients(one).uniform(size) for one in seen])),
        "worth": {**asdict(worth), "waiting": len(worth.waiting)},
    }


def main() -> None:
    args = arguments(__doc__, seeds=3)
    torch.set_num_threads(1)
    rows = [row_of(file, setting, args.seeds) for file, setting in measured_settings()]
    used = [r for r in rows if r["dataset"] in FIT_ON]
    fit = fit_of([r["discrepancy"] for r in used], [np.log(r["measured"]) for r in used])
    for row in rows:
        row["held out"] = row["dataset"] not in FIT_ON
        row["predicted"] = asdict(fit.predict(row["discrepancy"]))
        print(row["setting"], row["discrepancy"], row["measured"], row["predicted"], flush=True)
    about = {"fitted on": [r["setting"] for r in used], "made by": provenance()}
    found = {"fit": asdict(fit), "settings": rows}
    write(RESULTS / "plan-gain.json", found)  # both are written last: the tree is clean until then
    FITTED.write_text(json.dumps({"fit": asdict(fit), **about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
