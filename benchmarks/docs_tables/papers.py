"""The claims of the papers beside our measurements: docs/reproductions.md."""

from __future__ import annotations

import reproductions as claims
from docs_tables.results import result, table
from verdicts import NOT_RUN, VERDICTS


def reproductions(paper):
    """The claims of one paper by setting: what each form measured, with its verdict."""
    groups = {}
    for own, form, claim, theirs, ours, seeds, _, word in claims.rows(result):
        if own == paper:
            words, _, short = claim.rpartition("\n")
            cells = groups.setdefault(words, {}).setdefault((short, theirs), {})
            cells[form] = f"*{word}*" if word == NOT_RUN else f"**{word}**: {ours}" + _seeds(seeds)
    lines = []
    for words, rows in groups.items():
        if words:
            lines.append([f"**{words}**", "", "", "", ""])
        for (short, theirs), cells in rows.items():
            lines.append([short, theirs, *(cells.get(form, "") for form in claims.FORMS)])
    return table(["claim", "the paper", *claims.FORMS], lines)


def _seeds(count):
    return f" ({count} seeds)" if count else ""


def verdicts():
    """How many claims of each paper hold, by form."""
    rows = claims.rows(result)
    lines = []
    for paper in sorted({row[0] for row in rows}):
        for form in claims.FORMS:
            words = [row[-1] for row in rows if row[:2] == [paper, form]]
            if words:
                lines.append([paper, form, *(str(words.count(word)) for word in VERDICTS)])
    return table(["paper", "form", *VERDICTS], lines)


def to_run():
    """What runs the claims that were not run."""
    counts = {}
    for row in claims.rows(result):
        if row[-1] == NOT_RUN:
            counts.setdefault(row[6], []).append(f"{row[0]} {row[1]}")
    lines = []
    for command, rows in counts.items():
        forms = ", ".join(dict.fromkeys(rows))
        lines.append(f"- {command} (paper {forms}; {len(rows)} claims)")
    return "\n".join(lines) + "\n"
