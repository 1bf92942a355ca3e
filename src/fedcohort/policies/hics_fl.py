"""HiCS-FL: clusters of clients by the update of the output layer's biases."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from fedcohort.numerics import sampling
from fedcohort.options import Count, Positive
from fedcohort.policies.base import Array, Indices, Policy, equal_weights, pick, register
from fedcohort.policies.readings import sizes, vectors
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

_MAX_TREE_CLIENTS = 1_000  # clients that are clustered; of more, a random part
_SIMILAR = 0.1  # variance of the entropies below which clusters are drawn by entropy
_ENTROPY_WEIGHT = 10.0  # in the distance between clients, lambda
_GAMMA = 4.0  # how strongly balanced clusters are preferred in the first round
_CONTRAST = 7.0  # largest entry of a typical update over the temperature


@dataclass
class HiCSFLState:
    """The clients that were selected at least once and did not drop out, and their updates."""

    tried: dict[ClientId, bool] = field(default_factory=dict)
    updates: dict[ClientId, Array] = field(default_factory=dict)


@register("hics-fl", when="nothing may be asked for; label balance is read from bias updates")
class HiCSFL(Policy):
    """Hierarchical clustered sampling of Chen and Vikalo.

    The entropy of softmax(update / temperature), for the update of the output layer's biases,
    estimates how balanced a client's labels are. Clients are clustered by the angle between their
    updates plus 10 times the difference of their entropies, into as many clusters as the cohort is
    large. For each place a cluster is drawn in proportion to exp(gamma_t * its mean entropy), and
    in it a client by size; gamma_t = 4 (1 - t / rounds). While the variance of the entropies is 0.1
    or more, clients are drawn by clustered sampling instead. Models are averaged equally. Clients
    that were never tried come before all others.

    Parameters
    ----------
    temperature : float, optional
        Of the softmax; by default a seventh of the typical update's largest entry. The paper's
        0.0025 belongs to its learning rate of 0.001.
    rounds : int, default=200
        Rounds until gamma_t is zero; set it to those of the run.

    Notes
    -----
    Source: paper with appendix, and authors' code CityChan/HiCS-FL.
    Checked: entropies, clusters, guard and laws by hand.
    Reference: Chen, Vikalo (2024), Heterogeneity-Guided Client Sampling, NeurIPS.

    Each client's first update is kept, as in the code where clients differ in balance by design
    (one that has learned its labels sends small updates, which look balanced; else the code keeps
    the last one), and Ward's linkage clusters the rows of the distance matrix. Unlike the code,
    updates are those of the biases, which must be the model's last array, and draws are by size.
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"bias_update"}))

    def __init__(self, temperature: Positive | None = None, rounds: Count = 200) -> None:
        self.temperature, self.rounds = temperature, rounds
        self.state = HiCSFLState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Try everybody once; then draw clusters by entropy, or groups of similar clients."""
        from scipy.cluster.hierarchy import fcluster

        tried, updates = self.state.tried, self.state.updates
        untried = [c for c in round.available if c not in tried]
        first = pick(untried, round.size, rng)
        clients = [c for c in round.available if c in updates]
        part = sampling.sample_positions(len(clients), _MAX_TREE_CLIENTS, rng)
        clients = [clients[i] for i in part.tolist()]
        places = min(round.size - len(first), len(clients))
        if not places:
            return Selection(first, equal_weights(round, len(first)))
        rows = np.array([updates[c] for c in clients])
        typical = float(np.median(np.abs(rows).max(axis=1)))
        entropy = entropies(rows, self.temperature or max(typical, 1e-12) / _CONTRAST)
        tree = sampling.angle_tree(rows, _ENTROPY_WEIGHT * np.abs(entropy[:, None] - entropy))
        size = np.maximum(sizes(signals, clients), 1e-12)
        if entropy.var() < _SIMILAR:
            labels = np.zeros(1, np.int64)
            if len(rows) > 1:
                labels = fcluster(tree, round.size, "maxclust").astype(np.int64) - 1
            gamma = _GAMMA * max(0.0, 1 - round.number / self.rounds)
            means = np.bincount(labels, entropy) / np.bincount(labels)
            chosen = _by_cluster(labels, gamma * means, size, places, rng)
        else:
            chosen = _by_group(tree, size / size.sum(), places, rng)
        cohort = first + tuple(clients[i] for i in chosen)
        scores = {clients[i]: float(entropy[i]) for i in chosen}
        return Selection(cohort, equal_weights(round, len(cohort)), scores)

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Remember who was tried (who drops out is tried again), and the updates."""
        self.state.tried.update(dict.fromkeys((*outcome.finished, *outcome.withheld), True))
        updates = self.state.updates
        positions, rows = vectors(signals, "bias_update", outcome.finished, round.number)
        if len(rows) and any(len(u) != rows.shape[1] for u in list(updates.values())[:1]):
            updates.clear()  # the model changed
        for position, row in zip(positions.tolist(), rows, strict=True):
            updates.setdefault(outcome.finished[position], row)


def entropies(updates: Array, temperature: float) -> Array:
    """Return the entropy of softmax(update / temperature) of each row."""
    from scipy.special import entr, softmax

    return np.asarray(entr(softmax(updates / temperature, axis=1)).sum(axis=1))


def _by_cluster(
    labels: Indices, logits: Array, size: Array, places: int, rng: Generator
) -> list[int]:
    """Draw a cluster for each place, and a client of it that is not taken."""
    weights, chosen = size.copy(), []
    for _ in range(places):
        left = np.bincount(labels, weights, logits.size) > 0
        cluster = sampling.draw(np.where(left, logits, -np.inf), 1, rng)
        with np.errstate(divide="ignore"):
            inside = np.log(np.where(labels == cluster, weights, 0.0))
        chosen.append(int(sampling.draw(inside, 1, rng)[0]))
        weights[chosen[-1]] = 0.0
    return chosen


def _by_group(tree: Array, share: Array, places: int, rng: Generator) -> list[int]:
    """Draw one client from each group of similar ones, in proportion to size."""
    always, mass = sampling.always_selected(share, places)
    if always.size == places or len(share) == 1:
        return always.tolist() or [0]
    left = np.flatnonzero(mass > 0)
    labels = sampling.similarity_groups(tree, mass)
    order = sampling.group_order(left, labels[left], mass, places - always.size)
    drawn = order[sampling.one_per_unit(mass[order], places - always.size, rng)]
    return [*always.tolist(), *drawn.tolist()]
