"""Clustered sampling: unbiased selection of clients from different clusters."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.random import Generator

from fedcohort.numerics import sampling
from fedcohort.policies.base import Array, Indices, Policy, register, scored
from fedcohort.policies.readings import shares, vector_needs, vector_options, vectors
from fedcohort.rounds import ClientId, Round, Selection
from fedcohort.signals.catalog import Needs
from fedcohort.signals.table import Signals

_MAX_TREE_CLIENTS = 1000  # clients in the similarity tree; all others form one group


@register("clustered-sampling", when="the aggregate must stay unbiased and vary little")
class ClusteredSampling(Policy):
    """Algorithms 1 and 2 of Fraboni et al.

    Clients fill as many distributions as the cohort is large, each with the same share of the data,
    and one client is drawn from each, so a client's expected weight is its share of the data. They
    fill them in the order of sizes (Algorithm 1), or with the largest groups of similar clients
    that fit into one, found in every round by Ward's method on the angles between updates
    (Algorithm 2).

    Parameters
    ----------
    by : {"size", "similarity"}
        Algorithm 1 or 2.
    signal : str, default="update_sketch"
        What similarity is measured on: updates, which arrive anyway, or "race_sketch",
        "feature_profile" or "insight", which are known from the start. Clients without a reading
        form one group.

    Notes
    -----
    Source: authors' code Accenture/Labs-Federated-Learning, branch clustered_sampling.
    Checked: inclusion probabilities exactly, groups against the code's rule.
    Reference: Fraboni et al. (2021), Clustered Sampling, ICML.

    Draws from neighboring distributions, independent in the paper, are coupled here so that no
    client is drawn twice and each keeps its probability. A client with more than a place's share of
    the data is always selected, with its share as weight. The scores are inclusion probabilities.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> sizes = {"a": 60, "b": 20, "c": 10, "d": 10}
    >>> selection = select(ClusteredSampling(), "abcd", 2, num_examples=sizes)
    >>> selection.clients[0], selection.weights       # "a" holds more than half of all data
    ('a', (0.6, 0.4))
    """

    def __init__(
        self, by: Literal["size", "similarity"] = "size", signal: str = "update_sketch"
    ) -> None:
        self.by, self.signal = by, signal
        needs = vector_needs("ClusteredSampling", signal, "num_examples", when=("profile", "reply"))
        self.needs = Needs(profile=frozenset({"num_examples"})) if by == "size" else needs
        self.signal_options = {} if by == "size" else vector_options(signal)
        self._groups: tuple[tuple[ClientId, ...], int, bytes, Indices] | None = None

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        share = shares(signals, round.available)
        always, mass = sampling.always_selected(share, round.size)
        places = round.size - always.size
        chosen, weights = always, share[always]
        if places and mass.any():
            left = np.flatnonzero(mass > 0)
            order = left[np.argsort(-mass[left], kind="stable")]  # the largest first
            if self.by == "similarity":
                labels = self._labels(round.available, signals, mass, places)[order]
                order = sampling.group_order(order, labels, mass, places)
            drawn = order[sampling.one_per_unit(mass[order], places, rng)]
            chosen = np.append(always, drawn)
            rest = 1 - share[always].sum()
            weights = np.append(weights, np.full(places, rest / places))
        inclusion = np.append(np.ones(always.size), mass[chosen[always.size :]])
        return scored(round.available, chosen, inclusion, tuple(weights.tolist()))

    def _labels(
        self, clients: tuple[ClientId, ...], signals: Signals, mass: Array, places: int
    ) -> Indices:
        """Cut the tree of similarity into groups that fit into one distribution each."""
        stamps = signals.rounds(self.signal, clients)
        key = (clients, places, stamps.tobytes())
        if self._groups is None or self._groups[:3] != key:
            labels = np.full(len(clients), -1)
            positions, rows = vectors(signals, self.signal, clients)
            latest = np.sort(np.argsort(stamps[positions])[-_MAX_TREE_CLIENTS:])
            positions, rows = positions[latest], rows[latest]
            if len(positions) > 1:
                tree = sampling.angle_tree(rows)
                labels[positions] = sampling.similarity_groups(tree, mass[positions])
            self._groups = (*key, labels)
        return self._groups[3]
