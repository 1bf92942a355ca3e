"""The claims of the five papers beside what the suites measured, with verdicts by rule.

`docs_numbers.py` writes these rows into docs/reproductions.md. A row whose parts were not run says
so. The rules:

- a comparison holds if the method is better than its baseline beyond the 95 % bootstrap interval of
  paired seeds and has at least half of the paper's gain; it holds weaker with less of the gain; it
  does not hold if it is level or worse;
- where the paper gives no number, better beyond the interval is enough to hold;
- it is not decidable if seeds of both never reached the target, or if there are fewer than three;
- other rows state their rule in the claim.
"""

# ruff: noqa: E501  (rows of a table)
from __future__ import annotations

import itertools

import numpy as np

from fedcohort.report.tables import paired_interval

HOLDS, WEAKER, FAILS = "holds", "holds weaker", "does not hold"
UNDECIDED, NOT_RUN = "not decidable", "not run"


def verdict(gain, low, papers):
    """By a gain, the lower end of its interval and the paper's gain; 0 is no gain."""
    if low <= 0:
        return FAILS
    return HOLDS if gain >= papers / 2 else WEAKER


class Suite:
    """The parts of one result file, by setting and variant; empty if there is no file."""

    def __init__(self, result, name):
        self.name = name
        self.parts = (
            {} if result is None else {(p["setting"], p["variant"]): p for p in result["parts"]}
        )

    def get(self, setting, *variants):
        """The parts of a setting; None if one of them was not run."""
        found = [self.parts.get((setting, v)) for v in variants]
        return None if any(p is None for p in found) else found

    def command(self, only):
        return f"`fedcohort benchmark --suite {self.name} --only '{only}'`"


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
    word = verdict(gain, low, papers[1] / papers[0] - 1 if None not in papers else 0.0)
    text += f": {gain + 1:.2f}x fewer"
    return [paper, claim, theirs, text, seeds_of(ours), command, word]


def accuracy_row(suite, paper, claim, setting, method, base, papers, key="accuracy"):
    """Accuracy in percent of a method and its baseline, as a difference in points."""
    theirs = "no number" if papers == (0, 0) else f"{papers[0]:g} against {papers[1]:g}"
    command = suite.command(f"{setting}, ")
    found = suite.get(setting, method, base)
    if found is None:
        return [paper, claim, theirs, NOT_RUN, "", command, NOT_RUN]
    a, b = (np.array([100 * row[key] for row in part["seeds"]]) for part in found)
    text = f"{spread(a)} against {spread(b)}"
    if len(a) < 3:
        return [paper, claim, theirs, text, seeds_of(found[0]), command, UNDECIDED]
    interval = paired_interval((a - b).tolist())
    word = verdict(interval.mean, interval.low, papers[0] - papers[1])
    return [paper, claim, theirs, text, seeds_of(found[0]), command, word]


def curve_row(suite, claim, setting, method="race-softmax", base="uniform"):
    """Share of evaluated rounds in which the mean curve is above the baseline's; mean difference."""
    command = suite.command(f"{setting}, ")
    found = suite.get(setting, method, base)
    if found is None:
        return ["0", claim, "above in almost every round", NOT_RUN, "", command, NOT_RUN]
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
    return ["0", claim, "above in almost every round", text, seeds_of(found[0]), command, word]


def script_row(suite, paper, claim, papers, setting, variant, read):
    """A row of a script's result; `read` returns what we found and a verdict."""
    command = suite.command(f"{setting}, {variant}")
    found = suite.get(setting, variant)
    if found is None:
        return [paper, claim, papers, NOT_RUN, "", command, NOT_RUN]
    text, word = read(found[0]["result"])
    return [paper, claim, papers, text, str(len(found[0]["experiment"]["seeds"])), command, word]


