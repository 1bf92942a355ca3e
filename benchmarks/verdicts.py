"""Rows that compare a paper's claim with the parts of a suite, and verdicts by rule.

- A comparison holds if the method is better than its baseline beyond the 95 % interval of paired
  seeds (Student's t), by an effect that matters, and has at least half of the paper's gain; it
  holds weaker with less of the gain; it does not hold if it is level or worse.
- An effect matters from half a point of accuracy or 5 % of the rounds on.
- Where the paper gives no number, better beyond the interval is enough to hold.
- It is not decidable if seeds of both never reached the target, or if there are fewer than three.
- Other rows state their rule in the claim.
"""

from __future__ import annotations

import numpy as np

from fedcohort.analysis.comparison import paired_interval

HOLDS, WEAKER, FAILS = "holds", "holds weaker", "does not hold"
UNDECIDED, NOT_RUN = "not decidable", "not run"
VERDICTS = HOLDS, WEAKER, FAILS, UNDECIDED, NOT_RUN


SMALLEST_POINTS, SMALLEST_GAIN = 0.5, 0.05


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

    def get(self, setting, *variants):
        """The parts of a setting, with the seeds that all have; None if one was not run."""
        return self.get_each(*((setting, variant) for variant in variants))

    def get_each(self, *names):
        """The same for parts of several settings: pairs of setting and variant."""
        found = [self.parts.get(name) for name in names]
        return None if any(p is None for p in found) else with_shared_seeds(found)

    def command(self, only):
        """What runs them; the colon keeps MNIST apart from Fashion-MNIST."""
        start = "" if self.name == "papers" else ": "
        return f"`--suite {self.name} --only '{start}{only}'`"


def with_shared_seeds(parts):
    """The parts with the seeds that all of them have; results of scripts as they are."""
    if any("seeds" not in part for part in parts):
        return parts
    shared = set.intersection(*({row["seed"] for row in part["seeds"]} for part in parts))
    return [{**p, "seeds": [r for r in p["seeds"] if r["seed"] in shared]} for p in parts]


def seeds_of(part):
    found = part["seeds"] if "seeds" in part else part["result"]
    return str(len(found)) if isinstance(found, list) else ""


def spread(values, form="{:.1f}"):
    text = form.format(np.mean(values))
    return f"{text} ± {form.format(np.std(values, ddof=1))}" if len(values) > 1 else text


def first_rounds(part, target):
    at, last = part["targets"].index(target), part["experiment"]["rounds"] + 1
    found = [row["rounds_to"][at] for row in part["seeds"]]
    return np.array([last if r is None else r for r in found], float), found.count(None)


def rounds_text(part, target):
    values, missing = first_rounds(part, target)
    if missing == len(values):
        return f"not in {part['experiment']['rounds']}"
    text = spread(values)
    return f"≥ {text} ({len(values) - missing} of {len(values)} seeds)" if missing else text


def rounds_row(suite, paper, claim, setting, method, base, target, papers):
    """Rounds to a target of a method and its baseline; `papers` are the paper's two numbers."""
    theirs = " against ".join("N/A" if p is None else f"{p:g}" for p in papers)
    theirs = "no number" if papers == (None, None) else theirs
    command = suite.command(f"{setting}, ")
    found = suite.get(setting, method, base)
    if found is None:
        return [paper, claim, theirs, NOT_RUN, "", command, NOT_RUN]
    ours, other = found
    (a, missing_a), (b, missing_b) = first_rounds(ours, target), first_rounds(other, target)
    text = f"{rounds_text(ours, target)} against {rounds_text(other, target)}"
    if (missing_a and missing_b) or len(a) < 3:
        return [paper, claim, theirs, text, seeds_of(ours), command, UNDECIDED]
    interval = paired_interval(np.log(b / a).tolist())
    gain, low = np.exp(interval.mean) - 1, np.exp(interval.low) - 1
    theirs_gain = papers[1] / papers[0] - 1 if None not in papers else 0.0
    word = verdict(gain, low, theirs_gain, SMALLEST_GAIN)
    text += f": {gain + 1:.2f}x fewer"
    return [paper, claim, theirs, text, seeds_of(ours), command, word]


def accuracy_row(
    suite, paper, claim, setting, method, base, papers, key="accuracy", base_setting=None
):
    """Accuracy in percent of a method and its baseline, as a difference in points."""
    theirs = "no number" if papers == (0, 0) else f"{papers[0]:g} against {papers[1]:g}"
    command = suite.command(f"{setting}, ")
    found = suite.get_each((setting, method), (base_setting or setting, base))
    if found is None:
        return [paper, claim, theirs, NOT_RUN, "", command, NOT_RUN]
    a, b = (np.array([100 * row[key] for row in part["seeds"]]) for part in found)
    text = f"{spread(a)} against {spread(b)}"
    if len(a) < 3:
        return [paper, claim, theirs, text, seeds_of(found[0]), command, UNDECIDED]
    interval = paired_interval((a - b).tolist())
    word = verdict(interval.mean, interval.low, papers[0] - papers[1], SMALLEST_POINTS)
    return [paper, claim, theirs, text, seeds_of(found[0]), command, word]


def lower_row(suite, paper, claim, theirs, setting, method, bases, key, form="{:.2f}"):
    """Whether a number is below every baseline's, beyond the interval of paired seeds."""
    command = suite.command(f"{setting}, ")
    found = suite.get(setting, method, *bases)
    if found is None:
        return [paper, claim, theirs, NOT_RUN, "", command, NOT_RUN]
    own, *others = (np.array([row[key] for row in part["seeds"]]) for part in found)
    names = zip((method, *bases), (own, *others), strict=True)
    text = ", ".join(f"{name} {spread(values, form)}" for name, values in names)
    if len(own) < 3:
        return [paper, claim, theirs, text, seeds_of(found[0]), command, UNDECIDED]
    lower = all(paired_interval((other - own).tolist()).low > 0 for other in others)
    word = HOLDS if lower else FAILS
    return [paper, claim, theirs, text, seeds_of(found[0]), command, word]


def curve_row(suite, paper, claim, setting, method="race-softmax", base="uniform"):
    """Share of evaluated rounds with the mean curve above the baseline's; mean difference."""
    command = suite.command(f"{setting}, ")
    found = suite.get(setting, method, base)
    if found is None:
        return [paper, claim, "above in almost every round", NOT_RUN, "", command, NOT_RUN]
    a, b = (100 * np.array([row["curve"] for row in part["seeds"]], float) for part in found)
    known = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
    a, b = a[:, known], b[:, known]
    above = np.mean(a.mean(axis=0) > b.mean(axis=0))
    interval = paired_interval((a - b).mean(axis=1).tolist())
    text = (
        f"above in {above:.0%} of the rounds; mean difference {interval.mean:+.1f} points "
        f"({interval.low:+.1f} to {interval.high:+.1f})"
    )
    word = FAILS if interval.low <= 0 else HOLDS if above >= 0.9 else WEAKER
    return [paper, claim, "above in almost every round", text, seeds_of(found[0]), command, word]


def script_row(suite, paper, claim, papers, setting, variant, read):
    """A row of a script's result; `read` returns what we found and a verdict."""
    command = suite.command(f"{setting}, {variant}")
    found = suite.get(setting, variant)
    if found is None:
        return [paper, claim, papers, NOT_RUN, "", command, NOT_RUN]
    text, word = read(found[0]["result"])
    return [paper, claim, papers, text, str(len(found[0]["experiment"]["seeds"])), command, word]
