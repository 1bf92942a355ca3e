"""Claims of papers beside the parts of a suite, with verdicts by rule.

- A comparison holds if the method is better than its baseline beyond the 95 % interval of paired
  seeds (Student's t), by an effect that matters, and has at least half of the paper's gain; it
  holds weaker with less of the gain; it does not hold if it is level or worse.
- An effect matters from half a point of accuracy or 5 % of the rounds, or of another number, on.
- Rounds to a target are judged by the first hit, as in the papers. Beside it are the rounds below
  the target, which do not depend on one lucky evaluation and count a seed that never gets there.
- Where the paper gives no number, better beyond the interval is enough to hold.
- It is not decidable if seeds of both never reached the target, or if there are fewer than three.
- Other rows state their rule in the claim. What scripts measured is judged by functions, whose
  docstring is the claim.
"""

from __future__ import annotations

import numpy as np
from docs_tables.results import (
    SMALLEST_POINTS,
    difference,
    missing,
    rounds_below,
    rounds_cell,
    rounds_to,
    spread,
    values_of,
    with_shared_seeds,
)

from fedcohort.analysis.comparison import paired_interval

HOLDS, WEAKER, FAILS = "holds", "holds weaker", "does not hold"
UNDECIDED, NOT_RUN = "not decidable", "not run"
VERDICTS = HOLDS, WEAKER, FAILS, UNDECIDED, NOT_RUN

SMALLEST_GAIN = 0.05
MIN_SEEDS = 3


def verdict(gain, low, papers, smallest=0.0):
    """By a gain, the lower end of its interval and the paper's gain; 0 is no gain."""
    if low <= 0 or gain < smallest:
        return FAILS
    return HOLDS if gain >= papers / 2 else WEAKER


def judged(text, differences, papers=0.0, smallest=0.0):
    """What was measured, and the verdict on the differences of paired seeds."""
    if len(differences) < MIN_SEEDS:
        return text, UNDECIDED
    interval = paired_interval(differences)
    return text, verdict(interval.mean, interval.low, papers, smallest)


class Suite:
    """The parts of a suite's result file, by setting and variant; empty if there is no file.

    Its methods make one row each: paper and form, the claim, the paper's numbers, ours, seeds, what
    runs it, the verdict.
    """

    def __init__(self, name, results):
        self.name = name
        self.parts = {(p["setting"], p["variant"]): p for p in (results or {"parts": []})["parts"]}

    def row(self, paper, claim, theirs, names, judge, only=""):
        """A claim about parts, which `names` are pairs of setting and variant of.

        `judge` says in words what they measured, over the seeds that all have, and the verdict.
        """
        start = "" if self.name == "papers" else ": "  # keeps MNIST apart from Fashion-MNIST
        command = f"`--suite {self.name} --only '{start}{names[0][0]}, {only}'`"
        text, seeds, word = NOT_RUN, "", NOT_RUN
        if all(name in self.parts for name in names):
            parts = with_shared_seeds([self.parts[name] for name in names])
            text, word = judge(*parts)
            first = parts[0]
            seeds = str(len((first if "seeds" in first else first["experiment"])["seeds"]))
        return [*paper, claim, theirs, text, seeds, command, word]

    def rounds(self, paper, claim, setting, method, base, target, papers):
        """Rounds to a target of a method and its baseline; `papers` are the paper's two numbers."""

        def judge(ours, other):
            text = f"{rounds_cell(ours, target)} against {rounds_cell(other, target)}"
            below = " against ".join(
                spread(rounds_below(p, target), "{:.0f}") for p in (ours, other)
            )
            logs = np.log(rounds_to(other, target) / rounds_to(ours, target))
            if (missing(ours, target) and missing(other, target)) or len(logs) < MIN_SEEDS:
                return f"{text}; below it {below}", UNDECIDED
            interval = paired_interval(logs)
            theirs_gain = papers[1] / papers[0] - 1 if None not in papers else 0.0
            gain, low = np.expm1([interval.mean, interval.low])
            text = f"{text}: {gain + 1:.2f}x fewer; below it {below}"
            return text, verdict(gain, low, theirs_gain, SMALLEST_GAIN)

        theirs = " against ".join("N/A" if p is None else f"{p:g}" for p in papers)
        theirs = "no number" if papers == (None, None) else theirs
        return self.row(paper, claim, theirs, [(setting, method), (setting, base)], judge)

    def accuracy(self, paper, claim, setting, method, base, papers=(0, 0), base_setting=None):
        """Accuracy in percent of a method and its baseline, as a difference in points."""

        def judge(*parts):
            a, b = (100 * values_of(part, "accuracy") for part in parts)
            return judged(f"{spread(a)} against {spread(b)}", a - b, gain, SMALLEST_POINTS)

        gain = papers[0] - papers[1]
        theirs = "no number" if papers == (0, 0) else f"{papers[0]:g} against {papers[1]:g}"
        names = [(setting, method), (base_setting or setting, base)]
        return self.row(paper, claim, theirs, names, judge)

    def lower(self, paper, claim, setting, method, bases, key, form="{:.2f}"):
        """Whether a number is below every baseline's, beyond the interval of paired seeds."""

        def judge(*parts):
            values = [values_of(part, key) for part in parts]
            named = zip((method, *bases), values, strict=True)
            text = ", ".join(f"{name} {spread(each, form)}" for name, each in named)
            words = [
                judged(text, other - values[0], smallest=SMALLEST_GAIN * abs(other.mean()))[1]
                for other in values[1:]
            ]
            return text, next((word for word in words if word != HOLDS), HOLDS)

        names = [(setting, name) for name in (method, *bases)]
        return self.row(paper, claim, "qualitative", names, judge)

    def curve(self, paper, claim, setting, method="race-softmax"):
        """Share of evaluated rounds with the mean curve above random cohorts'; mean difference."""

        def judge(*parts):
            a, b = (100 * values_of(part, "curve").astype(float) for part in parts)
            evaluated = np.isfinite(a).all(axis=0) & np.isfinite(b).all(axis=0)
            a, b = a[:, evaluated], b[:, evaluated]
            above = np.mean(a.mean(axis=0) > b.mean(axis=0))
            points = (a - b).mean(axis=1)
            text = f"above in {above:.0%} of the rounds; mean difference "
            text, word = judged(f"{text}{difference(points)[0]} points", points, 0, SMALLEST_POINTS)
            return text, WEAKER if word == HOLDS and above < 0.9 else word

        names = [(setting, method), (setting, "uniform")]
        return self.row(paper, claim, "above in almost every round", names, judge)

    def script(self, paper, figure, variant, judge, theirs="qualitative"):
        """What a script measured; the docstring of `judge` is the claim."""
        claim, names = " ".join(judge.__doc__.split()), [(f"paper {paper[0]}, {figure}", variant)]
        return self.row(paper, claim, theirs, names, lambda part: judge(part["result"]), variant)


