"""The interface of a selection policy, the registry of policies, and helpers that they share."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import DTypeLike, NDArray

from fedcohort.options import Configurable, Range, unknown
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import SIGNALS, Needs, Option, When
from fedcohort.signals.table import Signals
from fedcohort.sketch.federation import MAX_SIZE_RATIO, MIN_SIZES

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
PositiveShare = Annotated[float, Range(0, 1, above=True)]

PROJECTION: Mapping[str, Option] = {"k": 50, "kind": "sparse", "seed": 0}
SKETCH: Mapping[str, Option] = {"rows": 10, "bits": 6, "seed": 0}


class Policy(Configurable, ABC):
    """Picks each round's cohort from the signals it declared it needs.

    A policy does no I/O and owns no generator. All it remembers is in `state`, one dataclass of
    numbers, strings, arrays and dicts or lists of those, so that a session can save and restore it.
    """

    name: ClassVar[str] = ""
    when: ClassVar[str] = ""
    needs: Needs = Needs()  # signals, by when they are collected
    signal_options: Mapping[str, Mapping[str, Option]] = {}  # how they are made, by name
    profile_first: bool = False  # ask all for their profile before the first round

    def check_cohort(self, size: int) -> None:
        """Raise ConfigError if the options do not fit cohorts of this size; fine by default."""

    def candidates(self, round: Round, signals: Signals, rng: Generator) -> Sequence[ClientId]:
        """Return whom to ask for the query signals this round; nobody by default."""
        return ()

    @abstractmethod
    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Pick up to ``round.size`` clients of ``round.available``.

        A cohort that falls short is topped up uniformly by the session.
        """

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Learn from what came back; nothing by default."""


POLICIES: dict[str, type[Policy]] = {}
P = TypeVar("P", bound=type[Policy])


def register(name: str, when: str) -> Callable[[P], P]:
    """Class decorator: enter a policy into `POLICIES`; `when` says when to use it, in a line."""

    def enter(policy: P) -> P:
        policy.name, policy.when = name, when
        POLICIES[name] = policy
        return policy

    return enter


def draw(logits: Array, size: int, rng: Generator) -> Indices:
    """Draw `size` different positions one by one, in proportion to exp(logits).

    The top `size` of logits plus Gumbel noise follow the law of successive sampling without
    replacement exactly, in one vectorized pass that neither overflows nor underflows. Positions
    with a logit of minus infinity are never drawn, even if the sample falls short.
    """
    keys = logits + rng.gumbel(size=len(logits))
    size = min(size, int(np.count_nonzero(keys > -np.inf)))
    if size == 0:
        return np.empty(0, np.int64)
    top = np.argpartition(-keys, size - 1)[:size]
    return np.asarray(top[np.argsort(-keys[top])])


def pick(
    clients: Sequence[ClientId], size: int, rng: Generator, logits: Array | None = None
) -> tuple[ClientId, ...]:
    """Draw `size` different clients, uniformly or by `draw`.

    Examples
    --------
    >>> pick(["a", "b", "c"], 3, np.random.default_rng(0), np.array([0.0, -np.inf, 50.0]))
    ('c', 'a')
    """
    if logits is not None:
        return take(clients, draw(logits, size, rng))
    return take(clients, rng.choice(len(clients), min(size, len(clients)), replace=False))


def take(clients: Sequence[ClientId], positions: Indices) -> tuple[ClientId, ...]:
    """Return the clients at these positions."""
    return tuple(clients[i] for i in positions.tolist())


def scored(
    clients: tuple[ClientId, ...], scores: Array, weights: tuple[float, ...] | None = None
) -> Selection:
    """Return the selection of clients with these scores, in their order."""
    return Selection(clients, weights, dict(zip(clients, scores.tolist(), strict=True)))


def sample_positions(count: int, limit: int, rng: Generator) -> Indices:
    """Draw at most `limit` of `count` positions uniformly, sorted."""
    if count <= limit:
        return np.arange(count)
    return np.sort(rng.choice(count, limit, replace=False))


def kmeans(rows: NDArray[Any], clusters: int, starts: int, rng: Generator) -> Any:
    """Return scikit-learn's model fitted to the rows."""
    from sklearn.cluster import KMeans

    model = KMeans(clusters, n_init=starts, random_state=int(rng.integers(2**31 - 1)))
    with warnings.catch_warnings():  # rows that differ by rounding only may share a cluster
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        return model.fit(rows)


def vector_needs(
    policy: str, signal: str, *profile: str, when: Sequence[When] = ("profile", "query", "reply")
) -> Needs:
    """Return the needs of a policy that compares clients by a signal's vectors or sketches.

    `profile` names further profile signals; `when` limits the signals that the policy can use.
    """
    vector = [n for n, s in SIGNALS.items() if getattr(s.form({}), "shape", None) != ()]
    possible = [name for name in vector if SIGNALS[name].when in when]
    if signal not in possible:
        raise unknown("signal", signal, possible, f"of {policy}")
    needs = {"profile": frozenset(profile), "query": frozenset[str](), "reply": frozenset[str]()}
    needs[SIGNALS[signal].when] |= {signal}
    return Needs(**needs)


def vector_options(signal: str) -> Mapping[str, Mapping[str, Option]]:
    """Return how the vectors of a signal are made: small sketches, or projections."""
    if signal == "race_sketch":
        return {signal: SKETCH}
    return {signal: PROJECTION} if SIGNALS[signal].when != "profile" else {}


