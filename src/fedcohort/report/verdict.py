"""The answer to "how different are my clients?" in plain words, by stated rules.

The rules, the first that holds:

1. *Unknown*: the noise exceeds the signal in more than half of the sketches, or nearly all records
   fall into one bucket. Then no answer is possible.
2. *Different in kind*: there are outliers, or several clusters of three clients or more on average.
3. *Alike*: fewer than 15% of the pairs are told apart. In 40 federations of equal clients the 95th
   percentile was 8% and the worst 17%, because the pairs of one client depend on each other.
4. *Different in degree*: clients are told apart, and no group or client stands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from fedcohort.report.heterogeneity import Heterogeneity

BY_CHANCE = 0.15  # share of the pairs that may be told apart where all clients are alike
UNEQUAL = 10.0  # largest client over the smallest
NAMED = 8  # clients to look at
NAMED_COLUMNS = 4  # of each
COHORTS = "`fedcohort plan` says whether cohorts that together look like the whole are worth it."
EXPLAIN = "make the sketches with --explain to see which of its columns differ"
SMALL_GROUP = 3  # clients per cluster


class Verdict(NamedTuple):
    """What is the case, why, and what to do next."""

    kind: Literal["unknown", "alike", "degree", "kind"]
    headline: str
    reasons: list[str]
    next_steps: list[str]


def judge(found: Heterogeneity, plan: Sequence[str] = ()) -> Verdict:
    """Judge a federation by the rules above.

    Parameters
    ----------
    found : Heterogeneity
    plan : sequence of str
        What `fedcohort plan` expects of cohorts, added to the next steps.
    """
    if found.blind:
        return Verdict(
            "unknown",
            "These sketches cannot tell the clients apart.",
            found.warnings,
            ["Make the sketches again, as the warnings say."],
        )
    clusters = found.clusters.number
    if found.outliers or 1 < clusters <= len(found.clients) / SMALL_GROUP:
        return Verdict("kind", _headline(found), _reasons(found), _steps_in_kind(found, plan))
    if found.told_apart < BY_CHANCE:
        steps = ["Federate as it is: any cohort looks like the whole."]
        return Verdict("alike", "The clients are alike.", _reasons(found), steps)
    steps = ["Federate, and compare the policies uniform and sketch-match.", *(plan or [COHORTS])]
    return Verdict("degree", "The clients differ in degree, not in kind.", _reasons(found), steps)


def _headline(found: Heterogeneity) -> str:
    odd, groups = len(found.outliers), len(_groups(found))
    parts = []
    if odd:
        parts.append("one client stands" if odd == 1 else f"{odd} clients stand")
        parts[-1] += " apart from all others"
    if groups > 1:
        parts.append(f"the clients form {groups} groups")
    elif not odd:
        parts.append("a few of them are unlike all others")
    return "The clients differ in kind: " + " and ".join(parts) + "."


def _reasons(found: Heterogeneity) -> list[str]:
    reasons = [
        f"{found.told_apart:.0%} of the pairs differ by more than sampling and noise explain; "
        f"where all clients are alike, it is below {BY_CHANCE:.0%}."
    ]
    median = float(np.median([c.distance for c in found.clients]))
    reference = found.references
    line = f"The median distance to all data together is {median:.3f}. Two random samples of the "
    line += f"same data, of the size of these clients, look up to {reference.random:.3f} apart"
    if reference.label is not None:
        line += f"; the classes of the label are {reference.label:.3f} apart"
    reasons.append(line + ".")
    sizes = sorted(c.n for c in found.clients)
    if sizes[-1] > UNEQUAL * max(sizes[0], 1):
        reasons.append(f"The sizes differ, too: from {sizes[0]:,.0f} to {sizes[-1]:,.0f} records.")
    return reasons


def _steps_in_kind(found: Heterogeneity, plan: Sequence[str]) -> list[str]:
    steps = [_look_at(found, client.name) for client in found.outliers]
    odd = {client.name for client in found.outliers}
    others = [c.name for c in found.clients if c.name not in odd and found.marked_columns(c.name)]
    steps += [_look_at(found, name) for name in others]
    if len(steps) > NAMED:
        steps[NAMED:] = [f"Look at {len(steps) - NAMED} further clients in the table below."]
    if len(groups := _groups(found)) > 1:
        sizes = ", ".join(f"group {i + 1}: {size} clients" for i, size in groups.items())
        steps.append(f"Consider training the groups apart, or personalizing ({sizes}).")
    steps.append("Federate the clients that are not outliers." if found.outliers else "Federate.")
    return [*steps, *(plan or [COHORTS])]


def _look_at(found: Heterogeneity, client: str) -> str:
    why = found.marked_columns(client, NAMED_COLUMNS)
    if not why and found.columns:
        why = "no single column stands out; its columns differ together"
    return f"Look at {client}: {why or EXPLAIN}."


def _groups(found: Heterogeneity) -> dict[int, int]:
    """Return the sizes of the clusters of two clients or more; a single one is an outlier."""
    sizes = np.bincount([c.cluster for c in found.clients])
    return {i: int(size) for i, size in enumerate(sizes) if size > 1}
