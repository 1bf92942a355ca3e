"""Gates against training without one: docs/skipping-tables.md."""

from __future__ import annotations

import numpy as np
from docs_tables.results import NOT_RUN, parts, spread, table


def skipping(file, setting):
    """All variants of one setting of the suite skip, with the change against both baselines."""
    found = parts(file, setting)
    if "uniform" not in found:
        return NOT_RUN
    bases = [name for name in ("uniform", "uniform, held") if name in found]
    lines = []
    for name, part in found.items():
        rows = part["seeds"]
        accuracy = np.array([100 * r["accuracy"] for r in rows])
        changes = []
        for base in bases:
            other = np.mean([100 * r["accuracy"] for r in found[base]["seeds"]])
            changes.append(f"{100 * (accuracy.mean() / other - 1):+.1f} %")
        over = [
            f"{np.mean([r['overhead'][k] for r in rows]):.1f} %"
            for k in ("up", "down", "down_to_all", "skipped")
        ]
        rounds = f"{100 * np.mean([r['accuracy_deviation'] for r in rows]):.1f}"
        lines.append([name, spread(accuracy), rounds, *changes, *over])
    header = ["variant", "accuracy %", "deviation over rounds"]
    header += [f"against {base}" for base in bases]
    header += ["up", "down", "down, all receive", "skipped rounds"]
    return table(header, lines)
