"""The committed results, and what the tables of several pages share."""

from __future__ import annotations

import json
from functools import cache, reduce
from pathlib import Path

import numpy as np
from against import DIFFERS, compare
from suite import published_experiment, read_suite

from fedcohort.analysis.comparison import paired_interval

ROOT = Path(__file__).parents[2]

RESULTS = ROOT / "benchmarks" / "results"

NOT_RUN = "Not run yet.\n"
BASELINE = "uniform"

TUNED = ", best of grid"  # ends the name of a variant whose option development seeds chose

# Files with parts that joined a suite after it was run; those of one go are in parentheses. Parts
# of one setting are of the same code, or their go brings runs of uniform cohorts along, which must
# repeat the published ones. A part with other seeds adds to the earlier one; else it takes the
# place of that, because its policy has changed.
LATER = {
    "benchmark-selection.json": [
        *("cifar10", "rivals-and-grid"),
        ("everywhere-uniform", "everywhere"),
    ],
    "benchmark-time.json": ["time-alike"],
    "benchmark-skip.json": [
        ("skip-literal-uniform", "skip-literal-mnist", "skip-literal-fashion"),
        "skip-literal-cifar10",
        ("skip-grid-20", "skip-grid"),
    ],
    "benchmark-papers.json": [
        *("papers-later", "papers-released", "papers-gradients", "papers-gradients-2"),
        *("papers-median", "papers-3-4", "papers-figure-4"),
        ("papers-0-1-3-uniform", "papers-0-1-3"),
    ],
}


def judge(interval, smallest=0.0):
    """Say whether there is an effect that matters: one of at least `smallest`, beyond chance.

    "level" means that an effect that matters is excluded, "cannot tell" that it is not.
    """
    if -smallest < interval.low and interval.high < smallest:
        return "level"
    if abs(interval.mean) >= smallest and interval.low > 0:
        return "better"
    if abs(interval.mean) >= smallest and interval.high < 0:
        return "worse"
    return "cannot tell"


@cache
def result(name):
    """A result file with the parts that joined its suite later."""
    held = read(name)
    for go in LATER.get(name, ()):
        later = [read(f"benchmark-{one}.json") for one in ([go] if isinstance(go, str) else go)]
        held = joined(held, reduce(together, later))
    return held


def read(name):
    return json.loads((RESULTS / name).read_text())


def together(held, later, parts=None):
    """Two results as one; `parts` are those of the later result that count."""
    shift = len(held["provenance"])
    more = [{**p, "made_by": p["made_by"] + shift} for p in parts or later["parts"]]
    commits = dict.fromkeys([*commits_of(held), *commits_of(later)])
    made = [*held["provenance"], *later["provenance"]]
    return {**held, "commits": [*commits], "provenance": made, "parts": [*held["parts"], *more]}


def joined(held, later):
    """Two results of a suite as one; a ValueError if parts of one setting cannot be compared."""
    published, sources = by_name(held["parts"]), {}
    for part in held["parts"]:
        source = held["provenance"][part["made_by"]]["source"]
        sources.setdefault(part["setting"], set()).add(source)
    baselines = {p["setting"]: p for p in later["parts"] if p["variant"] == BASELINE}
    added = []
    for part in later["parts"]:
        setting, source = part["setting"], later["provenance"][part["made_by"]]["source"]
        if "result" in part:  # a script's takes the place of an earlier one
            part = {**part, "again": True}
        elif source not in sources.get(setting, {source}):
            check_baseline(setting, baselines.get(setting), published.get((setting, BASELINE)))
            earlier = published.get((setting, part["variant"]), {"seeds": []})
            known = {row["seed"] for row in earlier["seeds"]}
            new = [row for row in part["seeds"] if row["seed"] not in known]
            if part["variant"] == BASELINE:
                part = with_seeds(part, new)
            elif len(new) < len(part["seeds"]):
                part = {**part, "again": True}
        added += [part] if part.get("seeds", True) else []
    again = {(p["setting"], p["variant"]) for p in added if p.get("again")}
    kept = [p for p in held["parts"] if (p["setting"], p["variant"]) not in again]
    whole = together({**held, "parts": kept}, later, added)
    return {**whole, "parts": list(by_name(whole["parts"]).values())}


