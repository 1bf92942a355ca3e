"""Distances between clients -> a map, and clusters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_CLUSTERS = 10
MIN_SILHOUETTE = 0.5  # from here on Kaufman and Rousseeuw (1990) see a reasonable structure
AS_GOOD = 0.02  # difference of silhouettes that chance makes
MIN_GAP = 3.0  # standard errors of one pair
MAX_ORDERED = 200  # clients; beyond, the best order of leaves takes too long


class Clusters(NamedTuple):
    """A suggested division; `labels` count from 0, larger clusters first.

    `order` puts like clients side by side, and `reason` says why it is this number of clusters.
    """

    number: int
    labels: NDArray[np.int64]
    order: NDArray[np.int64]
    reason: str


def classical_map(squares: Floats) -> tuple[Floats, float]:
    """Return positions in the plane, and which share of the squared distances they keep.

    Classical multidimensional scaling (Torgerson 1952): closed form, no random start.

    Examples
    --------
    >>> line = np.array([[0.0], [1.0], [3.0]])
    >>> positions, share = classical_map((line - line.T) ** 2)
    >>> np.round(np.abs(np.diff(positions[:, 0])), 6).tolist(), round(share, 6)
    ([1.0, 2.0], 1.0)
    """
    centered = squares - squares.mean(axis=0)
    inner = -(centered - centered.mean(axis=1, keepdims=True)) / 2
    values, vectors = np.linalg.eigh((inner + inner.T) / 2)
    values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
    positions = np.zeros((len(squares), 2))
    for axis in range(min(2, len(squares))):
        column = vectors[:, axis]
        side = np.sign(column[np.argmax(np.abs(column))])  # an eigenvector's sign is arbitrary
        positions[:, axis] = side * column * np.sqrt(values[axis])
    total = float(values.sum())
    return positions, float(values[:2].sum()) / total if total > 0 else 0.0


def suggest_clusters(squares: Floats, errors: Floats) -> Clusters:
    """Suggest a number of clusters of clients.

    Average linkage on the distances is cut into 2, 3, ... clusters, and the cut with the best
    mean silhouette (Rousseeuw 1987) is suggested; of several that are as good, the one with fewest
    clusters. One cluster is suggested instead if that silhouette is below 0.5, or if clients of
    different clusters are not farther apart (in the mean of squared distances) than those of the
    same by 3 standard errors of one pair: then sampling and noise would explain the division.

    Parameters
    ----------
    squares : array (N, N)
        Debiased squared distances.
    errors : array (N, N)
        Their standard errors if there were no difference.
    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
    from scipy.spatial.distance import squareform
    from sklearn.metrics import silhouette_score

    n = len(squares)
    distances = np.sqrt(np.maximum(squares, 0))
    np.fill_diagonal(distances, 0)
    near = squareform(distances, checks=False)
    tree = linkage(near, "average", optimal_ordering=n <= MAX_ORDERED)
    order = leaves_list(tree).astype(np.int64)
    tried = range(2, min(MAX_CLUSTERS, n - 1) + 1)
    cuts = {k: fcluster(tree, k, "maxclust").astype(np.int64) - 1 for k in tried}
    scores = {
        k: float(silhouette_score(distances, cut, metric="precomputed"))
        for k, cut in cuts.items()
        if len(set(cut)) == k
    }
    one = Clusters(1, np.zeros(n, np.int64), order, "one, as there are too few clients to divide")
    if not scores:
        return one
    best = min(k for k, score in scores.items() if score >= max(scores.values()) - AS_GOOD)
    gap, score = _gap(squares, errors, cuts[best]), scores[best]
    if score < MIN_SILHOUETTE:
        reason = f"no division stands out (silhouette {score:.2f}, needed {MIN_SILHOUETTE})"
        return one._replace(reason=f"one, as {reason}")
    if gap < MIN_GAP:
        reason = (
            f"chance explains the best division ({gap:.1f} standard errors, needed {MIN_GAP:g})"
        )
        return one._replace(reason=f"one, as {reason}")
    by_size = np.argsort(np.argsort(-np.bincount(cuts[best]), kind="stable"), kind="stable")
    reason = f"{best}, silhouette {score:.2f}, {gap:.1f} standard errors apart"
    return Clusters(best, by_size[cuts[best]], order, reason)


def _gap(squares: Floats, errors: Floats, labels: NDArray[np.int64]) -> float:
    """By how many standard errors of one pair clusters are apart."""
    pairs = np.triu(np.ones_like(squares, bool), 1)
    same = labels[:, None] == labels
    inside, across = pairs & same, pairs & ~same
    within = float(squares[inside].mean()) if inside.any() else 0.0
    error = float(errors[across].mean())
    difference = float(squares[across].mean()) - within
    return difference / error if error > 0 else float("inf") if difference > 0 else 0.0
