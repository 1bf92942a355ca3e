"""Policies against uniform cohorts: README.md, docs/index.md, benchmark.md and policies.md."""

from __future__ import annotations

import sys

import numpy as np
from docs_tables.results import (
    ROOT,
    difference,
    missing,
    paired_interval,
    parts,
    points_above,
    ratio,
    result,
    rounds_below,
    rounds_cell,
    rounds_to,
    spread,
    table,
)


def at_equal_bytes(part, base):
    """Accuracy of each seed when it has sent as much as uniform did in all its rounds."""
    budget = min(row["megabytes"][-1] for row in base["seeds"]) + 1e-9
    values = []
    for row in part["seeds"]:
        points = zip(row["curve"], row["megabytes"], strict=True)
        known = [a for a, sent in points if a is not None and sent <= budget]
        values.append(100 * np.mean(known[-2:]) if known else np.nan)
    return np.array(values)


def megabytes_to(part, target):
    """Megabytes up and down until the target, over the seeds that got there."""
    at = part["targets"].index(target)
    sent = [row["bytes_to"][at] / 1e6 for row in part["seeds"] if row["bytes_to"][at] is not None]
    return f"{np.mean(sent):,.0f}" if sent else "-"


MARKS = {"faster": " ▲", "slower": " ▼"}

# Policies that have changed since; parts that were not run again have a note.
EARLIER = (
    *("active-fl", "clustered-sampling, similarity", "clustered-sampling, sketches", "delta"),
    *("divfl", "fed-cbs", "flips", "hics-fl", "oort"),
)


def label(name, part=None):
    """A variant's name in a table."""
    if part is not None and is_uniform_again(name, part):
        return "uniform cohorts drawn again"
    return f"{name} †" if part is not None and is_earlier(name, part) else name


def is_earlier(name, part):
    """Whether the part is of an earlier version of its policy."""
    return name in EARLIER and not part.get("again")


def is_uniform_again(name, part):
    """Whether these are uniform cohorts drawn in another way, which show what chance does.

    Power-of-choice among as many candidates as places, all of one size, takes them all.
    """
    if name == "uniform, drawn again":
        return True
    _, _, d = name.partition("power-of-choice, d=")
    experiment = part["experiment"]
    return d == str(experiment["cohort_size"]) and experiment["data"]["partition"] == "shards"


def marked_ratio(part, base, target, comparisons):
    """How many times fewer rounds, a mark if that is not level, and the interval below."""
    times, word = ratio(part, base, target, comparisons)
    value, _, interval = times.removesuffix(")").partition(" (")
    joined = interval.replace(" to ", "\u2060–\u2060")  # which a browser does not break
    return f"{value}{MARKS.get(word, '')}<br>{joined}"


def selection_rows(file):
    """All variants of all settings and targets, for a CSV file."""
    held = result(file)
    for setting in dict.fromkeys(p["setting"] for p in held["parts"]):
        by_name = parts(file, setting)
        base = by_name["uniform"]
        gains = len(by_name) - 1
        for target in base["targets"] or [None]:
            for name, part in by_name.items():
                yield _selection_row(setting, target, name, part, base, gains)


def _selection_row(setting, target, name, part, base, gains):
    rows, is_base = part["seeds"], part is base
    row = {"setting": setting, "policy": label(name, part), "seeds": len(rows), "target": target}
    if target is not None:
        first = rounds_to(part, target)
        row |= {"rounds to target": mean(first), "deviation": deviation(first)}
        row |= {"seeds that missed it": missing(part, target)}
        row |= {"rounds below target": mean(rounds_below(part, target))}
        text, word = ("", "") if is_base else ratio(part, base, target, gains)
        row |= {"times fewer rounds": text, "rounds": word}
        row |= {"MB to target": megabytes_to(part, target)}
    accuracy = [100 * r["accuracy"] for r in rows]
    gain = ("", "") if is_base else difference(points_above(part, base), gains)
    row |= {"accuracy %": mean(accuracy), "deviation of accuracy": deviation(accuracy)}
    row |= {"points above uniform": gain[0], "accuracy": gain[1]}
    row |= {"mean accuracy over rounds %": mean([100 * area(r) for r in rows])}
    row |= {"accuracy at equal bytes %": mean(at_equal_bytes(part, base))}
    row |= {"worst tenth %": mean([100 * r["worst_tenth_accuracy"] for r in rows])}
    row |= {"GEMD": mean([r["gemd"] for r in rows], 3)}
    row |= {"entropy": mean([r["participation_entropy"] for r in rows], 3)}
    select = [1e3 * r["select_seconds"] for r in rows if "select_seconds" in r]  # older results
    return row | {"ms to select": mean(select, 2) if select else ""}


