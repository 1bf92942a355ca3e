"""Sampling designs: who is drawn with which probability, also from clusters of like clients.

Clustered sampling: Fraboni, Vidal, Kameni, Lorenzi. Clustered Sampling. ICML 2021.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


def draw(logits: Array, size: int, rng: Generator) -> Indices:
    """Draw `size` different positions one by one, in proportion to exp(logits).

    The top `size` of logits plus Gumbel noise follow that law exactly. Positions with a logit of
    minus infinity are never drawn, even if the sample falls short.
    """
    keys = logits + rng.gumbel(size=len(logits))
    size = min(size, int(np.count_nonzero(keys > -np.inf)))
    top = np.argpartition(-keys, size - 1)[:size] if size else np.empty(0, np.int64)
    return np.asarray(top[np.argsort(-keys[top])])


def sample_positions(count: int, limit: int, rng: Generator) -> Indices:
    """Draw at most `limit` of `count` positions uniformly, sorted."""
    if count <= limit:
        return np.arange(count)
    return np.sort(rng.choice(count, limit, replace=False))


def unit_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Scale rows to length one; rows of zeros stay as they are."""
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))[:, None]
    return np.asarray(np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0))


def angle_tree(rows: NDArray[Any], apart: Array | float = 0.0) -> Array:
    """Return Ward's linkage of clients by the angles of their rows to all rows, plus `apart`.

    A row of zeros is at an angle of 0 to all others.
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


def kmeans(rows: NDArray[Any], clusters: int, starts: int, rng: Generator) -> Any:
    """Return scikit-learn's model fitted to the rows."""
    from sklearn.cluster import KMeans

    model = KMeans(clusters, n_init=starts, random_state=int(rng.integers(2**31 - 1)))
    with warnings.catch_warnings():  # rows that differ by rounding only may share a cluster
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        return model.fit(rows)


def proportional_inclusion(importance: Array, size: int) -> Array:
    """Return probabilities that sum to `size`, proportional to importance but at most 1.

    >>> proportional_inclusion(np.array([2.0, 1.0, 1.0]), 2).tolist()
    [1.0, 0.5, 0.5]
    """
    inclusion = np.zeros(importance.size)
    left = np.ones(importance.size, bool)
    while left.any():
        total = importance[left].sum()
        places = size - int((~left).sum())
        share = importance[left] / total if total > 0 else np.full(left.sum(), 1 / left.sum())
        inclusion[left] = places * share
        over = left & (inclusion >= 1 - 1e-12)
        if not over.any():
            break
        inclusion[over] = 1.0
        left &= ~over
    return inclusion


def systematic(inclusion: Array, rng: Generator) -> Indices:
    """Draw a set of fixed size with these inclusion probabilities, which sum to a whole number."""
    always = np.flatnonzero(inclusion >= 1)
    others = rng.permutation(np.flatnonzero(inclusion < 1))
    places = round(float(inclusion[others].sum()))
    if not places:
        return always
    ends = np.cumsum(inclusion[others])
    ends *= places / ends[-1]
    marks = rng.random() + np.arange(places)
    hits = np.minimum(np.searchsorted(ends, marks, side="right"), others.size - 1)
    return np.concatenate([always, others[hits]])


def always_selected(share: Array, size: int) -> tuple[Indices, Array]:
    """Return who holds more than a place's share of the data, and the others' expected places."""
    inclusion = np.where(share > 0, proportional_inclusion(share, size), 0.0)
    always = np.flatnonzero(inclusion >= 1)
    return always, np.where(inclusion < 1, inclusion, 0.0)


def one_per_unit(mass: Array, places: int, rng: Generator) -> Indices:
    """Draw one position from each unit of the cumulative mass, none twice.

    A client whose mass crosses the border into a unit is taken there with the probability that
    keeps its share of this unit, given that it was not taken before.
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


def similarity_groups(tree: Array, mass: Array) -> Indices:
    """Cut a linkage into the largest groups with a mass of at most one place."""
    from scipy.cluster.hierarchy import fcluster

    total = np.append(mass, np.zeros(len(tree)))
    for node, (left, right) in enumerate(tree[:, :2].astype(int), len(mass)):
        total[node] = total[left] + total[right]
    by_mass = tree.copy()
    by_mass[:, 2] = total[len(mass) :]  # in place of distances, so that the cut is by mass
    return np.asarray(fcluster(by_mass, 1 + 1e-9, "distance"), np.int64)


def group_order(clients: Indices, labels: Indices, mass: Array, places: int) -> Indices:
    """Return an order that starts each place with one of the heaviest groups, then the rest.

    `labels` are the groups of `clients`, -1 for none; `mass` is that of all clients.
    """
    members: dict[int, list[int]] = {}
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
