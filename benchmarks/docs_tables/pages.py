"""Tables of the pages on reproductions, measuring, planning, personalizing and skipping."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from against import AGREES, DIFFERS, SAME, compare
from docs_tables import reproductions as claims
from docs_tables.results import (
    by_name,
    commits_and_machines,
    deviation,
    enumerated,
    mean,
    result,
    settings_of,
    table,
    values_of,
)
from docs_tables.verdicts import NOT_RUN, VERDICTS

from fedcohort.analysis.comparison import paired_interval
from fedcohort.privacy.release import sketch_size

FEW_SEEDS = 5


# The claims of the papers beside our measurements: docs/reproductions.md and its CSV file.
def reproductions(paper):
    """The claims of one paper that were run in some form: our means and verdicts, by form."""
    rows = [row for row in claims.rows(result) if row[0] == paper]
    groups = {}
    for _, form, claim, theirs, ours, seeds, _, word in rows:
        head, _, name = claim.rpartition("\n")
        cells = groups.setdefault(head, {}).setdefault((name, theirs), {})
        means = re.sub(r" ± [\d.]+", "", ours)  # spreads are in the CSV file
        few = f" ({seeds} seeds)" if seeds and int(seeds) < FEW_SEEDS else ""
        cells[form] = f"*{word}*" if word == NOT_RUN else f"**{word}**: {means}{few}"
    lines = []
    for head, claimed in groups.items():
        ran = {name: c for name, c in claimed.items() if {*c.values()} != {f"*{NOT_RUN}*"}}
        shared = {theirs for _, theirs in ran}
        shared = shared.pop() if head and len(shared) == 1 else ""
        lines += [[f"**{head}**", shared, "", "", ""]] if head and ran else []
        for (name, theirs), cells in ran.items():
            own = "" if shared else theirs
            lines.append([name, own, *(cells.get(form, "") for form in claims.FORMS)])
    return table(["claim", "the paper", *claims.FORMS], lines)


def reproduction_rows():
    """All claims in all forms, with what runs them, for a CSV file."""
    names = ("paper", "form", "claim", "the paper", "measured", "seeds", "run by", "verdict")
    for row in claims.rows(result):
        claim = row[2].replace("\n", "; ")
        yield dict(zip(names, [*row[:2], claim, *row[3:]], strict=True))


def verdicts():
    """How many claims of each paper hold, by form."""
    rows = claims.rows(result)
    counts = Counter((paper, form, word) for paper, form, *_, word in rows)
    cases = sorted({(r[0], r[1]) for r in rows}, key=lambda c: (c[0], claims.FORMS.index(c[1])))
    lines = [[*case, *(counts[*case, word] for word in VERDICTS)] for case in cases]
    return table(["paper", "form", *VERDICTS], lines)


def not_run():
    """Which settings of which paper were not run, by form."""
    lines = {}
    for paper, form, _, _, _, _, command, word in claims.rows(result):
        if word == NOT_RUN:
            setting = command.split("'")[1].strip(": ,").removeprefix(f"paper {paper}, ")
            lines.setdefault(f"- paper {paper}, {form}: ", {})[setting] = None
    return "\n".join(head + "; ".join(settings) for head, settings in lines.items()) + "\n"


# Published numbers that were made again with later code on another machine: docs/benchmark.md.
def repeated(suite):
    """How the parts in repeated-SUITE.json compare with the published ones."""
    again, published = result(f"repeated-{suite}.json"), result(f"benchmark-{suite}.json")
    twins = by_name(published["parts"])
    pairs = [(part, twins[part["setting"], part["variant"]]) for part in again["parts"]]
    rows = [compare(part, twin) for part, twin in pairs if not twin.get("again")]
    same, agree, differ = ([r.verdict for r in rows].count(w) for w in (SAME, AGREES, DIFFERS))
    seeds = enumerated([str(n) for n in sorted({row.seeds for row in rows})])
    return (
        f"{len(rows)} parts (seeds of each: {seeds}), run again {commits_and_machines(again)}: "
        f"{same} are the same, {agree} agree, {differ} differ.\n"
    )


# Gates against training without one: docs/tables/skipping.csv.
def skipping_rows(file):
    """All variants of the suite skip, with the change of accuracy against both baselines."""
    for setting, variants in settings_of(file).items():
        means = {name: values_of(part, "accuracy").mean() for name, part in variants.items()}
        for name, part in variants.items():
            row = {"setting": setting, "variant": name, "seeds": len(part["seeds"])}
            row["accuracy %"] = mean(100 * means[name], 2)
            row["deviation over seeds"] = deviation(100 * values_of(part, "accuracy"), 2)
            row["deviation over rounds"] = mean(100 * values_of(part, "accuracy_deviation"), 2)
            for base in ("uniform", "uniform, held"):
                change = mean(100 * (means[name] / means[base] - 1), 2) if base in means else ""
                row[f"change against {base} %"] = change
            for key in ("up", "down", "down_to_all", "skipped"):
                share = [overhead[key] for overhead in values_of(part, "overhead")]
                row[f"{key.replace('_', ' ')} %"] = mean(share, 2)
            yield row


# What sketches of single columns find, and how large private sketches are: docs/measure.md.
def explained(file):
    """Planted shifts that `fedcohort explain` found, and false marks, by budget."""
    rows = {True: {}, False: {}}
    for row in result(file)["result"]["rows"]:
        rows[bool(row["planted"])][tuple(row["budget"] or ())] = row
    lines = []
    for budget, row in rows[True].items():
        kinds = [f"{row['found'][kind]} of {count}" for kind, count in row["planted"].items()]
        both = row, rows[False][budget]
        false, looked = (sum(r[key] for r in both) for key in ("false_marks", "looked_at"))
        stated = ", ".join(f"{v:g}" for v in budget) or "no noise"
        lines.append([stated, *kinds, f"{false} of {looked:,}"])
    return table(["epsilon, delta", *row["planted"], "false marks"], lines)


def planned_sizes():
    """The sizes that `sketch_size` recommends, and what to expect of them."""
    budgets = {"epsilon 1": (1, 0.0), "epsilon 1, delta 1e-6": (1, 1e-6), "epsilon 4": (4, 0.0)}
    lines = []
    for n in (100, 1_000, 10_000, 100_000):
        sizes = [sketch_size(n, *budget) for budget in budgets.values()]
        cells = [f"{s.rows} × {2**s.bits}, {float(f'{s.signal_to_noise:.2g}'):g}" for s in sizes]
        lines.append([f"{n:,}", *cells])
    return table(["records", *budgets], lines)


# Cohorts in Flower's simulation engine: docs/flower.md.
def flower_cohorts(file):
    """Accuracy after the last round and over all rounds, and the difference to FedAvg alone."""
    curves = {name: np.array(rows) for name, rows in result(file)["result"]["accuracy"].items()}
    alone, lines = next(iter(curves.values())), []
    for name, rows in curves.items():
        cells = [f"`{name}`" if lines else name, f"{rows[:, -1].mean():.2f}", f"{rows.mean():.2f}"]
        interval = paired_interval((rows - alone).mean(axis=1).tolist())
        lines.append([*cells, "{:+.2f} ({:+.2f} to {:+.2f})".format(*interval) if lines else ""])
    header = ["cohorts", "after the last round", "mean of all rounds", "difference (95 %)"]
    return table(header, lines)


# Flower's own apps with our patches: docs/flower.md.
WHY_NOT = {
    "reports no loss": "no loss is reported",
    "not vectors": "trees are no vectors",
    "not a vector": "trees are no vectors",
    "features": "needs `model=`",
    "initial model, which is empty": "the first model is empty",
    "came without it": "needs `attach`",
    "No query function": "needs `attach`",
    "classes=": "needs `classes=`",
}


def flower_apps(*files):
    """Lines of each patch, how many policies run, and why others do not."""
    rows = {}  # apps with the same outcome share a row
    for app, found in (pair for file in files for pair in result(file)["result"]["apps"].items()):
        others = {}
        for policy, reason in found["reasons"].items():
            if reason:
                words = next((w for part, w in WHY_NOT.items() if part in reason), reason[:80])
                others.setdefault(words, []).append(policy)
        good = sum(not reason for reason in found["reasons"].values())
        why = "; ".join(f"{words}: {', '.join(names)}" for words, names in others.items())
        outcome = found["lines"], f"{good} of {len(found['reasons'])}", why
        rows.setdefault(outcome, []).append(app)
    lines = [["; ".join(apps), *outcome] for outcome, apps in rows.items()]
    return table(["app", "lines", "policies that run", "the others"], lines)


# What a plan predicted beside what was measured: docs/plan.md.
def plan_gain(file):
    """Predicted against measured speed-ups of SketchMatch, the settings held out last."""
    lines = []
    for row in sorted(result(file)["result"]["settings"], key=lambda row: row["held out"]):
        guess, form = row["predicted"], "{:.2f}x ({:.2f} to {:.2f})"
        measured = form.format(*np.exp(paired_interval(row["log_ratios"])))
        predicted = "{fewer_rounds:.2f}x ({low:.2f} to {high:.2f})".format(**guess)
        inside = "inside" if guess["low"] <= row["measured"] <= guess["high"] else "outside"
        used = "held out" if row["held out"] else "fitted"
        target = ", ".join(f"{t:.0%}" for t in row["targets"])
        cells = [f"{row['setting']}, {target}", used, f"{row['discrepancy']:.4f}"]
        lines.append([*cells, predicted, measured, inside])
    header = ["setting, targets", "", "uniform's discrepancy", "predicted (90 %)"]
    return table([*header, "measured (95 %)", "interval"], lines)


# Accuracy of newcomers and the speed of a registry: docs/personalize.md.
START_FROM = {
    "warm global": "warm, global model",
    "warm local": "warm, own model",
    "global": "global model",
    "random": "random personal model",
    "nearest": "`nearest`",
    "nearest, auto": "`nearest`, limit auto",
    "nearest, gains": "`nearest`, limit by gains",
    "match": "`match`",
    "match, gains": "`match`, limit by gains",
    "best": "best single model (needs labels)",
}
COLUMNS = [f"MNIST, {split}" for split in ("twins", "as the text reads", "no twins")]
COLUMNS += ["FEMNIST, by writer", "Shakespeare, all roles"]


def fraction(value):
    """A share without its leading zero."""
    return f"{value:.3f}".removeprefix("0")


def splits(file):
    """Every split of the suite coldstart that was run, by the name of its column."""
    parts = result(file)["parts"]
    found = {f"{p['setting']}, {p['variant']}": p["result"]["splits"][0] for p in parts}
    return {column: found[column] for column in COLUMNS if column in found}


def cold_start(file):
    """Accuracy of cold clients by the model that they start from."""
    found = splits(file)
    columns = [split["baselines"] | split["retrieval"][0]["accuracy"] for split in found.values()]
    lines = [[words, *(cell(c.get(key)) for c in columns)] for key, words in START_FROM.items()]
    lines.append(["seeds", *(len(column["global"]["seeds"]) for column in columns)])
    return table(["", *found], lines)


def cell(accuracy):
    """Mean and standard deviation over seeds; a dash for what was not measured."""
    return f"{fraction(accuracy['mean'])} ± {fraction(accuracy['std'])}" if accuracy else "-"


def cold_start_private(file):
    """Accuracy of cold clients by the budget and the size of their sketches."""
    mnist, femnist = (
        splits(file)[n]["retrieval"] for n in ("MNIST, no twins", "FEMNIST, by writer")
    )
    lines = []
    for pair in zip(mnist, femnist, strict=True):
        sizes = dict.fromkeys(f"{row['rows']} × {2 ** row['bits']}" for row in pair)
        means = [row["accuracy"][way]["mean"] for row in pair for way in ("nearest", "match")]
        budget = f"{pair[0]['epsilon'] or 0:g}".replace("0", "none")
        lines.append([budget, "; ".join(sizes), *map(fraction, means)])
    header = ["epsilon", "sketch", "MNIST nearest", "match", "FEMNIST nearest", "match"]
    return table(header, lines)


def registry_scale(file):
    """Time and memory of a registry of many clients."""
    r = result(file)["result"]
    fill, query, times = r["fill"], r["query"], r["query"]["seconds"]
    return (
        f"With {r['clients']:,} clients and sketches of 10 × 64, registering takes "
        f"{fill['seconds']:.0f} s and {fill['GB on disk']:.2f} GB on disk, one query "
        f"{times['median']:.1f} s ({times['p95']:.1f} s in 95 % of the cases) and "
        f"{query['peak memory GB']:.1f} GB of memory.\n"
    )


def registry_ranking(file):
    """What each ranking retrieves."""
    keys, r = ("debiased", "unbiased", "half", "plain"), result(file)["result"]
    lines = [
        [f"{row['rows']} × 64, {row['clients']:,}", *(fraction(row[k]) for k in (*keys, "best"))]
        for row in r["ranking"]
    ]
    lines.append(["twins found", *(fraction(r["twins"][key]["mean"]) for key in keys), "1.000"])
    header = ["sketches, clients", "default", "D² alone", "D² + half of e", "plain"]
    return table([*header, "best possible"], lines)
