"""Verdicts about the papers' claims follow the stated rules."""

from __future__ import annotations

import re

import numpy as np
import pytest
from docs_tables import reproductions, verdicts
from suite import read_suite


def suite(**rounds):
    """A result with one setting; each variant's rounds to the target 0.9, by seed."""
    parts = [
        {
            "setting": "s",
            "variant": variant,
            "targets": [0.9],
            "experiment": {"rounds": 100},
            "seeds": [
                {"seed": 1000 + i, "rounds_to": [r], "accuracy": 0.5, "curve": [0.5, None, 0.95]}
                for i, r in enumerate(found)
            ],
        }
        for variant, found in rounds.items()
    ]
    return verdicts.Suite("papers", {"parts": parts})


def against_uniform(found, papers):
    return found.rounds(("3", "ours"), "claim", "s", "method", "uniform", 0.9, papers)


@pytest.mark.parametrize(
    ("method", "papers", "expected"),
    [
        ([10, 20, 30], (50, 100), verdicts.HOLDS),  # twice as fast, as in the paper
        ([10, 20, 30], (10, 100), verdicts.WEAKER),  # the paper claims ten times
        ([20, 40, 60], (50, 100), verdicts.FAILS),  # level
        ([40, 20, 60], (50, 100), verdicts.FAILS),  # the interval includes 1x
        ([19.6, 39.2, 58.8], (99, 100), verdicts.FAILS),  # always 2 % fewer: too little to matter
        ([10, 20, 30], (84, None), verdicts.HOLDS),  # the paper's baseline never got there
        ([None, 20, 30], (50, 100), verdicts.FAILS),  # a seed that missed counts with 101 rounds
    ],
)
def test_rounds(method, papers, expected):
    row = against_uniform(suite(method=method, uniform=[20, 40, 60]), papers)
    assert row[-1] == expected
    assert row[5] == "3"


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ({"method": [None, 20, 30], "uniform": [20, None, 60]}, verdicts.UNDECIDED),
        ({"method": [10, 20], "uniform": [20, 40]}, verdicts.UNDECIDED),
        ({"uniform": [20]}, verdicts.NOT_RUN),
    ],
)
def test_what_cannot_be_decided_or_was_not_run(rounds, expected):
    assert against_uniform(suite(**rounds), (50, 100))[-1] == expected


def test_seeds_are_paired_by_their_number():
    """Where one of the two was run with fewer seeds, the others do not count."""
    found = suite(method=[10, 20, 30, 90], uniform=[1, 20, 40, 60])
    del found.parts["s", "uniform"]["seeds"][0], found.parts["s", "method"]["seeds"][3]
    row = against_uniform(found, (None, None))
    assert row[4].startswith("25.0 ± 7.1 against 30.0 ± 14.1")
    assert (row[5], row[-1]) == ("2", verdicts.UNDECIDED)


def test_without_results_every_row_says_how_to_run_it():
    names = [p.name for s in ("papers", "skip", "coldstart") for p in read_suite(s)]
    rows = reproductions.rows(lambda name: None)
    assert {row[0] for row in rows} == set("01234")
    for row in rows:
        assert row[-1] == verdicts.NOT_RUN and row[1] in reproductions.FORMS
        name, only = re.fullmatch(r"`--suite (\w+) --only '(.*)'`", row[6]).groups()
        assert any(n.startswith(f"{name}: ") and re.search(only, n) for n in names), row[6]


def curves(method, uniform, seeds=3):
    found = suite(method=[1] * seeds, uniform=[1] * seeds)
    for (_, variant), part in found.parts.items():
        for row in part["seeds"]:
            row["curve"] = method if variant == "method" else uniform
    return found.curve(("0", "ours"), "claim", "s", "method")


def test_curves_are_compared_where_both_were_evaluated():
    row = curves([None, 0.3, 0.4, 0.5], [0.9, 0.2, None, 0.4])
    assert row[4].startswith("above in 100% of the rounds; mean difference +10.0 (")
    assert row[-1] == verdicts.HOLDS


def test_curves_of_too_few_seeds_or_too_little_difference():
    assert curves([0.3], [0.2], seeds=2)[-1] == curves([0.3], [0.2], seeds=1)[-1] == "not decidable"
    assert curves([0.204], [0.2])[-1] == verdicts.FAILS


def test_first_hits_stand_beside_rounds_below_the_target():
    found = suite(method=[10, 20, 30], uniform=[20, 40, 60])
    for row in found.parts["s", "uniform"]["seeds"]:
        row["curve"] = [0.5, 0.89, 0.5]
    row = against_uniform(found, (50, 100))
    assert row[4].endswith("; below it 50 ± 0 against 100 ± 0")  # of 100 rounds


def test_the_cosine_of_two_covariances_without_the_noise_of_their_estimates():
    """Of the same covariance it is 1 however few the samples; the plain cosine is lower."""
    import claims as measured

    rng = np.random.default_rng(0)
    factor = rng.standard_normal((9, 40))
    pairs = [[rng.standard_normal((100, 9)) @ factor for _ in range(2)] for _ in range(20)]
    plain = np.mean([measured.cosine(a, b) for a, b in pairs])
    corrected = np.mean([measured.cosine_without_noise(a, b) for a, b in pairs])
    assert plain < 0.95  # about 100 / (100 + 9)
    assert corrected == pytest.approx(1, abs=0.02)  # standard error 0.006
    other = rng.standard_normal((100, 9)) @ rng.standard_normal((9, 40))
    assert measured.cosine_without_noise(pairs[0][0], other) < 0.6
