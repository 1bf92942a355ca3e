"""What a report on runs shows, as values: figures draw them, pages print them, tests read them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort.analysis.clusters import classical_map, leaf_order
from fedcohort.analysis.comparison import ComparisonRow, Curve, comparison, curves
from fedcohort.analysis.ranking import Rank, saved_session, skew_ranks
from fedcohort.exceptions import ConfigError
from fedcohort.experiments.config import NO_GATE, Experiment, dump
from fedcohort.experiments.results import Members, Results, Run, gemd_by_round
from fedcohort.report.columns import setting_columns
from fedcohort.rounds import ClientId, stream
from fedcohort.sketch.distances import distance_matrix

Floats = NDArray[np.float64]
HIGHLIGHTED = 3
MAX_POINTS = 150  # of one curve
MAX_CELLS = 64  # rows or columns of a matrix; more clients or rounds are grouped
MAX_CLIENTS = 1000  # on a map; of more, a random part is drawn
MAX_WAITED_FOR = 15  # clients
TIMES_DIFFER = 1.1  # ratio of the seconds per round of two runs
#: Signals that describe a client's data or model, the first one at hand is mapped.
DESCRIPTIONS = (
    "race_sketch",
    "feature_profile",
    "model_sketch",
    "update_sketch",
    "gradient_sketch",
)


class Line(NamedTuple):
    """One quantity of one run by round."""

    policy: str
    rounds: list[int]
    values: list[float]


class Roles(NamedTuple):
    """How runs are drawn: ranked ones have colors in this order, some are highlighted."""

    ranked: list[str]
    highlighted: list[str]
    baselines: list[str]


class WaitedFor(NamedTuple):
    """The clients that made the rounds of a run wait longest: name, rounds, seconds in all."""

    policy: str
    clients: list[tuple[ClientId, int, float]]


class Participation(NamedTuple):
    """How often a run selected each client in the first seed.

    `cells` has a row for each client (or group of clients) that was selected in a round (or span
    of rounds): "row" counts the clients from the one selected most.
    """

    policy: str
    totals: dict[ClientId, int]
    cells: list[dict[str, Any]]
    grouped: bool


class FederationMap(NamedTuple):
    """Clients in two dimensions, and the distances between them in the order of likeness.

    A point has "client", "x", "y", "examples" and "label", the most frequent one.
    """

    source: str
    points: list[dict[str, Any]]
    share: float
    sampled: bool
    names: list[str]
    distances: Floats


class Content(NamedTuple):
    """Everything that a report shows.

    `rows` go from the highest accuracy to the lowest, and so do the ranked runs, which are all but
    the baselines. `chosen` is the run whose cohorts are shown first. `axes` are what accuracy is
    drawn over, the most telling first.
    """

    title: str
    headline: str
    setting: str
    target: float | None
    finished: bool
    rows: list[ComparisonRow]
    settings_of_rows: list[dict[str, str]]
    roles: Roles
    chosen: str | None
    axes: list[str]
    curves: list[Curve]
    gemd: list[Line]
    withheld: list[Line]
    waiting: list[WaitedFor]
    ranks: dict[str, list[Rank]]
    window: int
    participation: list[Participation]
    maps: list[FederationMap]
    settings: dict[str, str]
    provenance: list[str]


def content(results: Results) -> Content:
    """Compute what the report on `results` shows."""
    started = Results(r for r in results if r.histories)
    pairs = list(zip(comparison(started), setting_columns(started), strict=True))
    pairs.sort(key=lambda pair: -np.nan_to_num(pair[0].accuracy.mean, nan=-1.0))
    rows = [row for row, _ in pairs]
    baselines = [r.policy for r in started if any(started.baseline(o) is r for o in started)]
    ranked = [row.policy for row in rows if row.policy not in baselines]
    experiments = [r.experiment for r in started if r.experiment is not None]
    longest = max((len(h.rounds) for r in started for h in r.histories), default=1)
    window = max(1, longest // 12)
    return Content(
        title=_title(experiments),
        headline=_headline(rows, baselines, started.target),
        setting=_setting(experiments),
        target=started.target,
        finished=all(r.finished for r in results),
        rows=rows,
        settings_of_rows=[columns for _, columns in pairs],
        roles=Roles(ranked, ranked[:HIGHLIGHTED], baselines),
        chosen=next(iter([*ranked, *(r.policy for r in started)]), None),
        axes=_axes(started),
        curves=[_thinned(curve) for curve in curves(started)],
        gemd=[line for r in started if (line := _gemd(r, window)).rounds],
        withheld=[_withheld(r, window) for r in started if _gated(r)],
        waiting=[waited for r in started if (waited := _waited_for(r)).clients],
        ranks={r.policy: ranks for r in started if (ranks := _ranks(r))},
        window=window,
        participation=[_participation(r) for r in started],
        maps=_maps(started),
        settings=_shared_settings(experiments),
        provenance=_provenance(started),
    )


def _title(experiments: Sequence[Experiment]) -> str:
    names = list(dict.fromkeys(e.data.dataset for e in experiments))
    return f"Client selection on {', '.join(names)}" if names else "Client selection"


def _setting(experiments: Sequence[Experiment]) -> str:
    """Say which data, split and seeds the runs have in common; captions repeat it."""
    splits = list(dict.fromkeys(_split(e) for e in experiments))[:3]
    seeds = dict.fromkeys(len(e.seeds) for e in experiments)
    counts = " or ".join("1 seed" if n == 1 else f"{n} seeds" for n in seeds)
    return "; ".join([*splits, counts]) if counts else ""


def _split(e: Experiment) -> str:
    options = ", ".join(f"{k}={v}" for k, v in e.data.options.items())
    split = f"{e.data.partition} ({options})" if options else e.data.partition
    clients = "" if e.data.num_clients is None else f"{e.data.num_clients} clients, "
    return f"{e.data.dataset}, {clients}split {split}, cohorts of {e.cohort_size}"


def _headline(rows: Sequence[ComparisonRow], baselines: Sequence[str], target: float | None) -> str:
    """Conclude in a sentence or two."""
    measured = [r for r in rows if math.isfinite(r.accuracy.mean)]
    if not measured:
        return "No accuracy has been measured yet."
    best = measured[0]
    accuracy = f"the highest accuracy, {100 * best.accuracy.mean:.1f} %"
    if len(measured) == 1:
        return f"{best.policy}: {accuracy.removeprefix('the highest ')}."
    if best.policy in baselines:
        return f"No policy is better than uniform selection: {best.policy} reaches {accuracy}."
    if best.gain is None:
        return f"{best.policy} reaches {accuracy}."
    gain, low, high = (100 * value for value in best.gain)
    text = f"{best.policy} reaches {accuracy}: {gain:+.1f} points against uniform selection "
    text += f"(95 % interval {low:+.1f} to {high:+.1f})"
    if low <= 0 <= high:
        return f"{text}, which these seeds cannot tell from zero."
    return f"{text}.{_rounds_saved(best, rows, baselines, target)}"


def _rounds_saved(
    best: ComparisonRow,
    rows: Sequence[ComparisonRow],
    baselines: Sequence[str],
    target: float | None,
) -> str:
    base = next((r for r in rows if r.policy in baselines), None)
    if base is None or target is None or best.rounds_to_target.missing:
        return ""
    text = f" It reaches {target:.0%} in {best.rounds_to_target.mean:.0f} rounds"
    if base.rounds_to_target.missing:
        return f"{text}; uniform selection does not in every seed."
    return f"{text}; uniform selection needs {base.rounds_to_target.mean:.0f}."


def _axes(results: Results) -> list[str]:
    """Order what accuracy is drawn over: time first if the rounds of some run take longer."""
    means = [float(np.mean([x.seconds for h in r.histories for x in h.rounds])) for r in results]
    if means and max(means) > TIMES_DIFFER * min(means):
        return ["seconds", "rounds", "megabytes"]
    return ["rounds", "megabytes", "seconds"]


def _thinned(curve: Curve) -> Curve:
    """Keep at most `MAX_POINTS` points of a curve, the last one among them."""
    keep = _spread_out(len(curve.rounds))
    kept = {name: values[keep] for name, values in curve._asdict().items() if name != "policy"}
    return Curve(curve.policy, **kept)


def _spread_out(count: int) -> slice:
    step = -(-count // MAX_POINTS) or 1
    return slice((count - 1) % step if count else 0, None, step)


def _gemd(result: Run, window: int) -> Line:
    pairs = zip(result.histories, result.members(), strict=True)
    return _running(result.policy, [gemd_by_round(h, *members) for h, members in pairs], window)


def _gated(result: Run) -> bool:
    gated = result.experiment is not None and result.experiment.gate != NO_GATE
    return gated or any(r.withheld for h in result.histories for r in h.rounds)


def _withheld(result: Run, window: int) -> Line:
    """Return the share of trained models whose upload a gate withheld."""
    values = [
        [len(r.withheld) / max(1, len(r.withheld) + len(r.finished)) for r in h.rounds]
        for h in result.histories
    ]
    return _running(result.policy, values, window)


def _running(policy: str, seeds: Sequence[Sequence[float]], window: int) -> Line:
    """Average over seeds and over the last `window` rounds; unknown rounds are left out."""
    length = min(map(len, seeds), default=0)
    values = np.array([seed[:length] for seed in seeds], float).reshape(len(seeds), length)
    measured = np.flatnonzero(np.isfinite(values).all(axis=0))
    mean = values[:, measured].mean(axis=0)
    total = np.concatenate([[0.0], np.cumsum(mean)])
    first = np.maximum(np.arange(len(mean)) + 1 - window, 0)
    smooth = (total[1:] - total[first]) / (np.arange(len(mean)) + 1 - first)
    keep = _spread_out(len(measured))
    return Line(policy, (measured[keep] + 1).tolist(), smooth[keep].tolist())


def _waited_for(result: Run) -> WaitedFor:
    """Return who was the slowest of its round, and how long these rounds took, in one seed."""
    rounds: dict[ClientId, list[float]] = {}
    for record in result.histories[0].rounds:
        if record.slowest is not None:
            rounds.setdefault(record.slowest, []).append(record.seconds)
    order = sorted(rounds, key=lambda client: (-sum(rounds[client]), client))[:MAX_WAITED_FOR]
    return WaitedFor(result.policy, [(c, len(rounds[c]), sum(rounds[c])) for c in order])


def _ranks(result: Run) -> list[Rank]:
    """Return what FedACS's duels of the first seed say about the clients; nothing for others."""
    try:
        return [] if result.folder is None else skew_ranks(result.folder)
    except ConfigError:
        return []


