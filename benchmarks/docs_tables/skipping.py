"""Gates against training without one: docs/tables/skipping.csv."""

from __future__ import annotations

import numpy as np
from docs_tables.results import parts, result


def skipping_rows(file):
    """All variants of the suite skip, with the change of accuracy against both baselines."""
    held = result(file)
    for setting in dict.fromkeys(p["setting"] for p in held["parts"]):
        by_name = parts(file, setting)
        for name, part in by_name.items():
            rows = part["seeds"]
            accuracy = 100 * np.array([r["accuracy"] for r in rows])
            row = {"setting": setting, "variant": name, "seeds": len(rows)}
            row |= {"accuracy %": round(float(accuracy.mean()), 2)}
            row |= {"deviation over seeds": round(float(np.std(accuracy, ddof=1)), 2)}
            over_rounds = np.mean([r["accuracy_deviation"] for r in rows])
            row |= {"deviation over rounds": round(100 * float(over_rounds), 2)}
            for base in ("uniform", "uniform, held"):
                change = ""
                if base in by_name:
                    theirs = 100 * np.mean([r["accuracy"] for r in by_name[base]["seeds"]])
                    change = round(100 * (float(accuracy.mean()) / float(theirs) - 1), 2)
                row |= {f"change against {base} %": change}
            for key in ("up", "down", "down_to_all", "skipped"):
                share = np.mean([r["overhead"][key] for r in rows])
                row |= {key.replace("_", " ") + " %": round(float(share), 2)}
            yield row
