"""Intervals mean what they say: coverage by simulation, with stated seeds and tolerances."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedcohort.analysis.comparison import comparison, curves, paired_interval
from fedcohort.experiments.results import Run, Summary
from fedcohort.rounds import History, RoundRecord

TRIALS = 4000  # standard error of a coverage of 0.95: 0.0034


def covered(draws, **options):
    """The share of rows of differences whose interval contains zero."""
    intervals = [paired_interval(row.tolist(), **options) for row in draws]
    return np.mean([i.low <= 0 <= i.high for i in intervals])


@pytest.mark.parametrize("n", [3, 5, 10])
def test_without_an_effect_95_of_100_intervals_contain_zero(n):
    """Exactly for normal values; a percentile bootstrap contains it in 75, 84 and 90 %."""
    rng = np.random.default_rng(n)
    assert covered(rng.normal(0, 1, (TRIALS, n))) == pytest.approx(0.95, abs=0.011)
    skewed = rng.exponential(1, (TRIALS, n)) - rng.exponential(1, (TRIALS, n))
    assert covered(skewed) > 0.95 - 0.011  # alike runs, whatever their law: never too narrow


def test_intervals_of_a_ranking_hold_together():
    """35 policies that are uniform cohorts in disguise, all against the same ten runs.

    With Bonferroni's correction at most 5 % of such rankings show a mark (standard error 0.009 at
    600 rankings); without it most of them do.
    """
    rng = np.random.default_rng(0)
    rankings = [rng.normal(0, 1, (35, 10)) - rng.normal(0, 1, 10) for _ in range(600)]
    together = np.mean([covered(ranking, comparisons=35) < 1 for ranking in rankings])
    alone = np.mean([covered(ranking) < 1 for ranking in rankings])
    assert together < 0.05 + 3 * 0.009
    assert alone > 0.5


def test_an_interval_is_that_of_the_t_test():
    values = [0.3, -0.1, 0.8, 0.4]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert paired_interval(values) == pytest.approx((np.mean(values), low, high))
    assert paired_interval([0.5]) is None


def result(policy, accuracies, reached):
    histories, summaries = [], []
    for seed, (values, rounds) in enumerate(zip(accuracies, reached, strict=True)):
        records = [
            RoundRecord(seed, i + 1, value, None, ("a",), ("a",), 1000, 2000, 1.0, i + 1.0)
            for i, value in enumerate(values)
        ]
        histories.append(History(seed, records))
        last = [v for v in values if v is not None][-1]
        summaries.append(
            Summary(
                seed, len(values), last, 0.0, last, last, last, rounds, None, 0.5, 0.9,
                1000 * len(values), 2000 * len(values), 0.0, 100.0, 100.0,
            )
        )  # fmt: skip
    return Run(policy, summaries, histories)


def test_rows_are_means_over_seeds_and_say_what_is_missing():
    (row,) = comparison([result("p", [[0.1, 0.4], [0.2, 0.6]], [2, None])])
    assert row.accuracy.mean == pytest.approx(0.5)
    assert row.accuracy.std == pytest.approx(np.std([0.4, 0.6], ddof=1))
    assert row.rounds_to_target.mean == 2 and np.isnan(row.rounds_to_target.std)
    assert row.rounds_to_target.missing == 1
    assert row.megabytes_down.mean == pytest.approx(0.004)


def test_changes_and_gains_are_paired_seed_by_seed():
    plain = result("fedavg", [[0.5], [0.8], [0.7]], [None] * 3)
    base, row = comparison([plain, result("p", [[0.6], [0.6]], [None, None])])
    assert base.accuracy_change.mean == 0 and base.gain is None
    assert row.accuracy_change.mean == pytest.approx((20 - 25) / 2)
    assert row.gain == pytest.approx(paired_interval([0.1, -0.2]))
    (alone,) = comparison([result("p", [[0.6]], [None])])
    assert alone.accuracy_change is None and alone.gain is None


def test_curves_skip_rounds_without_evaluation():
    (curve,) = curves([result("p", [[None, 0.4], [None, 0.6]], [None, None])])
    assert curve.rounds == [2] and curve.mean == [0.5] and curve.seconds == [2.0]
    assert curve.low[0] == pytest.approx(0.5 - np.std([0.4, 0.6], ddof=1))
    assert curve.megabytes == [pytest.approx(0.006)]
