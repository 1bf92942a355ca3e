"""Print the tables of the documentation from the committed results.

python benchmarks/tables.py selection | skipping
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SETTINGS = {
    "two shards": "two shards, 69 %",
    "one shard": "one shard, 62 %",
    "dirichlet 0.2": "Dirichlet 0.2, 72 %",
    "dirichlet 0.5": "Dirichlet 0.5, 76 %",
}


def rows(header, lines):
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print()


def rounds(run):
    value, seeds = run["rounds_to_target"], len(run["seeds"])
    if value["missing"] == seeds:
        return "never"
    share = f" ({seeds - value['missing']}/{seeds})" if value["missing"] else ""
    return f"{value['mean']:.1f} ± {value['std']:.1f}{share}"


def selection():
    runs = json.loads((RESULTS / "selection-fashion-mnist.json").read_text())["result"]
    cell = {(run["policy"], run["setting"]): run for run in runs}
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    rows(
        ["policy", *SETTINGS.values()],
        [[p, *(rounds(cell[p, s]) for s in SETTINGS)] for p in policies],
    )
    lines = []
    for p in policies:
        first = cell[p, "two shards"]
        accuracy = [f"{100 * cell[p, s]['terminal_accuracy']['mean']:.1f}" for s in SETTINGS]
        spread = f"{100 * first['terminal_spread']['mean']:.1f}"
        lines.append(
            [
                p,
                *accuracy,
                spread,
                f"{first['gemd']['mean']:.2f}",
                f"{first['participation_entropy']['mean']:.2f}",
                f"{first['bytes_up']['mean'] / 1e6:,.0f}",
                f"{first['bytes_down']['mean'] / 1e6:,.0f}",
            ]
        )
    names = ["two shards", "one shard", "Dirichlet 0.2", "Dirichlet 0.5"]
    rows(["policy", *names, "spread", "GEMD", "entropy", "MB up", "MB down"], lines)


def skipping():
    for name in ("fashion-mnist", "mnist", "cifar10"):
        path = RESULTS / f"skipping-{name}.json"
        if not path.exists():
            continue
        print(f"### {name}\n")
        runs = json.loads(path.read_text())["result"]["runs"]
        for case in dict.fromkeys(run["case"] for run in runs):
            print(f"{case}:\n")
            rows(
                ["variant", "accuracy", "change", "up", "down", "down, all receive", "skipped"],
                [
                    [
                        run["variant"],
                        f"{run['accuracy']:.3f} ± {run['spread']:.3f}",
                        f"{run['accuracy change %']:+.1f} %",
                        *(f"{run[k]:.1f} %" for k in ("up %", "down %", "down to all %")),
                        f"{run['skipped %']:.0f} %",
                    ]
                    for run in runs
                    if run["case"] == case
                ],
            )


if __name__ == "__main__":
    {"selection": selection, "skipping": skipping}[sys.argv[1]]()
