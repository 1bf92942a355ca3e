"""Accuracy of newcomers and the speed of a registry: docs/personalize.md."""

from __future__ import annotations

from docs_tables.results import NOT_RUN, result, table

BASELINES = {
    "warm global": "warm, global model",
    "warm local": "warm, own model",
    "global": "global model",
    "random": "random personal model",
}
RETRIEVALS = {
    "nearest": "`nearest`",
    "nearest, auto": "`nearest`, limit auto",
    "nearest, gains": "`nearest`, limit by gains",
    "k-nearest": "`k-nearest`",
    "match": "`match`",
    "match, gains": "`match`, limit by gains",
    "cluster": "`cluster`",
}
COLUMNS = (
    "MNIST, twins",
    "MNIST, as the text reads",
    "MNIST, no twins",
    "FEMNIST, by writer",
    "Shakespeare, all roles",
)


def fraction(value):
    """A share without its leading zero."""
    return f"{value:.3f}".removeprefix("0")


def splits(file):
    """Every split of the suite coldstart that was run, by the name of its column."""
    held = result(file) or {"parts": []}
    found = {f"{p['setting']}, {p['variant']}": p["result"]["splits"][0] for p in held["parts"]}
    return {column: found[column] for column in COLUMNS if column in found}


def cold_start(file):
    """Accuracy of cold clients by the model that they start from."""
    found = splits(file)
    if not found:
        return NOT_RUN
    without = [(s["baselines"], s["retrieval"][0]["accuracy"]) for s in found.values()]
    lines = [[label, *(cell(b.get(key)) for b, _ in without)] for key, label in BASELINES.items()]
    lines += [[label, *(cell(r.get(key)) for _, r in without)] for key, label in RETRIEVALS.items()]
    lines.append(["best single model (needs labels)", *(cell(b["best"]) for b, _ in without)])
    seeds = [len(b["global"]["seeds"]) for b, _ in without]
    lines.append(["seeds", *map(str, seeds)])
    return table(["", *found], lines)


def cell(accuracy):
    """Mean and standard deviation over seeds; a dash for what was not measured."""
    return f"{fraction(accuracy['mean'])} ± {fraction(accuracy['std'])}" if accuracy else "-"


def cold_start_private(file):
    """Accuracy of cold clients by the budget and the size of their sketches."""
    found = splits(file)
    names = "MNIST, no twins", "FEMNIST, by writer"
    if not set(names) <= set(found):
        return NOT_RUN
    lines = []
    for pair in zip(*(found[name]["retrieval"] for name in names), strict=True):
        sizes = dict.fromkeys(f"{row['rows']} × {2 ** row['bits']}" for row in pair)
        ways = "nearest", "k-nearest", "match"
        cells = [fraction(row["accuracy"][way]["mean"]) for row in pair for way in ways]
        budget = pair[0]["epsilon"]
        lines.append(["none" if budget is None else f"{budget:g}", "; ".join(sizes), *cells])
    header = ["epsilon", "sketch", "MNIST nearest", "k-nearest", "match"]
    return table([*header, "FEMNIST nearest", "k-nearest", "match"], lines)


def registry_scale(file):
    """Time and memory of a registry of a million clients, beside what we want."""
    held = result(file)
    if held is None:
        return NOT_RUN
    r = held["result"]
    fill, build, query = r["fill"], r["build"], r["query"]
    memory = f"{build['peak memory GB']:.1f} GB, {query['memory while querying GB']:.1f} GB"
    times = query["milliseconds"]
    wrote = f"{fill['seconds']:.0f} s, {fill['database GB']:.1f} GB on disk"
    lines = [
        [f"registering {r['clients']:,} clients", wrote, ""],
        ["building the index", f"{build['seconds']:.0f} s", "below 10 min"],
        ["peak memory: building, querying", memory, "below 4 GB"],
        ["one query, median (95%)", f"{times['median']:.1f} ms ({times['p95']:.1f} ms)",
         "below 10 ms"],
        ["recall@1 against comparing all full sketches", f"{query['recall@1']:.3f}", "0.95"],
    ]  # fmt: skip
    return table(["", "measured", "wanted"], lines)


def registry_engines(file):
    """Ways to search the compressed sketches, side by side."""
    held = result(file)
    if held is None:
        return NOT_RUN
    found = held["result"]["engines"]
    lines = [
        [
            row["engine"],
            f"{row['build cpu seconds']:.1f}",
            f"{row['cpu milliseconds']['median']:.1f}",
            f"{row['recall@1']:.3f}",
        ]
        for row in found["engines"]
    ]
    header = [f"engine, {found['clients']:,} clients", "build, CPU s", "query, CPU ms", "recall@1"]
    return table(header, lines)


def registry_ranking(file):
    """Total variation between a newcomer and the client found, by the share of e in the rank."""
    held = result(file)
    if held is None:
        return NOT_RUN
    keys = ("caution 0.0", "caution 0.3", "caution 0.5", "caution 1.0", "best possible")
    lines = [
        [f"{row['rows']}, {row['clients']:,}", *(fraction(row[key]) for key in keys)]
        for row in held["result"]["caution"]["rows"]
    ]
    header = ["rows × 64, clients", "D² alone", "+ 0.3 e", "+ half of e", "+ e (plain distance)"]
    return table([*header, "best possible"], lines)
