"""Claims of papers beside the parts of a suite, with verdicts by rule.

- A comparison holds if the method is better than its baseline beyond the 95 % interval of paired
  seeds (Student's t), by an effect that matters, and has at least half of the paper's gain; it
  holds weaker with less of the gain; it does not hold if it is level or worse.
- An effect matters from half a point of accuracy or 5 % of the rounds on.
- Where the paper gives no number, better beyond the interval is enough to hold.
- It is not decidable if seeds of both never reached the target, or if there are fewer than three.
- Other rows state their rule in the claim. `SCRIPTS` judge what the scripts of claims.py measured.
"""

from __future__ import annotations

import itertools

import numpy as np

from fedcohort.analysis.comparison import paired_interval

HOLDS, WEAKER, FAILS = "holds", "holds weaker", "does not hold"
UNDECIDED, NOT_RUN = "not decidable", "not run"
VERDICTS = HOLDS, WEAKER, FAILS, UNDECIDED, NOT_RUN

SMALLEST_POINTS, SMALLEST_GAIN = 0.5, 0.05
MIN_SEEDS = 3


def verdict(gain, low, papers, smallest=0.0):
    """By a gain, the lower end of its interval and the paper's gain; 0 is no gain."""
    if low <= 0 or gain < smallest:
        return FAILS
    return HOLDS if gain >= papers / 2 else WEAKER


class Suite:
    """The parts of a suite's result file, by setting and variant; empty if there is no file."""

    def __init__(self, name, results):
        self.name = name
        self.parts = {(p["setting"], p["variant"]): p for p in (results or {"parts": []})["parts"]}

    def row(self, paper, claim, theirs, only, names, judge):
        """Paper and form, the claim, the paper's numbers, ours, seeds, what runs it, the verdict.

        `names` are pairs of setting and variant. `judge` says in words what their parts measured,
        over the seeds that all have, and the verdict. `only` chooses them.
        """
        start = "" if self.name == "papers" else ": "  # keeps MNIST apart from Fashion-MNIST
        command = f"`--suite {self.name} --only '{start}{only}'`"
        parts = [self.parts.get(name) for name in names]
        if any(part is None for part in parts):
            return [*paper, claim, theirs, NOT_RUN, "", command, NOT_RUN]
        first, *others = with_shared_seeds(parts)
        text, word = judge(first, *others)
        seeds = first["seeds"] if "seeds" in first else first["experiment"]["seeds"]
        return [*paper, claim, theirs, text, str(len(seeds)), command, word]


def with_shared_seeds(parts):
    """The parts with the seeds that all of them have; results of scripts as they are."""
    if any("seeds" not in part for part in parts):
        return parts
    shared = set.intersection(*({row["seed"] for row in part["seeds"]} for part in parts))
    return [{**p, "seeds": [r for r in p["seeds"] if r["seed"] in shared]} for p in parts]


def spread(values, form="{:.1f}"):
    text = form.format(np.mean(values))
    return f"{text} ± {form.format(np.std(values, ddof=1))}" if len(values) > 1 else text


def values_of(part, key):
    return np.array([row[key] for row in part["seeds"]])


def first_rounds(part, target):
    at, last = part["targets"].index(target), part["experiment"]["rounds"] + 1
    rounds = [row["rounds_to"][at] for row in part["seeds"]]
    return np.array([last if r is None else r for r in rounds], float), rounds.count(None)


def rounds_text(part, target):
    values, missing = first_rounds(part, target)
    if missing == len(values):
        return f"not in {part['experiment']['rounds']}"
    text = spread(values)
    return f"≥ {text} ({len(values) - missing} of {len(values)} seeds)" if missing else text


def rounds_row(suite, paper, claim, setting, method, base, target, papers):
    """Rounds to a target of a method and its baseline; `papers` are the paper's two numbers."""

    def judge(ours, other):
        (a, missing_a), (b, missing_b) = first_rounds(ours, target), first_rounds(other, target)
        text = f"{rounds_text(ours, target)} against {rounds_text(other, target)}"
        if (missing_a and missing_b) or len(a) < MIN_SEEDS:
            return text, UNDECIDED
        interval = paired_interval(np.log(b / a).tolist())
        gain, low = np.exp(interval.mean) - 1, np.exp(interval.low) - 1
        theirs_gain = papers[1] / papers[0] - 1 if None not in papers else 0.0
        word = verdict(gain, low, theirs_gain, SMALLEST_GAIN)
        return f"{text}: {gain + 1:.2f}x fewer", word

    theirs = " against ".join("N/A" if p is None else f"{p:g}" for p in papers)
    theirs = "no number" if papers == (None, None) else theirs
    return suite.row(
        paper, claim, theirs, f"{setting}, ", [(setting, method), (setting, base)], judge
    )


