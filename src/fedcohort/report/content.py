"""What a report on runs shows, as values: figures draw them, pages print them, tests read them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcohort import storage
from fedcohort.analysis.clusters import classical_map
from fedcohort.exceptions import InvalidCheckpoint
from fedcohort.experiments.config import NO_GATE, Experiment, dump
from fedcohort.experiments.results import Members, PolicyResult, Results
from fedcohort.experiments.summary import gemd_by_round
from fedcohort.report.tables import ComparisonRow, Curve, comparison, curves, setting_columns
from fedcohort.rounds import ClientId, stream
from fedcohort.simulate.history import History
from fedcohort.sketch.distances import distance_matrix

Floats = NDArray[np.float64]
HIGHLIGHTED = 3
MOST_POINTS = 150  # of one curve
MOST_CELLS = 64  # rows or columns of a matrix; more clients or rounds are grouped
MOST_CLIENTS = 1000  # on a map; of more, a random part is drawn
LARGEST_CHECKPOINT = 500_000_000  # bytes; of a larger one, the map is drawn from labels
#: Signals that describe a client's data or model, the first one known is mapped.
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


class Participation(NamedTuple):
    """How often a run selected each client, in the first seed.

    `counts` has one row per client (or group of clients) and one column per span of rounds. The
    clients that were selected most come first.
    """

    policy: str
    clients: list[str]
    rounds: list[tuple[int, int]]
    counts: NDArray[np.int64]
    totals: dict[ClientId, int]


class ClientPoint(NamedTuple):
    """A client on the map."""

    client: ClientId
    x: float
    y: float
    examples: int
    main_label: int | None


class FederationMap(NamedTuple):
    """Clients in two dimensions, and the distances between them in the order of likeness."""

    source: str
    points: list[ClientPoint]
    share: float
    sampled: bool
    names: list[str]
    distances: Floats


class Content(NamedTuple):
    """Everything that a report shows.

    `ranked` are the runs from the highest accuracy to the lowest, without the baselines;
    `highlighted` are the first of them.
    """

    title: str
    headline: str
    setting: str
    target: float | None
    finished: bool
    rows: list[ComparisonRow]
    columns: list[dict[str, str]]
    ranked: list[str]
    highlighted: list[str]
    baselines: list[str]
    curves: list[Curve]
    gemd: list[Line]
    withheld: list[Line]
    window: int
    participation: list[Participation]
    maps: list[FederationMap]
    settings: dict[str, str]
    provenance: list[dict[str, Any]]


def content(results: Results) -> Content:
    """Compute what the report on `results` shows."""
    started = Results(r for r in results if r.histories)
    rows = comparison(started)
    baselines = [r.policy for r in started if any(started.baseline(o) is r for o in started)]
    by_accuracy = sorted(rows, key=lambda row: -np.nan_to_num(row.accuracy.mean, nan=-1.0))
    ranked = [row.policy for row in by_accuracy if row.policy not in baselines]
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
        columns=setting_columns(started),
        ranked=ranked,
        highlighted=ranked[:HIGHLIGHTED],
        baselines=baselines,
        curves=[_thinned(curve) for curve in curves(started)],
        gemd=[line for r in started if (line := _gemd(r, window)).rounds],
        withheld=[_withheld(r, window) for r in started if _gated(r)],
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
    splits = dict.fromkeys(_split(e) for e in experiments)
    seeds = dict.fromkeys(len(e.seeds) for e in experiments)
    counts = " or ".join("1 seed" if n == 1 else f"{n} seeds" for n in seeds)
    return "; ".join([*splits][:3]) + (f"; {counts}" if counts else "")


def _split(e: Experiment) -> str:
    options = ", ".join(f"{k}={v}" for k, v in e.data.options.items())
    split = f"{e.data.partition} ({options})" if options else e.data.partition
    clients = "" if e.data.num_clients is None else f"{e.data.num_clients} clients, "
    return f"{e.data.dataset}, {clients}split {split}, cohorts of {e.cohort_size}"


def _headline(rows: Sequence[ComparisonRow], baselines: Sequence[str], target: float | None) -> str:
    """Conclude in a sentence or two."""
    known = [r for r in rows if math.isfinite(r.accuracy.mean)]
    if not known:
        return "No accuracy has been measured yet."
    best = max(known, key=lambda r: r.accuracy.mean)
    reached = f"{best.policy} reaches the highest accuracy, {100 * best.accuracy.mean:.1f} %"
    if best.policy in baselines and len(known) > 1:
        return f"No policy is better than uniform selection: {reached}."
    gain = best.gain
    if gain is None:
        return f"{reached}." if len(known) > 1 else f"{best.policy}: {reached.split(', ')[1]}."
    low, high = 100 * gain.low, 100 * gain.high
    text = f"{reached}: {100 * gain.mean:+.1f} points against uniform selection "
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
    mine = f" It reaches {target:.0%} in {best.rounds_to_target.mean:.0f} rounds"
    if base.rounds_to_target.missing:
        return f"{mine}; uniform selection does not in every seed."
    return f"{mine}; uniform selection needs {base.rounds_to_target.mean:.0f}."


def _thinned(curve: Curve) -> Curve:
    """Keep at most `MOST_POINTS` points of a curve, the last one among them."""
    step = -(-len(curve.rounds) // MOST_POINTS) or 1
    keep = slice((len(curve.rounds) - 1) % step, None, step)
    kept = {name: values[keep] for name, values in curve._asdict().items() if name != "policy"}
    return Curve(curve.policy, **kept)


def _gemd(result: PolicyResult, window: int) -> Line:
    values = [
        gemd_by_round(h, *members)
        for h, members in zip(result.histories, result.members(), strict=True)
    ]
    return _running(result.policy, values, window)


def _gated(result: PolicyResult) -> bool:
    gated = result.experiment is not None and result.experiment.gate != NO_GATE
    return gated or any(r.withheld for h in result.histories for r in h.rounds)


def _withheld(result: PolicyResult, window: int) -> Line:
    """Return the share of trained models whose upload a gate withheld."""
    values = [
        [len(r.withheld) / max(1, len(r.withheld) + len(r.finished)) for r in h.rounds]
        for h in result.histories
    ]
    return _running(result.policy, values, window)


def _running(policy: str, seeds: Sequence[Sequence[float]], window: int) -> Line:
    """Average over seeds and over the last `window` rounds; unknown rounds are left out."""
    length = min(map(len, seeds), default=0)
    values = np.array([own[:length] for own in seeds], float)
    known = np.flatnonzero(np.isfinite(values).all(axis=0)) if length else np.array([], int)
    mean = values[:, known].mean(axis=0) if known.size else np.array([])
    total = np.concatenate([[0.0], np.cumsum(mean)])
    first = np.maximum(np.arange(len(mean)) + 1 - window, 0)
    smooth = (total[1:] - total[first]) / (np.arange(len(mean)) + 1 - first)
    step = -(-len(known) // MOST_POINTS) or 1
    keep = slice((len(known) - 1) % step if len(known) else 0, None, step)
    return Line(policy, (known[keep] + 1).tolist(), smooth[keep].tolist())


def _participation(result: PolicyResult) -> Participation:
    history, members = result.histories[0], result.members()[0]
    totals = _totals(history, members.clients)
    order = sorted(members.clients, key=lambda c: (-totals[c], c))
    groups = np.array_split(np.arange(len(order)), min(MOST_CELLS, len(order)))
    spans = np.array_split(np.arange(len(history.rounds)), min(MOST_CELLS, len(history.rounds)))
    row = {order[i]: g for g, group in enumerate(groups) for i in group.tolist()}
    counts = np.zeros((len(groups), len(spans)), np.int64)
    for column, span in enumerate(spans):
        for number in span.tolist():
            for client in history.rounds[number].selected:
                counts[row[client], column] += 1
    return Participation(
        result.policy,
        [_group_name([order[i] for i in group.tolist()]) for group in groups],
        [(int(span[0]) + 1, int(span[-1]) + 1) for span in spans],
        counts,
        totals,
    )


def _totals(history: History, clients: Sequence[ClientId]) -> dict[ClientId, int]:
    totals = dict.fromkeys(clients, 0)
    for cohort in history.selections:
        for client in cohort:
            totals[client] += 1
    return totals


def _group_name(clients: Sequence[ClientId]) -> str:
    return clients[0] if len(clients) == 1 else f"{clients[0]} and {len(clients) - 1} more"


def _maps(results: Results) -> list[FederationMap]:
    """Map the clients by their sketches and by FedCor's embedding, or else by their labels."""
    found: dict[str, FederationMap] = {}
    for result in results:
        members = result.members()[0]
        for source, clients, squares in _described(result):
            if source not in found and len(clients) > 2:
                found[source] = _map(source, clients, squares, members)
    sketch = next((found[name] for name in DESCRIPTIONS if name in found), None)
    maps = [m for m in (sketch, found.get("FedCor embedding")) if m is not None]
    return maps or _label_map(results)


