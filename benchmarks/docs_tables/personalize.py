"""Accuracy of newcomers and the speed of a registry: docs/personalize.md."""

from __future__ import annotations

from docs_tables.results import result, table

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
    "match": "`match`",
    "match, gains": "`match`, limit by gains",
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
    held = result(file)
    found = {f"{p['setting']}, {p['variant']}": p["result"]["splits"][0] for p in held["parts"]}
    return {column: found[column] for column in COLUMNS if column in found}


def cold_start(file):
    """Accuracy of cold clients by the model that they start from."""
    found = splits(file)
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
    lines = []
    for pair in zip(*(found[name]["retrieval"] for name in names), strict=True):
        sizes = dict.fromkeys(f"{row['rows']} × {2 ** row['bits']}" for row in pair)
        ways = "nearest", "match"
        cells = [fraction(row["accuracy"][way]["mean"]) for row in pair for way in ways]
        budget = pair[0]["epsilon"]
        lines.append(["none" if budget is None else f"{budget:g}", "; ".join(sizes), *cells])
    header = ["epsilon", "sketch", "MNIST nearest", "match", "FEMNIST nearest", "match"]
    return table(header, lines)


def registry_scale(file):
    """Time and memory of a registry of many clients."""
    r = result(file)["result"]
    fill, query = r["fill"], r["query"]
    times = query["seconds"]
    lines = [
        ["registering", f"{fill['seconds']:.0f} s, {fill['GB on disk']:.2f} GB on disk"],
        ["one query, median (95%)", f"{times['median']:.1f} s ({times['p95']:.1f} s)"],
        ["peak memory", f"{query['peak memory GB']:.1f} GB"],
    ]
    return table([f"{r['clients']:,} clients, sketches of 10 × 64", "measured"], lines)


def registry_ranking(file):
    """What each ranking retrieves."""
    held = result(file)
    keys, r = ("debiased", "unbiased", "half", "plain"), held["result"]
    lines = [
        [f"{row['rows']} × 64, {row['clients']:,}", *(fraction(row[k]) for k in (*keys, "best"))]
        for row in r["ranking"]
    ]
    lines.append(["twins found", *(fraction(r["twins"][key]["mean"]) for key in keys), "1.000"])
    header = ["sketches, clients", "default", "D² alone", "D² + half of e", "plain"]
    return table([*header, "best possible"], lines)
