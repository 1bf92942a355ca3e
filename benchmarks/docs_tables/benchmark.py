"""Policies against uniform cohorts: README.md, docs/index.md, benchmark.md and policies.md."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
from docs_tables.results import (
    NOT_RUN,
    RESULTS,
    ROOT,
    TUNED,
    cost_to,
    deviation,
    difference,
    log_ratios,
    mean,
    missing,
    paired_interval,
    parts,
    points_above,
    ratio,
    result,
    rounds_below,
    rounds_cell,
    rounds_to,
    seeds_text,
    settings_of,
    spread,
    table,
    values_of,
    with_shared_seeds,
)

from fedcohort.policies import POLICIES

MARKS = {"faster": " ▲", "slower": " ▼"}


def label(name, part):
    """A variant's name in a table."""
    return "uniform cohorts drawn again" if is_uniform_again(name, part) else name


def is_uniform_again(name, part):
    """Whether these are uniform cohorts drawn in another way, which show what chance does.

    Power-of-choice among as many candidates as places, all of one size, takes them all.
    """
    if name == "uniform, drawn again":
        return True
    _, _, d = name.partition("power-of-choice, d=")
    experiment = part["experiment"]
    all_taken = d and d == str(experiment["cohort_size"])
    return all_taken and experiment["data"]["partition"] == "shards"


def case_of(file, case):
    """What a column or row is about, its parts by variant and the target: SETTING=TARGET."""
    setting, _, target = case.rpartition("=")
    return f"{setting}, {float(target):.0%}", parts(file, setting), float(target)


def selection_rows(file):
    """All variants of all settings and targets, for a CSV file."""
    for setting, by_name in settings_of(file).items():
        base, gains = by_name["uniform"], len(by_name) - 1
        for target in base["targets"] or [None]:
            for name, part in by_name.items():
                about = {"setting": setting, "policy": label(name, part)}
                about |= {"seeds": len(part["seeds"]), "target": target}
                rounds = {} if target is None else rounds_columns(part, base, target, gains)
                yield about | rounds | accuracy_columns(part, base, gains)


def rounds_columns(part, base, target, gains):
    first = rounds_to(part, target)
    fewer, word = ("", "") if part is base else ratio(part, base, target, gains)
    return {
        "rounds to target": mean(first),
        "deviation": deviation(first),
        "seeds that missed it": missing(part, target),
        "rounds below target": mean(rounds_below(part, target)),
        "times fewer rounds": fewer,
        "rounds": word,
        "MB to target": megabytes_to(part, target),
    }


def accuracy_columns(part, base, gains):
    accuracy = 100 * values_of(part, "accuracy")
    points, word = ("", "") if part is base else difference(points_above(part, base), gains)
    over_rounds = np.nanmean(values_of(part, "curve").astype(float), axis=1)
    select = [1e3 * r["select_seconds"] for r in part["seeds"] if "select_seconds" in r]
    return {
        "accuracy %": mean(accuracy),
        "deviation of accuracy": deviation(accuracy),
        "points above uniform": points,
        "accuracy": word,
        "mean accuracy over rounds %": mean(100 * over_rounds),
        "accuracy at equal bytes %": mean(at_equal_bytes(part, base)),
        "worst tenth %": mean(100 * values_of(part, "worst_tenth_accuracy")),
        "GEMD": mean(values_of(part, "gemd"), 3),
        "entropy": mean(values_of(part, "participation_entropy"), 3),
        "ms to select": mean(select, 2) if select else "",  # older results have none
    }


def at_equal_bytes(part, base):
    """Accuracy of each seed when it has sent as much as uniform did in all its rounds."""
    budget = min(row["megabytes"][-1] for row in base["seeds"]) + 1e-9
    values = []
    for row in part["seeds"]:
        points = zip(row["curve"], row["megabytes"], strict=True)
        known = [a for a, sent in points if a is not None and sent <= budget]
        values.append(100 * np.mean(known[-2:]) if known else np.nan)
    return values


