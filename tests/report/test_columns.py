from __future__ import annotations

import io

from rich.console import Console

from fedcohort.experiments.config import parse
from fedcohort.experiments.results import Results, Run, Summary
from fedcohort.report.tables import comparison_cells, fitting
from fedcohort.rounds import History, RoundRecord


def run(policy, accuracies, reached):
    """A run of two rounds per seed, given by the accuracies of each seed."""
    histories, summaries = [], []
    for seed, (values, rounds) in enumerate(zip(accuracies, reached, strict=True)):
        records = [
            RoundRecord(seed, i + 1, value, None, ("a",), ("a",), 1000, 2000, 1.0, float(i))
            for i, value in enumerate(values)
        ]
        histories.append(History(seed, records))
        last = values[-1]
        summaries.append(
            Summary(seed, 2, last, 0.0, last, last, last, rounds, None, 0.5, 0.9, 2000, 4000, 0.0,
                    100.0, 100.0)
        )  # fmt: skip
    return Run(policy, summaries, histories, parse({"target": 0.8, "policy": policy}))


def printed(runs, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(fitting(comparison_cells(Results(runs), sparklines=True), "title", width))
    return console.export_text()


def test_the_table_fits_its_terminal():
    runs = [run("oort", [[0.5, 0.9]], [2]), run("uniform", [[0.1, 0.2]], [None])]
    for width in (80, 120):
        text = printed(runs, width)
        assert "90.0" in text and "20.0" in text and "not reached" in text
        assert ("accuracy by round" in text) == (width == 120)
        assert max(map(len, text.splitlines())) <= width


def test_one_seed_shows_no_deviation():
    assert "±" not in printed([run("oort", [[0.5, 0.9]], [2])], 120)
    assert "85.0 ± 7.1" in printed([run("oort", [[0.5, 0.9], [0.5, 0.8]], [2, 2])], 120)
