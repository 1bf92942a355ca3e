"""HACCS: clusters of clients by label histograms, the fastest member first."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from fedcohort.options import Share
from fedcohort.policies.base import Array, Indices, Policy, register, scored, take
from fedcohort.policies.readings import LabelClusters, filled, label_shares
from fedcohort.rounds import Round, Selection
from fedcohort.signals.catalog import HistogramEpsilon, Needs
from fedcohort.signals.table import Signals

_NEAR = 0.25  # distance of label shares up to which clients are in one cluster
_MAX_FITTED = 5_000  # clients that are clustered; the others join the nearest of them


@register("haccs", when="clients may tell private label counts, and differ in speed")
class HACCS(Policy):
    """Heterogeneity-aware clustered client selection of Wolfrath et al.

    Clients send noisy label histograms once. Those whose label shares are linked by distances of at
    most .25 form a cluster. In each round a cluster weighs ``rho * (1 - latency / largest latency)
    + (1 - rho) * (mean squared loss / sum)`` and gets the whole part of its share of the places;
    the places left are drawn by weight. In a cluster the fastest members come first.

    Parameters
    ----------
    rho : float, default=0.5
        How much latency counts against loss.
    epsilon : float, default=1.0
        Privacy of the label histograms; 0 sends exact counts.

    Notes
    -----
    Source: authors' code NS-PhD-Research/HACCS.
    Checked: clusters against OPTICS, weights and places by hand.
    Reference: Wolfrath et al. (2022), HACCS: Clustered Client Selection, IPDPS.

    OPTICS with two samples, cut at .25 as in the code, finds what single linkage finds directly. A
    client not known yet counts as the fastest, and with the median loss. In the code a loss is the
    share of errors, which all clients tell in every round; here it comes with the update. Noise in
    the code is continuous Laplace, here discrete.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> labels = {"a": [9, 1], "b": [9, 1], "c": [0, 9], "d": [0, 8]}
    >>> seconds = {"a": 5.0, "b": 1.0, "c": 1.0, "d": 9.0}
    >>> policy = HACCS(rho=0.0)
    >>> sorted(select(policy, "abcd", 2, label_histogram=labels, duration=seconds).clients)
    ['b', 'c']
    """

    needs = Needs(profile=frozenset({"label_histogram"}), reply=frozenset({"loss", "duration"}))

    def __init__(self, rho: Share = 0.5, epsilon: HistogramEpsilon = 1.0) -> None:
        self.rho = rho
        self.signal_options = {"label_histogram": {"epsilon": epsilon}}
        self.state = LabelClusters()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        positions, shares = label_shares(signals, round.available)
        if not positions.size:
            return Selection(())
        clients = take(round.available, positions)
        self.state.fit(shares, _MAX_FITTED, rng, linked)
        labels = np.unique(self.state.assign(shares), return_inverse=True)[1]
        seconds = filled(len(clients), *signals.read("duration", clients), typical=np.min)
        losses = filled(len(clients), *signals.read("loss", clients))
        chance = cluster_weights(labels, seconds, losses, self.rho)
        order = np.lexsort((rng.random(labels.size), seconds))
        queues = [order[labels[order] == label].tolist() for label in range(chance.size)]
        places = np.floor(round.size * chance + 1e-9).astype(int)
        chosen: list[int] = []
        for queue, count in zip(queues, places.tolist(), strict=True):
            chosen += queue[:count]
            del queue[:count]
        while len(chosen) < min(round.size, labels.size):
            left = np.array([p if queue else 0.0 for p, queue in zip(chance, queues, strict=True)])
            if not left.any():
                left = np.array([float(bool(queue)) for queue in queues])
            chosen.append(queues[int(rng.choice(left.size, p=left / left.sum()))].pop(0))
        return scored(clients, chosen, chance[labels[chosen]])


def linked(shares: Array, rng: Generator) -> tuple[Array, Indices]:
    """Return the label shares and their clusters: those linked by distances up to `_NEAR`."""
    from scipy.cluster.hierarchy import fcluster, linkage

    if len(shares) < 2:
        return shares, np.zeros(len(shares), np.int64)
    return shares, fcluster(linkage(shares, "single"), _NEAR, "distance").astype(np.int64)


def cluster_weights(labels: Indices, seconds: Array, losses: Array, rho: float) -> Array:
    """Return each cluster's chance to get a place."""
    members = np.bincount(labels)
    latency = np.bincount(labels, seconds) / members
    loss = np.bincount(labels, losses**2) / members
    weight = rho * (1 - latency / max(latency.max(), 1e-300))
    weight += (1 - rho) * loss / max(loss.sum(), 1e-300)
    if not weight.sum() > 0:
        return np.full(members.size, 1 / members.size)
    return np.asarray(weight / weight.sum())