def _participation(result: Run) -> Participation:
    history, members = result.histories[0], result.members()[0]
    totals = dict.fromkeys(members.clients, 0)
    for cohort in history.selections:
        for client in cohort:
            totals[client] += 1
    order = sorted(members.clients, key=lambda c: (-totals[c], c))
    groups, spans = _groups(len(order)), _groups(len(history.rounds))
    row = {order[i]: g for g, group in enumerate(groups) for i in group.tolist()}
    names = [_group_name([order[i] for i in group.tolist()]) for group in groups]
    cells = []
    for span in spans:
        picks = Counter(row[c] for number in span.tolist() for c in history.selections[number])
        where = {"run": result.policy, "first": int(span[0]) + 1, "last": int(span[-1]) + 1}
        cells += [
            {**where, "row": g + 1, "client": names[g], "times": times}
            for g, times in sorted(picks.items())
        ]
    grouped = len(groups) < len(order) or len(spans) < len(history.rounds)
    return Participation(result.policy, totals, cells, grouped)


def _groups(count: int) -> list[NDArray[np.int64]]:
    return np.array_split(np.arange(count), max(1, min(MAX_CELLS, count)))


def _group_name(clients: Sequence[ClientId]) -> str:
    return clients[0] if len(clients) == 1 else f"{clients[0]} and {len(clients) - 1} more"


