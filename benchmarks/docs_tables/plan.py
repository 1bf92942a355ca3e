"""What a plan predicted beside what was measured: docs/plan.md."""

from __future__ import annotations

import numpy as np
from docs_tables.results import result, table

from fedcohort.analysis.comparison import paired_interval


def plan_gain(file):
    """Predicted against measured speed-ups of SketchMatch, the settings held out last."""
    found = result(file)
    lines = []
    for row in sorted(found["result"]["settings"], key=lambda row: row["held out"]):
        guess = row["predicted"]
        logs = paired_interval(row["log_ratios"])
        measured = "{:.2f}x ({:.2f} to {:.2f})".format(*np.exp(logs))
        predicted = "{fewer_rounds:.2f}x ({low:.2f} to {high:.2f})".format(**guess)
        inside = "inside" if guess["low"] <= row["measured"] <= guess["high"] else "outside"
        used = "held out" if row["held out"] else "fitted"
        target = ", ".join(f"{t:.0%}" for t in row["targets"])
        cells = [f"{row['setting']}, {target}", used, f"{row['discrepancy']:.4f}"]
        lines.append([*cells, predicted, measured, inside])
    header = ["setting, targets", "", "uniform's discrepancy", "predicted (90 %)"]
    return table([*header, "measured (95 %)", "interval"], lines)


def plan_worth(file):
    """What matched cohorts are worth in the measured settings, at epsilon 1."""
    found = result(file)
    lines = []
    for row in found["result"]["settings"]:
        worth = row["worth"]
        better = worth["uniform"] - worth["discrepancy"] > 3 * worth["error"]
        clients = f"{worth['random_clients']:.0f}" if better else "nothing to gain"
        until = worth["rounds_until_all"]
        lines.append(
            [
                row["setting"],
                str(row["cohort_size"]),
                f"{worth['uniform']:.4f}",
                f"{worth['discrepancy']:.4f} ± {worth['error']:.4f}",
                clients,
                f"not in {worth['rounds']}" if until is None else str(until),
            ]
        )
    header = ["setting", "cohort", "uniform", "matched", "worth, random clients"]
    return table([*header, "all used by round"], lines)


def plan_million(file):
    """Time and memory of a plan for a million clients."""
    found = result(file)
    row = found["result"]["million"]
    return (
        f"A plan for {row['clients']:,} sketches of 10 x 64 counts took {row['seconds']:.0f} s "
        f"({row['cpu_seconds']:.0f} s of one core) and {row['peak_gb']:.1f} GB, "
        f"{row['sketches_gb']:.1f} GB of which are the sketches.\n"
    )
