from __future__ import annotations

import io

from rich.console import Console

from fedcohort.experiments.config import parse
from fedcohort.experiments.results import Results, Run, Summary
from fedcohort.report.tables import comparison_cells, fitting, sparkline
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
    return Run(policy, summaries, histories, parse({"target": 0.8, "policy": policy}))


def printed(results, width):
    console = Console(width=width, record=True, file=io.StringIO())
    cells = comparison_cells(Results(results), sparklines=True)
    console.print(fitting(cells, "title", width))
    return console.export_text()


def test_the_table_names_the_best_and_fits_its_terminal():
    results = [result("oort", [[0.5, 0.9]], [2]), result("uniform", [[0.1, 0.2]], [None])]
    for width in (80, 120):
        text = printed(results, width)
        assert "90.0" in text and "20.0" in text and "not reached" in text
        assert ("accuracy by round" in text) == (width == 120)
        assert max(map(len, text.splitlines())) <= width


def test_one_seed_shows_no_deviation():
    results = [result("oort", [[0.5, 0.9]], [2])]
    text = printed(results, 120)
    assert "90.0" in text and "±" not in text
    two = [result("oort", [[0.5, 0.9], [0.5, 0.8]], [2, 2])]
    assert "85.0 ± 7.1" in printed(two, 120)


def test_sparklines():
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline([0.5] * 1000)) <= 24
