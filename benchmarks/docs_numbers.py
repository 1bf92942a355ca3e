"""Write the numbers of the documentation from the committed results, between markers.

python benchmarks/docs_numbers.py            # rewrite README.md, docs/*.md and their figures
python benchmarks/docs_numbers.py --check    # exit 1 and name the pages that differ

A page marks a place with ``<!-- numbers: NAME ARGUMENTS -->`` and ``<!-- /numbers -->``; NAME is a
function of this file, which returns Markdown. What was not run says so.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import numpy as np
import reproductions as claims

from fedcohort.report.tables import paired_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- numbers: ([^\n]*?) -->\n)(.*?)(<!-- /numbers -->)", re.S)


NOT_RUN = "Not run yet.\n"


@cache
def result(name):
    """A result file, or None if there is none."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(header, lines):
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def spread(values, form="{:.1f}"):
    mean = form.format(np.mean(values))
    return f"{mean} ± {form.format(np.std(values, ddof=1))}" if len(values) > 1 else mean


def parts(file, setting):
    """The parts of one setting by variant; empty if it was not run."""
    held = result(file) or {"parts": []}
    return {p["variant"]: p for p in held["parts"] if p["setting"] == setting}


def rounds_to(part, target, key="rounds_to"):
    """Rounds to the target per seed; all rounds plus one for a seed that never got there."""
    at = part["targets"].index(target)
    last = part["experiment"]["rounds"] + 1
    return np.array([last if r[key][at] is None else r[key][at] for r in part["seeds"]])


def missing(part, target, key="rounds_to"):
    at = part["targets"].index(target)
    return sum(row[key][at] is None for row in part["seeds"])


def rounds_cell(part, target, key="rounds_to"):
    left, seeds = missing(part, target, key), len(part["seeds"])
    if left == seeds:
        return f"not in {part['experiment']['rounds']}"
    text = spread(rounds_to(part, target, key).astype(float))
    return f"≥ {text} ({seeds - left} of {seeds} seeds)" if left else text


def ratio(part, base, target):
    """How many times fewer rounds than uniform: geometric mean over paired seeds, 95 % interval."""
    logs = np.log(rounds_to(base, target) / rounds_to(part, target))
    interval = paired_interval(logs.tolist())
    if interval is None:
        return f"{np.exp(logs.mean()):.2f}x", "one seed"
    mean, low, high = (float(np.exp(v)) for v in interval)
    word = "faster" if low > 1 else "slower" if high < 1 else "level"
    if missing(part, target) and missing(base, target):
        word = "undecided"  # some seeds of both never got there
    return f"{mean:.2f}x ({low:.2f} to {high:.2f})", word


def at_equal_bytes(part, base):
    """Accuracy of each seed when it has sent as much as uniform did in all its rounds."""
    budget = min(row["megabytes"][-1] for row in base["seeds"])
    values = []
    for row in part["seeds"]:
        known = [
            a
            for a, b in zip(row["curve"], row["megabytes"], strict=True)
            if a is not None and b <= budget + 1e-9
        ]
        values.append(100 * np.mean(known[-2:]) if known else np.nan)
    return np.array(values)


def megabytes_to(part, target):
    """Megabytes up and down until the target, over the seeds that got there."""
    at = part["targets"].index(target)
    sent = [row["bytes_to"][at] / 1e6 for row in part["seeds"] if row["bytes_to"][at] is not None]
    return f"{np.mean(sent):,.0f}" if sent else "-"


def benchmark(file, setting, target):
    """All variants of one setting, by rounds to the target."""
    found, target = parts(file, setting), float(target)
    if "uniform" not in found or target not in found["uniform"]["targets"]:
        return NOT_RUN
    base = found["uniform"]
    order = sorted(found, key=lambda v: rounds_to(found[v], target).mean())
    lines = []
    for name in order:
        part = found[name]
        rows = part["seeds"]
        times, word = ("1x", "baseline") if part is base else ratio(part, base, target)
        lines.append(
            [
                name,
                rounds_cell(part, target),
                times,
                word,
                megabytes_to(part, target),
                spread([100 * r["accuracy"] for r in rows]),
                spread(at_equal_bytes(part, base)),
                spread([100 * r["worst_tenth_accuracy"] for r in rows]),
                f"{np.mean([r['gemd'] for r in rows]):.2f}",
                f"{np.mean([r['participation_entropy'] for r in rows]):.2f}",
                f"{1e3 * np.mean([r['select_seconds'] for r in rows]):.1f}",
            ]
        )
    header = [
        "policy",
        f"rounds to {target:.0%}",
        "fewer rounds",
        "against uniform",
        "MB to target",
    ]
    header += ["accuracy %", "at equal bytes %", "worst tenth %", "GEMD", "entropy", "ms to select"]
    return table(header, lines)


