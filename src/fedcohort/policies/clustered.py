"""Clustered sampling: unbiased selection of clients from different clusters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import (
    Policy,
    check_at_least,
    register,
    sizes,
    times_of,
    vector_needs,
    vectors,
)
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_MAX_TREE_CLIENTS = 1000  # clients in the similarity tree; all others form one group


@dataclass
class ClusteredState:
    """The group of each client, and the round in which the groups were made."""

    group: dict[ClientId, int] = field(default_factory=dict)
    made: int = -1


@register(
    "clustered-sampling",
    when="the aggregate must stay unbiased, with less variance than drawing by size",
)
class ClusteredSampling(Policy):
    """Algorithms 1 and 2 of Fraboni et al. [1]_.

    Clients fill as many distributions as the cohort is large, each with the same total share of
    the data, and one client is drawn from each. The expected weight of a client in the aggregate
    is its share of the data, whatever the clusters. By size (Algorithm 1) the distributions are
    filled in the order of sizes. By similarity (Algorithm 2) they are filled with groups of
    similar clients, found by Ward's method on their updates.

    Parameters
    ----------
    by : {"size", "similarity"}
        Algorithm 1 or 2.
    signal : str, default="update_sketch"
        What similarity is measured on: updates, which arrive anyway, or "race_sketch",
        "feature_profile" or "insight", which are known from the start. Clients without a reading
        form one group.
    interval : int, default=10
        Rounds between two groupings.
    k, kind, seed
        Of the projection of updates.

    Notes
    -----
    The paper draws from the distributions independently, so a client may be drawn twice. Here,
    draws from neighboring distributions are coupled so that no client is drawn twice and each
    keeps its probability: a cohort always has the wanted number of clients. A client whose share
    of the data exceeds one place in the cohort is always selected, with its share as weight. The
    scores are the inclusion probabilities.

    References
    ----------
    .. [1] Fraboni, Vidal, Kameni, Lorenzi (2021), Clustered Sampling: Low-Variance and Improved
       Representativity for Clients Selection in Federated Learning, ICML.

    Examples
    --------
    >>> signals = Signals()
    >>> _ = signals.record("num_examples", {"a": 60, "b": 20, "c": 10, "d": 10}, stamp=0)
    >>> round = Round(number=0, available=("a", "b", "c", "d"), cohort_size=2)
    >>> selection = ClusteredSampling().select(round, signals, np.random.default_rng(0))
    >>> selection.clients[0], selection.weights       # "a" holds more than half of all data
    ('a', (0.6, 0.4))
    """

    def __init__(
        self,
        by: str = "size",
        signal: str = "update_sketch",
        interval: int = 10,
        k: int = 50,
        kind: str = "sparse",
        seed: int = 0,
    ) -> None:
        if by not in ("size", "similarity"):
            raise ValueError(f"ClusteredSampling: by={by!r} must be 'size' or 'similarity'")
        check_at_least("ClusteredSampling", 1, interval=interval, k=k)
        self.by, self.signal, self.interval = by, signal, interval
        needs = vector_needs("ClusteredSampling", signal, "num_examples", when=("profile", "reply"))
        if by == "size":
            self.needs = Needs(profile=frozenset({"num_examples"}))
        else:
            self.needs = needs
            options: dict[str, Option] = {"k": k, "kind": kind, "seed": seed}
            if signal == "race_sketch":
                options = {"rows": 10, "bits": 6, "seed": seed}
            self.signal_options = {signal: options}
        self.state = ClusteredState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Fill the distributions and draw one client from each."""
        share = sizes(signals, round.available)
        share = share / share.sum() if share.any() else np.full(share.size, 1 / share.size)
        always, mass = _always_selected(share, round.size)
        places = round.size - always.size
        chosen, weights = always, share[always]
        if places and mass.any():
            order = self._order(round, signals, share, mass, places)
            drawn = order[_draw_one_per_unit(mass[order], places, rng)]
            chosen = np.append(always, drawn)
            rest = 1 - share[always].sum()
            weights = np.append(weights, np.full(places, rest / places))
        clients = tuple(round.available[i] for i in chosen.tolist())
        inclusion = np.append(np.ones(always.size), mass[chosen[always.size :]])
        scores = dict(zip(clients, inclusion.tolist(), strict=True))
        return Selection(clients, tuple(weights.tolist()), scores)

    def _order(
        self, round: Round, signals: Signals, share: Array, mass: Array, places: int
    ) -> Indices:
        """Order in which clients fill the distributions; `mass` is in units of places."""
        left = np.flatnonzero(mass > 0)
        by_size = left[np.argsort(-mass[left], kind="stable")]
        if self.by == "size":
            return by_size
        if self.state.made < 0 or round.number - self.state.made >= self.interval:
            self._regroup(round, signals, share, places)
        labels = times_of(self.state.group, round.available, -1)[by_size]
        return _fill_order(by_size, labels, mass, places)

    def _regroup(self, round: Round, signals: Signals, share: Array, places: int) -> None:
        """Cut the tree of similarity into groups that fit into one distribution each."""
        positions, rows = vectors(signals, self.signal, round.available)
        latest = np.sort(
            np.argsort(signals.rounds(self.signal, round.available)[positions])[-_MAX_TREE_CLIENTS:]
        )
        positions, rows = positions[latest], rows[latest]
        self.state.made, self.state.group = round.number, {}
        if len(positions) > 1:
            labels = _similarity_groups(rows, share[positions] * places, places)
            clients = [round.available[i] for i in positions.tolist()]
            self.state.group = dict(zip(clients, labels.tolist(), strict=True))


