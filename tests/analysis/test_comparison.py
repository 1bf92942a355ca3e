"""Intervals mean what they say: coverage by simulation, with stated seeds and tolerances."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedcohort.analysis.comparison import comparison, curve, paired_interval
from fedcohort.experiments.config import parse
from fedcohort.experiments.results import Members, Results, Run, summarize
from fedcohort.report.content import Content
from fedcohort.report.tables import comparison_cells, fit_table
from fedcohort.rounds import History, RoundRecord

TRIALS = 4000  # standard error of a coverage of 0.95: 0.0034


def covered(draws):
    """The share of rows of differences whose interval contains zero."""
    intervals = [paired_interval(row.tolist()) for row in draws]
    return np.mean([i.low <= 0 <= i.high for i in intervals])


@pytest.mark.parametrize("n", [3, 5, 10])
def test_without_an_effect_95_of_100_intervals_contain_zero(n):
    """Exactly for normal values; a percentile bootstrap contains it in 75, 84 and 90 %."""
    rng = np.random.default_rng(n)
    assert covered(rng.normal(0, 1, (TRIALS, n))) == pytest.approx(0.95, abs=0.011)
    skewed = rng.exponential(1, (TRIALS, n)) - rng.exponential(1, (TRIALS, n))
    assert covered(skewed) > 0.95 - 0.011  # alike runs, whatever their law: never too narrow


@pytest.mark.parametrize("comparisons", [1, 35])
def test_an_interval_is_that_of_the_t_test_with_bonferronis_correction(comparisons):
    values = [0.3, -0.1, 0.8, 0.4]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / comparisons)
    found = paired_interval(values, comparisons)
    assert found == pytest.approx((np.mean(values), low, high))
    assert paired_interval([0.5], comparisons) is None


MEMBERS = Members(["a"], np.ones((1, 2), int))


def run(policy, accuracies, seconds=1.0):
    """A run given by the accuracies of each seed's rounds; the target is 0.8."""
    histories = []
    for seed, values in enumerate(accuracies):
        times = [(seconds, (i + 1) * seconds) for i in range(len(values))]
        records = [
            RoundRecord(seed, i + 1, v, None, ("a",), ("a",), 1000, 2000, *times[i])
            for i, v in enumerate(values)
        ]
        histories.append(History(seed, records))
    summaries = [summarize(h, *MEMBERS, 0.8, 1000) for h in histories]
    experiment = parse({"target": 0.8, "policy": policy})
    return Run(policy, summaries, histories, experiment, None, [MEMBERS] * len(histories))


def test_rows_are_means_over_seeds_and_say_what_is_missing():
    (row,) = comparison([run("oort", [[0.1, 0.9], [0.2, 0.6]])])
    assert row.accuracy.mean == pytest.approx(0.75)
    assert row.accuracy.std == pytest.approx(np.std([0.9, 0.6], ddof=1))
    rounds = row.means["rounds_to_target"]
    assert rounds.mean == 2 and np.isnan(rounds.std) and rounds.missing == 1
    assert row.as_dict()["bytes_down"].mean == 4000


def test_changes_and_gains_are_paired_seed_by_seed():
    plain = run("uniform", [[0.5], [0.8], [0.7]])
    base, row, _ = comparison([plain, run("oort", [[0.6], [0.6]]), run("delta", [[0.6], [0.6]])])
    assert base.accuracy_change.mean == 0 and base.gain is None
    assert row.accuracy_change.mean == pytest.approx((20 - 25) / 2)
    assert row.gain == pytest.approx(paired_interval([0.1, -0.2], comparisons=2))
    (alone,) = comparison([run("oort", [[0.6]])])
    assert alone.accuracy_change is None and alone.gain is None


def test_curves_skip_rounds_without_evaluation():
    line = curve(run("oort", [[None, 0.4], [None, 0.6]]))
    assert line.rounds == [2] and line.mean == [0.5] and line.seconds == [2.0]
    assert line.low[0] == pytest.approx(0.5 - np.std([0.4, 0.6], ddof=1))
    assert line.megabytes == [pytest.approx(0.006)]


def printed(runs, width=120):
    console = Console(width=width, record=True, file=io.StringIO())
    table = comparison_cells(Results(runs), comparison(runs), sparklines=True)
    console.print(fit_table(table, "title", width))
    return console.export_text()


def test_the_table_fits_its_terminal():
    runs = [run("oort", [[0.5, 0.9]]), run("uniform", [[0.1, 0.2]])]
    for width in (80, 120):
        text = printed(runs, width)
        assert "90.0" in text and "20.0" in text and "not reached" in text and "±" not in text
        assert ("accuracy by round" in text) == (width == 120)
        assert max(map(len, text.splitlines())) <= width
    assert "85.0 ± 7.1" in printed([run("oort", [[0.5, 0.9], [0.5, 0.8]])])
    text = printed([runs[0], run("uniform", [])])  # before its first round
    assert "uniform" in text and "not reached" not in text and "change" not in text


def test_seconds_to_the_target_and_time_come_first_where_rounds_differ_in_time():
    runs = [run("oort", [[0.5, 0.9]]), run("uniform", [[0.1, 0.2]])]
    assert "seconds to 80%" not in printed(runs)
    assert Content(Results(runs)).axes[0] == "rounds"
    runs[0] = run("oort", [[0.5, 0.9]], seconds=3.5)
    text = printed(runs)
    assert "seconds to 80%" in text and "7.0" in text
    assert Content(Results(runs)).axes[0] == "seconds"
