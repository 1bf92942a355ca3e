"""Which columns differ: planted shifts found and false marks, on made-up federations.

200 sites of 300 to 3,000 records (one of three records) with 64 columns: 48 numbers, 8 categories
of four levels, 8 numbers of which a tenth is missing. Twelve sites get one planted shift each: of
the mean by one scale, of the scale by a factor of 2.5, of a category's shares, or of the rate of
missing values. Everything else is alike. The seeds were used for nothing else. Run

    python benchmarks/explain.py            # writes benchmarks/results/explain.json
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from provenance import write

from fedcohort.files.columns import Column
from fedcohort.files.marginals import bins_of, column_gaps
from fedcohort.rounds import stream
from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.race import ColumnCounts, RaceSketch

RESULT = Path(__file__).parent / "results" / "explain.json"
SITES, SEEDS = 200, (9201, 9202, 9203)
BUDGETS = (None, (4.0, 1e-6), (4.0, 0.0))  # epsilon and delta; half is for single columns
LEVELS, SHARES, OTHER_SHARES = tuple("abcd"), (0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4)
NUMBERS, CATEGORIES, GAPPY = range(48), range(48, 56), range(56, 64)
COLUMNS = tuple(
    Column(f"k{i}", "category", levels=LEVELS) if i in CATEGORIES else Column(f"x{i}")
    for i in range(64)
)
KINDS = {"mean": NUMBERS, "scale": NUMBERS, "share": CATEGORIES, "missing": GAPPY}


def site(rng, n, column=None, kind=None):
    """A site's sketch; `kind` says what is planted in `column`."""
    parts = []
    for i in range(len(COLUMNS)):
        planted = kind if i == column else None
        if i in CATEGORIES:
            order = rng.choice(4, n, p=OTHER_SHARES if planted else SHARES).astype(float)
        else:
            order = rng.normal(planted == "mean", 2.5 if planted == "scale" else 1.0, n)
        rate = 0.4 if planted == "missing" else 0.1 if i in GAPPY else 0.0
        parts.append(SimpleNamespace(order=order, missing=rng.random(n) < rate))
    made = RaceSketch(SRP(sum(c.width for c in COLUMNS), rows=1, bits=1))
    made.columns = tuple(column.spec() for column in COLUMNS)
    made.marginals = ColumnCounts.empty(len(COLUMNS))
    made.marginals.add(bins_of(COLUMNS, parts))
    made.counts[:, 0], made.n = n, n  # the joint counts play no part here
    return made


def federation(seed, shifts):
    """The sites and what was planted: (site, column) -> kind."""
    rng = stream(seed, "explain")
    sizes = np.exp(rng.uniform(np.log(300), np.log(3000), SITES)).astype(int)
    planted = {}
    for i in range(shifts):
        kind = list(KINDS)[i % len(KINDS)]
        planted[i, int(rng.choice(list(KINDS[kind])))] = kind
    of_site = {i: (column, kind) for (i, column), kind in planted.items()}
    sizes[-1] = 3
    return [site(rng, n, *of_site.get(i, ())) for i, n in enumerate(sizes)], planted


def measured(made, budget):
    """What is found in several federations under one budget."""
    hits, asked, false = Counter(), Counter(), 0
    for seed, (sites, planted) in zip(SEEDS, made, strict=True):
        if budget is not None:
            rng = stream(seed, "noise")
            sites = [s.privatize(*budget, rng=rng, explain=0.5) for s in sites]
        gaps = enumerate(column_gaps(sites))
        marks = {(i, j) for i, of_site in gaps for j, gap in enumerate(of_site) if gap.marked}
        hits += Counter(kind for where, kind in planted.items() if where in marks)
        asked, false = asked + Counter(planted.values()), false + len(marks - planted.keys())
    return {
        "budget": budget,
        "planted": dict(asked),
        "found": {kind: hits[kind] for kind in asked},
        "false_marks": false,
        "looked_at": len(SEEDS) * SITES * len(COLUMNS),
    }


def main():
    rows = []
    for shifts in (12, 0):
        made = [federation(seed, shifts) for seed in SEEDS]
        for budget in BUDGETS:
            rows.append(measured(made, budget))
            print(rows[-1], flush=True)
    write(RESULT, {"sites": SITES, "seeds": SEEDS, "rows": rows})


if __name__ == "__main__":
    main()