def _always_selected(share: Array, size: int) -> tuple[Indices, Array]:
    """Return the clients that are always selected, and the others' expected places per round."""
    always: list[int] = []
    mass = share * size
    while len(always) < size and (mass >= 1 - 1e-12).any():
        always += np.flatnonzero(mass >= 1 - 1e-12)[: size - len(always)].tolist()
        rest = share.copy()
        rest[always] = 0.0
        total = rest.sum()
        mass = rest * (size - len(always)) / total if total > 0 else rest
    return np.array(always, np.int64), mass


def _draw_one_per_unit(mass: Array, places: int, rng: Generator) -> Indices:
    """Draw one position from each unit of the cumulative mass, none twice.

    A client whose mass crosses the border into a unit is taken there with the probability that
    keeps its share of this unit, given that it was not taken before; the rest is uniform.
    """
    ends = np.cumsum(mass)
    ends *= places / ends[-1]
    taken: list[int] = []
    for unit, (first, mark) in enumerate(rng.random((places, 2)).tolist()):
        carried = min(int(np.searchsorted(ends, unit + 1e-12, side="right")), mass.size - 1)
        start = ends[carried - 1] if carried else 0.0
        inside = max(min(ends[carried], unit + 1.0) - unit, 0.0)
        before = max(unit - start, 0.0)
        if before > 1e-12:
            gone = carried in taken[-2:]
            if not gone and first * (1 - before) < inside:
                taken.append(carried)
                continue
            mark = inside + mark * (1 - inside)
        place = int(np.searchsorted(ends, unit + mark, side="right"))
        taken.append(min(place, mass.size - 1))
    return np.array(taken, np.int64)


def _similarity_groups(rows: Array, mass: Array, places: int) -> Indices:
    """Cut Ward's tree into at least `places` groups, each with a mass of at most one place."""
    from scipy.cluster.hierarchy import to_tree, ward

    nodes: list[Any] = [to_tree(ward(rows))]
    done: list[Any] = []
    while nodes:
        node = max(nodes, key=lambda n: n.dist)
        nodes.remove(node)
        enough = len(nodes) + len(done) + 1 >= places
        if node.is_leaf() or (enough and mass[node.pre_order()].sum() <= 1):
            done.append(node)
        else:
            nodes += [node.get_left(), node.get_right()]
    labels = np.empty(len(rows), np.int64)
    for label, node in enumerate(done):
        labels[node.pre_order()] = label
    return labels


def _fill_order(clients: Indices, labels: Array, mass: Array, places: int) -> Indices:
    """Return an order that starts each place with one of the heaviest groups, then the rest."""
    members: dict[float, list[int]] = {}
    grouped, weight = labels >= 0, mass.tolist()
    for client, label in zip(clients[grouped].tolist(), labels[grouped].tolist(), strict=True):
        members.setdefault(label, []).append(client)
    groups = sorted(members.values(), key=lambda m: -float(mass[m].sum()))
    rest = [client for group in groups[places:] for client in group]
    rest += clients[~grouped].tolist()
    order: list[int] = []
    filled, at = 0.0, 0
    for place in range(places):
        for client in groups[place] if place < len(groups) else []:
            order.append(client)
            filled += weight[client]
        while at < len(rest) and filled < place + 1 - 1e-12:
            order.append(rest[at])
            filled += weight[rest[at]]
            at += 1
    return np.array(order + rest[at:], np.int64)
