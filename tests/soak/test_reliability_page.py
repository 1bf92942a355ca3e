"""The tables of docs/reliability.md are those of the result file."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def short(value):
    return "1.00" if value >= 0.995 else f"{value:.2f}"[1:]


def test_the_tables_are_those_of_the_result_file():
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    result = json.loads((ROOT / "benchmarks/results/forgery.json").read_text())["result"]
    found = {(r["policy"], r["bounded"], r["liars"]): r for r in result["rows"]}
    accuracy = {(r["policy"], r["bounded"]): r["accuracy"][0] for r in result["accuracy"]}
    for name in {r["policy"] for r in result["rows"]}:
        one, ten = found[name, False, 1], found[name, False, 10]
        bounds = [short(found[name, True, liars]["share"]) for liars in (1, 10)]
        cells = [name, short(one["share"]), one["best attack"], short(ten["share"]), *bounds]
        assert f"| {' | '.join(cells)} |" in page
        kept = [short(accuracy[name, bounded]) for bounded in (False, True)]
        assert f"| {' | '.join([name, *kept])} |" in page
