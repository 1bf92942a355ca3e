"""The claims of the papers beside our measurements: docs/reproductions.md."""

from __future__ import annotations

import reproductions as claims
from docs_tables.results import NOT_RUN, parts, result, rounds_cell, table
from verdicts import VERDICTS


def reproductions(paper):
    """The claims of one paper, what we measured, and verdicts, by setting; each command once."""
    by_command = {}
    for own, claim, papers, ours, seeds, command, word in claims.rows(result):
        if own == paper:
            words, _, short = claim.rpartition("\n")
            group = by_command.setdefault(command, {}).setdefault(words, [])
            group.append([short, papers, ours, word, seeds])
    lines = []
    for command, by_words in by_command.items():
        for i, (words, rows) in enumerate(by_words.items()):
            told = f"<br>{command}" if i == 0 else ""
            if words:
                lines.append([f"**{words}**{told}", "", "", "", ""])
            else:
                rows[0][0] += told
            lines += rows
    return table(["claim", "the paper", "ours", "verdict", "seeds"], lines)


def single_rounds():
    """FedCor's Table 1 for random cohorts and FedCor: first round, and the mean of five rounds."""
    lines = []
    for split, (target, random, *_, fedcor) in claims.TABLE_1.items():
        for way, words in claims.SCALINGS.items():
            found = parts("benchmark-papers.json", f"paper 3, Fashion-MNIST {split}, {way}")
            for name, paper in (("uniform", random), ("fedcor", fedcor)):
                if name in found:
                    keys = ("rounds_to", "rounds_to_mean")
                    cells = [rounds_cell(found[name], target, key) for key in keys]
                    number = "N/A" if paper is None else f"{paper:g}"
                    lines.append([split, words, name, number, *cells])
    header = [
        "split",
        "inputs and network",
        "policy",
        "the paper",
        "first round",
        "mean of five rounds",
    ]
    return table(header, lines) if lines else NOT_RUN


def verdicts():
    """How many claims of each paper hold."""
    rows = claims.rows(result)
    lines = [
        [str(paper), *(str(sum(r[0] == str(paper) and r[-1] == w for r in rows)) for w in VERDICTS)]
        for paper in range(5)
    ]
    return table(["paper", *VERDICTS], lines)
