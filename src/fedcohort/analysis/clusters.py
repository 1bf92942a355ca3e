"""Distances between clients -> a map, an order that puts like ones side by side, and clusters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOST_CLUSTERS = 10
LEAST_SILHOUETTE = 0.5  # from here on Kaufman and Rousseeuw (1990) see a reasonable structure
AS_GOOD = 0.02  # difference of silhouettes that chance makes
LEAST_GAP = 3.0  # standard errors of one pair
ORDERED_WELL = 200  # clients; beyond, the best order of leaves takes too long


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


def classical_map(squares: Floats) -> Map:
    """Classical multidimensional scaling (Torgerson 1952): closed form, no random start.

    Examples
    --------
    >>> line = np.array([[0.0], [1.0], [3.0]])
    >>> found = classical_map((line - line.T) ** 2)
    >>> np.round(np.abs(np.diff(found.positions[:, 0])), 6).tolist(), round(found.share, 6)
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
        side = np.sign(column[np.argmax(np.abs(column))])  # eigenvectors have no sign of their own
        positions[:, axis] = side * column * np.sqrt(values[axis])
    total = float(values.sum())
    return Map(positions, float(values[:2].sum()) / total if total > 0 else 0.0)


def suggest_clusters(squares: Floats, errors: Floats) -> tuple[Clusters, NDArray[np.int64]]:
    """Suggest a number of clusters, and an order that puts like clients side by side.

    Average linkage on the distances is cut into 2, 3, ... clusters, and the cut with the best
    mean silhouette is suggested; of several that are as good, the one with fewest clusters. One
    cluster is suggested instead if that silhouette is below 0.5, or if clients of different
    clusters are not farther apart (in the mean of squared distances) than those of the same by 3
    standard errors of one pair: then sampling and noise would explain the division.

    Parameters
    ----------
    squares : array (N, N)
        Debiased squared distances.
    errors : array (N, N)
        Their standard errors if there were no difference.
    """
    from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
    from scipy.spatial.distance import squareform

    n = len(squares)
    distances = np.sqrt(np.maximum(squares, 0))
    near = squareform(distances, checks=False)
    tree = linkage(near, "average", optimal_ordering=n <= ORDERED_WELL)
    order: NDArray[np.int64] = leaves_list(tree).astype(np.int64)
    tried = range(2, min(MOST_CLUSTERS, n - 1) + 1)
    cuts = {k: fcluster(tree, k, "maxclust").astype(np.int64) - 1 for k in tried}
    scores = {k: silhouette(distances, cut) for k, cut in cuts.items() if len(set(cut)) == k}
    if not scores:
        return Clusters(1, np.zeros(n, np.int64), {}, 0.0), order
    best = min(k for k, score in scores.items() if score >= max(scores.values()) - AS_GOOD)
    gap = _gap(squares, errors, cuts[best])
    if scores[best] < LEAST_SILHOUETTE or gap < LEAST_GAP:
        return Clusters(1, np.zeros(n, np.int64), scores, gap), order
    return Clusters(best, _by_size(cuts[best]), scores, gap), order


def silhouette(distances: Floats, labels: NDArray[np.int64]) -> float:
    """Return the mean silhouette (Rousseeuw 1987); a client alone in its cluster counts 0.

    Examples
    --------
    >>> points = np.array([0.0, 1.0, 10.0, 11.0])
    >>> round(silhouette(np.abs(points[:, None] - points), np.array([0, 0, 1, 1])), 4)
    0.8997
    """
    member = (labels[:, None] == np.arange(labels.max() + 1)).astype(float)
    sizes = member.sum(axis=0)
    own = sizes[labels]
    sums = distances @ member
    rows = np.arange(len(labels))
    inside = sums[rows, labels] / np.maximum(own - 1, 1)
    means = sums / sizes
    means[rows, labels] = np.inf
    outside = means.min(axis=1)
    larger = np.maximum(inside, outside)
    single = np.where(larger > 0, (outside - inside) / np.where(larger > 0, larger, 1), 0.0)
    return float(np.where(own > 1, single, 0.0).mean())


def _gap(squares: Floats, errors: Floats, labels: NDArray[np.int64]) -> float:
    """By how many standard errors of one pair clusters are apart."""
    pairs = np.triu(np.ones_like(squares, bool), 1)
    same = labels[:, None] == labels
    inside, across = pairs & same, pairs & ~same
    within = float(squares[inside].mean()) if inside.any() else 0.0
    error = float(errors[across].mean())
    difference = float(squares[across].mean()) - within
    return difference / error if error > 0 else float("inf") if difference > 0 else 0.0


def _by_size(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number clusters from the largest."""
    sizes = np.bincount(labels)
    rank = np.empty(len(sizes), np.int64)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
    return rank[labels]