def grouped(
    distances: Floats, order: Sequence[int], names: Sequence[str]
) -> tuple[Floats, list[str]]:
    """Put distances in an order; those of many clients become means over groups of neighbors."""
    groups = [np.asarray(order)[part] for part in _groups(len(order))]
    means = [[distances[np.ix_(a, b)].mean() for b in groups] for a in groups]
    return np.array(means), [_group_name([names[i] for i in group.tolist()]) for group in groups]


def _maps(results: Results) -> list[FederationMap]:
    """Map the clients by their sketches and by FedCor's embedding, or else by their labels."""
    maps: dict[str, FederationMap] = {}
    for result in results:
        members = result.members()[0]
        for source, clients, squares in _described(result):
            if source not in maps and len(clients) > 2:
                maps[source] = _map(source, clients, squares, members)
    sketch = next((maps[name] for name in DESCRIPTIONS if name in maps), None)
    shown = [m for m in (sketch, maps.get("FedCor embedding")) if m is not None]
    return shown or _label_map(results)


def _described(result: Run) -> list[tuple[str, list[ClientId], Floats]]:
    """Return squared distances of clients by what the run's checkpoint holds about them."""
    session = None if result.folder is None else saved_session(result.folder)
    if session is None:
        return []  # the map is drawn from labels, and its caption says so
    columns, state = session.signals, session.state
    described = []
    for name in DESCRIPTIONS:
        if name in columns:
            keep = _sampled(columns[name]["clients"])
            clients = [columns[name]["clients"][i] for i in keep]
            described.append((name, clients, _squares(name, columns[name]["values"][keep])))
    if session.policy == "FedCor" and state.get("embedding") is not None:
        embedding = state["embedding"].T
        keep = _sampled(state["clients"][: len(embedding)])
        clients = [state["clients"][i] for i in keep]
        described.append(("FedCor embedding", clients, _euclidean(embedding[keep])))
    return described