def area(row):
    """Mean accuracy over the rounds of a curve: what it has of the area under 100 %."""
    return float(np.nanmean(np.array(row["curve"], float)))


def mean(values, digits=1):
    return round(float(np.mean(values)), digits)


def deviation(values, digits=1):
    return round(float(np.std(values, ddof=1)), digits) if len(values) > 1 else ""


def ranking(file, *cases):
    """Policies by the geometric mean of their ratios to uniform: SETTING=TARGET for each column.

    The intervals of a column hold together. A cell has two lines, so that several fit on a page.
    """
    columns = {}
    for case in cases:
        setting, _, target = case.rpartition("=")
        by_name = parts(file, setting)
        columns[f"{setting}, {float(target):.0%}"] = by_name, float(target)
    names = set.intersection(*(set(by_name) for by_name, _ in columns.values())) - {"uniform"}
    lines = []
    for name in sorted(names):
        logs, cells = [], []
        for by_name, target in columns.values():
            part, base = by_name[name], by_name["uniform"]
            if is_uniform_again(name, part):
                cells.append("(uniform)")
                continue
            logs.append(np.log(rounds_to(base, target) / rounds_to(part, target)).mean())
            note = " †" if is_earlier(name, part) else ""
            cells.append(marked_ratio(part, base, target, len(names)) + note)
        lines.append((np.mean(logs), [label(name), f"{np.exp(np.mean(logs)):.2f}x", *cells]))
    lines.sort(key=lambda line: -line[0])
    header = ["policy", "geometric mean", *columns]
    return table(header, [cells for _, cells in lines])


def only_there(file, case):
    """Policies that were run in this setting and in no other, against uniform: SETTING=TARGET."""
    setting, _, target = case.rpartition("=")
    by_name, lines = parts(file, setting), []
    elsewhere = {p["variant"] for p in result(file)["parts"] if p["setting"] != setting}
    base = by_name["uniform"]
    names = [name for name in by_name if name not in elsewhere]
    for name in names:
        part = by_name[name]
        fewer = ratio(part, base, float(target), len(names))
        points = difference(points_above(part, base), len(names))
        lines.append([name, rounds_cell(part, float(target)), *fewer, *points])
    header = ["policy", f"rounds to {float(target):.0%}", "fewer rounds", "verdict"]
    return table([*header, "points of accuracy", "verdict"], lines)


def chance(file):
    """How often chance earned a mark: uniform cohorts drawn again, beside uniform cohorts."""
    lines = []
    for setting in dict.fromkeys(p["setting"] for p in result(file)["parts"]):
        by_name = parts(file, setting)
        base, count = by_name["uniform"], len(by_name) - 1
        for part in (part for name, part in by_name.items() if is_uniform_again(name, part)):
            points = difference(points_above(part, base), count)
            for target in base["targets"]:
                alone, together = (ratio(part, base, target, m) for m in (1, count))
                lines.append([f"{setting}, {target:.0%}", *alone, together[1], *points])
    header = ["setting, target", "fewer rounds", "by itself", "in the ranking"]
    return table([*header, "points of accuracy", "in the ranking"], lines)


def accuracy_ranking(file, setting):
    """Policies of one setting that end above or below uniform cohorts, beyond chance."""
    by_name = parts(file, setting)
    lines, others = [], 0
    for name, part in by_name.items():
        accuracy = [100 * row["accuracy"] for row in part["seeds"]]
        cells = difference(points_above(part, by_name["uniform"]), len(by_name) - 1)
        if name == "uniform" or cells[1] in ("better", "worse"):
            cells = ["", "baseline"] if name == "uniform" else cells
            lines.append((np.mean(accuracy), [label(name, part), spread(accuracy), *cells]))
        elif not is_uniform_again(name, part):
            others += 1
    lines.sort(key=lambda line: -line[0])
    header = ["policy", "accuracy %", "points above uniform", "verdict"]
    rest = f"\nThe other {others} policies cannot be told from uniform cohorts.\n" if others else ""
    return table(header, [cells for _, cells in lines]) + rest


def headline(file, *cases):
    """Uniform against SketchMatch at epsilon 1: SETTING=TARGET for each row."""
    lines = []
    for case in cases:
        setting, _, target = case.rpartition("=")
        found, goal = parts(file, setting), float(target)
        base, ours = found["uniform"], found["sketch-match, epsilon 1"]
        times, word = ratio(ours, base, goal)
        cells = [rounds_cell(part, goal) for part in (base, ours)]
        lines.append([f"{setting}, {goal:.0%}", *cells, times, word])
    header = ["setting, target", "uniform", "sketch-match", "fewer rounds", "verdict"]
    return table(header, lines)


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


