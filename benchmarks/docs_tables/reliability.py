"""Kills, damaged files, attacks on privacy, load and liars: docs/reliability.md."""

from __future__ import annotations

from collections import Counter

from docs_tables.results import result, table


def kills(*files):
    """Kills per job over all result files, and what came of them."""
    names = {"torn": "with a cut file", "by time": "at a random time", "missed": "too late"}
    names["finished"] = "finished jobs"
    keys = ("kills", *names, "differences", "losses", "double payments")
    rows: dict[str, Counter[str]] = {}
    for row in (row for file in files for row in result(file)["result"]["jobs"]):
        for name in (row["job"], "all"):
            rows.setdefault(name, Counter()).update({key: row[key] for key in keys})
    rows["all"] = rows.pop("all")
    lines = [[job, *(f"{counts[key]:,}" for key in keys)] for job, counts in rows.items()]
    return table(["job", *(names.get(key, key) for key in keys)], lines)


def fuzzing(file):
    """Trials of all parsers, and what came of them."""
    rows = result(file)["result"]["parsers"]
    other = sum(found["count"] for row in rows for found in row["errors"].values())
    totals = [sum(row[key] for row in rows) for key in ("trials", "refused", "accepted", "crashes")]
    cells = [*totals, other, max(row["peak_mb"] for row in rows)]
    header = ["trials", "refused", "accepted", "crashes", "other errors", "peak MB"]
    fewest = min(rows, key=lambda row: row["trials"])
    least = f"{len(rows)} parsers; the fewest trials had {fewest['target']}, {fewest['trials']:,}"
    return table(header, [[f"{cell:,}" for cell in cells]]) + f"\n{least}.\n"


def audit(file):
    """How much of a claim attacks prove, and whether they catch what is broken on purpose."""
    rows = result(file)["result"]["mechanisms"]
    good, broken = ([row for row in rows if row["broken"] is kind] for kind in (False, True))
    part = max(row["proven"] / row["epsilon"] for row in good)
    over = [row["mechanism"] for row in good if row["proven"] > row["epsilon"]]
    caught = sum(row["proven"] > row["epsilon"] for row in broken)
    held = f"attacks prove more than is claimed of {', '.join(over)}" if over else "all hold"
    return (
        f"{len(good)} mechanisms: {held}; at most {part:.1%} of a claimed epsilon was proved. "
        f"{len(broken)} broken on purpose: {caught} caught.\n"
    )


def audit_rows(file):
    """The epsilon that attacks prove, beside the claim: docs/tables/audit.csv."""
    for row in result(file)["result"]["mechanisms"]:
        names = ("mechanism", "broken", "epsilon", "delta", "proven")
        yield {name: row[name] for name in names}


def load(*files):
    """How many cases of the soak of load did all rounds, and which raised an error or grew."""
    lines = []
    for held in (result(file)["result"] for file in files):
        cases = held["cases"]
        done = sum(row["rounds"] == held["rounds"] for row in cases)
        wrong = [row["case"] for row in cases if row["error"] is not None]
        growing = [row["case"] for row in cases if row["flat"] is False]
        slow = max((row for row in cases if "late_ms" in row), key=lambda row: row["late_ms"])
        cells = [f"{held['clients']:,}", f"{done} of {len(cases)}", f"{held['rounds']:,}"]
        cells += [", ".join(names) or "none" for names in (wrong, growing)]
        lines.append([*cells, f"{slow['case']}, {slow['late_ms']:.0f} ms, {slow['late_mb']:,} MB"])
    header = ["clients", "cases done", "rounds", "errors", "not flat", "slowest, in a round"]
    return table(header, lines)


def share_text(value):
    return "1.00" if value >= 0.995 else f"{value:.2f}"[1:]


PLACES = {
    "one liar": (False, False, 1),
    "ten liars": (False, False, 10),
    "one liar, bounded": (True, False, 1),
    "ten liars, bounded": (True, False, 10),
    "one liar, bounded, a new name each round": (True, True, 1),
}


def liar_rows(file):
    """Places of liars by policy, without and with bounds: docs/tables/liars.csv."""
    by_policy = {}
    for row in result(file)["result"]["rows"]:
        case = (row["bounded"], row.get("renamed", False), row["liars"])
        by_policy.setdefault(row["policy"], {})[case] = row
    for name, rows in sorted(by_policy.items()):
        shares = {n: share_text(rows[c]["share"]) if c in rows else "" for n, c in PLACES.items()}
        yield {"policy": name, "best lie of one": rows[PLACES["one liar"]]["best attack"], **shares}
