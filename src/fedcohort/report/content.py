"""What a report on runs shows, as values: figures draw them, pages print them, tests read them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcohort import storage
from fedcohort.analysis.comparison import ComparisonRow, Curve, comparison, curve, durations_differ
from fedcohort.analysis.verdict import few
from fedcohort.exceptions import ConfigError, InvalidCheckpoint
from fedcohort.experiments import config
from fedcohort.experiments.config import Experiment
from fedcohort.experiments.results import Results, Run, read_json
from fedcohort.options import as_text
from fedcohort.policies import FedACS
from fedcohort.report.tables import Cells, Rank, comparison_cells, rank_cells
from fedcohort.rounds import ClientId, stream

Rows = list[dict[str, Any]]
HIGHLIGHTED = 3
MAX_POINTS = 150  # of one curve
MAX_CELLS = 64  # rows or columns of cohorts; more clients or rounds are grouped
MAX_WAITED_FOR = 15  # clients
MAX_CHECKPOINT = 500_000_000  # bytes; larger ones are not read


class Roles(NamedTuple):
    """How runs are drawn: ranked ones have colors in this order, some are highlighted."""

    ranked: list[str]
    highlighted: list[str]
    baselines: list[str]


class Content:
    """Everything that a report on runs shows; they go from the highest accuracy to the lowest."""

    def __init__(self, results: Results) -> None:
        rows = comparison(runs := Results(r for r in results if r.histories))
        accuracy = [-np.nan_to_num(row.accuracy.mean, nan=-1.0) for row in rows]
        order = np.argsort(accuracy, kind="stable")
        rows, runs = [rows[i] for i in order], Results(runs[i] for i in order)
        baselines = [r.policy for r in runs if any(runs.baseline(o) is r for o in runs)]
        ranked = [r.policy for r in runs if r.policy not in baselines]
        experiments = [r.experiment for r in runs if r.experiment is not None]
        datasets = ", ".join(dict.fromkeys(e.data.dataset for e in experiments))
        self.title = f"Client selection on {datasets}" if datasets else "Client selection"
        self.headline, self.setting = _headline(rows, baselines), _setting(experiments)
        self.target, self.finished = runs.target, all(r.finished for r in results)
        self.table = comparison_cells(runs, rows)
        self.roles = Roles(ranked, ranked[:HIGHLIGHTED], baselines)
        self.chosen = next(iter([*ranked, *baselines]), None)  # whose cohorts are shown first
        axes = ["seconds", "rounds", "megabytes"]
        self.axes = axes if durations_differ(runs) else [*axes[1:], axes[0]]  # of accuracy
        self.curves = [_thin(line) for line in map(curve, runs) if line.rounds]
        self.waiting = [row for r in runs for row in _waited_for(r)]
        self.cohorts = [row for r in runs for row in _cohorts(r)]
        self.grouped = any(
            max(len(r.histories[0].rounds), len(r.members[0].clients)) > MAX_CELLS for r in runs
        )
        self.ranks: dict[str, Cells] = {}  # of clients by skew, from runs with FedACS
        for run in runs:
            with suppress(ConfigError):  # of another policy than FedACS
                if run.folder is not None:
                    self.ranks[run.policy] = rank_cells(skew_ranks(run.folder)[::-1])
        self.settings, self.provenance = _shared_settings(experiments), _provenance(runs)


def _setting(experiments: Sequence[Experiment]) -> str:
    """Say which data, split and seeds the runs have in common; captions repeat it."""
    splits: dict[str, None] = {}
    for e in experiments:
        options = ", ".join(f"{k}={v}" for k, v in e.data.options.items())
        split = f"{e.data.partition} ({options})" if options else e.data.partition
        clients = "" if e.data.num_clients is None else f"{e.data.num_clients} clients, "
        splits[f"{e.data.dataset}, {clients}split {split}, cohorts of {e.cohort_size}"] = None
    seeds = dict.fromkeys(len(e.seeds) for e in experiments)
    counts = " or ".join("1 seed" if n == 1 else f"{n} seeds" for n in seeds)
    return "; ".join([*list(splits)[:3], counts]) if counts else ""


def _headline(rows: Sequence[ComparisonRow], baselines: Sequence[str]) -> str:
    """Conclude in a sentence or two."""
    measured = [r for r in rows if math.isfinite(r.accuracy.mean)]
    if not measured:
        return "No accuracy has been measured yet."
    best = measured[0]
    accuracy = f"{100 * best.accuracy.mean:.1f}%"
    if len(measured) == 1:
        return f"{best.policy} reaches an accuracy of {accuracy}."
    reached = f"{best.policy} reaches the highest accuracy, {accuracy}"
    if best.policy in baselines:
        return f"No policy is better than uniform selection: {reached}."
    if best.gain is None:
        return f"{reached}."
    gain, low, high = (100 * value for value in best.gain)
    text = f"{reached}: {gain:+.1f} points against uniform selection "
    text += f"(95% interval {low:+.1f} to {high:+.1f})"
    return f"{text}, which these seeds cannot tell from zero." if low <= 0 <= high else f"{text}."


def _thin(curve: Curve) -> Curve:
    """Keep at most `MAX_POINTS` points of a curve, the last one among them."""
    step = math.ceil(len(curve.rounds) / MAX_POINTS)
    keep = slice((len(curve.rounds) - 1) % step, None, step)
    return curve._replace(**{name: getattr(curve, name)[keep] for name in Curve._fields[1:]})


def _waited_for(result: Run) -> Rows:
    """Return who was the slowest of its round, and how long these rounds took, in one seed."""
    seconds: dict[ClientId, list[float]] = {}
    for record in result.histories[0].rounds:
        if record.slowest is not None:
            seconds.setdefault(record.slowest, []).append(record.seconds)
    order = sorted(seconds, key=lambda client: (-sum(seconds[client]), client))[:MAX_WAITED_FOR]
    return [
        {"run": result.policy, "client": c, "rounds": len(seconds[c]), "seconds": sum(seconds[c])}
        for c in order
    ]


def _cohorts(result: Run) -> Rows:
    """Count how often clients (or groups) were selected by round (or span) in the first seed."""
    history = result.histories[0]
    counts = Counter(client for cohort in history.selections for client in cohort)
    order = sorted(result.members[0].clients, key=lambda c: (-counts[c], c))
    groups = group_neighbors(order, MAX_CELLS)
    row_of = {client: row for row, group in enumerate(groups, start=1) for client in group}
    cells = []
    for span in group_neighbors(range(len(history.rounds)), MAX_CELLS):
        times = Counter(row_of[c] for number in span for c in history.selections[number])
        where = {"run": result.policy, "first": span[0] + 1, "last": span[-1] + 1}
        cells += [
            {**where, "row": row, "client": few(groups[row - 1], 1), "times": n}
            for row, n in sorted(times.items())
        ]
    return cells


def group_neighbors(items: Sequence[Any], max_groups: int) -> list[list[Any]]:
    """Divide items into at most so many groups of neighbors."""
    parts = max(1, min(max_groups, len(items)))
    return [part.tolist() for part in np.array_split(np.array(items, object), parts)]


def skew_ranks(folder: Path, seed: int = 0) -> list[Rank]:
    """Rank the clients of a run with FedACS (Wang et al. 2021) by the duels of a seed (from 0)."""
    path = folder / ("checkpoint" if (folder / "checkpoint").exists() else "session")
    try:
        if path.stat().st_size > MAX_CHECKPOINT:
            raise InvalidCheckpoint(f"{path} is too large")
        state = storage.load(path)
        session = state["session"] if "session" in state else state["seeds"][seed]["session"]
        name, state = session["policy"].partition("(")[0], session["policy_state"]
    except (OSError, InvalidCheckpoint, KeyError, IndexError, TypeError, AttributeError):
        raise ConfigError(
            f"{folder}: no run with a checkpoint of seed {seed + 1}; give the folder of one "
            "run, such as COMPARISON/fedacs"
        ) from None
    if name != "FedACS":
        raise ConfigError(f"{folder}: ranks come from duels of FedACS, not {name}")
    policy = FedACS()
    policy.load_state_dict(state)
    wins, losses = policy.state.wins, policy.state.losses
    clients = sorted(wins.keys() | losses.keys())
    ranks = policy.ranks(clients, stream(0, "rank", seed))
    rows = [
        Rank(c, float(mean), float(low), float(high), wins.get(c, 0.0) + losses.get(c, 0.0))
        for c, mean, low, high in zip(clients, *ranks, strict=True)
    ]
    return sorted(rows, key=lambda row: row.rank)


def _shared_settings(experiments: Sequence[Experiment]) -> dict[str, str]:
    """Return the settings that all runs share, by dotted key."""
    first, *others = [config.flat(config.dump(e)) for e in experiments] or [{}]
    return {
        key: as_text(value)
        for key, value in first.items()
        if value is not None and all(other.get(key) == value for other in others)
    }


def _provenance(results: Results) -> list[str]:
    """Return the different versions that made the runs, in words."""
    texts: dict[str, None] = {}
    for result in results:
        values = read_json(Path(result.folder or "") / "provenance.json", {"versions": None})
        if isinstance(values, dict) and values.get("versions"):
            versions = ", ".join(f"{name} {number}" for name, number in values["versions"].items())
            texts[f"{versions}; {values.get('machine')}"] = None
    return list(texts)