def of(rows, key, form):
    return spread([row[key] for row in rows], form)


def separation(rows):
    """sketch distance separates distributions (Figure 1): every two uniform subsets are closer than
    any two Dirichlet ones, and a Dirichlet subset is equally far from all uniform ones (within
    10 %)
    """
    a, b, across = (of(rows, key, "{:.2f}") for key in ("within A", "within B", "A to B"))
    apart = all(r["within B, largest"] < r["within A, smallest"] for r in rows)
    even = max(r["A to B, relative spread over B"] for r in rows)
    text = f"uniform subsets {b} apart, Dirichlet ones {a}, across {across}; a Dirichlet subset's "
    text += f"distances to the uniform ones differ by at most {even:.1%}"
    return text, HOLDS if apart and even < 0.1 else FAILS


def total_variation(rows):
    """sketch distance tracks total variation (Figure 4): rank correlation with the exact one above
    0.9
    """
    smallest = min(r["rank correlation"] for r in rows)
    text = (
        f"rank correlation {of(rows, 'rank correlation', '{:.3f}')}, smallest {smallest:.3f}; the"
    )
    text += f" estimate itself is off by {of(rows, 'plug-in error', '{:.2f}')}"
    return text, HOLDS if smallest > 0.9 else FAILS


def calibrated(rows):
    """the total variation that `fedcohort distance --kind total-variation` estimates is the exact
    one (Figure 4): it lies in the 95 % interval for at least 90 % of the pairs
    """
    if "calibrated error" not in rows[0]:
        return NOT_RUN, NOT_RUN
    inside = np.mean([row["inside the interval"] for row in rows])
    text = f"inside for {inside:.0%}; off by {of(rows, 'calibrated error', '{:.2f}')}"
    return text, HOLDS if inside >= 0.9 else FAILS


def mean_points(rows, key):
    """A number of each point, as a mean over the seeds."""
    return np.mean([[point[key] for point in row["points"]] for row in rows], axis=0)


