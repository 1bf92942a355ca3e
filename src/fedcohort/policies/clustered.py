"""Clustered sampling: unbiased selection of clients from different clusters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import (
    Policy,
    at_least,
    register,
    sizes,
    vector_needs,
    vectors,
)
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs, Option
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_TREE = 3000  # clients that the tree of similarity is built for; the others are one group


@dataclass
class ClusteredState:
    """The group of each client, and the round in which groups were made."""

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
    filled in the order of sizes; by similarity (Algorithm 2) they are filled with groups of like
    clients, found by Ward's method on their updates.

    Parameters
    ----------
    by : {"size", "similarity"}
        Algorithm 1 or 2.
    signal : str, default="update_sketch"
        What likeness is measured on: updates that arrive anyway, or "race_sketch",
        "feature_profile", "insight", known from the start. Clients without one form a group.
    interval : int, default=10
        Rounds between two groupings.
    k, kind, seed
        Of the projection of updates.

    Notes
    -----
    The paper draws from the distributions independently, so that a client may be drawn twice.
    Here draws from neighboring distributions are coupled such that no client comes twice, with
    the same probability for each: a cohort has as many clients as wanted. A client whose share of
    the data exceeds one place in the cohort is always in it, with its share as weight. The scores
    are the inclusion probabilities.

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
        at_least("ClusteredSampling", 1, interval=interval, k=k)
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
        sure, mass = _certain(share, round.size)
        places = round.size - sure.size
        chosen, weights = sure, share[sure]
        if places and mass.any():
            order = self._order(round, signals, share, mass, places)
            drawn = order[_draw(mass[order], places, rng)]
            chosen = np.append(sure, drawn)
            rest = 1 - share[sure].sum()
            weights = np.append(weights, np.full(places, rest / places))
        clients = tuple(round.available[i] for i in chosen.tolist())
        inclusion = np.append(np.ones(sure.size), mass[chosen[sure.size :]])
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
        group = self.state.group.get
        clients = round.available
        labels = np.fromiter((group(clients[i], -1) for i in by_size.tolist()), np.int64)
        return _packed(by_size, labels, mass, places)

    def _regroup(self, round: Round, signals: Signals, share: Array, places: int) -> None:
        """Cut the tree of similarity into groups that fit into one distribution each."""
        positions, rows = vectors(signals, self.signal, round.available)
        latest = np.sort(
            np.argsort(signals.rounds(self.signal, round.available)[positions])[-_TREE:]
        )
        positions, rows = positions[latest], rows[latest]
        self.state.made, self.state.group = round.number, {}
        if len(positions) > 1:
            labels = _groups(rows, share[positions] * places, places)
            clients = [round.available[i] for i in positions.tolist()]
            self.state.group = dict(zip(clients, labels.tolist(), strict=True))


def _certain(share: Array, size: int) -> tuple[Indices, Array]:
    """Clients with a place of their own, and the others' masses, which sum to the other places."""
    sure: list[int] = []
    mass = share * size
    while len(sure) < size and (mass >= 1 - 1e-12).any():
        sure += np.flatnonzero(mass >= 1 - 1e-12)[: size - len(sure)].tolist()
        rest = share.copy()
        rest[sure] = 0.0
        total = rest.sum()
        mass = rest * (size - len(sure)) / total if total > 0 else rest
    return np.array(sure, np.int64), mass


def _draw(mass: Array, places: int, rng: Generator) -> Indices:
    """One position from each unit of the cumulative mass, none twice.

    The client that straddles the border into a unit is taken there with the probability that keeps
    its share of this unit, given that it was not taken before; the rest of the unit is uniform.
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


def _groups(rows: Array, mass: Array, places: int) -> Indices:
    """Groups of Ward's tree: at least `places`, each of a mass of at most one place."""
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


def _packed(clients: Indices, labels: Indices, mass: Array, places: int) -> Indices:
    """Put the heaviest groups at the start of each place and fill up with the others."""
    members: dict[int, list[int]] = {}
    for client, label in zip(clients.tolist(), labels.tolist(), strict=True):
        members.setdefault(label, []).append(client)
    strangers = members.pop(-1, [])
    groups = sorted(members.values(), key=lambda m: -float(mass[m].sum()))
    filler = [client for group in groups[places:] for client in group] + strangers
    order: list[int] = []
    filled, at = 0.0, 0
    for place in range(places):
        for client in groups[place] if place < len(groups) else []:
            order.append(client)
            filled += mass[client]
        while at < len(filler) and filled < place + 1 - 1e-12:
            order.append(filler[at])
            filled += mass[filler[at]]
            at += 1
    return np.array(order + filler[at:], np.int64)