def megabytes_to(part, target):
    """Megabytes up and down until the target, over the seeds that got there."""
    sent = cost_to(part, target, "bytes_to")
    return "-" if np.isnan(sent).all() else f"{np.nanmean(sent / 1e6):,.0f}"


def ranking(file, *cases):
    """Policies by the geometric mean of their ratios to uniform: SETTING=TARGET for each column.

    The intervals of a column hold together. A cell has two lines, so that several fit on a page.
    """
    columns = [case_of(file, case) for case in cases]
    held = Counter(name for _, by_name, _ in columns for name in by_name)
    names = sorted(name for name in held if is_ranked(name, held[name], len(columns)))
    lines = []
    for name in names:
        logs, cells = [], []
        for _, by_name, target in columns:
            part, base = by_name.get(name), by_name["uniform"]
            if part is None or is_uniform_again(name, part):
                cells.append("not run" if part is None else "(uniform)")
                continue
            logs.append(log_ratios(part, base, target).mean())
            cells.append(marked(part, base, target, len(names)))
        lines.append((np.mean(logs), [name, f"{np.exp(np.mean(logs)):.2f}x", *cells]))
    lines.sort(key=lambda line: -line[0])
    header = ["policy", "geometric mean", *(words for words, _, _ in columns)]
    return table(header, [cells for _, cells in lines])


def marked(part, base, target, comparisons):
    """How many times fewer rounds, a mark, and below these the interval."""
    times, word = ratio(part, base, target, comparisons)
    value, _, interval = times.removesuffix(")").partition(" (")
    joined = interval.replace(" to ", "\u2060–\u2060")  # which a browser does not break
    return f"{value}{MARKS.get(word, '')}<br>{joined}"


def is_ranked(name, count, columns):
    """Whether a variant is in all columns, or is a policy as its authors set it."""
    as_published = name in POLICIES or name.startswith("optimal-sampling")
    return not name.startswith("uniform") and (as_published or count == columns)


def best_of_grid(file):
    """Policies with the best option of a grid, as in the ranking."""
    rows, settings = {}, {}
    for setting, run in settings_of(file).items():
        tuned = [name for name in run if name.endswith(TUNED)]
        for name in tuned:
            part, target = run[name], run["uniform"]["targets"][0]
            options = part["experiment"]["policy"]["options"].items()
            row = rows.setdefault(name.removesuffix(TUNED), {})
            row[""] = "; ".join(f"{key}={value}" for key, value in options)
            row[setting] = marked(part, run["uniform"], target, len(tuned))
            settings[setting] = f"{setting}, {target:.0%}"
    lines = [[n, *(row.get(key, "not run") for key in ("", *settings))] for n, row in rows.items()]
    return table(["policy", "best option", *settings.values()], lines) if lines else NOT_RUN


def grid_rows(file):
    """All options on development seeds; nothing if they were not run."""
    for setting, by_name in settings_of(file).items() if (RESULTS / file).exists() else ():
        for name, part in by_name.items():
            accuracy = np.nanmean(values_of(part, "curve").astype(float), axis=1)
            row = {"setting": setting, "policy": part["experiment"]["policy"]["name"]}
            yield row | {"variant": name, "mean accuracy over rounds %": mean(100 * accuracy, 4)}


def grid(file):
    """Which option of each policy is the best on development seeds, over all settings."""
    scores = {}  # of each policy, by option
    for row in (row for row in grid_rows(file) if row["policy"] != "uniform"):
        options = scores.setdefault(row["policy"], {})
        options.setdefault(row["variant"], []).append(row["mean accuracy over rounds %"])
    if not scores:
        return NOT_RUN
    best = [max(options, key=lambda name: np.mean(options[name])) for options in scores.values()]
    papers = [next(iter(options)) for options in scores.values()]
    others = [name for name in best if name not in papers]
    return (
        f"{sum(map(len, scores.values()))} options of {len(scores)} policies, in "
        "[grid.csv](tables/grid.csv). The paper's option is the best but for "
        f"{len(others)} of them: {'; '.join(others) or 'none'}.\n"
    )