def _separation(rows):
    within_a, within_b, between = ([r[k] for r in rows] for k in ("within A", "within B", "A to B"))
    apart = all(r["within B, largest"] < r["within A, smallest"] for r in rows)
    even = max(r["A to B, relative spread over B"] for r in rows)
    text = (
        f"uniform subsets {spread(within_b, '{:.2f}')} apart, Dirichlet ones "
        f"{spread(within_a, '{:.2f}')}, across {spread(between, '{:.2f}')}; a Dirichlet subset's "
        f"distances to the uniform ones differ by at most {even:.1%}"
    )
    return text, HOLDS if apart and even < 0.1 else FAILS


def _total_variation(rows):
    correlation = [r["rank correlation"] for r in rows]
    text = f"rank correlation {spread(correlation, '{:.3f}')}, smallest {min(correlation):.3f}"
    return text, HOLDS if min(correlation) > 0.9 else FAILS


def exponent(points, key, value, fixed):
    """Slope of log error over the log of one variable, the others fixed."""
    chosen = [p for p in points if all(p[k] == v for k, v in fixed.items())]
    return float(
        np.polyfit(np.log([p[key] for p in chosen]), np.log([p[value] for p in chosen]), 1)[0]
    )


def _private_error(rows):
    n = max(p["n"] for p in rows[0]["points"])
    laws = {
        "n": ("noise", {"rows": 20, "epsilon": 1.0}, -1.0),
        "epsilon": ("noise", {"rows": 20, "n": n}, -1.0),
        "rows": ("noise", {"epsilon": 1.0, "n": n}, 0.5),
    }
    found = {
        key: np.mean([exponent(r["points"], key, value, fixed) for r in rows])
        for key, (value, fixed, _) in laws.items()
    }
    sizes = sorted({p["n"] for p in rows[0]["points"]})
    along = [
        np.mean(
            [
                p["all"]
                for r in rows
                for p in r["points"]
                if p["n"] == m and p["rows"] == int(np.sqrt(m))
            ]
        )
        for m in sizes
    ]
    good = all(abs(found[k] - law) < 0.15 for k, (_, _, law) in laws.items())
    text = (
        f"noise grows as n^{found['n']:.2f}, epsilon^{found['epsilon']:.2f}, "
        f"rows^{found['rows']:.2f}; with rows = √n the whole error is "
        + ", ".join(f"{e:.4f}" for e in along)
        + f" at n = {', '.join(f'{m:,}' for m in sizes)}"
    )
    falls = all(b < a for a, b in itertools.pairwise(along))
    return text, HOLDS if good and falls else FAILS


def _covariance(rows):
    values = {k: np.mean([r["cosine"][k] for r in rows]) for k in rows[0]["cosine"]}
    text = ", ".join(f"{v:.3f} ({k})" for k, v in values.items())
    same = np.mean([s["same"] for r in rows for s in r["same label"]])
    other = np.mean([s["other"] for r in rows for s in r["same label"]])
    text += f"; correlation {same:.2f} within a label, {other:.2f} between labels"
    # Two estimates of one covariance of effective rank r from n samples have a cosine of about
    # n / (n + 1 + r); clients of ten labels have an effective rank of up to nine.
    most = rows[0]["cohorts"] / (rows[0]["cohorts"] + 10)
    text += f"; two estimates of the same covariance would have about {most:.2f}"
    if min(values.values()) > 0.97:
        return text, HOLDS
    return text, UNDECIDED if most <= 0.97 else FAILS


def _cold_start(papers):
    def read(result):
        split = result["splits"][0]
        exact = next(r for r in split["retrieval"] if r["epsilon"] is None)
        near, whole = exact["accuracy"]["nearest"]["seeds"], split["baselines"]["global"]["seeds"]
        text = f"{spread(near, '{:.3f}')} against {spread(whole, '{:.3f}')}"
        if len(near) < 3:
            return text, UNDECIDED
        interval = paired_interval((np.array(near) - whole).tolist())
        return text, verdict(interval.mean, interval.low, papers[0] - papers[1])

    return read