def slope(x, y):
    """Of the logarithms: the exponent of a power law."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def median(rows):
    """the sketch is a consistent estimator of the density (Algorithm 4, Theorem 3.3): the error of
    the median over rows falls as 1/√rows (exponent within 0.15)
    """
    columns = {key: mean_points(rows, key) for key in rows[0]["points"][0]}
    sizes = columns.pop("rows")
    text = [f"{way} {', '.join(f'{value:.4f}' for value in by)}" for way, by in columns.items()]
    counts = ", ".join(f"{size:,.0f}" for size in sizes)
    word = HOLDS if slope(sizes, columns["median"]) < -0.35 else FAILS
    return f"error at {counts} rows: {'; '.join(text)}", word


def private_error(rows):
    """the private sketch converges (Theorems 3.3 and 3.4): noise falls as 1/n and 1/epsilon and
    grows as √rows (exponents within 0.15), and the error falls with n at rows = √n; ours takes the
    mean over rows, the paper the median of means
    """
    points, n = rows[0]["points"], max(p["n"] for p in rows[0]["points"])
    fixed = {"n": {"rows": 20, "epsilon": 1.0}, "epsilon": {"rows": 20, "n": n}}
    fixed["rows"] = {"epsilon": 1.0, "n": n}
    powers = []  # of the noise in each variable, the others fixed
    for key, values in fixed.items():
        chosen = [[p for p in r["points"] if p.items() >= values.items()] for r in rows]
        slopes = [slope([p[key] for p in ps], [p["noise"] for p in ps]) for ps in chosen]
        powers.append(np.mean(slopes))
    whole = zip(points, mean_points(rows, "all"), strict=True)
    along = {p["n"]: error for p, error in whole if p["rows"] == int(p["n"] ** 0.5)}
    text = "noise grows as n^{:.2f}, epsilon^{:.2f}, rows^{:.2f}; with rows = √n".format(*powers)
    text += f" the whole error is {', '.join(f'{error:.4f}' for error in along.values())}"
    text += f" at n = {', '.join(f'{m:,}' for m in along)}"
    good = np.abs(np.subtract(powers, (-1, -1, 0.5))).max() < 0.15
    falls = (np.diff(list(along.values())) < 0).all()
    return text, HOLDS if good and falls else FAILS


def covariance(rows):
    """the covariance is stationary (Figure 3): cosine over ten rounds above 0.97; Fashion-MNIST
    1SPC, many cohorts per estimate, corrected for the noise of the estimates
    """
    raw, corrected = (
        np.mean([list(r[key].values()) for r in rows], axis=0)
        for key in ("cosine", "without noise")
    )
    labels = [one for r in rows for one in r["same label"]]
    pairs = zip(rows[0]["cosine"], corrected, strict=True)
    text = f"{', '.join(f'{v:.3f} ({pair})' for pair, v in pairs)}; {raw.min():.3f} to "
    text += f"{raw.max():.3f} without the correction; correlation "
    text += "{:.2f} within a label, {:.2f} between labels".format(
        *(np.mean([one[key] for one in labels]) for key in ("same", "other"))
    )
    return text, HOLDS if corrected.min() > 0.97 else FAILS


def embedding(rows):
    """embeddings after the warm-up cluster by label (Figure 7): the most similar client has the
    same label for more than 90 % of the clients; Fashion-MNIST 1SPC
    """
    same, other = (of(rows, key, "{:.2f}") for key in ("same", "other"))
    near = np.mean([r["nearest has the same label"] for r in rows])
    text = f"mean cosine {same} within a label, {other} between labels; the most similar client has"
    text += f" the same label for {near:.0%} of the clients"
    return text, HOLDS if near > 0.9 else FAILS


def reward(rows):
    """the bandit selects clients of higher reward than random cohorts (Figure 5), low
    heterogeneity
    """
    ours, other = (np.array([r[k] for r in rows]) for k in ("fedacs", "random"))
    above = np.mean(ours.mean(axis=0) > other.mean(axis=0))
    ours, other = ours.mean(axis=1), other.mean(axis=1)
    text = f"{spread(ours, '{:.3f}')} against {spread(other, '{:.3f}')}; above in {above:.0%} of "
    text += f"the first {len(rows[0]['random'])} rounds"
    return judged(text, ours - other, smallest=SMALLEST_GAIN * abs(other.mean()))


def initialization(rows):
    """the kernel hardly depends on how the first model is drawn (Figures 4 and 5): entries of the
    kernels of 20 clients under four initializations correlate by more than 0.9
    """
    kernels, profiles = (min(r[k] for r in rows) for k in ("kernels", "profiles"))
    text = f"smallest correlation between two kernels {kernels:.3f}, between two sets of profiles "
    return f"{text}{profiles:.3f}", HOLDS if kernels > 0.9 else FAILS