def chance(file, *settings):
    """How often chance earned a mark: uniform cohorts drawn again, beside uniform cohorts."""
    lines = []
    for setting, by_name in settings_of(file).items():
        base, count = by_name.get("uniform"), len(by_name) - 1
        if settings and setting not in settings:
            continue
        for part in (part for name, part in by_name.items() if is_uniform_again(name, part)):
            points = difference(points_above(part, base), count)
            for target in base["targets"]:
                if missing(base, target) == len(base["seeds"]):
                    continue  # neither ever gets there
                alone, together = (ratio(part, base, target, m) for m in (1, count))
                lines.append([f"{setting}, {target:.0%}", *alone, together[1], *points])
    header = ["setting, target", "fewer rounds", "by itself", "in the ranking"]
    return table([*header, "points of accuracy", "in the ranking"], lines)


def accuracy_ranking(file, setting):
    """Policies of one setting that end above or below uniform cohorts, beyond chance."""
    by_name = parts(file, setting)
    lines, others = [], 0
    for name, part in by_name.items():
        accuracy = 100 * values_of(part, "accuracy")
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
    for words, by_name, target in (case_of(file, case) for case in cases):
        pair = by_name["uniform"], by_name[PRIVATE]
        rounds = [rounds_cell(part, target) for part in pair]
        below = " / ".join(f"{mean(rounds_below(part, target), 0):.0f}" for part in pair)
        lines.append([words, *rounds, *ratio(*reversed(pair), target), below])
    header = ["setting, target", "uniform", "sketch-match", "fewer rounds", "verdict"]
    return table([*header, "rounds below the target"], lines)


def case_rows(file):
    """Cases of benchmarks/selection_cases.py, paired by seed: docs/tables/cases.csv."""
    rows = result(file)["result"]
    uniform = {row["case"]: row for row in rows if row["variant"] == "uniform"}
    for row in rows:
        is_uniform, by = row["variant"] == "uniform", values_of(row, "all_used_by")
        gain = "" if is_uniform else difference(points_above(row, uniform[row["case"]]))[0]
        yield {
            **{name: row[name] for name in ("case", "about")},
            "policy": row["variant"],
            "seeds": len(row["seeds"]),
            "accuracy %": spread(100 * values_of(row, "accuracy")),
            "points above uniform": gain,
            "GEMD": mean(values_of(row, "gemd"), 2),
            "entropy": mean(values_of(row, "participation_entropy"), 2),
            "never picked": mean(values_of(row, "never_picked")),
            "all used by round": "-" if None in by else mean(by, 0),
        }


def cases(file):
    """What the page shows of them."""
    lines, case = [], ""
    for row in case_rows(file):
        first, case = "" if row["case"] == case else f"{row['case']}: {row['about']}", row["case"]
        lines.append([first, *(row[k] for k in ("policy", "accuracy %", "points above uniform"))])
    return table(["case", "policy", "accuracy %", "points above uniform"], lines)


def figure(file, setting, name, target="0"):
    """Mean accuracy by round of the policies that matter; drawn when pages are written."""
    if "--check" not in sys.argv:
        draw(parts(file, setting), setting, ROOT / f"docs/images/{name}.svg", float(target) or None)
    return f"![{setting}: test accuracy by round](images/{name}.svg)\n"


PRIVATE = "sketch-match, epsilon 1"
SHOWN = (PRIVATE, "fedcor", "label-match", "power-of-choice, d=20", "kdpp", "oort")


def draw(by_name, setting, path, target):
    from fedcohort.report import figures
    from fedcohort.report.content import Roles

    rows = []
    for name, part in by_name.items():
        curves = values_of(part, "curve").astype(float)
        last, step = part["experiment"]["rounds"], 5
        numbers = range(last - step * (curves.shape[1] - 1), last + 1, step)
        for number, values in zip(numbers, curves.T, strict=True):
            if np.isfinite(values).all():
                row = {"run": name, "x": number, "y": float(values.mean())}
                if len(values) > 1:
                    error = 2 * float(values.std(ddof=1)) / np.sqrt(len(values))
                    row |= {"low": row["y"] - error, "high": row["y"] + error}
                rows.append(row)
    shown = [name for name in SHOWN if name in by_name]
    roles = Roles(shown, shown, ["uniform"])
    words = "Means over seeds with two standard errors; faint lines: all other policies."
    chart = figures.accuracy_chart(path.stem, setting, words, rows, roles, target=target)
    path.write_bytes(figures.render(chart, path.suffix))


