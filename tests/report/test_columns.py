from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
from rich.console import Console

from fedcohort.experiments.results import PolicyResult
from fedcohort.experiments.summary import Overhead, Summary
from fedcohort.report.tables import (
    comparison,
    comparison_table,
    curves,
    paired_interval,
    sparkline,
)
from fedcohort.simulate.history import History, RoundRecord


def result(policy, accuracies, reached):
    histories, summaries = [], []
    for seed, (values, rounds) in enumerate(zip(accuracies, reached, strict=True)):
        records = [
            RoundRecord(seed, i, value, None, ("a",), ("a",), 1000, 2000, 1.0, float(i))
            for i, value in enumerate(values)
        ]
        histories.append(History(seed, records))
        last = [v for v in values if v is not None][-1]
        whole = Overhead(0.0, 100.0, 100.0, 100.0)
        summaries.append(
            Summary(
                seed, len(values), last, 0.0, last, last, last, rounds, None, 0.5, 0.9,
                1000 * len(values), 2000 * len(values), {}, whole,
            )
        )  # fmt: skip
    return PolicyResult(policy, summaries, histories, 1.0)


def printed(rows, lines, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison_table(rows, lines, 0.8, "title", width))
    return console.export_text()


def test_rows_are_means_over_seeds_and_say_what_is_missing():
    (row,) = comparison([result("p", [[0.1, 0.4], [0.2, 0.6]], [2, None])])
    assert row.accuracy.mean == pytest.approx(0.5)
    assert row.accuracy.std == pytest.approx(np.std([0.4, 0.6], ddof=1))
    assert row.rounds_to_target.mean == 2 and np.isnan(row.rounds_to_target.std)
    assert row.rounds_to_target.missing == 1
    assert row.megabytes_down.mean == pytest.approx(0.004)


def test_changes_are_relative_to_plain_fedavg_seed_by_seed():
    plain = result("fedavg", [[0.5], [0.8]], [None, None])
    base, row = comparison([plain, result("p", [[0.6], [0.6]], [None, None])])
    assert base.accuracy_change.mean == 0
    assert row.accuracy_change.mean == pytest.approx((20 - 25) / 2)
    assert comparison([result("p", [[0.6]], [None])])[0].accuracy_change is None


def test_curves_skip_rounds_without_evaluation():
    (curve,) = curves([result("p", [[None, 0.4], [None, 0.6]], [None, None])])
    assert curve.rounds == [2]
    assert curve.mean == [0.5]
    assert curve.low[0] == pytest.approx(0.5 - np.std([0.4, 0.6], ddof=1))
    assert curve.megabytes == [pytest.approx(0.006)]


def test_the_table_names_the_best_and_fits_its_terminal():
    results = [result("good", [[0.5, 0.9]], [2]), result("bad", [[0.1, 0.2]], [None])]
    rows, lines = comparison(results), curves(results)
    for width in (80, 120):
        text = printed(rows, lines, width)
        assert "not reached" in text
        assert ("accuracy by round" in text) == (width == 120)
        assert max(map(len, text.splitlines())) <= width


def test_one_seed_shows_no_deviation():
    results = [result("p", [[0.5, 0.9]], [2])]
    text = printed(comparison(results), curves(results), 120)
    assert "90.0" in text and "2.0" in text and "±" not in text
    two = [result("p", [[0.5, 0.9], [0.5, 0.8]], [2, 2])]
    assert "85.0 ± 7.1" in printed(comparison(two), curves(two), 120)


def test_sparklines():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline([0.5] * 1000)) <= 24


def test_paired_intervals_are_percentiles_of_all_resamples():
    differences = [0.1, 0.4, -0.2]
    means = sorted(sum(c) / 3 for c in itertools.product(differences, repeat=3))
    found = paired_interval(differences)
    assert found.mean == pytest.approx(0.1)
    assert found.low == pytest.approx(means[math.ceil(0.025 * 27) - 1])
    assert found.high == pytest.approx(means[math.ceil(0.975 * 27) - 1])
    assert paired_interval([0.5]) is None


def test_paired_intervals_of_many_differences_cover_about_95_percent():
    """300 normal samples of 30 with a fixed seed: coverage 0.945 ± 0.04 (three standard errors)."""
    rng = np.random.default_rng(0)
    found = [paired_interval(rng.normal(1.0, 1.0, 30).tolist(), 1000) for _ in range(300)]
    assert np.mean([i.low <= 1.0 <= i.high for i in found]) == pytest.approx(0.94, abs=0.04)


def test_gains_are_paired_by_seed():
    plain = result("uniform", [[0.5], [0.8]], [None, None])
    base, row = comparison([plain, result("p", [[0.6], [0.9]], [None, None])])
    assert base.gain is None
    assert row.gain == pytest.approx((0.1, 0.1, 0.1))  # unpaired, the interval would be wide