def accuracy_row(suite, paper, claim, setting, method, base, papers, base_setting=None):
    """Accuracy in percent of a method and its baseline, as a difference in points."""

    def judge(*parts):
        a, b = (100 * values_of(part, "accuracy") for part in parts)
        text = f"{spread(a)} against {spread(b)}"
        if len(a) < MIN_SEEDS:
            return text, UNDECIDED
        interval = paired_interval((a - b).tolist())
        return text, verdict(interval.mean, interval.low, papers[0] - papers[1], SMALLEST_POINTS)

    theirs = "no number" if papers == (0, 0) else f"{papers[0]:g} against {papers[1]:g}"
    names = [(setting, method), (base_setting or setting, base)]
    return suite.row(paper, claim, theirs, f"{setting}, ", names, judge)


def lower_row(suite, paper, claim, theirs, setting, method, bases, key, form="{:.2f}"):
    """Whether a number is below every baseline's, beyond the interval of paired seeds."""

    def judge(*parts):
        values = [values_of(part, key) for part in parts]
        named = zip((method, *bases), values, strict=True)
        text = ", ".join(f"{name} {spread(each, form)}" for name, each in named)
        if len(values[0]) < MIN_SEEDS:
            return text, UNDECIDED
        differences = [(other - values[0]).tolist() for other in values[1:]]
        lower = all(paired_interval(each).low > 0 for each in differences)
        return text, HOLDS if lower else FAILS

    names = [(setting, name) for name in (method, *bases)]
    return suite.row(paper, claim, theirs, f"{setting}, ", names, judge)


def curve_row(suite, paper, claim, setting, method="race-softmax", base="uniform"):
    """Share of evaluated rounds with the mean curve above the baseline's; mean difference."""

    def judge(*parts):
        a, b = (100 * values_of(part, "curve").astype(float) for part in parts)
        evaluated = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
        a, b = a[:, evaluated], b[:, evaluated]
        above = np.mean(a.mean(axis=0) > b.mean(axis=0))
        interval = paired_interval((a - b).mean(axis=1).tolist())
        text = (
            f"above in {above:.0%} of the rounds; mean difference {interval.mean:+.1f} points "
            f"({interval.low:+.1f} to {interval.high:+.1f})"
        )
        return text, FAILS if interval.low <= 0 else HOLDS if above >= 0.9 else WEAKER

    names = [(setting, method), (setting, base)]
    return suite.row(paper, claim, "above in almost every round", f"{setting}, ", names, judge)


def script_row(suite, paper, claim, papers, setting, variant, read):
    """A row of a script's result; `read` returns what it says and a verdict."""
    names, only = [(setting, variant)], f"{setting}, {variant}"
    return suite.row(paper, claim, papers, only, names, lambda part: read(part["result"]))


def separation(rows):
    within_a, within_b, between = ([r[k] for r in rows] for k in ("within A", "within B", "A to B"))
    apart = all(r["within B, largest"] < r["within A, smallest"] for r in rows)
    even = max(r["A to B, relative spread over B"] for r in rows)
    text = (
        f"uniform subsets {spread(within_b, '{:.2f}')} apart, Dirichlet ones "
        f"{spread(within_a, '{:.2f}')}, across {spread(between, '{:.2f}')}; a Dirichlet subset's "
        f"distances to the uniform ones differ by at most {even:.1%}"
    )
    return text, HOLDS if apart and even < 0.1 else FAILS


def total_variation(rows):
    correlation = [r["rank correlation"] for r in rows]
    error = [r["plug-in error"] for r in rows]
    text = f"rank correlation {spread(correlation, '{:.3f}')}, smallest {min(correlation):.3f}; the"
    text += f" estimate itself is off by {spread(error, '{:.2f}')}"
    return text, HOLDS if min(correlation) > 0.9 else FAILS


def exponent(points, key, value, fixed):
    """Slope of log error over the log of one variable, the others fixed."""
    chosen = [p for p in points if all(p[k] == v for k, v in fixed.items())]
    return float(
        np.polyfit(np.log([p[key] for p in chosen]), np.log([p[value] for p in chosen]), 1)[0]
    )


