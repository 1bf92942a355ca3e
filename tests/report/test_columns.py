from __future__ import annotations

import io

from rich.console import Console

from fedcohort.analysis.comparison import comparison, curves
from fedcohort.experiments.results import Run, Summary
from fedcohort.report.tables import comparison_table, sparkline
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
        summaries.append(
            Summary(
                seed, len(values), last, 0.0, last, last, last, rounds, None, 0.5, 0.9,
                1000 * len(values), 2000 * len(values), 0.0, 100.0, 100.0,
            )
        )  # fmt: skip
    return Run(policy, summaries, histories)


def printed(rows, lines, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(comparison_table(rows, lines, 0.8, "title", width))
    return console.export_text()


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
