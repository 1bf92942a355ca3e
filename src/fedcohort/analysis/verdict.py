"""How different the clients are, in plain words; the page of a profile states the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedcohort.files.columns import Column, columns_of
from fedcohort.privacy.release import signal_to_noise
from fedcohort.sketch.race import RaceSketch

if TYPE_CHECKING:
    from fedcohort.analysis.heterogeneity import Heterogeneity
    from fedcohort.analysis.plan import Plan
    from fedcohort.files.marginals import ColumnGap

#: Share of the pairs that may be told apart where all clients are alike. In 40 federations of equal
#: clients the 95th percentile was 8% and the worst 17%: pairs of one client depend on each other.
BY_CHANCE = 0.15
UNEQUAL = 10.0  # largest client over the smallest
MAX_NAMED = 8  # clients to look at
MAX_COLUMNS = 4  # of each
MAX_LISTED = 12  # columns in the facts of a sketch
COHORTS = "`fedcohort plan` says whether cohorts that together look like the whole are worth it."
EXPLAIN = "sketch with --set explain=0.5 to see which of its columns differ"
SMALL_GROUP = 3  # clients per cluster


def few(names: Sequence[object], most: int = 8) -> str:
    """Join names, and count those that would be too many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + rest


class Verdict(NamedTuple):
    """What is the case, why, and what to do next."""

    kind: Literal["unknown", "alike", "columns", "degree", "kind"]
    headline: str
    reasons: list[str]
    next_steps: list[str]


def judge(profile: Heterogeneity, plan: Plan | None = None) -> Verdict:
    """Judge a federation; `plan` adds what to expect of chosen cohorts."""
    looks, marked, unknown = _looks(profile), profile.marked_clients, profile.unknown_columns
    remedies = "; ".join(f"{column} ({remedy})" for column, remedy in unknown.items())
    judged = [f"Columns that cannot be judged: {remedies}."] if unknown else []
    if profile.blind:
        headline = "These sketches cannot tell the clients apart."
        if marked:
            headline = f"Columns of {few(marked, 3)} differ; the sketches tell nothing else."
        again = "Make the sketches again, as the warnings say."
        return Verdict("unknown", headline, [*judged, *profile.warnings], [*looks, again])
    reasons, cohorts = [*judged, *_reasons(profile)], [COHORTS]
    if plan is not None:
        at_random = "Draw the cohorts at random: choosing them by these sketches gains nothing."
        cohorts = plan.lines() if plan.worthwhile else [at_random]
    if profile.outliers or 1 < profile.clusters.number <= len(profile.clients) / SMALL_GROUP:
        headline, steps = _in_kind(profile)
        return Verdict("kind", headline, reasons, [*looks, *steps, *cohorts])
    if profile.told_apart >= BY_CHANCE:
        federate = "Federate, and compare the policies uniform and sketch-match."
        steps = [federate] if plan is None or plan.worthwhile else []
        headline = "The clients differ in degree, not in kind."
        return Verdict("degree", headline, reasons, [*looks, *steps, *cohorts])
    if marked:
        headline = f"The clients are alike as a whole, but columns of {few(marked, 3)} differ."
        after = "Then federate: as a whole, any cohort looks like the federation."
        return Verdict("columns", headline, reasons, [*looks, after])
    if unknown:
        headline = f"These sketches cannot tell: {few(list(unknown), 3)} cannot be judged."
        return Verdict("unknown", headline, reasons, ["State what is missing, and sketch again."])
    steps = ["Federate as it is: any cohort looks like the whole."]
    return Verdict("alike", "The clients are alike.", reasons, steps)


def _in_kind(profile: Heterogeneity) -> tuple[str, list[str]]:
    """Say who is unlike the others, and what to do with outliers and groups."""
    sizes = np.bincount([c.cluster for c in profile.clients]).tolist()
    groups = {i: size for i, size in enumerate(sizes, start=1) if size > 1}  # else an outlier
    odd, parts, steps = len(profile.outliers), [], []
    if odd:
        stand = "one client stands" if odd == 1 else f"{odd} clients stand"
        parts.append(f"{stand} apart from all others")
    if len(groups) > 1:
        parts.append(f"the clients form {len(groups)} groups")
        listed = ", ".join(f"group {i}: {size} clients" for i, size in groups.items())
        steps.append(f"Consider training the groups apart, or personalizing ({listed}).")
    elif not odd:
        parts.append("a few of them are unlike all others")
    steps.append("Federate the clients that are not outliers." if odd else "Federate.")
    return f"The clients differ in kind: {' and '.join(parts)}.", steps