def _described(result: PolicyResult) -> list[tuple[str, list[ClientId], Floats]]:
    """Return squared distances of clients by whatever the run's checkpoint knows of them."""
    folder = Path(result.folder or "")
    path = next((folder / n for n in ("checkpoint", "session") if (folder / n).exists()), None)
    if result.folder is None or path is None or path.stat().st_size > LARGEST_CHECKPOINT:
        return []
    try:
        state = storage.load(path)
        session = state["session"] if "session" in state else state["seeds"][0]["session"]
        columns, state = session["signals"]["columns"], session["policy_state"]
    except (InvalidCheckpoint, KeyError, IndexError, TypeError):
        return []  # of another version: the map is drawn from labels, and its caption says so
    described = []
    for name in DESCRIPTIONS:
        if name in columns:
            keep = _sampled(columns[name]["clients"])
            values = columns[name]["values"][keep]
            clients = [columns[name]["clients"][i] for i in keep]
            described.append((name, clients, _squares(name, values)))
    if session["policy"] == "FedCor" and state.get("embedding") is not None:
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
    if len(clients) <= MOST_CLIENTS:
        return list(range(len(clients)))
    chosen = stream(0, "map").choice(len(clients), MOST_CLIENTS, replace=False)
    return sorted(chosen.tolist())


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
    row = {client: i for i, client in enumerate(members.clients)}
    counts = members.label_counts
    points = []
    for client, (x, y) in zip(clients, placed.positions.tolist(), strict=True):
        own = counts[row[client]] if client in row and counts.shape[1] else None
        label = None if own is None or not own.sum() else int(own.argmax())
        points.append(ClientPoint(client, x, y, 0 if own is None else int(own.sum()), label))
    names, distances = _ordered(clients, np.sqrt(np.maximum(squares, 0)))
    sampled = len(clients) == MOST_CLIENTS < len(members.clients)
    return FederationMap(source, points, placed.share, sampled, names, distances)