def ranking(file, *cases):
    """Policies by the geometric mean of their ratios to uniform: SETTING=TARGET for each column."""
    columns = {}
    for case in cases:
        setting, _, target = case.rpartition("=")
        found = parts(file, setting)
        if "uniform" in found:
            columns[f"{setting}, {float(target):.0%}"] = found, float(target)
    everywhere = [set(found) for found, _ in columns.values()]
    names = set.intersection(*everywhere) - {"uniform"} if everywhere else set()
    if not names:
        return NOT_RUN
    lines = []
    for name in sorted(names):
        logs, cells = [], []
        for found, target in columns.values():
            part, base = found[name], found["uniform"]
            logs.append(np.log(rounds_to(base, target) / rounds_to(part, target)).mean())
            cells.append(" ".join(ratio(part, base, target)))
        lines.append((np.mean(logs), [name, f"{np.exp(np.mean(logs)):.2f}x", *cells]))
    lines.sort(key=lambda line: -line[0])
    header = ["policy", "geometric mean", *columns]
    return table(header, [cells for _, cells in lines])


def accuracy_ranking(file, setting):
    """Policies of one setting by accuracy over the last rounds, with the paired difference."""
    found = parts(file, setting)
    if "uniform" not in found:
        return NOT_RUN
    base = np.array([100 * r["accuracy"] for r in found["uniform"]["seeds"]])
    lines = []
    for name, part in found.items():
        own = np.array([100 * r["accuracy"] for r in part["seeds"]])
        interval = paired_interval((own - base).tolist())
        word = "better" if interval.low > 0 else "worse" if interval.high < 0 else "level"
        text = f"{interval.mean:+.1f} ({interval.low:+.1f} to {interval.high:+.1f})"
        cells = ["", "baseline"] if name == "uniform" else [text, word]
        lines.append((own.mean(), [name, spread(own), *cells]))
    lines.sort(key=lambda line: -line[0])
    header = ["policy", "accuracy %", "points above uniform", "verdict"]
    return table(header, [cells for _, cells in lines])


def figure(file, setting, name, target="0"):
    """Mean accuracy by round of the policies that matter; drawn when pages are written."""
    found = parts(file, setting)
    if "uniform" not in found:
        return NOT_RUN
    if "--check" not in sys.argv:
        draw(found, setting, ROOT / "docs" / "images" / f"{name}.svg", float(target) or None)
    return f"![{setting}: test accuracy by round](images/{name}.svg)\n"


SHOWN = (
    "sketch-match, epsilon 1",
    "fedcor",
    "label-match",
    "power-of-choice, d=20",
    "kdpp",
    "oort",
)


def draw(found, setting, path, target):
    import altair as alt

    from fedcohort.report import figures

    rows = []
    for name, part in found.items():
        curves = np.array([row["curve"] for row in part["seeds"]], float)
        last, step = part["experiment"]["rounds"], 5
        numbers = range(last - step * (curves.shape[1] - 1), last + 1, step)
        for number, values in zip(numbers, curves.T, strict=True):
            if np.isfinite(values).all():
                own = {"run": name, "x": number, "y": float(values.mean())}
                if len(values) > 1:
                    error = 2 * float(values.std(ddof=1)) / np.sqrt(len(values))
                    own |= {"low": own["y"] - error, "high": own["y"] + error}
                rows.append(own)
    shown = [name for name in SHOWN if name in found]
    roles = figures.Roles(shown, shown, ["uniform"])
    domain = (0.0, float(np.ceil(20 * max(row["y"] for row in rows)) / 20))
    chart = figures.line_chart(
        rows,
        roles,
        x=figures.x_axis("round", rows),
        y=alt.Y("y:Q", title="test accuracy").axis(format=".0%"),
        domain=domain,
        tooltip=[],
        target=target,
    )
    words = "Means over seeds with two standard errors; faint lines: all other policies."
    figures.save(figures.Figure(path.stem, setting, words, chart.chart, chart.data), path)