def paper_0(papers, cold):
    yield script_row(
        papers, "0", "sketch distance separates distributions (Figure 1): every two uniform subsets "
        "are closer than any two Dirichlet ones, and a Dirichlet subset is equally far from all "
        "uniform ones (within 10 %)", "qualitative", "paper 0, Figure 1", "sketch distance", _separation,
    )  # fmt: skip
    yield script_row(
        papers, "0", "sketch distance tracks total variation (Figure 4): rank correlation with the "
        "exact one above 0.9", "qualitative", "paper 0, Figure 4", "sketches", _total_variation,
    )  # fmt: skip
    yield script_row(
        papers, "0", "the private sketch converges (Theorem 3.4): noise falls as 1/n and 1/epsilon and "
        "grows as √rows (exponents within 0.15), and the error falls with n at rows = √n",
        "rate", "paper 0, Theorem 3.4", "sketches", _private_error,
    )  # fmt: skip
    for setting, claim in {
        "paper 0, MNIST Dirichlet 0.5": "faster than random, MNIST Dirichlet 0.5 (Figure 2); 40 of 200 rounds",
        "paper 0, MNIST uniform plus Dirichlet": "the same, MNIST uniform plus Dirichlet; 40 of 200 rounds",
        "paper 0, FEMNIST": "the same, FEMNIST; fewer writers than the paper's",
        "paper 0, Shakespeare": "the same, Shakespeare; 500 windows per role at most",
        "paper 0, CIFAR-10 sizes": "the same, CIFAR-10 with IID labels and sizes 100 to 700 (C.2)",
    }.items():
        yield curve_row(papers, claim, setting)
    for setting, variant, numbers, claim in (
        ("MNIST", "twins", (0.970, 0.879), "cold start (Table 1): nearest sketch's model against the global one; MNIST, a warm twin for every newcomer, as the released code"),
        ("MNIST", "as the text reads", (0.970, 0.879), "the same, warm and cold clients drawn at random, as the text reads"),
        ("MNIST", "no twins", (0.970, 0.879), "the same, no warm client with both classes of a newcomer (not in the paper)"),
        ("FEMNIST", "by writer", (0.694, 0.667), "the same, FEMNIST; fewer writers than the paper's"),
        ("Shakespeare", "all roles", (0.346, 0.324), "the same, Shakespeare; 500 windows per role at most"),
    ):  # fmt: skip
        theirs = f"{numbers[0]:.3f} against {numbers[1]:.3f}"
        yield script_row(cold, "0", claim, theirs, setting, variant, _cold_start(numbers))


def paper_1(papers):
    for level, terminal, rounds in (
        ("low", (72.5, 69.7), (130, 270)),
        ("high", (72.1, 68.4), (155, 365)),
    ):
        setting = f"paper 1, {level} heterogeneity"
        yield accuracy_row(
            papers, "1", f"FedACS, {level} heterogeneity (Table I): accuracy over the last rounds; 300 of 1,000 "
            "rounds, 3 seeds", setting, "fedacs", "uniform", terminal,
        )  # fmt: skip
        yield rounds_row(
            papers, "1", f"FedACS, {level} heterogeneity (Table II): rounds to 65 %", setting, "fedacs", "uniform",
            0.65, rounds,
        )  # fmt: skip
        yield accuracy_row(
            papers, "1", f"random above CMFL, {level} heterogeneity (Table I)", setting, "uniform", "cmfl",
            (terminal[1], 64.8 if level == "low" else 62.9),
        )  # fmt: skip
    yield accuracy_row(
        papers, "1", "lambda = 0.4 above 0.8 (Figure 4)",
        "paper 1, low heterogeneity", "fedacs", "fedacs, lambda 0.8", (0, 0),
    )  # fmt: skip


