"""FLIPS: equal shares for clusters of clients with similar labels."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from fedcohort.numerics.sampling import kmeans
from fedcohort.options import Count
from fedcohort.policies.base import Array, Indices, Policy, count_up, register, scored, values_for
from fedcohort.policies.readings import LabelClusters, label_shares
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import HistogramEpsilon, Needs
from fedcohort.signals.table import Signals

_MAX_FITTED = 2_000  # clients that clusters are fitted to; the others join the nearest center
_MAX_CLUSTERS = 10


@dataclass
class FLIPSState(LabelClusters):
    """The clusters, and the picks by client and by cluster."""

    picks: dict[ClientId, int] = field(default_factory=dict)
    used: Array = field(default_factory=lambda: np.empty(0))


@register("flips", when="clients may tell their label counts, and kinds of clients are few")
class FLIPS(Policy):
    """Participant selection of Bhope et al.

    Clients are clustered by k-means on their label distributions. In every round each cluster gets
    an equal number of places; places that remain go to the clusters with the fewest picks so far.
    In a cluster, and for places that clusters cannot fill, those with the fewest picks are taken.

    Parameters
    ----------
    clusters : int, optional
        By default the number from 2 to 10 with the smallest Davies-Bouldin index.
    epsilon : float, default=0.0
        Privacy of the label histograms; 0 sends exact counts, which are sensitive.

    Notes
    -----
    Source: first author's code rahulatulbhope/flower (server/flips).
    Checked: quotas and picks by hand, also with absent clients.
    Reference: Bhope et al. (2023), FLIPS: Intelligent Participant Selection, Middleware.

    Chosen here: remaining places by picks (the code gives them to the largest clusters, so that
    small ones may never be heard), and clusters anew when there are twice as many clients. The
    paper's enclave and its over-provisioning are not part of this.

    Examples
    --------
    >>> from fedcohort.testing import select
    >>> labels = {"a": [9, 1], "b": [9, 1], "c": [9, 1], "d": [0, 10]}
    >>> "d" in select(FLIPS(clusters=2), "abcd", 2, label_histogram=labels).clients
    True
    """

    needs = Needs(profile=frozenset({"label_histogram"}))

    def __init__(self, clusters: Count | None = None, epsilon: HistogramEpsilon = 0.0) -> None:
        self.clusters = clusters
        self.signal_options = {"label_histogram": {"epsilon": epsilon}}
        self.state = FLIPSState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        state = self.state
        positions, shares = label_shares(signals, round.available)
        if not positions.size:
            return Selection(())
        if state.fit(shares, _MAX_FITTED, rng, self._centers):
            state.used = np.zeros(len(state.points))
        labels = state.assign(shares)
        picks = values_for(state.picks, round.available)[positions]
        order = np.lexsort((rng.random(positions.size), picks))
        queues = [order[labels[order] == label] for label in range(state.used.size)]
        present = [label for label, queue in enumerate(queues) if queue.size]
        quota = np.zeros(len(queues), int)
        quota[present] = round.size // len(present)
        fewest = np.lexsort((rng.random(len(present)), state.used[present]))
        quota[np.array(present)[fewest[: round.size % len(present)]]] += 1
        chosen = [i for queue, places in zip(queues, quota, strict=True) for i in queue[:places]]
        rest = order[~np.isin(order, chosen)]
        chosen += rest[: round.size - len(chosen)].tolist()
        return scored(round.available, positions[chosen], picks[chosen])

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        count_up(self.state.picks, outcome.selected)
        _, shares = label_shares(signals, outcome.selected)
        if len(shares) and shares.shape[1:] == self.state.points.shape[1:]:
            places = np.bincount(self.state.assign(shares), minlength=len(self.state.used))
            self.state.used = self.state.used + places

    def _centers(self, rows: Array, rng: Generator) -> tuple[Array, Indices]:
        from sklearn.metrics import davies_bouldin_score

        different = len(np.unique(rows.round(12), axis=0))
        numbers = list(range(2, min(_MAX_CLUSTERS, different, len(rows) - 1) + 1))
        if self.clusters is not None or different < 3:
            numbers = [min(self.clusters or different, different)]
        models = [kmeans(rows, count, 3, rng) for count in numbers]
        scores = [0.0] * len(models)
        if len(models) > 1 and all(np.ptp(model.labels_) for model in models):
            scores = [davies_bouldin_score(rows, model.labels_) for model in models]
        centers = np.asarray(models[int(np.argmin(scores))].cluster_centers_, np.float64)
        return centers, np.arange(len(centers))