def skipping(file, setting):
    """All variants of one setting of the suite skip, with the change against both baselines."""
    found = parts(file, setting)
    if "uniform" not in found:
        return NOT_RUN
    bases = [name for name in ("uniform", "uniform, held") if name in found]
    lines = []
    for name, part in found.items():
        rows = part["seeds"]
        accuracy = np.array([100 * r["accuracy"] for r in rows])
        changes = []
        for base in bases:
            other = np.mean([100 * r["accuracy"] for r in found[base]["seeds"]])
            changes.append(f"{100 * (accuracy.mean() / other - 1):+.1f} %")
        over = [
            f"{np.mean([r['overhead'][k] for r in rows]):.1f} %"
            for k in ("up", "down", "down_to_all", "skipped")
        ]
        rounds = f"{100 * np.mean([r['accuracy_deviation'] for r in rows]):.1f}"
        lines.append([name, spread(accuracy), rounds, *changes, *over])
    header = ["variant", "accuracy %", "deviation over rounds"]
    header += [f"against {base}" for base in bases]
    header += ["up", "down", "down, all receive", "skipped rounds"]
    return table(header, lines)


def reproductions(paper):
    """The claims of one paper, what we measured, and verdicts."""
    header = ["claim", "the paper", "ours", "seeds", "command", "verdict"]
    return table(header, [row[1:] for row in claims.rows(result) if row[0] == paper])


def single_rounds():
    """FedCor's Table 1 for random cohorts and FedCor: first round, and the mean of five rounds."""
    lines = []
    for split, (target, random, *_, fedcor) in claims.TABLE_1.items():
        for way, words in claims.SCALINGS.items():
            found = parts("benchmark-papers.json", f"paper 3, Fashion-MNIST {split}, {way}")
            for name, paper in (("uniform", random), ("fedcor", fedcor)):
                if name in found:
                    keys = ("rounds_to", "rounds_to_mean")
                    cells = [rounds_cell(found[name], target, key) for key in keys]
                    number = "N/A" if paper is None else f"{paper:g}"
                    lines.append([split, words, name, number, *cells])
    header = [
        "split",
        "inputs and network",
        "policy",
        "the paper",
        "first round",
        "mean of five rounds",
    ]
    return table(header, lines) if lines else NOT_RUN


def verdicts():
    """How many claims of each paper hold."""
    words = (claims.HOLDS, claims.WEAKER, claims.FAILS, claims.UNDECIDED, claims.NOT_RUN)
    rows = claims.rows(result)
    lines = [
        [str(paper), *(str(sum(r[0] == str(paper) and r[-1] == w for r in rows)) for w in words)]
        for paper in range(5)
    ]
    return table(["paper", *words], lines)


def selection_growth(file):
    """Exponents of the time to select over the number of clients, fitted from 10,000 clients on."""
    held = result(file)
    by_policy = {}
    for row in held["result"]["rounds"]:
        if row["clients"] >= 10_000:
            by_policy.setdefault(row["policy"], []).append((row["clients"], row["median_round_s"]))
    lines = []
    for policy, points in by_policy.items():
        clients, seconds = np.log(np.array(points).T)
        lines.append([policy, f"{np.polyfit(clients, seconds, 1)[0]:.2f}"])
    return table(["policy", "time to select grows as clients to the power"], lines)


def dpp_set_up(file):
    """After how many draws our k-DPP is ahead of DPPy, set-up counted."""
    d = result(file)["result"]["k_dpp"]
    more, saved = d["setup_s"] - d["dppy_setup_s"], d["dppy_draw_s"] - d["draw_s"]
    draws = max(1, int(np.ceil(more / saved)))
    return (
        f"A k-DPP draw of {d['k']} of {d['clients']:,} takes {1e3 * d['draw_s']:.2f} ms after a "
        f"set-up of {d['setup_s']:.2f} s; DPPy takes {1e3 * d['dppy_draw_s']:.1f} ms after "
        f"{d['dppy_setup_s']:.2f} s. With set-up we are ahead after {draws} draws.\n"
    )


def left_out(file):
    """Which parts of a suite were not run."""
    held = result(file)
    if held is None:
        return NOT_RUN
    missing = held.get("missing", [])
    ran = len(held["parts"])
    if not missing:
        return f"All {ran} parts were run.\n"
    return f"{ran} of {ran + len(missing)} parts were run; not run: {'; '.join(missing)}.\n"


