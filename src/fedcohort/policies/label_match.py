"""Label matching: cohorts whose pooled labels are close to a target distribution."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import (
    Policy,
    check_at_least,
    label_counts,
    label_distances,
    register,
    sample_positions,
)
from fedcohort.rounds import Round, Selection
from fedcohort.signals.catalog import Needs, check_histogram_epsilon
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]


@register("label-match", when="clients may tell their label counts, and a target is known")
class LabelMatch(Policy):
    """Distribution-controlled selection of Duesing and Cimiano [1]_.

    The first client is drawn uniformly. Each further client is the one that brings the pooled
    label distribution of the cohort closest to the target, in squared Euclidean distance. It is
    SketchMatch's idea with label histograms in place of sketches.

    Parameters
    ----------
    target : {"global", "balanced"}
        The pooled labels of all available clients, or all labels equally often.
    candidates : int, optional
        With more clients than this, this many are drawn uniformly first; None uses all.
    epsilon : float, default=0.0
        Privacy of the label histograms; 0 sends exact counts. Counts of labels are sensitive.

    Notes
    -----
    Where the engine says that models are averaged equally, label distributions are too; otherwise
    counts are pooled. We are certain of the two targets and of the greedy idea, not of the paper's
    distance and of its first pick.

    References
    ----------
    .. [1] Duesing, Cimiano (2025), Distribution-Controlled Client Selection to Improve Federated
       Learning Strategies.

    Examples
    --------
    >>> signals = Signals()
    >>> labels = {"a": [9, 1], "b": [1, 9], "c": [9, 1], "d": [8, 2]}
    >>> _ = signals.record("label_histogram", labels, stamp=0)
    >>> round = Round(number=0, available=("a", "b", "c", "d"), cohort_size=2)
    >>> sorted(LabelMatch("balanced").select(round, signals, np.random.default_rng(0)).clients)
    ['b', 'd']
    """

    needs = Needs(profile=frozenset({"label_histogram"}))

    def __init__(
        self,
        target: Literal["global", "balanced"] = "global",
        candidates: int | None = 50_000,
        epsilon: float = 0.0,
    ) -> None:
        if target not in ("global", "balanced"):
            raise ValueError(f"LabelMatch: target={target!r} must be 'global' or 'balanced'")
        check_histogram_epsilon("LabelMatch", epsilon)
        check_at_least("LabelMatch", 1, candidates=candidates)
        self.target, self.limit = target, candidates
        self.signal_options = {"label_histogram": {"epsilon": epsilon}}

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Add the client that brings the pooled labels closest to the target."""
        positions, counts = label_counts(signals, round.available)
        if not positions.size:
            return Selection(())
        if round.averaging == "equal":
            counts = counts / counts.sum(axis=1, keepdims=True)
        classes = counts.shape[1]
        goal = np.full(classes, 1 / classes)
        if self.target == "global":
            goal = counts.sum(axis=0) / counts.sum()
        part = sample_positions(positions.size, self.limit, rng)
        positions, counts = positions[part], counts[part]
        chosen = [int(rng.integers(positions.size))]
        pooled, penalty = counts[chosen[0]].copy(), np.zeros(positions.size)
        distances = [float(label_distances(pooled[None], 0.0, goal)[0])]
        while len(chosen) < min(round.size, positions.size):
            penalty[chosen[-1]] = np.inf
            after = label_distances(counts, pooled, goal) + penalty
            chosen.append(int(np.argmin(after)))
            pooled += counts[chosen[-1]]
            distances.append(float(after[chosen[-1]]))
        clients = tuple(round.available[i] for i in positions[chosen].tolist())
        return Selection(clients, scores=dict(zip(clients, distances, strict=True)))
