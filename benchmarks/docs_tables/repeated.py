"""Published numbers that were made again with later code on another machine: docs/benchmark.md."""

from __future__ import annotations

from against import AGREES, DIFFERS, OTHER_BYTES, SAME, compare
from docs_tables.results import by_name, commits_of, enumerated, result, table


def repeated(*suites):
    """How the parts in repeated-SUITE.json compare with the published ones, by setting."""
    rows, made, commits = [], [], []
    for suite in suites:
        again, published = result(f"repeated-{suite}.json"), result(f"benchmark-{suite}.json")
        twins = by_name(published["parts"])
        names = ((part["setting"], part["variant"]) for part in again["parts"])
        rows += [compare(p, twins[n]) for p, n in zip(again["parts"], names, strict=True)]
        made, commits = [*made, *again["provenance"]], [*commits, *commits_of(again)]
    machines = sorted({m["gpu"] or m["cpu"] for m in made})
    commit = enumerated([f"`{name[:10]}`" for name in dict.fromkeys(commits)])
    seeds = {row.seeds for row in rows}
    each = "one seed" if seeds == {1} else f"{min(seeds)} to {max(seeds)} seeds"
    text = f"{len(rows)} parts with {each} each, run again at commit {commit} on "
    text += f"{enumerated(machines)}: {sum(row.verdict == SAME for row in rows)} are the same, "
    text += f"{sum(row.verdict == AGREES for row in rows)} agree, "
    text += f"{sum(row.verdict == DIFFERS for row in rows)} differ."
    lines = []
    for setting in dict.fromkeys(row.setting for row in rows):
        here = [row for row in rows if row.setting == setting]
        same = [row for row in here if row.verdict == SAME]
        agree = [row for row in here if row.verdict == AGREES]
        cohorts = [row for row in agree if row.same_cohorts == row.seeds]
        differ = [row.variant for row in here if row.verdict in (DIFFERS, OTHER_BYTES)]
        largest = f"{100 * max(row.largest for row in same):.2f}" if same else ""
        counts = len(cohorts), len(agree) - len(cohorts)
        cells = [setting, str(len(here)), str(len(same)), largest, *map(str, counts)]
        lines.append([*cells, "; ".join(differ) or "0"])
    header = ["setting", "parts", "the same", "points apart at most"]
    header += ["agree, same cohorts", "agree, other cohorts", "differ"]
    return f"{text}\n\n{table(header, lines)}"