def paper_2(skip):
    """Uploads and the change of accuracy, against redrawn and against held random cohorts."""
    theirs = "up 0.57 to 31.25 %, down 0.21 to 28.28 %, accuracy -6.47 to +34.22 % (medians)"
    for dataset in ("MNIST", "Fashion-MNIST", "CIFAR-10"):
        for case in ("IID", "one label per node"):
            setting = f"{dataset}, {case}"
            skips = ["select, skip 0.02", "select, skip 0.05", "select, skip 0.1"]
            skips += ["select, skip 0.01"] if dataset == "CIFAR-10" else ["select, skip 0.2"]
            base = ["uniform"] + (["uniform, held"] if case != "IID" else [])
            claim = f"skipping and selecting, {setting}: medians over {len(skips)} thresholds"
            command = skip.command(f"{setting}, ")
            found = skip.get(setting, *skips, *base)
            if found is None:
                yield ["2", claim, theirs, NOT_RUN, "", command, NOT_RUN]
                continue
            gated, bases = found[: len(skips)], found[len(skips) :]
            up, down = (
                np.median([np.mean([r["overhead"][k] for r in p["seeds"]]) for p in gated])
                for k in ("up", "down_to_all")
            )
            accuracy = [np.mean([r["accuracy"] for r in p["seeds"]]) for p in gated]
            changes = []
            for name, part in zip(("redrawn", "held"), bases, strict=False):
                own = np.mean([r["accuracy"] for r in part["seeds"]])
                changes.append((name, 100 * (np.median(accuracy) / own - 1)))
            text = f"up {up:.2f} %, down {down:.2f} %, accuracy " + ", ".join(
                f"{c:+.1f} % against {name} cohorts" for name, c in changes
            )
            within = up <= 31.25 and down <= 28.28 and max(c for _, c in changes) >= -6.47
            yield [
                "2",
                claim,
                theirs,
                text,
                seeds_of(gated[0]),
                command,
                HOLDS if within else FAILS,
            ]
    for dataset in ("MNIST", "Fashion-MNIST", "CIFAR-10"):
        setting = f"{dataset}, one label per node"
        for base in ("uniform, held", "uniform"):
            kind = "held for the interval" if "held" in base else "redrawn every round"
            yield accuracy_row(
                skip, "2", f"selection alone above random cohorts {kind}, {setting}",
                setting, "select", base, (0, 0),
            )  # fmt: skip


TABLE_1 = {  # paper 3: Rand, AFL, Pow-d, FedCor
    "2SPC": (0.69, 295.8, 218.6, 126.6, 94.8),
    "1SPC": (0.62, None, None, 167.2, 84.0),
    "Dir": (0.64, 141.0, 169.0, 123.0, 68.8),
}


SCALINGS = {
    "raw pixels": "raw pixels",
    "released code": "the released network, with dropout",
    "standardized": "standardized pixels",
}


def paper_3(papers):
    for split, (target, random, afl, pow_d, fedcor) in TABLE_1.items():
        for way, words in SCALINGS.items():
            setting, goal = f"paper 3, Fashion-MNIST {split}, {way}", f"{target:.0%}"
            base = f"Fashion-MNIST {split}, rounds to {goal} (Table 1), {words}: "
            yield rounds_row(
                papers,
                "3",
                base + "FedCor against random",
                setting,
                "fedcor",
                "uniform",
                target,
                (fedcor, random),
            )
            yield rounds_row(
                papers,
                "3",
                base + "FedCor against Pow-d",
                setting,
                "fedcor",
                "power-of-choice, d=10",
                target,
                (fedcor, pow_d),
            )
            yield rounds_row(
                papers,
                "3",
                base + "FedCor against AFL",
                setting,
                "fedcor",
                "active-fl",
                target,
                (fedcor, afl),
            )
            yield rounds_row(
                papers,
                "3",
                base + "literal FedCor, whose selection leaves the noise out, against random",
                setting,
                "fedcor, literal",
                "uniform",
                target,
                (fedcor, random),
            )
    setting = "paper 3, CIFAR-10 2SPC"
    yield rounds_row(
        papers,
        "3",
        "CIFAR-10 2SPC, rounds to 62 % (Table 1); 1,200 of 2,000 rounds, 2 seeds: FedCor against random",
        setting,
        "fedcor",
        "uniform",
        0.62,
        (1033.4, 1561.2),
    )
    yield script_row(
        papers, "3", "the covariance is stationary (Figure 3): cosine over ten rounds above 0.97; "
        "Fashion-MNIST 1SPC, 200 cohorts per estimate", "above 0.97", "paper 3, Figure 3", "covariance", _covariance,
    )  # fmt: skip
    setting = "paper 3, Fashion-MNIST 1SPC, standardized"
    yield rounds_row(
        papers,
        "3",
        "never fitted again after the warm-up, FedCor is still faster than random (Figure 5)",
        setting,
        "fedcor, interval 500, beta 0.99",
        "uniform",
        0.62,
        (None, None),
    )
    yield rounds_row(
        papers,
        "3",
        "annealing matters (Figure 6): beta 0.95 against none",
        setting,
        "fedcor",
        "fedcor, beta 1",
        0.62,
        (None, None),
    )