def private_error(rows):
    points, n = rows[0]["points"], max(p["n"] for p in rows[0]["points"])
    laws = {
        "n": ({"rows": 20, "epsilon": 1.0}, -1.0),
        "epsilon": ({"rows": 20, "n": n}, -1.0),
        "rows": ({"epsilon": 1.0, "n": n}, 0.5),
    }
    found = {
        key: np.mean([exponent(r["points"], key, "noise", fixed) for r in rows])
        for key, (fixed, _) in laws.items()
    }
    along = {}  # the whole error by n, at rows = sqrt(n)
    for i, point in enumerate(points):
        if point["rows"] == int(np.sqrt(point["n"])) and point["epsilon"] == 1.0:
            along[point["n"]] = np.mean([r["points"][i]["all"] for r in rows])
    sizes = sorted(along)
    text = (
        f"noise grows as n^{found['n']:.2f}, epsilon^{found['epsilon']:.2f}, "
        f"rows^{found['rows']:.2f}; with rows = √n the whole error is "
        + ", ".join(f"{along[m]:.4f}" for m in sizes)
        + f" at n = {', '.join(f'{m:,}' for m in sizes)}"
    )
    good = all(abs(found[key] - law) < 0.15 for key, (_, law) in laws.items())
    falls = all(along[b] < along[a] for a, b in itertools.pairwise(sizes))
    return text, HOLDS if good and falls else FAILS


def median(rows):
    """Whether the error falls with the rows as that of a mean does."""
    ways = [key for key in rows[0]["points"][0] if key != "rows"]
    sizes = [p["rows"] for p in rows[0]["points"]]
    text, slopes = [], {}
    for way in ways:
        means = [np.mean([r["points"][i][way] for r in rows]) for i in range(len(sizes))]
        slopes[way] = float(np.polyfit(np.log(sizes), np.log(means), 1)[0])
        text.append(f"{way} {', '.join(f'{value:.4f}' for value in means)}")
    counts = ", ".join(f"{size:,}" for size in sizes)
    word = HOLDS if slopes["median"] < -0.35 else FAILS
    return f"error at {counts} rows: {'; '.join(text)}", word


def covariance(rows):
    def means(key):
        return {k: np.mean([r[key][k] for r in rows]) for k in rows[0][key]}

    def text(values):
        return ", ".join(f"{v:.3f} ({k})" for k, v in values.items())

    same = np.mean([s["same"] for r in rows for s in r["same label"]])
    other = np.mean([s["other"] for r in rows for s in r["same label"]])
    labels = f"correlation {same:.2f} within a label, {other:.2f} between labels"
    raw = means("cosine")
    corrected = means("without noise")
    plain = f"{min(raw.values()):.3f} to {max(raw.values()):.3f} without the correction"
    word = HOLDS if min(corrected.values()) > 0.97 else FAILS
    return f"{text(corrected)}; {plain}; {labels}", word


def embedding(rows):
    same, other = (spread([r[k] for r in rows], "{:.2f}") for k in ("same", "other"))
    near = np.mean([r["nearest has the same label"] for r in rows])
    text = (
        f"mean cosine {same} within a label, {other} between labels; the most similar client has "
        f"the same label for {near:.0%} of the clients"
    )
    return text, HOLDS if near > 0.9 else FAILS


def reward(rows):
    ours, other = ([np.mean(r[k]) for r in rows] for k in ("fedacs", "random"))
    curves = {k: np.mean([r[k] for r in rows], axis=0) for k in ("fedacs", "random")}
    above = np.mean(curves["fedacs"] > curves["random"])
    text = (
        f"{spread(ours, '{:.3f}')} against {spread(other, '{:.3f}')}; above in {above:.0%} of the "
        f"first {len(curves['random'])} rounds"
    )
    if len(rows) < MIN_SEEDS:
        return text, UNDECIDED
    return text, HOLDS if paired_interval(np.subtract(ours, other).tolist()).low > 0 else FAILS


def initialization(rows):
    kernels, profiles = ([r[k] for r in rows] for k in ("kernels", "profiles"))
    text = (
        f"smallest correlation between two kernels {min(kernels):.3f}, between two sets of "
        f"profiles {min(profiles):.3f}"
    )
    return text, HOLDS if min(kernels) > 0.9 else FAILS