def check_baseline(setting, again, published):
    """Refuse parts of other code, unless that code repeats the published baseline.

    Cohorts and bytes must be the same for every seed that was run again. Accuracies must agree:
    where training is unstable, rounding on other hardware is enough to change them.
    """
    if again is None or published is None:
        raise ValueError(f"parts of {setting!r} were made by different code")
    found = compare(again, published)
    if found.same_cohorts < found.seeds or found.bytes != 1 or found.verdict == DIFFERS:
        raise ValueError(f"{setting!r}: the code that made later parts has another baseline")


def by_name(every):
    """Parts by setting and variant; those that were run with some of the seeds each, as one."""
    found = {}
    for part in every:
        name = part["setting"], part["variant"]
        found[name] = with_more_seeds(found[name], part) if name in found else part
    return found


def with_more_seeds(part, more):
    """A part with the seeds of another run of it; a ValueError if that is not what it is."""
    one, other = ({**p["experiment"], "seeds": [0]} for p in (part, more))
    same = one == other or published_experiment(one) == published_experiment(other)
    whole = with_seeds(part, sorted([*part["seeds"], *more["seeds"]], key=lambda row: row["seed"]))
    if not same or len(set(whole["experiment"]["seeds"])) < len(whole["seeds"]):
        raise ValueError(f"{part['setting']}, {part['variant']} was run twice, not with more seeds")
    return whole


def with_seeds(part, rows):
    """A part with these rows of its seeds."""
    experiment = {**part["experiment"], "seeds": [row["seed"] for row in rows]}
    return {**part, "experiment": experiment, "seeds": rows}


def commits_of(found):
    return found.get("commits", [found["commit"]])


def parts(file, setting):
    """The parts of one setting by variant; empty if it was not run."""
    return settings_of(file).get(setting, {})


@cache
def settings_of(file):
    """The parts of every setting by variant."""
    found = {}
    for part in result(file)["parts"]:
        found.setdefault(part["setting"], {})[part["variant"]] = part
    return found


def table(header, lines):
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows) + "\n"


def spread(values, form="{:.1f}"):
    mean = form.format(np.mean(values))
    return f"{mean} ± {form.format(np.std(values, ddof=1))}" if len(values) > 1 else mean


def mean(values, digits=1):
    return round(float(np.mean(values)), digits)


def deviation(values, digits=1):
    return round(float(np.std(values, ddof=1)), digits) if len(values) > 1 else ""


# The smallest effects that matter: points of accuracy, and a ratio of rounds.
SMALLEST_POINTS = 0.5
SMALLEST_RATIO = 1.05


def values_of(part, key):
    """One number per seed."""
    return np.array([row[key] for row in part["seeds"]])


def with_shared_seeds(parts):
    """The parts with the seeds that all of them have; results of scripts as they are."""
    if any("seeds" not in part for part in parts):
        return parts
    shared = set.intersection(*({row["seed"] for row in part["seeds"]} for part in parts))
    return [{**p, "seeds": [r for r in p["seeds"] if r["seed"] in shared]} for p in parts]


def points_above(part, base):
    """Points of accuracy above the baseline per seed."""
    ours, theirs = (values_of(one, "accuracy") for one in with_shared_seeds([part, base]))
    return (100 * (ours - theirs)).tolist()


def difference(values, comparisons=1):
    """Mean of paired differences in points with its 95 % interval, and a verdict."""
    interval = paired_interval(values, comparisons)
    if interval is None:
        return f"{np.mean(values):+.1f} (one seed)", ""
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*interval), judge(interval, SMALLEST_POINTS)


def cost_to(part, target, key):
    """What the target cost each seed, NaN for a seed that never got there."""
    at = part["targets"].index(target)
    return np.array([row[key][at] for row in part["seeds"]], float)  # None becomes NaN


def rounds_to(part, target):
    """Rounds to the target per seed; all rounds plus one for a seed that never got there."""
    return np.nan_to_num(cost_to(part, target, "rounds_to"), nan=part["experiment"]["rounds"] + 1)


def rounds_below(part, target):
    """Rounds per seed in which the accuracy is below the target, of the rounds in the curve.

    Unlike the first round that reaches the target, it does not depend on one lucky evaluation, and
    a seed that never gets there counts with all its rounds.
    """
    curves = values_of(part, "curve").astype(float)
    evaluated = np.isfinite(curves).all(axis=0)
    share = (curves[:, evaluated] < target).mean(axis=1)
    return share * part["experiment"]["rounds"]


def missing(part, target):
    return int(np.isnan(cost_to(part, target, "rounds_to")).sum())


def rounds_cell(part, target):
    left, seeds = missing(part, target), len(part["seeds"])
    if left == seeds:
        return f"not in {part['experiment']['rounds']}"
    text = spread(rounds_to(part, target))
    return f"≥ {text} ({seeds - left} of {seeds} seeds)" if left else text


