"""Cohorts whose pooled labels are close to a target: our greedy one, and DC-FedAvg's."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.random import Generator

from fedcohort.numerics.sampling import sample_positions
from fedcohort.options import Count
from fedcohort.policies.base import Array, Policy, register, scored
from fedcohort.policies.readings import label_counts, label_distances
from fedcohort.rounds import Round, Selection
from fedcohort.signals.catalog import HistogramEpsilon, Needs
from fedcohort.signals.table import Signals

Target = Literal["global", "balanced"]

_MAX_CANDIDATES = 50_000  # with more clients, a random part


@register("label-match", when="clients may tell their label counts, and a target is known")
class LabelMatch(Policy):
    """Greedy matching of labels: SketchMatch with label histograms in place of sketches.

    The first client is drawn uniformly. Each further one brings the cohort's label distribution
    closest to the target, in squared Euclidean distance. Label distributions are averaged as models
    are: equally, or by counts.

    Parameters
    ----------
    target : {"global", "balanced"}
        The pooled labels of all available clients, or all labels equally often.
    epsilon : float, default=0.0
        Privacy of the label histograms; 0 sends exact counts, which are sensitive.

    Notes
    -----
    Source: ours.
    Checked: choices by enumeration.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> labels = {"a": [9, 1], "b": [1, 9], "c": [9, 1], "d": [8, 2]}
    >>> "b" in select(LabelMatch("balanced"), "abcd", 2, label_histogram=labels).clients
    True
    """

    needs = Needs(profile=frozenset({"label_histogram"}))
    added: int | None = None  # clients that DC-FedAvg adds to random ones

    def __init__(self, target: Target = "global", epsilon: HistogramEpsilon = 0.0) -> None:
        self.target = target
        self.signal_options = {"label_histogram": {"epsilon": epsilon}}

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        positions, counts = label_counts(signals, round.available)
        if not positions.size:
            return Selection(())
        if round.averaging == "equal":
            counts /= counts.sum(axis=1, keepdims=True)
        goal = counts.sum(axis=0) / counts.sum()
        if self.target == "balanced":
            goal = np.full(counts.shape[1], 1 / counts.shape[1])
        part = sample_positions(positions.size, _MAX_CANDIDATES, rng)
        positions, counts = positions[part], counts[part]
        size = min(round.size, positions.size)
        if self.added is None:
            chosen = [int(rng.integers(positions.size))]
        else:
            at_random = max(size - self.added, 1)
            chosen = rng.choice(positions.size, at_random, replace=False).tolist()
        distances = self._grow(chosen, counts, goal, size)
        return scored(round.available, positions[chosen], np.array(distances))

    def _grow(self, chosen: list[int], counts: Array, goal: Array, size: int) -> list[float]:
        """Add rows, each the one with which the cohort is nearest the goal; return distances."""
        distances_of = label_distances if self.added is None else _cosine_distances
        pooled = counts[chosen].sum(axis=0)
        distances = [float(distances_of(pooled[None], 0.0, goal)[0])] * len(chosen)
        while len(chosen) < size:
            after = distances_of(counts, counts[chosen].sum(axis=0), goal)
            after[chosen] = np.inf
            best = int(np.argmin(after))
            if self.added is not None and after[best] > distances[-1]:
                break
            chosen.append(best)
            distances.append(float(after[best]))
        return distances


@register("dc-fedavg", when="as label-match, but most of the cohort must stay random")
class DCFedAvg(LabelMatch):
    """Distribution-controlled client selection of Duesing and Cimiano.

    All but `added` places are drawn uniformly. Then clients are added, each of which brings the
    pooled label counts closest to the target in cosine distance, while that makes it smaller;
    places that remain are filled uniformly.

    Parameters
    ----------
    target : {"global", "balanced"}
        The pooled labels of all available clients, or all labels equally often.
    added : int, default=1
        Clients added at most, c. One place at least is random.
    epsilon : float, default=0.0
        Privacy of the label histograms; 0 sends exact counts.

    Notes
    -----
    Source: authors' code cduesing/FedAVGdc.
    Checked: choices by hand.
    Reference: Duesing, Cimiano (2025), Distribution-Controlled Client Selection.

    The authors add c clients to a cohort of K; here K is the whole cohort.
    """

    def __init__(
        self, target: Target = "global", added: Count = 1, epsilon: HistogramEpsilon = 0.0
    ) -> None:
        super().__init__(target, epsilon)
        self.added = added


def _cosine_distances(counts: Array, pooled: Array | float, goal: Array) -> Array:
    rows = counts + pooled
    return np.asarray(1 - rows @ goal / (np.linalg.norm(rows, axis=1) * np.linalg.norm(goal)))
