"""Sampling designs: who is drawn with which probability, when some must weigh more than others.

`successive_inclusion` belongs to drawing clients one by one in proportion to exp(logit), which
does not include client i with probability k p_i. Give client i an exponential waiting time of rate
p_i: the first k to arrive are exactly such a sample, so i is included if fewer than k others arrive
before it. `proportional_inclusion` and `systematic` go the other way: inclusion probabilities are
given, and a sample has them exactly. `one_per_unit` does so with one client per group.

References
----------
Rosén. Asymptotic Theory for Successive Sampling with Varying Probabilities. 1972.
Fraboni, Vidal, Kameni, Lorenzi. Clustered Sampling. ICML 2021.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_NODES = 96  # of the integral over time; with 60 or more, errors are below 1e-9
_EXACT = 100_000  # clients times k up to which the exact integral is used


def successive_inclusion(logits: ArrayLike, k: int) -> Array:
    """Probability of each client to be among k successive draws in proportion to exp(logits).

    Exact up to rounding for clients times k up to 100,000; beyond that by Rosén's limit, whose
    error falls with the number of clients.

    Examples
    --------
    >>> successive_inclusion(np.log([0.5, 0.3, 0.2]), 2).round(4).tolist()
    [0.8393, 0.675, 0.4857]
    """
    values = np.asarray(logits, dtype=np.float64)
    possible = np.flatnonzero(values > -np.inf)
    result = np.zeros(values.size)
    if k >= possible.size:
        result[possible] = 1.0
    elif k > 0:
        finite = values[possible]
        reference = np.partition(finite, -k)[-k]
        rates = np.exp(np.clip(finite - reference, -300.0, 300.0))
        solve = _exact if possible.size * k <= _EXACT else _limit
        result[possible] = solve(rates, k)
    return result


def _exact(rates: Array, k: int) -> Array:
    """Integrate P(i arrives at t) P(fewer than k others arrive before t) over log t."""
    low, high = _range(rates, k)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    t = np.exp(low + (nodes + 1) / 2 * (high - low))
    arrived = -np.expm1(-np.outer(rates, t))  # probability to have arrived by t, (N, nodes)
    density = rates[:, None] * t * np.exp(-np.outer(rates, t)) * weights * (high - low) / 2
    before = -np.expm1(-rates * np.exp(low))  # until then nobody is left out
    return np.asarray(np.clip(before + (density * _few_others(arrived, k)).sum(axis=1), 0.0, 1.0))


def _few_others(arrived: Array, k: int) -> Array:
    """P(fewer than k of the others have arrived), for every client: prefix times suffix sums."""
    clients, nodes = arrived.shape
    prefix = np.zeros((clients + 1, k, nodes))
    prefix[0, 0] = 1.0
    for i in range(clients):
        _add_one(prefix[i], arrived[i], prefix[i + 1])
    result = np.empty((clients, nodes))
    suffix = np.zeros((k, nodes))
    suffix[0] = 1.0
    for i in range(clients - 1, -1, -1):
        at_most = np.cumsum(suffix, axis=0)
        result[i] = np.einsum("an,an->n", prefix[i], at_most[::-1])
        suffix = _add_one(suffix, arrived[i], np.empty_like(suffix))
    return result


def _add_one(counts: Array, chance: Array, out: Array) -> Array:
    """Distribution of a count, cut at k, with one more client."""
    np.multiply(counts, 1 - chance, out=out)
    out[1:] += counts[:-1] * chance
    return out


def _range(rates: Array, k: int) -> tuple[float, float]:
    """Log-times between which the k-th client arrives, but for a probability of 1e-13."""
    low, high = np.log(1e-14 / rates.sum()), np.log(60.0 / rates.min())
    for _ in range(3):
        grid = np.linspace(low, high, 200)
        counts = np.zeros((k, grid.size))
        counts[0] = 1.0
        for rate in rates:
            counts = _add_one(counts, -np.expm1(-rate * np.exp(grid)), np.empty_like(counts))
        few = counts.sum(axis=0)
        started, over = few < 1 - 1e-13, few < 1e-13
        first = max(int(np.argmax(started)) - 1, 0) if started.any() else 0
        last = int(np.argmax(over)) if over.any() else grid.size - 1
        low, high = float(grid[first]), float(grid[last])
        if last - first > 100:
            break
    return float(low), float(high)


def _limit(rates: Array, k: int) -> Array:
    """Probability to arrive before the time by which k arrive on average (Rosén)."""
    from scipy.optimize import brentq

    low, high = float(np.log(1e-14 / rates.sum())), float(np.log(700.0 / rates.min()))
    at = brentq(lambda t: -np.expm1(-rates * np.exp(t)).sum() - k, low, high, xtol=1e-14)
    return np.asarray(-np.expm1(-rates * np.exp(at)))


def proportional_inclusion(importance: Array, size: int) -> Array:
    """Return probabilities that sum to `size`, proportional to importance but at most 1.

    Examples
    --------
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
    always: list[int] = []
    mass = share * size
    while len(always) < size and (mass >= 1 - 1e-12).any():
        always += np.flatnonzero(mass >= 1 - 1e-12)[: size - len(always)].tolist()
        rest = share.copy()
        rest[always] = 0.0
        total = rest.sum()
        mass = rest * (size - len(always)) / total if total > 0 else rest
    return np.array(always, np.int64), mass


def one_per_unit(mass: Array, places: int, rng: Generator) -> Indices:
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


def similarity_groups(tree: Array, mass: Array, places: int) -> Indices:
    """Cut a linkage into at least `places` groups, each with a mass of at most one place."""
    from scipy.cluster.hierarchy import to_tree

    nodes: list[Any] = [to_tree(tree)]
    done: list[Any] = []
    while nodes:
        node = max(nodes, key=lambda n: n.dist)
        nodes.remove(node)
        enough = len(nodes) + len(done) + 1 >= places
        if node.is_leaf() or (enough and mass[node.pre_order()].sum() <= 1):
            done.append(node)
        else:
            nodes += [node.get_left(), node.get_right()]
    labels = np.empty(len(mass), np.int64)
    for label, node in enumerate(done):
        labels[node.pre_order()] = label
    return labels


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