OURS, ASKED = "sketch-match", "sketch-match with time, asked, epsilon 1"
LEARNED = "sketch-match with time, epsilon 1"


def first_cost(part, key="seconds_to"):
    """What the first target cost each seed."""
    return cost_to(part, part["targets"][0], key)


def cost_cell(part, key="seconds_to", digits=0):
    values = first_cost(part, key)
    there = int(np.isfinite(values).sum())
    if not there:
        return "never"
    missed = "" if there == values.size else f" ({there} of {values.size} seeds)"
    return f"{np.nanmean(values):.{digits}f}{missed}"


def sooner(part, base, key="seconds_to"):
    """How many times less than `base` it took: geometric mean over paired seeds, 95 % interval.

    None if a seed of one of them never got there.
    """
    ours, theirs = (first_cost(one, key) for one in with_shared_seeds([part, base]))
    if not np.isfinite([ours, theirs]).all():
        return None
    return np.exp(paired_interval(np.log(theirs / ours).tolist()))


def times_less(part, base, key="seconds_to"):
    ratios = None if part is base else sooner(part, base, key)
    return "" if ratios is None else "{:.1f}x ({:.1f} to {:.1f})".format(*ratios)


def best_of_others(run):
    """The policy of others that gets there soonest on average, among those that always do."""
    rivals = [v for v in run if OURS not in v and np.isfinite(first_cost(run[v])).all()]
    return min(rivals, key=lambda name: np.log(first_cost(run[name])).mean(), default="uniform")


def time_headline(file):
    """Matching with time, asked, against the best policy of others that always got there."""
    lines = []
    for setting, run in settings_of(file).items():
        best = best_of_others(run)
        cells = [cost_cell(run[name]) for name in ("uniform", best, PRIVATE, LEARNED, ASKED)]
        cells[1] = f"{best}, {cells[1]}"
        ratios = [times_less(run[ASKED], run[name]) for name in (best, PRIVATE)]
        lines.append([f"{setting}, {run[ASKED]['targets'][0]:.0%}", *cells, *ratios])
    header = ["setting, target", "uniform", "best of others", "matching",
              "with learned durations", "with asked ones", "less time than the best of others",
              "than matching"]  # fmt: skip
    return table(header, lines)


def time_claim(file):
    """Say how much sooner matching with time gets there, and where it does not."""
    runs = settings_of(file)
    gains = {s: sooner(run[ASKED], run[best_of_others(run)]) for s, run in runs.items()}
    ahead = [s for s, gain in gains.items() if gain is not None and gain[1] > 1]
    behind = "; ".join(s for s in runs if s not in ahead)
    random, plain = (
        span(sooner(runs[s][ASKED], runs[s][name]) for s in ahead) for name in ("uniform", PRIVATE)
    )
    learned = span(sooner(run[LEARNED], run[PRIVATE]) for run in runs.values())
    seeds = {row["seed"] for run in runs.values() for row in run[ASKED]["seeds"]}
    return (
        f"In {len(ahead)} of {len(runs)} settings it reaches the target sooner than the best "
        f"policy of others, by a factor of {span(gains[s] for s in ahead)}; that is {random} "
        f"against random cohorts and {plain} against plain matching."
        f"{f' Not beyond chance: {behind}.' if behind else ''} Durations that are only learned are "
        f"worth a factor of {learned} over plain matching (geometric means, {seeds_text(seeds)}).\n"
    )


def span(ratios):
    """The smallest and the largest mean of ratios with intervals; None has none."""
    means = [ratio[0] for ratio in ratios if ratio is not None]
    return f"{min(means):.1f} to {max(means):.1f}" if means else "?"


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
