"""Kills, damaged files, attacks on privacy, load and liars: docs/reliability.md."""

from __future__ import annotations

from docs_tables.results import result, table


def named_left_out(held):
    left = "; ".join(f"{name} (no {', '.join(m)})" for name, m in held["left out"].items())
    return f"\nLeft out, because packages were missing there: {left}.\n" if left else ""


def kills(*files):
    """Kills per job over all result files, and what came of them."""
    found = [held["result"] for held in map(result, files) if held is not None]
    names = {"torn": "with a cut file", "by time": "at a random time", "missed": "too late"}
    names["finished"] = "finished jobs"
    keys = ("kills", *names, "differences", "losses", "double payments")
    rows: dict[str, list[int]] = {}
    for row in (row for held in found for row in held["jobs"]):
        before = rows.setdefault(row["job"], [0] * len(keys))
        rows[row["job"]] = [count + row[key] for count, key in zip(before, keys, strict=True)]
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [[job, *(f"{count:,}" for count in counts)] for job, counts in rows.items()]
    return table(["job", *(names.get(key, key) for key in keys)], lines) + named_left_out(found[0])


def fuzzing(file):
    """Trials of all parsers, and what came of them."""
    held = result(file)
    rows = held["result"]["parsers"]
    other = sum(found["count"] for row in rows for found in row["errors"].values())
    totals = [sum(row[key] for row in rows) for key in ("trials", "refused", "accepted")]
    crashes, peak = sum(row["crashes"] for row in rows), max(row["peak_mb"] for row in rows)
    cells = [*totals, other, crashes, peak]
    header = ["trials", "refused", "accepted", "other errors", "crashes", "peak MB"]
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
    held = "attacks prove more than is claimed of " + ", ".join(over) if over else "all hold"
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
    for held in map(result, files):
        cases, rounds = held["result"]["cases"], held["result"]["rounds"]
        done = sum(row["rounds"] == rounds for row in cases)
        slowest = max((row for row in cases if "late_ms" in row), key=lambda row: row["late_ms"])
        lines.append(
            [
                f"{held['result']['clients']:,}",
                f"{done} of {len(cases)}",
                f"{rounds:,}",
                ", ".join(row["case"] for row in cases if row["error"] is not None) or "none",
                ", ".join(row["case"] for row in cases if row["flat"] is False) or "none",
                f"{slowest['case']}, {slowest['late_ms']:.0f} ms, {slowest['late_mb']:,} MB",
            ]
        )
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


def forgery(file):
    """The same without the lies and without ten under bounds."""
    names = ["policy", *(name for name in PLACES if name != "ten liars, bounded")]
    return table(names, [[row[name] for name in names] for row in liar_rows(file)])