def _reasons(profile: Heterogeneity) -> list[str]:
    reasons = [
        f"{profile.told_apart:.0%} of the pairs differ by more than sampling and noise explain; "
        f"where all clients are alike, it is below {BY_CHANCE:.0%}.",
        f"The median distance to all data together is {profile.median_distance:.3f}. Two random "
        f"samples of the same data, of the size of these clients, look up to "
        f"{profile.random_distance:.3f} apart.",
    ]
    sizes = sorted(c.n for c in profile.clients)
    if sizes[-1] > UNEQUAL * max(sizes[0], 1):
        reasons.append(f"The sizes differ, too: from {sizes[0]:,.0f} to {sizes[-1]:,.0f} records.")
    return reasons


def _looks(profile: Heterogeneity) -> list[str]:
    """Say which clients to look at: those with marked columns first, the surest of all first."""
    marked = profile.marked_clients
    names = [*marked, *(c.name for c in profile.outliers if c.name not in marked)]
    together = "no single column stands out; its columns differ together"
    steps = []
    for name in names[:MAX_NAMED]:
        why = marked_in_words(profile.marked(name), MAX_COLUMNS)
        steps.append(f"Look at {name}: {why or (together if profile.columns else EXPLAIN)}.")
    if further := len(names[MAX_NAMED:]):
        steps.append(f"Look at {further} further clients in the table below.")
    return steps


def with_hint(gap: ColumnGap) -> str:
    """Say what differs in a column, and what may be the cause."""
    return f"{gap.what} ({gap.hint})" if gap.hint else gap.what


def marked_in_words(gaps: Sequence[ColumnGap], most: int | None = None) -> str:
    """Name columns and what differs in them."""
    texts = [f"{gap.column}, {with_hint(gap)}" for gap in gaps]
    rest = 0 if most is None else max(0, len(texts) - most)
    return "; ".join(texts[:most]) + (f"; {rest} more" if rest else "")


def describe(sketch: RaceSketch) -> dict[str, str]:
    """Say what a sketch holds, how it was made and what it protects.

    Examples
    --------
    >>> describe(RaceSketch.srp(dim=2, rows=10, bits=3))["hash"]
    'srp, 10 rows of 8 buckets, bits=3, dim=2, family=fast, seed=0'
    """
    hashing, transform = sketch.spec["hash"], sketch.spec["transform"]
    named = ("name", "rows", "buckets")
    options = ", ".join(f"{k}={v}" for k, v in sorted(hashing.items()) if k not in named)
    size = f"{sketch.rows} rows of {sketch.buckets} buckets"
    facts = {"hash": f"{hashing['name']}, {size}, {options}"} | _column_facts(columns_of(sketch))
    for key, value in transform.items():
        listed = value if isinstance(value, list) else [value]
        facts[key.replace("_", " ")] = few(listed, MAX_LISTED)
    facts |= {"records": f"{sketch.n:,.0f}", "privacy": privacy(sketch)}
    if sketch.private:
        facts["signal to noise"] = f"{signal_to_noise(sketch):.2g}"
    return facts


def _column_facts(columns: Sequence[Column]) -> dict[str, str]:
    """Say which columns were hashed and, where they share them, by which constants."""
    if not columns:
        return {}
    plain = {column.kind for column in columns} <= {"number"}
    named = [c.name if plain else f"{c.name} ({c.kind})" for c in columns]
    facts = {"columns": few(named, MAX_LISTED)}
    for key, default in (("center", 0.0), ("scale", 1.0), ("weight", 1.0)):
        scaled = [c for c in columns if key == "weight" or c.kind == "number" or c.since]
        values = {c.name: getattr(c, key) for c in scaled}
        if len(set(values.values())) > 1:
            facts[key] = few([f"{name} {value:g}" for name, value in values.items()], MAX_LISTED)
        elif set(values.values()) - {default}:
            facts[key] = f"{getattr(scaled[0], key):g}"
    return facts


def privacy(sketch: RaceSketch) -> str:
    """Say in one line what protects the records in all, and what is public."""
    return sketch.claim() if sketch.private else "none: exact counts"