def log_ratios(part, base, target):
    """Logarithms of how many times fewer rounds than the baseline, over paired seeds."""
    part, base = with_shared_seeds([part, base])
    return np.log(rounds_to(base, target) / rounds_to(part, target))


def ratio(part, base, target, comparisons=1):
    """How many times fewer rounds than uniform: geometric mean over paired seeds, 95 % interval.

    With `comparisons`, so many such intervals hold together.
    """
    logs = log_ratios(part, base, target)
    interval = paired_interval(logs.tolist(), comparisons)
    if interval is None:
        return f"{np.exp(logs.mean()):.2f}x", "one seed"
    words = {"better": "faster", "worse": "slower"}
    word = judge(interval, float(np.log(SMALLEST_RATIO)))
    if missing(part, target) and missing(base, target):
        word = "cannot tell"  # some seeds of both never got there
    return "{:.2f}x ({:.2f} to {:.2f})".format(*np.exp(interval)), words.get(word, word)


def left_out(suite, file):
    """Which parts of a suite, as it is now, have fewer seeds in the file or no result at all."""
    every = {(part.setting, part.variant): part.experiment.seeds for part in read_suite(suite)}
    held = by_name(result(file)["parts"])
    ran = {name: held[name]["experiment"]["seeds"] for name in every if name in held}
    count = f"{len(ran)} of the" if len(ran) < len(every) else "All"
    text = f"{count} {len(every)} parts of the suite have results.\n"
    groups = {}
    for name, seeds in every.items():
        if name not in ran:
            groups.setdefault("Not run", []).append(name)
        elif len(ran[name]) < len(seeds):
            groups.setdefault(f"With {seeds_text(ran[name])} only", []).append(name)
    return text + "".join(f"\n{head}:\n\n{by_setting(n, every)}" for head, n in groups.items())


def by_setting(names, every):
    """Parts of a suite as a list: settings that lack the same variants share a line."""
    lines = {}
    for setting in dict.fromkeys(setting for setting, _ in names):
        variants = [variant for where, variant in every if where == setting]
        listed = [variant for where, variant in names if where == setting]
        others = [variant for variant in variants if variant not in listed]
        if all(v in listed for v in variants if v.endswith(TUNED)):
            listed = list(dict.fromkeys("the best of the grid" if v.endswith(TUNED) else v
                                        for v in listed))  # fmt: skip
        words = "; ".join(listed)
        if len(others) < len(listed):
            words = f"all variants but {'; '.join(others)}" if others else "all variants"
        lines.setdefault(words, []).append(setting)
    return "".join(f"- {'; '.join(settings)}: {words}\n" for words, settings in lines.items())


def seeds_text(seeds):
    """Seeds in words: "seeds 1000 to 1004"."""
    first, last = min(seeds), max(seeds)
    if len(seeds) > 2 and last - first + 1 == len(seeds):
        return f"seeds {first} to {last}"
    return f"seed{'s' * (len(seeds) > 1)} {enumerated([*map(str, sorted(seeds))])}"


def provenance(file):
    """Where a result comes from, in a sentence."""
    goes = LATER.get(file, ())
    names = [name for go in goes for name in ([go] if isinstance(go, str) else go)]
    more = f", and in the files `benchmark-NAME.json` for {enumerated(names)}" if names else ""
    return (
        f"Made {commits_and_machines(result(file))} with seeds 1000 and up; commands, versions and "
        f"loads are in `benchmarks/results/{file}`{more}.\n"
    )


def commits_and_machines(held):
    commits = enumerated([f"`{name[:10]}`" for name in commits_of(held)])
    machines = enumerated(sorted({made["gpu"] or made["cpu"] for made in held["provenance"]}))
    return f"at commit {commits} on {machines}"


def enumerated(words):
    """Return them as a list in a sentence: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def made_by(file):
    """The command, commit and machine of a result file of benchmarks/provenance.py."""
    held = result(file)
    runs = held["provenance"] if isinstance(held["provenance"], list) else [held["provenance"]]
    last = {**runs[-1], **runs[-1].get("machine", {})}  # which older files have in a table
    machine = f"{last['cpu']}, {last['cores']} cores"
    more = f" (the last of {len(runs)} runs)" if len(runs) > 1 else ""
    when = f"{last['date']}, " if "date" in last else ""
    return f"`{last['command']}`{more}, commit `{last['commit']}`, {when}{machine}.\n"