def headline(file, *cases):
    """Uniform against SketchMatch at epsilon 1: SETTING=TARGET for each row."""
    lines = []
    for case in cases:
        setting, _, target = case.rpartition("=")
        found, goal = parts(file, setting), float(target)
        if not {"uniform", "sketch-match, epsilon 1"} <= set(found):
            continue
        base, ours = found["uniform"], found["sketch-match, epsilon 1"]
        times, word = ratio(ours, base, goal)
        cells = [rounds_cell(part, goal) for part in (base, ours)]
        lines.append([f"{setting}, {goal:.0%}", *cells, times, word])
    header = ["setting, target", "uniform", "sketch-match", "fewer rounds", "verdict"]
    return table(header, lines) if lines else NOT_RUN


def claim(file, case):
    """Say in a sentence how SketchMatch at epsilon 1 compares with uniform: SETTING=TARGET."""
    setting, _, target = case.rpartition("=")
    found, goal = parts(file, setting), float(target)
    base, ours = found["uniform"], found["sketch-match, epsilon 1"]
    before, after = (rounds_to(part, goal).mean() for part in (base, ours))
    times, interval = ratio(ours, base, goal)[0].removesuffix(")").split("x (")
    return (
        f"On {setting} per client, random cohorts need {before:.0f} rounds to {goal:.0%} accuracy. "
        "Cohorts matched by one small private sketch per client (epsilon 1) need "
        f"{after:.0f}: {times} times fewer (95 % interval {interval}; "
        f"{len(ours['seeds'])} held-out seeds).\n"
    )


def provenance(file):
    """Where a result comes from, in a sentence."""
    found = result(file)
    if found is None:
        return NOT_RUN
    made = found["provenance"]
    machines = sorted({m["gpu"] or m["cpu"] for m in made})
    text = f"Made at commit `{found['commit'][:10]}` on {' and '.join(machines)}"
    text += " with seeds 1000 and up; commands, versions and loads"
    return f"{text} are in `benchmarks/results/{file}`.\n"


def plan_gain(file):
    """Predicted against measured speed-ups of SketchMatch, the settings held out last."""
    found = result(file)
    if found is None:
        return NOT_RUN
    lines = []
    for row in sorted(found["result"]["settings"], key=lambda row: row["held out"]):
        guess = row["predicted"]
        logs = paired_interval(row["log_ratios"])
        measured = "{:.2f}x ({:.2f} to {:.2f})".format(*np.exp(logs))
        predicted = "{fewer_rounds:.2f}x ({low:.2f} to {high:.2f})".format(**guess)
        inside = "inside" if guess["low"] <= row["measured"] <= guess["high"] else "outside"
        used = "held out" if row["held out"] else "fitted"
        target = ", ".join(f"{t:.0%}" for t in row["targets"])
        cells = [f"{row['setting']}, {target}", used, f"{row['discrepancy']:.4f}"]
        lines.append([*cells, predicted, measured, inside])
    header = ["setting, targets", "", "uniform's discrepancy", "predicted (90 %)"]
    return table([*header, "measured (95 %)", "interval"], lines)


def plan_worth(file):
    """What matched cohorts are worth in the measured settings, at epsilon 1."""
    found = result(file)
    if found is None:
        return NOT_RUN
    lines = []
    for row in found["result"]["settings"]:
        worth = row["worth"]
        better = worth["uniform"] - worth["discrepancy"] > 3 * worth["error"]
        clients = f"{worth['random_clients']:.0f}" if better else "nothing to gain"
        until = worth["rounds_until_all"]
        lines.append(
            [
                row["setting"],
                str(row["cohort_size"]),
                f"{worth['uniform']:.4f}",
                f"{worth['discrepancy']:.4f} ± {worth['error']:.4f}",
                clients,
                f"not in {worth['rounds']}" if until is None else str(until),
            ]
        )
    header = ["setting", "cohort", "uniform", "matched", "worth, random clients"]
    return table([*header, "all used by round"], lines)


def plan_million(file):
    """Time and memory of a plan for a million clients."""
    found = result(file)
    if found is None:
        return NOT_RUN
    row = found["result"]["million"]
    return (
        f"A plan for {row['clients']:,} sketches of 10 x 64 counts took {row['seconds']:.0f} s "
        f"({row['cpu_seconds']:.0f} s of one core) and {row['peak_gb']:.1f} GB, "
        f"{row['sketches_gb']:.1f} GB of which are the sketches.\n"
    )