def _squares(name: str, values: NDArray[Any]) -> Floats:
    if name == "race_sketch":
        return np.nan_to_num(distance_matrix(values, "mmd"))
    return _euclidean(values.reshape(len(values), -1))


def _euclidean(vectors: NDArray[Any]) -> Floats:
    centered = np.asarray(vectors, np.float64)
    centered = centered - centered.mean(axis=0)
    norms = (centered**2).sum(axis=1)
    squares: Floats = np.maximum(norms[:, None] + norms - 2 * centered @ centered.T, 0)
    np.fill_diagonal(squares, 0)
    return squares


def _sampled(clients: Sequence[ClientId]) -> list[int]:
    """Return the positions of all clients, or of a random part of them."""
    if len(clients) <= MAX_CLIENTS:
        return list(range(len(clients)))
    drawn = stream(0, "map").choice(len(clients), MAX_CLIENTS, replace=False)
    return sorted(drawn.tolist())


def _label_map(results: Results) -> list[FederationMap]:
    """Map the clients by the Hellinger distance of their label distributions."""
    for result in results:
        members = result.members()[0]
        if members.label_counts.shape[1] and len(members.clients) > 2:
            keep = _sampled(members.clients)
            counts = members.label_counts[keep].astype(float)
            shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
            clients = [members.clients[i] for i in keep]
            return [_map("labels", clients, _euclidean(np.sqrt(shares / 2)), members)]
    return []


def _map(source: str, clients: list[ClientId], squares: Floats, members: Members) -> FederationMap:
    placed = classical_map(squares)
    labels = dict(zip(members.clients, members.label_counts, strict=True))
    points = []
    for client, (x, y) in zip(clients, placed.positions.tolist(), strict=True):
        counts = labels.get(client, np.zeros(0, np.int64))
        label = str(counts.argmax()) if counts.sum() else "unknown"
        examples = int(counts.sum())
        points.append({"client": client, "x": x, "y": y, "examples": examples, "label": label})
    distances = np.sqrt(np.maximum(squares, 0))
    _, order = leaf_order(distances)
    means, names = grouped(distances, order.tolist(), clients)
    sampled = len(clients) == MAX_CLIENTS < len(members.clients)
    return FederationMap(source, points, placed.share, sampled, names, means)


def _shared_settings(experiments: Sequence[Experiment]) -> dict[str, str]:
    """Return the settings that all runs share, by dotted key."""
    flat = [_flat(dump(e), "") for e in experiments]
    shared = flat[0] if flat else {}
    return {k: v for k, v in shared.items() if all(other.get(k) == v for other in flat)}


def _flat(values: Mapping[str, Any], where: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{where}{key}.")
        elif value is not None:
            flat[f"{where}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def _provenance(results: Results) -> list[str]:
    """Return the different versions that made the runs, in words."""
    made_with: dict[str, None] = {}
    for result in results:
        path = Path(result.folder or "") / "provenance.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            versions = ", ".join(
                f"{name} {version}" for name, version in values["versions"].items()
            )
            made_with[f"{versions}; {values['machine']}"] = None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a folder of an older version has none
    return list(made_with)
