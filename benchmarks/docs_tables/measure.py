"""What sketches of single columns find: docs/measure.md."""

from __future__ import annotations

from docs_tables.results import NOT_RUN, result, table


def explained(file):
    """Planted shifts that `fedcohort explain` found, and false marks, by budget."""
    held = result(file)
    if held is None:
        return NOT_RUN
    rows = {True: {}, False: {}}
    for row in held["result"]["rows"]:
        rows[bool(row["planted"])][tuple(row["budget"] or ())] = row
    lines = []
    for budget, row in rows[True].items():
        kinds = [f"{row['found'][kind]} of {count}" for kind, count in row["planted"].items()]
        false = [r["false_marks"] for r in (row, rows[False][budget])]
        looked = row["looked_at"] + rows[False][budget]["looked_at"]
        stated = ", ".join(f"{v:g}" for v in budget) or "no noise"
        lines.append([stated, *kinds, f"{sum(false)} of {looked:,}"])
    return table(["epsilon, delta", *row["planted"], "false marks"], lines)