def plan_choices(file):
    """How the worth of five clients depends on the rows to choose by and on the pool."""
    found = result(file)
    if found is None:
        return NOT_RUN
    lines = [
        [str(row["rows"]), str(row["rows"] // 2), row["pool"], f"{row['random_clients']:.0f}"]
        for row in found["result"]["choices"]
    ]
    return table(["rows of the sketch", "rows to choose by", "pool", "worth of 5 clients"], lines)


def cases(file, *names):
    """Cases of benchmarks/selection_cases.py: every variant against uniform, paired by seed."""
    found = result(file)
    if found is None:
        return NOT_RUN
    rows = [r for r in found["result"] if not names or r["case"] in names]
    uniform = {r["case"]: r for r in rows if r["variant"] == "uniform"}
    lines, case = [], ""
    for row in rows:
        seeds, base = row["seeds"], uniform[row["case"]]["seeds"]
        gain = [100 * (a["accuracy"] - b["accuracy"]) for a, b in zip(seeds, base, strict=True)]
        by = [s["all_used_by"] for s in seeds]
        first, case = "" if row["case"] == case else f"{row['case']}: {row['about']}", row["case"]
        lines.append(
            [
                first,
                row["variant"],
                spread([100 * s["accuracy"] for s in seeds]),
                "" if row["variant"] == "uniform" else difference(gain),
                f"{np.mean([s['gemd'] for s in seeds]):.2f}",
                f"{np.mean([s['participation_entropy'] for s in seeds]):.2f}",
                f"{np.mean([s['never_picked'] for s in seeds]):.1f}",
                "-" if None in by else f"{np.mean(by):.0f}",
            ]
        )
    header = ["case", "policy", "accuracy %", "against uniform", "GEMD", "entropy", "never picked"]
    count = len(rows[0]["seeds"])
    return table([*header, "all used by round"], lines) + f"\n{count} seeds, paired.\n"


def difference(values):
    """Mean of paired differences in points, with its 95 % interval."""
    interval = paired_interval(values)
    if interval is None:
        return f"{np.mean(values):+.1f} (one seed)"
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*interval)


def explained(file):
    """Planted shifts that `fedcohort explain` found, and false marks, by budget."""
    held = result(file)
    if held is None:
        return NOT_RUN
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


def made_by(file):
    """The command, commit and machine of a result file of benchmarks/provenance.py."""
    held = result(file)
    if held is None:
        return NOT_RUN
    runs = held["provenance"] if isinstance(held["provenance"], list) else [held["provenance"]]
    last = runs[-1]
    machine = f"{last['machine']['cpu']}, {last['machine']['cores']} cores"
    more = f" (the last of {len(runs)} runs)" if len(runs) > 1 else ""
    return f"`{last['command']}`{more}, commit `{last['commit']}`, {machine}.\n"


def named_left_out(held):
    left = "; ".join(f"{name} (no {', '.join(m)})" for name, m in held["left out"].items())
    return f"\nLeft out, because packages were missing there: {left}.\n" if left else ""


def kills(file):
    """Kills per job, and what came of them."""
    held = result(file)
    if held is None:
        return NOT_RUN
    keys = ("kills", "missed", "finished", "differences", "losses", "double payments")
    rows = held["result"]["jobs"]
    lines = [[row["job"], *(f"{row[key]:,}" for key in keys)] for row in rows]
    lines.append(["all", *(f"{sum(row[key] for row in rows):,}" for key in keys)])
    header = ["job", "kills", "too late", "finished jobs", *keys[3:]]
    return table(header, lines) + named_left_out(held["result"])


def fuzzing(file):
    """Trials per parser, and what came of them."""
    held = result(file)
    if held is None:
        return NOT_RUN
    lines = []
    for row in held["result"]["parsers"]:
        other = sum(found["count"] for found in row["errors"].values())
        counts = row["trials"], row["refused"], row["accepted"], other, row["crashes"]
        lines.append([row["target"], *(f"{c:,}" for c in counts), f"{row['peak_mb']:,}"])
    header = ["parser", "trials", "refused", "accepted", "other errors", "crashes", "peak MB"]
    return table(header, lines) + named_left_out(held["result"])


def audit(file):
    """The epsilon that attacks prove, beside the claim."""
    held = result(file)
    if held is None:
        return NOT_RUN
    lines = []
    for row in held["result"]["mechanisms"]:
        over = row["proven"] > row["epsilon"]
        verdict = ("caught" if over else "missed") if row["broken"] else ("no" if over else "holds")
        kind = "broken on purpose" if row["broken"] else ""
        claim = f"{row['epsilon']:g}" + (f", delta {row['delta']:g}" if row["delta"] else "")
        lines.append([row["mechanism"], kind, claim, f"{row['proven']:.3f}", verdict])
    return table(["mechanism", "", "claimed epsilon", "proven, at least", "verdict"], lines)


def load(file):
    """Time and memory per case of the soak of load."""
    held = result(file)
    if held is None:
        return NOT_RUN
    lines = []
    for row in held["result"]["cases"]:
        if "early_ms" not in row:
            cells = ["", "", "too few rounds"]
        else:
            cells = [f"{row['early_ms']:.1f} to {row['late_ms']:.1f}"]
            cells += [f"{row['early_mb']:,} to {row['late_mb']:,}", "yes" if row["flat"] else "no"]
        lines.append([row["case"], f"{row['rounds']:,}", *cells, row["error"] or "none"])
    return table(["case", "rounds", "ms per round", "MB", "flat", "error"], lines)


def share_text(value):
    return "1.00" if value >= 0.995 else f"{value:.2f}"[1:]


def forgery(file):
    """Places of liars by policy, without and with bounds."""
    held = result(file)
    if held is None:
        return NOT_RUN
    found = {(r["policy"], r["bounded"], r["liars"]): r for r in held["result"]["rows"]}
    lines = []
    for name in sorted({name for name, _, _ in found}):
        one, ten = found[name, False, 1], found[name, False, 10]
        bounds = [share_text(found[name, True, liars]["share"]) for liars in (1, 10)]
        shares = [share_text(one["share"]), one["best attack"], share_text(ten["share"])]
        lines.append([name, *shares, *bounds])
    header = ["policy", "one liar", "best lie", "ten liars", "one liar, bounded"]
    return table([*header, "ten liars, bounded"], lines)


def forgery_gates(file):
    """How far liars move the uploads of honest clients, by gate."""
    held = result(file)
    if held is None or not held["result"].get("gates"):
        return NOT_RUN
    lines = []
    for row in held["result"]["gates"]:
        ends = [f"{share_text(value)} ({lie})" for lie, value in (row["lowest"], row["highest"])]
        lines.append([row["gate"], str(row["liars"]), share_text(row["honest"]), *ends])
    return table(["gate", "liars of ten", "nobody lies", "lowest", "highest"], lines)


def forgery_cost(file):
    """Accuracy without liars, without and with bounds."""
    held = result(file)
    if held is None or not held["result"].get("accuracy"):
        return NOT_RUN
    found = {(r["policy"], r["bounded"]): r["accuracy"] for r in held["result"]["accuracy"]}
    lines = []
    for name in sorted({name for name, _ in found}):
        plain, bounded = (100 * np.array(found[name, b]) for b in (False, True))
        lines.append([name, spread(plain), spread(bounded), f"{np.mean(bounded - plain):+.1f}"])
    return table(["policy", "without bounds, %", "with bounds, %", "difference"], lines)


WORKLOADS = {
    "pfl-cifar10": "pfl's CIFAR-10 network: 50 clients x 50 images, batch 10, dropout",
    "fedcor": "FedCor's CIFAR network: 5 clients x 500 images x 5 epochs, batch 50",
    "W1": "MLP 784-64-30-10: 5 clients x 600 samples x 5 epochs, batch 64",
    "char-lstm": "char-LSTM 256: 3 clients x 400 windows x 20 epochs, batch 10",
    "resnet18": "ResNet-18 with group norm: 10 clients x 500 images, batch 32",
    "vit-tiny": "ViT-tiny: 10 clients x 500 images, batch 32",
}


def gpu_rounds(file):
    """Milliseconds per seed-round of every workload on a GPU, beside the plain loop."""
    found = result(file)
    if found is None:
        return NOT_RUN
    lines = []
    for name, words in WORKLOADS.items():
        held = found["result"].get(name)
        if held is None:
            continue
        rows = {(row["seeds"], row["precision"]): row for row in held["fedcohort"]}
        one = rows[1, "float32"]["mean_s"]
        many = [f"{1e3 * row['mean_s']:.1f} ({n} seeds)" for (n, p), row in rows.items()
                if n > 1 and p == "float32"]  # fmt: skip
        rough = [f"{1e3 * row['mean_s']:.1f}" for (_, p), row in rows.items() if p == "tf32"]
        plain = [row["median_s"] for row in held["loop"] if row["precision"] == "float32"]
        loop = [f"{1e3 * plain[0]:,.0f}", f"{plain[0] / one:.1f}x"] if plain else ["-", "-"]
        cells = [loop[0], f"{1e3 * one:,.1f}", loop[1], *(many or ["-"])]
        lines.append([words, *cells, " / ".join(rough) or "-"])
    header = ["workload", "plain loop", "one seed", "ratio", "more seeds, per seed", "TF32"]
    return table(header, lines)


def gpu_kernels(file):
    """Where a round's time goes: outside of kernels, and in which."""
    found = result(file)
    if found is None:
        return NOT_RUN
    lines = []
    for name, words in WORKLOADS.items():
        for row in found["result"].get(name, {"fedcohort": []})["fedcohort"]:
            if row["precision"] != "float32" or "kernels_ms" not in row:
                continue
            top = [f"`{key.split('(')[0].split('<')[0].removeprefix('void ')}` "
                   f"{100 * ms / row['kernels_ms']:.0f} %"
                   for key, _, ms in row["top_kernels"][:4]]  # fmt: skip
            wall = 1e3 * row["median_s"] * row["seeds"]
            cells = [str(row["seeds"]), f"{wall:.1f}", f"{row['kernels_ms']:.1f}"]
            lines.append([words.split(":")[0], *cells, f"{row['launches']:,}", ", ".join(top)])
    header = ["workload", "seeds", "ms per round", "ms in kernels", "kernels", "most of it"]
    return table(header, lines)


def gpu_sketches(file):
    """The time of the sketches of several seeds on a GPU."""
    held = result(file) and result(file)["result"].get("sketches")
    if not held:
        return NOT_RUN
    return (
        f"The sketches of {held['clients']} clients under {held['seeds']} seeds, of "
        f"{held['images']:,} images each time, take {held['median_s']:.2f} s on the same GPU.\n"
    )


def gpu_pfl(file):
    """The ratio to pfl on the workload that its authors published."""
    found = result(file)
    held = found and found["result"].get("pfl-cifar10", {})
    if not held or "pfl" not in held:
        return NOT_RUN
    (own,) = (row["mean_s"] for row in held["fedcohort"]
              if (row["seeds"], row["precision"]) == (1, "float32"))  # fmt: skip
    theirs, gpu = held["pfl"]["mean_s"], found["provenance"]["machine"]["gpu"]
    return (
        f"The CIFAR-10 workload by which pfl-research compares frameworks takes "
        f"{1e3 * own:.0f} ms per round in float32 on one {gpu}, pfl 0.6 beside it "
        f"{1e3 * theirs:.0f} ms: {theirs / own:.0f} times as long.\n"
    )


FUNCTIONS = {
    f.__name__: f
    for f in (
        accuracy_ranking,
        audit,
        benchmark,
        dpp_set_up,
        claim,
        cases,
        explained,
        figure,
        forgery,
        forgery_cost,
        forgery_gates,
        fuzzing,
        gpu_kernels,
        gpu_pfl,
        gpu_rounds,
        gpu_sketches,
        headline,
        kills,
        left_out,
        load,
        made_by,
        plan_choices,
        plan_gain,
        plan_million,
        plan_worth,
        provenance,
        ranking,
        reproductions,
        selection_growth,
        single_rounds,
        skipping,
        verdicts,
    )
}


def filled(text):
    def fill(match):
        name, *arguments = shlex.split(match[2])
        return match[1] + FUNCTIONS[name](*arguments) + match[4]

    return PLACE.sub(fill, text)


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    differ = []
    for page in pages():
        text = page.read_text()
        wanted = filled(text)
        if wanted != text:
            differ.append(page.relative_to(ROOT).as_posix())
            if "--check" not in sys.argv:
                page.write_text(wanted)
    for page in differ:
        print(page)
    return int(bool(differ) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
