"""Accuracy over the share of models sent, for every threshold: as paper 2's Figure 1.

A dashed line shows what fewer rounds without a gate reach with the same number of models.

python benchmarks/skipping_figure.py OUT.svg benchmarks/results/skipping-*.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

FAMILIES = {  # pattern of the variant: legend, color, marker
    r"FedAvg, random": ("FedAvg, random cohorts", "#404040", "s"),
    r"select": ("sketch-to-select", "#1f77b4", "s"),
    r"select by steps": ("sketch-to-select by steps", "#ff7f0e", "s"),
    r"select by steps, .*": ("and skip, by steps", "#ff7f0e", "D"),
    r"select, skip ([\d.]+)": ("and skip: all or none (paper 2)", "#1f77b4", "o"),
    r"select, skip ([\d.]+), by client": ("and skip: by client", "#d62728", "o"),
    r"select, skip [\d.]+, at most (\d+) in a row": ("and skip: bounded run", "#2ca02c", "^"),
    r"select, auto [\d.]+(?:, adaptive)?": ("and skip: threshold found by itself", "#9467bd", "D"),
}


def stopped_early(axis, run) -> None:
    """Draw the accuracy of a run without a gate over its rounds, as a share of all of them."""
    accuracy = np.mean([seed["accuracy"] for seed in run["seeds"]], axis=0)
    ends = range(1, len(accuracy) + 1)
    smooth = [accuracy[end - -(-end // 10) : end].mean() for end in ends]  # the last tenth
    share = 100 * np.array(ends) / len(accuracy)
    axis.plot(share, smooth, "--", color="#1f77b4", alpha=0.6, lw=1, label="stopped early")


def draw(axis, runs) -> None:
    bottom = min(run["accuracy"] for run in runs if "reset" not in run["variant"])
    stopped_early(axis, next(run for run in runs if run["variant"] == "select"))
    for pattern, (legend, color, marker) in FAMILIES.items():
        found = [(re.fullmatch(pattern, run["variant"]), run) for run in runs]
        points = [(m[1] if m.re.groups else "", run) for m, run in found if m]
        points.sort(key=lambda point: (float(point[0] or 0), point[1]["up %"]))
        if not points:
            continue
        up = [run["up %"] for _, run in points]
        accuracy = [run["accuracy"] for _, run in points]
        style = {"marker": marker, "color": color, "label": legend, "markersize": 5}
        joined = len(points) > 2 and bool(points[0][0])
        axis.plot(up, accuracy, linestyle="-" if joined else "", **style)
        for (text, _), x, y in zip(points, up, accuracy, strict=True):
            axis.annotate(text, (x, y), (3, 4), textcoords="offset points", fontsize=7)
    axis.set_xscale("log")
    axis.set_xlim(0.3, 130)
    axis.set_ylim(bottom=bottom - 0.02)
    axis.grid(alpha=0.3)


def main(target: str, *sources: str) -> None:
    results = [json.loads(Path(source).read_text())["result"] for source in sources]
    panels = {(r["dataset"], run["case"]): [] for r in results for run in r["runs"]}
    for r in results:
        for run in r["runs"]:
            panels[r["dataset"], run["case"]].append(run)
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5 * columns, 3.4 * rows), squeeze=False, layout="constrained"
    )
    for axis, ((dataset, case), runs) in zip(axes.flat, sorted(panels.items()), strict=False):
        draw(axis, runs)
        axis.set_title(f"{dataset}, {case}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("models uploaded, % of FedAvg")
    for row in axes:
        row[0].set_ylabel("test accuracy")
    lines = {label: line for axis in axes.flat for line, label in zip(*_legend(axis), strict=True)}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, fontsize=8)
    plt.rcParams["svg.hashsalt"] = "fedcohort"
    figure.savefig(target, metadata={"Date": None})


def _legend(axis):
    return axis.get_legend_handles_labels()


if __name__ == "__main__":
    main(*sys.argv[1:])
