"""What sketches of single columns find, and how large private sketches are: docs/measure.md."""

from __future__ import annotations

from docs_tables.results import result, table

from fedcohort.privacy.release import sketch_size


def explained(file):
    """Planted shifts that `fedcohort explain` found, and false marks, by budget."""
    held = result(file)
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


def planned_sizes():
    """The sizes that `sketch_size` recommends, and what to expect of them."""
    lines = []
    for n in (100, 1_000, 10_000, 100_000):
        for epsilon, delta in ((1, 0.0), (1, 1e-6), (4, 0.0)):
            size = sketch_size(n, epsilon, delta)
            budget = f"{n:,}", f"{epsilon:g}", f"{delta:g}"
            expected = f"{float(f'{size.signal_to_noise:.2g}'):g}"
            lines.append([*budget, str(size.rows), str(size.buckets), expected])
    return table(["records", "epsilon", "delta", "rows", "buckets", "signal to noise"], lines)
