"""What the scripts of claims.py measured, in words, and a verdict on each.

The rules are in the claims of reproductions.py.
"""

from __future__ import annotations

import itertools

import numpy as np
from verdicts import FAILS, HOLDS, UNDECIDED, spread

from fedcohort.analysis.comparison import paired_interval


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


def covariance(rows):
    def means(key):
        return {k: np.mean([r[key][k] for r in rows]) for k in rows[0][key]}

    def text(values):
        return ", ".join(f"{v:.3f} ({k})" for k, v in values.items())

    same = np.mean([s["same"] for r in rows for s in r["same label"]])
    other = np.mean([s["other"] for r in rows for s in r["same label"]])
    labels = f"correlation {same:.2f} within a label, {other:.2f} between labels"
    raw = means("cosine")
    if "without noise" not in rows[0]:
        # Two estimates of one covariance of effective rank r from n samples have a cosine of about
        # n / (n + 1 + r); clients of ten labels have an effective rank of up to nine.
        most = rows[0]["cohorts"] / (rows[0]["cohorts"] + 10)
        noise = f"not corrected; two estimates of the same covariance would have about {most:.2f}"
        return f"{text(raw)}, {noise}; {labels}", UNDECIDED
    corrected = means("without noise")
    plain = f"{min(raw.values()):.3f} to {max(raw.values()):.3f} without the correction"
    word = HOLDS if min(corrected.values()) > 0.97 else FAILS
    return f"{text(corrected)}; {plain}; {labels}", word


def embedding(rows):
    same, other, near = (
        [r[k] for r in rows] for k in ("same", "other", "nearest has the same label")
    )
    text = (
        f"mean cosine {spread(same, '{:.2f}')} within a label, {spread(other, '{:.2f}')} between "
        f"labels; the most similar client has the same label for {np.mean(near):.0%} of the clients"
    )
    return text, HOLDS if np.mean(near) > 0.9 else FAILS


def reward(rows):
    gains = [np.mean(np.subtract(r["fedacs"], r["random"])) for r in rows]
    own, other = ([np.mean(r[k]) for r in rows] for k in ("fedacs", "random"))
    means = {k: np.mean([r[k] for r in rows], axis=0) for k in ("fedacs", "random")}
    above = np.mean(means["fedacs"] > means["random"])
    text = (
        f"{spread(own, '{:.3f}')} against {spread(other, '{:.3f}')}; above in {above:.0%} of the "
        f"first {len(means['random'])} rounds"
    )
    if len(gains) < 3:
        return text, UNDECIDED
    return text, HOLDS if paired_interval(gains).low > 0 else FAILS


def initialization(rows):
    kernels, profiles = ([r[k] for r in rows] for k in ("kernels", "profiles"))
    text = (
        f"smallest correlation between two kernels {min(kernels):.3f}, between two sets of "
        f"profiles {min(profiles):.3f}"
    )
    return text, HOLDS if min(kernels) > 0.9 else FAILS
