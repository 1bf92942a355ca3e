"""FLIPS: equal shares for clusters of clients with similar labels."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcohort.policies.base import (
    Policy,
    check_at_least,
    label_counts,
    register,
    sample_positions,
    times_of,
)
from fedcohort.rounds import ClientId, Outcome, Round, Selection
from fedcohort.signals.catalog import Needs, check_histogram_epsilon
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

_MAX_FITTED = 2_000  # clients that clusters are fitted to; the others join the nearest center


@dataclass
class FLIPSState:
    """The cluster centers, for how many clients they were fitted, and the picks per client."""

    centers: Array = field(default_factory=lambda: np.empty((0, 0)))
    fitted: int = 0
    picks: dict[ClientId, int] = field(default_factory=dict)


@register("flips", when="clients may tell their label counts, and kinds of clients are few")
class FLIPS(Policy):
    """Participant selection of Bhope et al. [1]_.

    Clients are clustered by k-means on their label distributions. Each place of the cohort goes to
    the cluster with the fewest places so far, and in it to the client with the fewest picks; ties
    are broken at random. A client that drops out loses its place to nobody in that round, but it
    is counted as picked.

    Parameters
    ----------
    clusters : int, optional
        Number of clusters. None takes the number between 2 and `most_clusters` with the smallest
        Davies-Bouldin index.
    most_clusters : int, default=15
        The largest number that is tried.
    epsilon : float, default=0.0
        Privacy of the label histograms; 0 sends exact counts. Counts of labels are sensitive.

    Notes
    -----
    Read: the abstract only (clusters by label distribution, each equitably represented, a trusted
    enclave, straggler management); no public code was found. The Davies-Bouldin index and the
    order by picks follow the paper as we remember it. Chosen here: clusters are fitted once, and
    again when twice as many clients are known; newcomers join the nearest center. Over-provisioning
    for stragglers is left to the engine. The server sees the histograms.

    References
    ----------
    .. [1] Bhope, Jayaram, Venkatasubramanian, Verma, Thomas (2023), FLIPS: Federated Learning using
       Intelligent Participant Selection, Middleware.

    Examples
    --------
    >>> signals = Signals()
    >>> labels = {"a": [9, 1], "b": [9, 1], "c": [9, 1], "d": [0, 10]}
    >>> _ = signals.record("label_histogram", labels, stamp=0)
    >>> round = Round(number=0, available=("a", "b", "c", "d"), cohort_size=2)
    >>> "d" in FLIPS(clusters=2).select(round, signals, np.random.default_rng(0)).clients
    True
    """

    needs = Needs(profile=frozenset({"label_histogram"}))

    def __init__(
        self, clusters: int | None = None, most_clusters: int = 15, epsilon: float = 0.0
    ) -> None:
        check_histogram_epsilon("FLIPS", epsilon)
        check_at_least("FLIPS", 1, clusters=clusters)
        check_at_least("FLIPS", 2, most_clusters=most_clusters)
        self.clusters, self.most_clusters = clusters, most_clusters
        self.signal_options = {"label_histogram": {"epsilon": epsilon}}
        self.state = FLIPSState()

    def select(self, round: Round, signals: Signals, rng: Generator) -> Selection:
        """Give places to the clusters in turn, and in each to the client with the fewest picks."""
        positions, counts = label_counts(signals, round.available)
        if not positions.size:
            return Selection(())
        labels = self._labels(counts / counts.sum(axis=1, keepdims=True), rng)
        picks = times_of(self.state.picks, round.available)[positions]
        order = np.lexsort((rng.random(positions.size), picks))
        queues = [order[labels[order] == label] for label in range(len(self.state.centers))]
        used = np.array([picks[q].sum() if q.size else np.inf for q in queues])
        taken, chosen = np.zeros(len(queues), int), []
        for _ in range(min(round.size, positions.size)):
            ready = np.array([t < q.size for t, q in zip(taken, queues, strict=True)])
            fewest = np.flatnonzero(ready & (used == used[ready].min()))
            label = int(rng.choice(fewest))
            chosen.append(int(queues[label][taken[label]]))
            taken[label] += 1
            used[label] += 1
        clients = tuple(round.available[i] for i in positions[chosen].tolist())
        return Selection(clients, scores=dict(zip(clients, picks[chosen].tolist(), strict=True)))

    def _labels(self, rows: Array, rng: Generator) -> Indices:
        """Return the cluster of each row; fit the centers where that is due."""
        state = self.state
        if len(rows) >= 2 * state.fitted or state.centers.shape[1:] != rows.shape[1:]:
            part = rows[sample_positions(len(rows), _MAX_FITTED, rng)]
            state.centers = _fitted(part, self.clusters, self.most_clusters, rng)
            state.fitted = len(rows)
        centers = state.centers  # |row - center|^2 less |row|^2, which is the same for all centers
        distances = np.square(centers).sum(axis=1) - 2 * rows @ centers.T
        return np.asarray(distances.argmin(axis=1))

    def observe(self, round: Round, outcome: Outcome, signals: Signals) -> None:
        """Count the picks."""
        for client in outcome.selected:
            self.state.picks[client] = self.state.picks.get(client, 0) + 1


def _fitted(rows: Array, clusters: int | None, most: int, rng: Generator) -> Array:
    """Return k-means centers, for the wanted number or the smallest Davies-Bouldin index."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import davies_bouldin_score

    different = len(np.unique(rows.round(12), axis=0))
    if clusters is not None or different < 3:
        tried = [min(clusters or different, different)]
    else:
        tried = list(range(2, min(most, different, len(rows) - 1) + 1))
    best: tuple[float, Array] = (np.inf, rows[:1])
    for count in tried:
        model = KMeans(count, n_init=3, random_state=int(rng.integers(2**31 - 1)))
        with warnings.catch_warnings():  # rows that differ by rounding only may share a cluster
            warnings.filterwarnings("ignore", message="Number of distinct clusters")
            model.fit(rows)
        alone = len(tried) == 1
        found = len(np.unique(model.labels_))
        score = 0.0 if alone or found < 2 else float(davies_bouldin_score(rows, model.labels_))
        if score < best[0]:
            best = (score, np.asarray(model.cluster_centers_, np.float64))
    return best[1]
