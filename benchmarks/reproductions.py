"""The claims of the five papers beside what the suites measured.

`docs_numbers.py` writes these rows into docs/reproductions.md. A row whose parts were not run says
so. Where several rows share a setting, its words come first in the claim, then a line break. Rules
and verdicts are in verdicts.py; docs/reproductions.md names the rows that were added or changed
after results had been seen.
"""

# ruff: noqa: E501  (rows of a table)
from __future__ import annotations

import itertools

import numpy as np
from script_verdicts import (
    covariance,
    embedding,
    initialization,
    private_error,
    reward,
    separation,
    total_variation,
)
from verdicts import (
    FAILS,
    HOLDS,
    NOT_RUN,
    UNDECIDED,
    Suite,
    accuracy_row,
    curve_row,
    lower_row,
    rounds_row,
    script_row,
    seeds_of,
    spread,
    verdict,
)

from fedcohort.analysis.comparison import paired_interval


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
        "uniform ones (within 10 %)", "qualitative", "paper 0, Figure 1", "sketch distance", separation,
    )  # fmt: skip
    yield script_row(
        papers, "0", "sketch distance tracks total variation (Figure 4): rank correlation with the "
        "exact one above 0.9", "qualitative", "paper 0, Figure 4", "sketches", total_variation,
    )  # fmt: skip
    yield script_row(
        papers, "0", "the private sketch converges (Theorem 3.4): noise falls as 1/n and 1/epsilon and "
        "grows as √rows (exponents within 0.15), and the error falls with n at rows = √n",
        "rate", "paper 0, Theorem 3.4", "sketches", private_error,
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


# Accuracy over the last rounds and rounds to 65 %.
TABLES_1 = {
    "low": {"fedacs": (72.5, 130), "uniform": (69.7, 270), "cmfl": (64.8, 620)},
    "high": {"fedacs": (72.1, 155), "uniform": (68.4, 365), "cmfl": (62.9, 915)},
}

REWARDS_1 = {
    "fedacs": "reward by updates",
    "fedacs, gradients": "reward by full gradients",
    "fedacs, gradient sketch": "reward by 100 numbers per gradient (not in the paper)",
}

WAYS_1 = {  # by the end of the setting's name: in words, a target that all seeds reach, rewards
    "decaying rate": ("as the paper says", 0.5, list(REWARDS_1)[:2]),
    "released code": ("as in the released code", 0.6, list(REWARDS_1)),
}


def tables_1(papers, words, claim, setting, variants, numbers):
    """Tables I and II for a method and its baseline; `numbers` are the paper's pairs of both."""
    accuracies, rounds = zip(*numbers, strict=True)
    text = f"{words}\n{claim}: accuracy over the last rounds (Table I)"
    yield accuracy_row(papers, "1", text, setting, *variants, accuracies)
    text = f"{words}\n{claim}: rounds to 65 % (Table II)"
    yield rounds_row(papers, "1", text, setting, *variants, 0.65, rounds)


def paper_1(papers):
    for way, (reading, lower, rewards) in WAYS_1.items():
        for level, table in TABLES_1.items():
            setting = f"paper 1, {level} heterogeneity, {way}"
            words = f"CIFAR-10, {level} heterogeneity, {reading}; 400 of 1,000 rounds"
            for method in rewards:
                claim = f"FedACS, {REWARDS_1[method]}, against random"
                numbers = table["fedacs"], table["uniform"]
                yield from tables_1(papers, words, claim, setting, (method, "uniform"), numbers)
                claim = f"{words}\n{claim}: rounds to {lower:.0%} (not in the paper)"
                yield rounds_row(
                    papers, "1", claim, setting, method, "uniform", lower, (None, None)
                )
            if way == "released code":
                numbers, variants = (
                    (table["uniform"], table["cmfl"]),
                    ("uniform", "cmfl, released code"),
                )
                yield from tables_1(
                    papers, words, "random against CMFL", setting, variants, numbers
                )
            yield accuracy_row(
                papers, "1", f"CIFAR-10, IID clients, {reading}; each image on one client\nagainst random cohorts at "
                f"{level} heterogeneity (Table I)", f"paper 1, IID, {way}", "uniform", "uniform",
                (74.0, table["uniform"][0]), base_setting=setting,
            )  # fmt: skip
    for setting, method, words in (
        ("paper 1, low heterogeneity", "fedacs", "reward by updates, 300 rounds, the rate restarted in every round"),
        ("paper 1, low heterogeneity, released code", "fedacs, gradients", "reward by full gradients, as in the released code"),
    ):  # fmt: skip
        words = f"CIFAR-10, low heterogeneity, {words}\n"
        yield accuracy_row(
            papers, "1", f"{words}lambda = 0.4 above 0.6 (Figure 4)", setting, method, f"{method}, lambda 0.6", (0, 0),
        )  # fmt: skip
        yield accuracy_row(
            papers, "1", f"{words}lambda = 0.05 even below random (Figure 4)", setting, "uniform",
            f"{method}, lambda 0.05", (0, 0),
        )  # fmt: skip
    yield script_row(
        papers, "1", "the bandit selects clients of higher reward than random cohorts (Figure 5), low "
        "heterogeneity", "qualitative", "paper 1, Figure 5", "reward", reward,
    )  # fmt: skip


def _words_2(setting):
    return setting + ("; 500 of 1,000 rounds" if setting.startswith("CIFAR-10") else "")


def paper_2(skip):
    """Uploads and the change of accuracy, against redrawn and against held random cohorts."""
    theirs = "up 0.57 to 31.25 %, down 0.21 to 28.28 %, accuracy -6.47 to +34.22 % (medians)"
    for dataset in ("MNIST", "Fashion-MNIST", "CIFAR-10"):
        for case in ("IID", "one label per node"):
            setting = f"{dataset}, {case}"
            skips = ["select, skip 0.02", "select, skip 0.05", "select, skip 0.1"]
            skips += ["select, skip 0.01"] if dataset == "CIFAR-10" else ["select, skip 0.2"]
            base = ["uniform"] + (["uniform, held"] if case != "IID" else [])
            claim = (
                f"{_words_2(setting)}\nskipping and selecting: medians over {len(skips)} thresholds"
            )
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
            word = HOLDS if within else FAILS
            yield ["2", claim, theirs, text, seeds_of(gated[0]), command, word]
    for dataset in ("MNIST", "Fashion-MNIST", "CIFAR-10"):
        setting = f"{dataset}, one label per node"
        for base in ("uniform, held", "uniform"):
            kind = "held for the interval" if "held" in base else "redrawn every round"
            yield accuracy_row(
                skip, "2", f"{_words_2(setting)}\nselection alone above random cohorts {kind}",
                setting, "select", base, (0, 0),
            )  # fmt: skip
        yield lower_row(
            skip, "2", f"{_words_2(setting)}\naccuracy oscillates less over rounds with selection than with random "
            "cohorts held for the interval (Figure 3): deviation over the last rounds",
            "qualitative", setting, "select", ("uniform, held",), "accuracy_deviation", "{:.3f}",
        )  # fmt: skip


TABLE_1 = {  # paper 3: Rand, AFL, Pow-d, FedCor
    "2SPC": (0.69, 295.8, 218.6, 126.6, 94.8),
    "1SPC": (0.62, None, None, 167.2, 84.0),
    "Dir": (0.64, 141.0, 169.0, 123.0, 68.8),
}

# Target, our rounds, and the paper's rounds of random cohorts, AFL, Pow-d and FedCor.
TABLE_1_CIFAR = {
    "2SPC": (0.62, 1200, 1561.2, None, 1558.2, 1033.4),
    "1SPC": (0.36, 800, 1750.4, 1845.2, 1752.2, 1269.2),
    "Dir": (0.54, 1200, None, 1524.4, 1355.2, 1076.8),
}

SCALINGS = {
    "raw pixels": "raw pixels",
    "released code": "the released network, with dropout",
    "standardized": "standardized pixels",
}


def paper_3(papers):
    for split, (target, random, afl, pow_d, fedcor) in TABLE_1.items():
        for way, reading in SCALINGS.items():
            setting = f"paper 3, Fashion-MNIST {split}, {way}"
            words = f"Fashion-MNIST {split}, {reading}: rounds to {target:.0%} (Table 1)\n"
            for claim, method, base, theirs in (
                ("FedCor against random", "fedcor", "uniform", random),
                ("FedCor against Pow-d", "fedcor", "power-of-choice, d=10", pow_d),
                ("FedCor against AFL", "fedcor", "active-fl", afl),
                ("literal FedCor, whose selection leaves the noise out, against random", "fedcor, literal", "uniform", random),
            ):  # fmt: skip
                numbers = (fedcor, theirs)
                yield rounds_row(papers, "3", words + claim, setting, method, base, target, numbers)
    for split, (target, rounds, random, afl, pow_d, fedcor) in TABLE_1_CIFAR.items():
        words = f"CIFAR-10 {split}: rounds to {target:.0%} (Table 1); {rounds:,} of 2,000 rounds\n"
        for name, variant, theirs in (
            ("random", "uniform", random),
            ("Pow-d", "power-of-choice, d=10", pow_d),
            ("AFL", "active-fl", afl),
        ):
            yield rounds_row(
                papers, "3", f"{words}FedCor against {name}", f"paper 3, CIFAR-10 {split}",
                "fedcor, interval 50, beta 0.9", variant, target, (fedcor, theirs),
            )  # fmt: skip
    yield script_row(
        papers, "3", "the covariance is stationary (Figure 3): cosine over ten rounds above 0.97; "
        "Fashion-MNIST 1SPC, many cohorts per estimate, corrected for the noise of the estimates", "above 0.97",
        "paper 3, Figure 3", "covariance", covariance,
    )  # fmt: skip
    yield script_row(
        papers, "3", "embeddings after the warm-up cluster by label (Figure 7): the most similar client has "
        "the same label for more than 90 % of the clients; Fashion-MNIST 1SPC", "qualitative",
        "paper 3, Figure 7", "embedding", embedding,
    )  # fmt: skip
    setting = "paper 3, Fashion-MNIST 1SPC, standardized"
    words = "Fashion-MNIST 1SPC, standardized pixels: options of FedCor\n"
    for claim, method, base in (
        ("never fitted again after the warm-up, FedCor is still faster than random (Figure 5)", "fedcor, interval 500, beta 0.99", "uniform"),
        ("annealing by 0.95 against none (not in the paper)", "fedcor", "fedcor, beta 1"),
    ):  # fmt: skip
        yield rounds_row(papers, "3", words + claim, setting, method, base, 0.62, (None, None))
    yield lower_row(
        papers, "3", f"{words}cohorts are more uniform with a smaller beta (Figure 6): entropy of participation",
        "qualitative", setting, "fedcor, beta 1", ("fedcor, beta 0.9",), "participation_entropy", "{:.4f}",
    )  # fmt: skip


BASELINES_4 = {  # paper 4, xi = 1: rounds to 90 %
    "uniform": ("random", 127),
    "clustered-sampling, similarity": ("clustered sampling", 122),
    "fedsae": ("FedSAE", 259),
}


XI_4 = ("1", "0.8", "0.5", "H")  # skewness


def paper_4(papers):
    for xi in XI_4:
        setting, words = f"paper 4, MNIST xi {xi}", f"MNIST, xi = {xi}; test set, our rates\n"
        for base, (name, rounds) in BASELINES_4.items():
            claim = f"{words}FL-DP3S against {name}"
            yield rounds_row(
                papers, "4", f"{claim}: rounds to 90 % (Figure 1)", setting, "kdpp", base, 0.9,
                (62, rounds) if xi == "1" else (None, None),
            )  # fmt: skip
            text = f"{claim}: accuracy over the last rounds (Figure 1)"
            yield accuracy_row(papers, "4", text, setting, "kdpp", base, (0, 0))
    setting, words = "paper 4, MNIST xi 1", "MNIST, xi = 1; test set, our rates\n"
    for base, claim in {
        "kdpp, gradients": "FC-1 profiles against gradients (Figure 3)",
        "kdpp, representative gradients": "FC-1 profiles against representative gradients (Figure 3)",
        "kdpp, kernel of features": "the paper's kernel of similarities against one of features (not in the paper)",
    }.items():
        text = f"{words}{claim}: rounds to 90 %"
        yield rounds_row(papers, "4", text, setting, "kdpp", base, 0.9, (None, None))
        text = f"{words}{claim}: accuracy over the last rounds"
        yield accuracy_row(papers, "4", text, setting, "kdpp", base, (0, 0))
    for xi in XI_4:
        setting, words = (
            f"paper 4, Fashion-MNIST xi {xi}",
            f"Fashion-MNIST, xi = {xi}; test set, our rates\n",
        )
        for base, (name, _) in BASELINES_4.items():
            text = f"{words}FL-DP3S against {name}: accuracy over the last rounds (Figure 1)"
            yield accuracy_row(papers, "4", text, setting, "kdpp", base, (0, 0))
    for name, xi in itertools.product(("MNIST", "Fashion-MNIST"), XI_4):
        yield lower_row(
            papers, "4", f"{name}, xi = {xi}; test set, our rates\nlowest GEMD of the four (Figure 2)", "qualitative",
            f"paper 4, {name} xi {xi}", "kdpp", tuple(BASELINES_4), "gemd",
        )  # fmt: skip
    yield script_row(
        papers, "4", "the kernel hardly depends on how the first model is drawn (Figures 4 and 5): entries of the "
        "kernels of 20 clients under four initializations correlate by more than 0.9", "qualitative",
        "paper 4, Figure 5", "initialization", initialization,
    )  # fmt: skip


def rows(results):
    """All rows; `results` returns a result file by name, or None."""
    papers = Suite("papers", results("benchmark-papers.json"))
    skip = Suite("skip", results("benchmark-skip.json"))
    cold = Suite("coldstart", results("benchmark-coldstart.json"))
    return [
        *paper_0(papers, cold),
        *paper_1(papers),
        *paper_2(skip),
        *paper_3(papers),
        *paper_4(papers),
    ]
