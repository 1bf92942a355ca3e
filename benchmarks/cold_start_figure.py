"""Paper 0's Figure 3 from a result file: accuracy of each cold client, from worst to best.

python benchmarks/cold_start_figure.py benchmarks/results/cold-start-mnist.json OUT.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LINES = {
    "random": ("random personal model", "#b0b0b0"),
    "global": ("global model", "#1f77b4"),
    "nearest": ("nearest sketch's model", "#d62728"),
    "best": ("best personal model (needs labels)", "#2ca02c"),
}


def main(source: str, target: str) -> None:
    result = json.loads(Path(source).read_text())["result"]
    splits = result["splits"]
    figure, axes = plt.subplots(1, len(splits), figsize=(4.5 * len(splits), 3.2), sharey=True)
    for axis, split in zip([axes] if len(splits) == 1 else axes, splits, strict=True):
        known = split["by client, seed 0"]
        for key, (label, color) in LINES.items():
            axis.plot(sorted(known[key]), label=label, color=color)
        axis.set_title(f"{result['dataset']}, {split['split']}")
        axis.set_xlabel("cold clients, sorted")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy")
    figure.axes[-1].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "fedcohort"
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