def paper_4(papers):
    for xi in ("1", "0.8", "0.5", "H"):
        setting = f"paper 4, MNIST xi {xi}"
        numbers = (62, 127) if xi == "1" else (None, None)
        yield rounds_row(
            papers,
            "4",
            f"MNIST, xi = {xi}, rounds to 90 % (Figure 1); test set, our rates: FL-DP3S against random",
            setting,
            "kdpp",
            "uniform",
            0.9,
            numbers,
        )
    setting = "paper 4, MNIST xi 1"
    yield rounds_row(
        papers,
        "4",
        "MNIST, xi = 1: FL-DP3S against clustered sampling",
        setting,
        "kdpp",
        "clustered-sampling, similarity",
        0.9,
        (62, 122),
    )
    yield rounds_row(
        papers,
        "4",
        "MNIST, xi = 1: FL-DP3S against FedSAE",
        setting,
        "kdpp",
        "fedsae",
        0.9,
        (62, 259),
    )
    yield rounds_row(
        papers,
        "4",
        "MNIST, xi = 1: FC-1 profiles against gradients (Figure 3)",
        setting,
        "kdpp",
        "kdpp, gradients",
        0.9,
        (None, None),
    )
    yield rounds_row(
        papers,
        "4",
        "MNIST, xi = 1: FC-1 profiles against representative gradients (Figure 3)",
        setting,
        "kdpp",
        "kdpp, representative gradients",
        0.9,
        (None, None),
    )
    yield rounds_row(
        papers,
        "4",
        "MNIST, xi = 1: the paper's kernel of similarities against one of features (Figures 4 to 6)",
        setting,
        "kdpp",
        "kdpp, kernel of features",
        0.9,
        (None, None),
    )
    for base, words in (
        ("uniform", "random"),
        ("clustered-sampling, similarity", "clustered sampling"),
    ):
        claim = (
            f"MNIST, xi = 1, accuracy over the last of 150 rounds: FL-DP3S above {words} (Figure 1)"
        )
        yield accuracy_row(papers, "4", claim, setting, "kdpp", base, (0, 0))
    command = papers.command("paper 4, MNIST xi 1, ")
    names = ("uniform", "kdpp", "clustered-sampling, similarity", "fedsae")
    found = papers.get(setting, *names)
    claim = "lowest GEMD of the four (Figure 2), MNIST, xi = 1"
    if found is None:
        yield ["4", claim, "qualitative", NOT_RUN, "", command, NOT_RUN]
        return
    values = [np.mean([r["gemd"] for r in p["seeds"]]) for p in found]
    text = ", ".join(f"{n} {v:.2f}" for n, v in zip(names, values, strict=True))
    yield [
        "4",
        claim,
        "qualitative",
        text,
        seeds_of(found[0]),
        command,
        HOLDS if np.argmin(values) == 1 else FAILS,
    ]


def rows(results):
    """All rows; `results` returns a result file by name, or None."""
    papers = Suite(results("benchmark-papers.json"), "papers")
    skip = Suite(results("benchmark-skip.json"), "skip")
    cold = Suite(results("benchmark-coldstart.json"), "coldstart")
    return [
        *paper_0(papers, cold),
        *paper_1(papers),
        *paper_2(skip),
        *paper_3(papers),
        *paper_4(papers),
    ]
