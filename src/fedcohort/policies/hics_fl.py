"""HiCS-FL: clusters of clients by the update of the output layer's biases."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import (
    Policy,
    check_at_least,
    pick,
    register,
    sample_positions,
    sizes,
    vectors,
)
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_MAX_TREE_CLIENTS = 1_000  # clients that are clustered; of more, a random part


@dataclass
class HiCSFLState:
    """The clients that were selected at least once and did not drop out."""

    tried: dict[ClientId, bool] = field(default_factory=dict)


@register("hics-fl", when="nothing may be asked for; label balance is read from bias updates")
class HiCSFL(Policy):
    """Hierarchical clustered sampling of Chen and Vikalo [1]_.

    The update of the output layer's biases tells how a client's labels are distributed. The
    entropy of softmax(update / temperature) estimates how balanced they are. Clients are clustered
    by the angle between their updates plus `entropy_weight` times the difference of their
    entropies, into as many clusters as the cohort is large. For each place a cluster is drawn in
    proportion to exp(gamma_t * its mean entropy), and in it a client in proportion to its size.
    gamma_t = gamma (1 - t / rounds) falls to zero, so balanced clients come first and all
    clusters are equal in the end. Clients that were never tried come before all others.

    Parameters
    ----------
    temperature : float, default=0.0025
        Of the softmax. It must fit the size of the bias updates, which grows with the learning
        rate and the number of local steps.
    entropy_weight : float, default=10.0
        Weight of the entropies in the distance, lambda.
    gamma : float, default=4.0
        How strongly balanced clusters are preferred in the first round.
    rounds : int, default=200
        Rounds until gamma_t is zero.

    Notes
    -----
    Read: the abstract and the authors' released code (CityChan/HiCS-FL). The released code differs
    from the text in several ways, and so do we. It takes the entropy of the mean update per class
    of the output layer's weights, here that of the biases, as the paper derives it; its angles are
    between weights and biases together, here between biases. It clusters the rows of the distance
    matrix by Ward's linkage into a number of clusters of its own (5 to 14), here clients are
    clustered by the distances themselves with average linkage, into as many clusters as the cohort
    has places. Where entropies differ little it draws clusters by entropy, otherwise by
    clustered sampling; here always by entropy. Its temperature is 0.001 or 0.0015, entropy_weight
    10, gamma 4 and rounds 200. Each client is tried once first, in random order here; one that
    drops out is tried again. The model's last array must be the biases of the output layer.

    References
    ----------
    .. [1] Chen, Vikalo (2024), Heterogeneity-Guided Client Sampling: Towards Fast and Efficient
       Non-IID Federated Learning, NeurIPS (arXiv 2310.00198, 2023).

    Examples
    --------
    >>> entropies(np.array([[0.0, 0.0], [0.1, 0.0]]), temperature=0.0025).round(3).tolist()
    [0.693, 0.0]
    """

    needs = Needs(profile=frozenset({"num_examples"}), reply=frozenset({"bias_update"}))

    def __init__(
        self,
        temperature: float = 0.0025,
        entropy_weight: float = 10.0,
        gamma: float = 4.0,
        rounds: int = 200,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"HiCSFL: temperature={temperature} must be positive")
        check_at_least("HiCSFL", 0, entropy_weight=entropy_weight, gamma=gamma)
        check_at_least("HiCSFL", 1, rounds=rounds)
        self.temperature, self.entropy_weight = temperature, entropy_weight
        self.gamma, self.rounds = gamma, rounds
        self.state = HiCSFLState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Try everybody once; then draw clusters by entropy and clients by size."""
        tried = self.state.tried
        untried = [c for c in round.available if c not in tried]
        first = pick(untried, round.size, rng)
        places = round.size - len(first)
        positions, rows = vectors(signals, "bias_update", round.available)
        known = [i for i, p in enumerate(positions.tolist()) if round.available[p] in tried]
        known = [known[i] for i in sample_positions(len(known), _MAX_TREE_CLIENTS, rng).tolist()]
        if not places or not known:
            return Selection(first)
        clients = tuple(round.available[i] for i in positions[known].tolist())
        entropy = entropies(rows[known], self.temperature)
        labels = _clusters(rows[known], entropy, self.entropy_weight, round.size)
        chosen = self._draw(round, labels, entropy, sizes(signals, clients), places, rng)
        scores = {clients[i]: float(entropy[i]) for i in chosen}
        return Selection(first + tuple(clients[i] for i in chosen), scores=scores)

    def _draw(
        self,
        round: Round,
        labels: Indices,
        entropy: Array,
        size: Array,
        places: int,
        rng: Generator,
    ) -> list[int]:
        """Draw a cluster for each place, and a client of it that is not taken."""
        gamma = self.gamma * max(0.0, 1 - round.number / self.rounds)
        means = np.bincount(labels, entropy) / np.bincount(labels)
        weights, chosen = np.maximum(size, 1e-12), []
        for _ in range(min(places, labels.size)):
            left = np.bincount(labels, weights, means.size) > 0
            cluster = pick_one(np.where(left, gamma * means, -np.inf), rng)
            inside = np.where(labels == cluster, weights, 0.0)
            with np.errstate(divide="ignore"):
                taken = pick_one(np.log(inside), rng)
            chosen.append(taken)
            weights[taken] = 0.0
        return chosen

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Remember who was selected, except for those that dropped out: they are tried again."""
        for client in (*outcome.finished, *outcome.withheld):
            self.state.tried[client] = True


def pick_one(logits: Array, rng: Generator) -> int:
    """Draw one position in proportion to exp(logits)."""
    return int(np.argmax(logits + rng.gumbel(size=logits.size)))


def entropies(updates: Array, temperature: float) -> Array:
    """Return the entropy of softmax(update / temperature) of each row."""
    logits = updates / temperature
    logits = logits - logits.max(axis=1, keepdims=True)
    shares = np.exp(logits)
    total = shares.sum(axis=1, keepdims=True)
    return np.asarray(np.log(total[:, 0]) - (shares * logits).sum(axis=1) / total[:, 0])


def _clusters(rows: Array, entropy: Array, weight: float, count: int) -> Indices:
    """Return the cluster of each row, by average linkage of angles and entropy differences."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist

    if len(rows) == 1:
        return np.zeros(1, np.int64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1.0)
    cosines = 1 - pdist(unit, "sqeuclidean") / 2
    distances = np.arccos(np.clip(cosines, -1, 1)) + weight * pdist(entropy[:, None], "cityblock")
    labels = fcluster(linkage(distances, "average"), count, "maxclust")
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)