def _ordered(clients: Sequence[ClientId], distances: Floats) -> tuple[list[str], Floats]:
    """Put like clients side by side, and average groups of neighbors if there are many."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    near = squareform(distances, checks=False)
    order = leaves_list(linkage(near, "average", optimal_ordering=len(clients) <= 200))
    groups = np.array_split(order, min(MOST_CELLS, len(order)))
    names = [_group_name([clients[i] for i in group.tolist()]) for group in groups]
    blocks = [[distances[np.ix_(a, b)].mean() for b in groups] for a in groups]
    return names, np.array(blocks)


def _shared_settings(experiments: Sequence[Experiment]) -> dict[str, str]:
    """Return the settings that all runs share, by dotted key."""
    flat = [_flat(dump(e), "") for e in experiments]
    if not flat:
        return {}
    return {k: v for k, v in flat[0].items() if all(own.get(k) == v for own in flat)}


def _flat(values: dict[str, Any], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{where}{key}.")
        elif value is not None:
            found[f"{where}{key}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def _provenance(results: Results) -> list[dict[str, Any]]:
    """Return the different commands and versions that made the runs."""
    found: list[dict[str, Any]] = []
    for result in results:
        path = Path(result.folder or "") / "provenance.json"
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # a folder of an older version has none
        if isinstance(known, dict) and known not in found:
            found.append(known)
    return found