def vectors(
    signals: Signals,
    name: str,
    clients: Sequence[ClientId],
    since: int | None = None,
    dtype: DTypeLike = np.float64,
) -> tuple[Indices, NDArray[Any]]:
    """Return the positions of clients with a usable reading, and the readings as rows of numbers.

    A sketch becomes its counts divided by n; an empty sketch is not usable. With `since`, readings
    of earlier rounds are left out. A number that does not fit the `dtype` becomes infinite.
    """
    positions, readings = signals.read(name, clients)
    if since is not None and len(positions):
        fresh = signals.rounds(name, clients)[positions] >= since
        positions, readings = positions[fresh], readings[fresh]
    if not len(positions):
        return positions, np.empty((0, 0))
    if readings.dtype.names is None:
        with np.errstate(over="ignore"):
            return positions, readings.reshape(len(positions), -1).astype(dtype)
    filled = readings["n"] > 0
    counts = readings["counts"][filled].reshape(int(filled.sum()), -1)
    return positions[filled], np.asarray(counts / readings["n"][filled][:, None])


def unit_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Scale rows to length one; rows that are zero or too long for their dtype become zero."""
    with np.errstate(over="ignore"):
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    usable = np.isfinite(lengths) & (lengths > 0)
    whole = np.where(usable[:, None], rows, 0)
    return np.asarray(whole / np.where(usable, lengths, 1)[:, None])


def angle_tree(rows: NDArray[Any], apart: Array | float = 0.0) -> Array:
    """Return Ward's linkage of clients by the angles of their rows to those of all clients.

    `apart` is added to the angles. A row of zeros is at an angle of 0 to all others.
    """
    from scipy.cluster.hierarchy import ward
    from scipy.spatial.distance import pdist

    if len(rows) < 2:
        return np.empty((0, 4))
    unit = unit_rows(rows)
    angles = np.arccos(np.clip(unit @ unit.T, -1, 1))
    angles[~unit.any(axis=1)] = angles[:, ~unit.any(axis=1)] = 0.0
    np.fill_diagonal(angles, 0.0)
    return np.asarray(ward(pdist(angles + apart)))


def believed(values: Array) -> Array:
    """Clip sizes at `MAX_SIZE_RATIO` times their median, where at least `MIN_SIZES` are known.

    A client must not take over by claiming 2^40 examples.
    """
    if len(values) < MIN_SIZES:
        return values
    return np.minimum(values, MAX_SIZE_RATIO * max(float(np.median(values)), 1.0))


def sizes(signals: Signals, clients: Sequence[ClientId]) -> Array:
    """Return each client's believed number of examples; the mean of the others if unknown."""
    positions, claims = signals.read("num_examples", clients)
    claims = believed(claims)
    result = np.full(len(clients), float(claims.mean()) if len(positions) else 1.0)
    result[positions] = claims
    return result


def shares(signals: Signals, clients: Sequence[ClientId]) -> Array:
    """Return each client's share of the data of `clients`; equal shares if nobody has any."""
    size = sizes(signals, clients)
    return size / size.sum() if size.any() else np.full(size.size, 1 / max(size.size, 1))


def label_counts(signals: Signals, clients: Sequence[ClientId]) -> tuple[Indices, Array]:
    """Return the positions of clients with labels, and their label counts, one row per client.

    Counts below zero, which privacy noise makes, are set to zero. Rows that claim more examples
    than are believed are scaled down.
    """
    positions, rows = signals.read("label_histogram", clients)
    rows = rows.reshape(len(positions), -1) if len(positions) else np.empty((0, 0))
    counts = np.maximum(rows, 0.0, dtype=np.float64)
    total = counts.sum(axis=1)
    filled = total > 1e-9  # a smaller sum could not be divided by
    if not filled.all():
        positions, counts, total = positions[filled], counts[filled], total[filled]
    cap = believed(total)
    large = np.flatnonzero(total > cap)
    counts[large] *= (cap / total)[large, None]
    return positions, counts


def label_distances(counts: Array, pooled: Array | float, goal: Array | float) -> Array:
    """Return the squared distance from `goal` of the label shares of each row plus `pooled`."""
    sums = counts + pooled
    sums /= sums.sum(axis=1, keepdims=True)
    sums -= goal
    return np.asarray(np.square(sums, out=sums).sum(axis=1))


def values_for(
    values: Mapping[ClientId, float], clients: Sequence[ClientId], otherwise: float = 0.0
) -> Array:
    """Return each client's entry of `values`, or `otherwise`; fast for a million clients."""
    if not values:
        return np.full(len(clients), otherwise)
    return np.fromiter(map(values.get, clients, repeat(otherwise)), np.float64, len(clients))


def count_up(counts: dict[ClientId, int], clients: Sequence[ClientId]) -> None:
    """Add one to each client's count."""
    for client in clients:
        counts[client] = counts.get(client, 0) + 1


def by_report(
    round: Round, outcome: Outcome, signals: Signals, name: str
) -> tuple[tuple[ClientId, ...], tuple[ClientId, ...]]:
    """Divide those that finished into those with and without a valid reading of a reply signal.

    Policies count a missing one against them, so that never reporting does not pay.
    """
    fresh = signals.rounds(name, outcome.finished) == round.number
    finished = outcome.finished
    return take(finished, np.flatnonzero(fresh)), take(finished, np.flatnonzero(~fresh))


def halve(values: dict[ClientId, float], clients: Sequence[ClientId]) -> None:
    """Halve the values of clients; unknown ones start from the median."""
    typical = float(np.median(list(values.values()))) if values else 0.0
    values.update((c, values.get(c, typical) / 2) for c in clients)


def equal_weights(round: Round, size: int) -> tuple[float, ...] | None:
    """Return equal weights for clients that were drawn by size, unless models get them anyway.

    A client drawn in proportion to its size and averaged by its size would count twice.
    """
    return None if round.averaging == "equal" or not size else (1 / size,) * size