def cases(file, *names):
    """Cases of benchmarks/selection_cases.py: every variant against uniform, paired by seed."""
    found = result(file)
    rows = [r for r in found["result"] if not names or r["case"] in names]
    uniform = {r["case"]: r for r in rows if r["variant"] == "uniform"}
    lines, case = [], ""
    for row in rows:
        seeds, gain = row["seeds"], points_above(row, uniform[row["case"]])
        by = [s["all_used_by"] for s in seeds]
        first, case = "" if row["case"] == case else f"{row['case']}: {row['about']}", row["case"]
        lines.append(
            [
                first,
                row["variant"],
                spread([100 * s["accuracy"] for s in seeds]),
                "" if row["variant"] == "uniform" else difference(gain)[0],
                f"{np.mean([s['gemd'] for s in seeds]):.2f}",
                f"{np.mean([s['participation_entropy'] for s in seeds]):.2f}",
                f"{np.mean([s['never_picked'] for s in seeds]):.1f}",
                "-" if None in by else f"{np.mean(by):.0f}",
            ]
        )
    header = ["case", "policy", "accuracy %", "against uniform", "GEMD", "entropy", "never picked"]
    count = len(rows[0]["seeds"])
    return table([*header, "all used by round"], lines) + f"\n{count} seeds, paired.\n"


def figure(file, setting, name, target="0"):
    """Mean accuracy by round of the policies that matter; drawn when pages are written."""
    found = parts(file, setting)
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
    from fedcohort.report import figures
    from fedcohort.report.content import Roles

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
    roles = Roles(shown, shown, ["uniform"])
    words = "Means over seeds with two standard errors; faint lines: all other policies."
    figure = figures.accuracy_chart(path.stem, setting, words, rows, roles, target=target)
    path.write_bytes(figures.render(figure, path.suffix))


OURS, ASKED = "sketch-match", "sketch-match with time, asked, epsilon 1"


def cost_to(part, key="seconds_to"):
    """What the first target cost each seed, NaN for a seed that never got there."""
    costs = [row[key][0] for row in part["seeds"]]
    return np.array([np.nan if cost is None else cost for cost in costs])


def cost_cell(part, key="seconds_to", digits=0):
    values = cost_to(part, key)
    there = int(np.isfinite(values).sum())
    if not there:
        return "never"
    missed = "" if there == values.size else f" ({there} of {values.size} seeds)"
    return f"{np.nanmean(values):.{digits}f}{missed}"


def times_less(part, base, key="seconds_to"):
    """How many times less than `base` it took: geometric mean over paired seeds, 95 % interval."""
    ratios = cost_to(base, key) / cost_to(part, key)
    if part is base or not np.isfinite(ratios).all():
        return ""
    return "{:.1f}x ({:.1f} to {:.1f})".format(*np.exp(paired_interval(np.log(ratios).tolist())))


def time_headline(file):
    """Matching with time, asked, against the best policy of others that always got there."""
    lines = []
    for setting in dict.fromkeys(p["setting"] for p in result(file)["parts"]):
        run = parts(file, setting)
        rivals = [v for v in run if OURS not in v and np.isfinite(cost_to(run[v])).all()]
        best = min(rivals, key=lambda name: np.log(cost_to(run[name])).mean())
        plain = f"{OURS}, epsilon 1"
        names = ("uniform", best, plain, f"{OURS} with time, epsilon 1", ASKED)
        cells = [cost_cell(run[name]) for name in names]
        cells[1] = f"{best}, {cells[1]}"
        ratios = [times_less(run[ASKED], run[name]) for name in (best, plain)]
        lines.append([setting, *cells, *ratios])
    header = ["setting", "uniform", "best of others", "matching", "with learned durations",
              "with asked ones", "less time than the best of others", "than matching"]  # fmt: skip
    return table(header, lines)


def time_rows(file):
    """All variants of a suite of speeds."""
    for part in result(file)["parts"]:
        base = parts(file, part["setting"])["uniform"]
        target = part["targets"][0]
        yield {
            **{key: part[key] for key in ("setting", "variant")},
            "target": target,
            "seconds": cost_cell(part),
            "rounds": rounds_cell(part, target),
            "client-hours": cost_cell(part, "hours_to", digits=2),
            "megabytes": megabytes_to(part, target),
            "less time than uniform": times_less(part, base),
            "fewer client-hours": times_less(part, base, "hours_to"),
            "fewer bytes": times_less(part, base, "bytes_to"),
        }
