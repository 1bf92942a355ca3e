"""Published numbers that were made again with later code on another machine: docs/benchmark.md."""

from __future__ import annotations

from against import AGREES, DIFFERS, SAME, compare
from docs_tables.results import by_name, commits_of, enumerated, result


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
    return f"{text}\n"
