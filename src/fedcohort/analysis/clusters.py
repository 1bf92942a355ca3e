"""Distances between clients -> a map, an order that puts like ones side by side, and clusters."""

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


class Map(NamedTuple):
    """Positions (N, 2) whose distances approximate the given ones, and how much they keep."""

    positions: Floats
    share: float


class Clusters(NamedTuple):
    """A suggested division.

    `labels` count from 0, larger clusters first; `silhouettes` holds the mean silhouette of each
    number of clusters tried; `gap` says by how many standard errors of one pair the clients of
    different clusters are farther apart than those of the same (squared distances).
    """

    number: int
    labels: NDArray[np.int64]
    silhouettes: dict[int, float]
    gap: float

    def reason(self) -> str:
        """Say how many clusters are suggested and why."""
        if not self.silhouettes:
            return "one, as there are too few clients to divide"
        best = max(self.silhouettes.values())
        if self.number > 1:
            return f"{self.number}, silhouette {best:.2f}, {self.gap:.1f} standard errors apart"
        if best < MIN_SILHOUETTE:
            needed = f"silhouette {best:.2f}, needed {MIN_SILHOUETTE}"
            return f"one, as no division stands out ({needed})"
        needed = f"{self.gap:.1f} standard errors, needed {MIN_GAP:g}"
        return f"one, as chance explains the best division ({needed})"


def classical_map(squares: Floats) -> Map:
    """Classical multidimensional scaling (Torgerson 1952): closed form, no random start.

    Examples
    --------
    >>> line = np.array([[0.0], [1.0], [3.0]])
    >>> placed = classical_map((line - line.T) ** 2)
    >>> np.round(np.abs(np.diff(placed.positions[:, 0])), 6).tolist(), round(placed.share, 6)
    ([1.0, 2.0], 1.0)
    """
    n = len(squares)
    centered = squares - squares.mean(axis=0)
    inner = -(centered - centered.mean(axis=1, keepdims=True)) / 2
    values, vectors = np.linalg.eigh((inner + inner.T) / 2)
    values, vectors = np.maximum(values[::-1], 0), vectors[:, ::-1]
    positions = np.zeros((n, 2))
    for axis in range(min(2, n)):
        column = vectors[:, axis]
        side = np.sign(column[np.argmax(np.abs(column))])  # an eigenvector's sign is arbitrary
        positions[:, axis] = side * column * np.sqrt(values[axis])
    total = float(values.sum())
    return Map(positions, float(values[:2].sum()) / total if total > 0 else 0.0)


def leaf_order(distances: Floats) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the tree of average linkage, and its order of clients: like ones are neighbors."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    near = squareform(distances, checks=False)
    tree = linkage(near, "average", optimal_ordering=len(distances) <= MAX_ORDERED)
    return tree, leaves_list(tree).astype(np.int64)


def suggest_clusters(squares: Floats, errors: Floats) -> tuple[Clusters, NDArray[np.int64]]:
    """Suggest a number of clusters, and an order that puts like clients side by side.

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
    from scipy.cluster.hierarchy import fcluster
    from sklearn.metrics import silhouette_score

    n = len(squares)
    distances = np.sqrt(np.maximum(squares, 0))
    np.fill_diagonal(distances, 0)
    tree, order = leaf_order(distances)
    tried = range(2, min(MAX_CLUSTERS, n - 1) + 1)
    cuts = {k: fcluster(tree, k, "maxclust").astype(np.int64) - 1 for k in tried}
    scores = {
        k: float(silhouette_score(distances, cut, metric="precomputed"))
        for k, cut in cuts.items()
        if len(set(cut)) == k
    }
    if not scores:
        return Clusters(1, np.zeros(n, np.int64), {}, 0.0), order
    best = min(k for k, score in scores.items() if score >= max(scores.values()) - AS_GOOD)
    gap = _gap(squares, errors, cuts[best])
    if scores[best] < MIN_SILHOUETTE or gap < MIN_GAP:
        return Clusters(1, np.zeros(n, np.int64), scores, gap), order
    by_size = np.argsort(np.argsort(-np.bincount(cuts[best]), kind="stable"), kind="stable")
    return Clusters(best, by_size[cuts[best]], scores, gap), order


def _gap(squares: Floats, errors: Floats, labels: NDArray[np.int64]) -> float:
    """By how many standard errors of one pair clusters are apart."""
    pairs = np.triu(np.ones_like(squares, bool), 1)
    same = labels[:, None] == labels
    inside, across = pairs & same, pairs & ~same
    within = float(squares[inside].mean()) if inside.any() else 0.0
    error = float(errors[across].mean())
    difference = float(squares[across].mean()) - within
    return difference / error if error > 0 else float("inf") if difference > 0 else 0.0
