"""Rows and curves computed from results, and the tables that a terminal shows.

`comparison` and `curves` return plain values, which tables print, figures draw and tests read.
`policy_costs` measures what the signals of each policy cost in bytes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedcohort.analysis.plan import Plan
from fedcohort.experiments.results import PolicyResult, Results
from fedcohort.experiments.summary import Spread, Summary, spread
from fedcohort.policies import POLICIES
from fedcohort.rounds import stream
from fedcohort.session import Session
from fedcohort.simulate.history import History
from fedcohort.testing import drive


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


class ComparisonRow(NamedTuple):
    """One run of a comparison, over all seeds.

    The overheads are in percent of plain FedAvg. The baseline is the run with uniform cohorts, no
    gate and otherwise equal settings: `accuracy_change` is in percent of its accuracy, and `gain`
    is the difference to it, with a paired interval. Both are None without a baseline; `gain` is
    also None for the baseline itself and if fewer than two seeds can be paired.
    """

    policy: str
    seeds: int
    accuracy: Spread
    rounds_to_target: Spread
    gemd: Spread
    participation_entropy: Spread
    megabytes_up: Spread
    megabytes_down: Spread
    seconds: float
    overhead_up: Spread
    overhead_down: Spread
    overhead_down_to_all: Spread
    skipped: Spread
    accuracy_change: Spread | None
    gain: Interval | None


class Curve(NamedTuple):
    """Mean accuracy over seeds, and one sample standard deviation to either side.

    `rounds` counts from 1. `megabytes` is the total traffic so far, in both directions, and
    `seconds` the simulated time. `low` and `high` are NaN for one seed.
    """

    policy: str
    rounds: list[int]
    megabytes: list[float]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def comparison(results: Sequence[PolicyResult]) -> list[ComparisonRow]:
    """Return one row per run, in the order of the results."""
    every = Results(results)
    return [_comparison_row(r, every.baseline(r)) for r in results]


def _comparison_row(r: PolicyResult, baseline: PolicyResult | None) -> ComparisonRow:
    pairs = [] if baseline is None else _paired(r.summaries, baseline.summaries)
    return ComparisonRow(
        policy=r.policy,
        seeds=len(r.summaries),
        accuracy=spread([s.accuracy for s in r.summaries]),
        rounds_to_target=spread([s.rounds_to_target for s in r.summaries]),
        gemd=spread([s.gemd for s in r.summaries]),
        participation_entropy=spread([s.participation_entropy for s in r.summaries]),
        megabytes_up=spread([s.bytes_up / 1e6 for s in r.summaries]),
        megabytes_down=spread([s.bytes_down / 1e6 for s in r.summaries]),
        seconds=r.seconds,
        overhead_up=spread([s.overhead.up for s in r.summaries]),
        overhead_down=spread([s.overhead.down for s in r.summaries]),
        overhead_down_to_all=spread([s.overhead.down_to_all for s in r.summaries]),
        skipped=spread([s.overhead.skipped for s in r.summaries]),
        accuracy_change=spread([100 * (a / b - 1) if b else None for a, b in pairs])
        if pairs
        else None,
        gain=None if baseline is r else paired_interval([a - b for a, b in pairs]),
    )


def _paired(own: Sequence[Summary], other: Sequence[Summary]) -> list[tuple[float, float]]:
    """Return the accuracies of the seeds that both runs have."""
    known = {s.seed: s.accuracy for s in other}
    pairs = [(s.accuracy, known[s.seed]) for s in own if s.seed in known]
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def paired_interval(differences: Sequence[float], resamples: int = 10_000) -> Interval | None:
    """Return the bootstrap 95 % interval of a mean of paired differences.

    It is the percentile interval of Efron (1979). Up to six differences, all resamples are
    enumerated, so that the interval is exact; otherwise `resamples` are drawn with a fixed seed.
    With very few differences it is too narrow. None if there are fewer than two.

    Examples
    --------
    >>> paired_interval([1.0, 3.0])
    Interval(mean=2.0, low=1.0, high=3.0)
    """
    values, n = np.asarray(differences, float), len(differences)
    if n < 2:
        return None
    if n <= 6:
        chosen = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        chosen = stream(0, "bootstrap", n).integers(0, n, (resamples, n))
    means = values[chosen].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975], method="inverted_cdf")
    return Interval(float(values.mean()), float(low), float(high))


def curves(results: Sequence[PolicyResult]) -> list[Curve]:
    """Return one curve per run, over the rounds in which every seed was evaluated."""
    return [_curve(result.policy, result.histories) for result in results]


def _curve(policy: str, histories: Sequence[History]) -> Curve:
    length = min(len(h.rounds) for h in histories)
    accuracy = np.array([h.accuracy[:length] for h in histories])
    rounds = [h.rounds[:length] for h in histories]
    sent = np.cumsum([[r.bytes_up + r.bytes_down for r in own] for own in rounds], axis=1)
    seconds = np.array([[r.elapsed for r in own] for own in rounds])
    known = np.flatnonzero(np.isfinite(accuracy).all(axis=0))
    mean = accuracy[:, known].mean(axis=0)
    several = len(histories) > 1
    std = accuracy[:, known].std(axis=0, ddof=1) if several else np.full(len(known), np.nan)
    return Curve(
        policy=policy,
        rounds=(known + 1).tolist(),
        megabytes=(sent[:, known].mean(axis=0) / 1e6).tolist(),
        seconds=seconds[:, known].mean(axis=0).tolist(),
        mean=mean.tolist(),
        low=np.maximum(mean - std, 0).tolist(),
        high=np.minimum(mean + std, 1).tolist(),
    )


class CostRow(NamedTuple):
    """Bytes of one policy, all messages, for all clients together."""

    policy: str
    profile: str
    query: str
    reply: str
    once: int
    each_round: float
    models_each_round: float
    when: str


def policy_costs(
    clients: int, cohort_size: int, model_bytes: int, rounds: int = 20
) -> list[CostRow]:
    """Run every policy for some rounds and read its ledger.

    `once` is what clients send about themselves in the first round; `each_round` the mean of the
    signals in later rounds; `models_each_round` counts model transfers, down and up, in units of
    one model. Readings have the sizes of `fedcohort.testing.reading`.
    """
    return [_costs(name, clients, cohort_size, model_bytes, rounds) for name in sorted(POLICIES)]


def _costs(name: str, clients: int, cohort_size: int, model_bytes: int, rounds: int) -> CostRow:
    policy = POLICIES[name]()
    size = min(cohort_size, clients)
    session = Session(policy, cohort_size=size, seed=0, model_bytes=model_bytes)
    names = [f"{i:07d}" for i in range(clients)]
    for _ in range(rounds):
        drive(session, names)
    up = [session.ledger.by_kind("up", r) for r in range(rounds)]
    down = [session.ledger.by_kind("down", r) for r in range(rounds)]
    profiles = policy.needs.profile
    signals = [sum(n for kind, n in u.items() if kind not in ("model", *profiles)) for u in up]
    models = sum(u.get("model", 0) + d.get("model", 0) for u, d in zip(up, down, strict=True))
    return CostRow(
        policy=name,
        profile=", ".join(sorted(profiles)),
        query=", ".join(sorted(policy.needs.query)),
        reply=", ".join(sorted(policy.needs.reply)),
        once=sum(n for u in up for kind, n in u.items() if kind in profiles),
        each_round=sum(signals) / rounds,
        models_each_round=models / model_bytes / rounds,
        when=policy.when,
    )


BARS = "▁▂▃▄▅▆▇█"
UNLIMITED = 100_000  # columns of a console that never wraps


class Cells(NamedTuple):
    """The texts of a table; `best` are the (row, column) to stand out."""

    headers: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]]


def comparison_table(
    rows: Sequence[ComparisonRow],
    curves: Sequence[Curve],
    target: float | None,
    title: str,
    width: int = 120,
    settings: Sequence[Mapping[str, str]] | None = None,
) -> Table:
    """Lay out a comparison, with the best accuracy and the fewest rounds in bold.

    A terminal that is too narrow gets no sparklines, and if that does not suffice, one block of
    lines per run: no number is ever cut.

    Parameters
    ----------
    rows, curves : sequences
        From `comparison` and `curves`.
    target : float or None
        The accuracy that `rounds_to_target` counts to.
    title : str
        Shown above.
    width : int, default=120
        Columns of the terminal.
    settings : sequence of mappings, optional
        From `setting_columns`: the first columns. By default there is one, the policy.
    """
    named = settings or [{"policy": row.policy} for row in rows]
    cells = comparison_cells(rows, target, named)
    drawn = Cells(
        [*cells.headers, "accuracy by round"],
        [[*own, sparkline(c.mean)] for own, c in zip(cells.rows, curves, strict=True)],
        cells.best,
    )
    names = max(len(own) for own in named)
    return next(
        (
            table
            for table in (_columns(drawn, title, names), _columns(cells, title, names))
            if _natural_width(table) <= width
        ),
        _blocks(cells, title, names),
    )


def comparison_cells(
    rows: Sequence[ComparisonRow],
    target: float | None,
    settings: Sequence[Mapping[str, str]],
) -> Cells:
    """Return the texts of a comparison.

    The columns of a gate appear only if a gate withheld something. They are in percent of plain
    FedAvg; the downlink is given twice, with models going to the cohort and to all clients.
    """
    gated = any(row.skipped.mean or row.overhead_up.mean < 99 for row in rows)
    names = list(dict.fromkeys(key for own in settings for key in own))
    headers = [*names, "accuracy %"]
    if any(row.gain for row in rows):
        headers.append("against uniform")
    if target is not None:
        headers.append(f"rounds to {target:.0%}")
    headers += GATE_COLUMNS if gated else PLAIN_COLUMNS
    texts = []
    for row, own in zip(rows, settings, strict=True):
        known = {**own, **_texts(row), f"rounds to {target or 0:.0%}": _rounds(row)}
        texts.append([known.get(header, "") for header in headers])
    best = {(i, headers.index("accuracy %")) for i in _extreme([-r.accuracy.mean for r in rows])}
    if target is not None:
        reached = [
            math.nan if r.rounds_to_target.missing else r.rounds_to_target.mean for r in rows
        ]
        best |= {(i, headers.index(f"rounds to {target:.0%}")) for i in _extreme(reached)}
    return Cells(headers, texts, best)


GATE_COLUMNS = ["change %", "skipped %", "up %", "down %", "(all) %"]
PLAIN_COLUMNS = ["GEMD", "MB up", "MB down", "s"]


def _texts(row: ComparisonRow) -> dict[str, str]:
    """Return the numbers of a row as texts, by column."""
    change = row.accuracy_change
    return {
        "accuracy %": plus_minus(100 * row.accuracy.mean, 100 * row.accuracy.std),
        "against uniform": "" if row.gain is None else gain_text(row.gain),
        "change %": "" if change is None else f"{change.mean:+.1f}",
        "skipped %": _number(row.skipped.mean),
        "up %": _number(row.overhead_up.mean),
        "down %": _number(row.overhead_down.mean),
        "(all) %": _number(row.overhead_down_to_all.mean),
        "GEMD": _number(row.gemd.mean, 2),
        "MB up": _number(row.megabytes_up.mean),
        "MB down": _number(row.megabytes_down.mean),
        "s": _number(row.seconds),
    }


def gain_text(gain: Interval) -> str:
    """Format a difference of accuracies in percentage points, with its interval."""
    return f"{100 * gain.mean:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"


def _number(value: float, digits: int = 1) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _extreme(values: Sequence[float]) -> list[int]:
    """Return the positions of the smallest value; NaN is ignored."""
    known = [v for v in values if not math.isnan(v)]
    return [i for i, v in enumerate(values) if known and v == min(known)]


def setting_columns(results: Results) -> list[dict[str, str]]:
    """Return what tells the runs apart: swept settings by column, or the name of the policy.

    A column has the last words of the setting's key, as many as make it unique.
    """
    varied = results.varied()
    keys = list(dict.fromkeys(key for own in varied for key in own))
    if all(key.startswith(("policy.", "gate.")) for key in keys):
        return [{"policy": r.policy} for r in results]
    short = {key: _short_key(key, keys) for key in keys}
    return [{short[key]: _word(own.get(key, "")) for key in keys} for own in varied]


def _short_key(key: str, keys: Sequence[str]) -> str:
    """Shorten a dotted key.

    Examples
    --------
    >>> _short_key("local.lr", ["local.lr", "policy.name"])
    'lr'
    >>> _short_key("policy.name", ["policy.name", "gate.name"])
    'policy'
    """
    if key.endswith(".name"):
        return key.removesuffix(".name")
    parts = key.split(".")
    for start in range(len(parts) - 1, -1, -1):
        text = ".".join(parts[start:])
        if sum(k == text or k.endswith(f".{text}") for k in keys) == 1:
            return text
    return key


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _columns(cells: Cells, title: str, names: int) -> Table:
    """Lay cells out as one line per row, the first `names` columns to the left."""
    table = Table(title=Text(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    for position, header in enumerate(cells.headers):
        left = position < names or header == "accuracy by round"
        table.add_column(Text(header), justify="left" if left else "right", no_wrap=True)
    for i, row in enumerate(cells.rows):
        table.add_row(*(_styled(text, (i, j) in cells.best) for j, text in enumerate(row)))
    return table


def _blocks(cells: Cells, title: str, names: int) -> Table:
    """Lay cells out as one block per row, with a line for each column."""
    table = Table(title=Text(title), title_justify="left", show_header=False, box=SIMPLE_HEAD)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for i, row in enumerate(cells.rows):
        for j, (header, text) in enumerate(zip(cells.headers, row, strict=True)):
            name = Text(header, "bold" if j < names else "")
            table.add_row(name, _styled(text, j < names or (i, j) in cells.best))
        table.add_section()
    return table


def _natural_width(table: Table) -> int:
    console = Console(width=UNLIMITED)
    return Measurement.get(console, console.options, table).maximum


def _styled(text: str, best: bool) -> Text:
    return Text(text, "bold green" if best else "")


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values between 0 and 1 as a row of block characters.

    Examples
    --------
    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    step = max(1, -(-len(values) // width))
    shown = [values[min(i + step, len(values)) - 1] for i in range(0, len(values), step)]
    return "".join(BARS[min(int(max(v, 0.0) * len(BARS)), len(BARS) - 1)] for v in shown)


def plus_minus(mean: float, std: float) -> str:
    """Format a mean with its deviation, or alone if there is only one value."""
    if math.isnan(mean):
        return ""
    return f"{mean:.1f}" + ("" if math.isnan(std) else f" ± {std:.1f}")


def _rounds(row: ComparisonRow) -> str:
    """Format the rounds to the target, with the share of seeds that reached it if not all did."""
    value, seeds = row.rounds_to_target, row.seeds
    if value.missing == seeds:
        return "not reached"
    text = plus_minus(value.mean, value.std)
    return text if not value.missing else f"{text} ({seeds - value.missing}/{seeds})"


def cost_table(rows: Sequence[CostRow], clients: int, cohort_size: int, parameters: int) -> Table:
    """Lay out which signals the policies need and what these cost."""
    title = f"{clients} clients, cohorts of {cohort_size}, a model of {parameters:,} parameters"
    table = Table(title=title, title_justify="left", header_style="bold", show_lines=True)
    for name in (
        "policy",
        "asks for",
        "kB once",
        "kB per round",
        "models per round",
        "use it when",
    ):
        right = name.startswith(("kB", "models"))
        table.add_column(name, justify="right" if right else "left", no_wrap=name == "policy")
    for row in rows:
        asks = [("once", row.profile), ("before", row.query), ("after", row.reply)]
        table.add_row(
            row.policy,
            "\n".join(f"{when}: {what}" for when, what in asks if what) or "nothing",
            f"{row.once / 1e3:.1f}",
            f"{row.each_round / 1e3:.1f}",
            f"{row.models_each_round:.1f}",
            row.when,
        )
    return table


def worth_table(plan: Plan) -> Table:
    """Lay out what the cohorts of each policy and size are worth."""
    table = Table(title="Worth of a cohort", title_justify="left", header_style="bold")
    for name in ("policy", "clients", "discrepancy", "worth (random clients)", "all used by round"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    table.add_column("picks, least to most", justify="right")
    for k, expected in plan.uniform.items():
        table.add_row("uniform", str(k), f"{expected:.4f}", str(k), "-", "-")
    for w in plan.worths:
        table.add_row(
            w.policy,
            str(w.cohort_size),
            f"{w.discrepancy:.4f} ± {w.error:.4f}",
            f"{w.random_clients:.0f}",
            "-" if w.rounds_until_all is None else str(w.rounds_until_all),
            f"{w.fewest:.1f}x to {w.most:.1f}x",
        )
    return table


def summary_table(summaries: Sequence[Summary], title: str, width: int = 120) -> Table:
    """Lay out one run, one row per seed; no number is ever cut."""
    headers = ["seed", "rounds", "accuracy %", "to target", "GEMD", "MB up", "MB down"]
    rows = []
    for s in summaries:
        reached = "" if s.rounds_to_target is None else str(s.rounds_to_target)
        cells = [str(s.seed), str(s.rounds), _number(100 * s.accuracy), reached]
        cells += [_number(s.gemd, 2), _number(s.bytes_up / 1e6), _number(s.bytes_down / 1e6)]
        rows.append(cells)
    table = _columns(Cells(headers, rows, set()), title, 1)
    return (
        table if _natural_width(table) <= width else _blocks(Cells(headers, rows, set()), title, 1)
    )
