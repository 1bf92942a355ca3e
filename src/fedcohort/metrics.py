"""Measures of a run: label balance of its cohorts, accuracy, and how evenly clients took part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import UnknownClient


def gemd(label_counts: ArrayLike, selected: ArrayLike) -> float:
    """Group earth mover's distance between the labels of a cohort and of all clients.

    Eq. 15 of FL-DP3S (paper 4): the L1 distance, without a factor of one half, between the label
    distribution of the cohort's pooled data and that of all clients' pooled data. It is 0 if the
    cohort mirrors the federation, and always below 2.

    Parameters
    ----------
    label_counts : array (clients, classes)
        Number of examples per client and class.
    selected : sequence of int
        Row numbers of the cohort's clients.

    Examples
    --------
    >>> counts = [[10, 0], [0, 10], [5, 5]]
    >>> gemd(counts, [0, 1]), gemd(counts, [0])
    (0.0, 1.0)
    """
    counts = np.asarray(label_counts, dtype=np.float64)
    if counts.ndim != 2 or not np.isfinite(counts).all() or (counts < 0).any():
        raise ValueError("gemd: label_counts must be non-negative counts (clients x classes)")
    cohort = counts[_rows(selected, len(counts))].sum(axis=0)
    if cohort.sum() == 0:
        raise ValueError("gemd: the selected clients hold no examples")
    everyone = counts.sum(axis=0)
    return float(np.abs(cohort / cohort.sum() - everyone / everyone.sum()).sum())


def _rows(selected: ArrayLike, clients: int) -> NDArray[np.int64]:
    rows = np.asarray(selected)
    if rows.size == 0:
        raise ValueError("gemd: selected is empty")
    if rows.dtype.kind not in "iu" or rows.ndim != 1 or rows.min() < 0 or rows.max() >= clients:
        raise ValueError(f"gemd: selected must be row numbers from 0 to {clients - 1}, got {rows}")
    return rows.astype(np.int64)


def rounds_to_target(accuracy: ArrayLike, target: float) -> int | None:
    """Count the rounds until the accuracy first reaches the target.

    Parameters
    ----------
    accuracy : array (rounds,)
        Accuracy after each round, NaN if it was not measured.
    target : float
        In the same unit as `accuracy`.

    Returns
    -------
    int or None
        1 if the first round reached the target, None if no round did.

    Examples
    --------
    >>> rounds_to_target([0.2, float("nan"), 0.7, 0.6], 0.6)
    3
    >>> rounds_to_target([0.2, 0.3], 0.6) is None
    True
    """
    reached = np.flatnonzero(_row("accuracy", accuracy) >= target)
    return int(reached[0]) + 1 if reached.size else None


def time_to_target(accuracy: ArrayLike, seconds: ArrayLike, target: float) -> float | None:
    """Sum the durations of the rounds until the accuracy first reaches the target.

    Parameters
    ----------
    accuracy : array (rounds,)
        As in `rounds_to_target`.
    seconds : array (rounds,)
        Duration of each round.
    target : float
        In the same unit as `accuracy`.

    Examples
    --------
    >>> time_to_target([0.2, 0.7], [1.5, 2.0], 0.6)
    3.5
    """
    durations = _row("seconds", seconds)
    if durations.size != np.size(accuracy):
        raise ValueError(
            f"time_to_target: {np.size(accuracy)} accuracies but {durations.size} durations"
        )
    rounds = rounds_to_target(accuracy, target)
    return None if rounds is None else float(durations[:rounds].sum())


def terminal_accuracy(accuracy: ArrayLike, last: int = 50) -> float:
    """Average the accuracy over the last rounds, as FedACS (paper 1) does with 50.

    A shorter run is averaged as a whole. Rounds without a measurement (NaN) are ignored.

    Examples
    --------
    >>> terminal_accuracy([0.1, 0.6, float("nan"), 0.8], last=3)
    0.7
    """
    if last < 1:
        raise ValueError(f"terminal_accuracy: last={last} is below 1")
    tail = _row("accuracy", accuracy)[-last:]
    measured = tail[~np.isnan(tail)]
    if not measured.size:
        raise ValueError(f"terminal_accuracy: no accuracy was measured in the last {last} rounds")
    return float(measured.mean())


def participation(selections: Iterable[Iterable[str]], clients: Sequence[str]) -> NDArray[np.int64]:
    """Count how often each client was selected.

    Parameters
    ----------
    selections : iterable of cohorts
        The client ids selected in each round.
    clients : sequence of str
        All clients. The counts are in this order.

    Examples
    --------
    >>> participation([("a", "b"), ("a", "c")], ["a", "b", "c", "d"]).tolist()
    [2, 1, 1, 0]
    """
    position = {client: i for i, client in enumerate(clients)}
    counts = np.zeros(len(position), dtype=np.int64)
    for cohort in selections:
        for client in cohort:
            if client not in position:
                raise UnknownClient(f"participation: {client!r} was selected but is not a client")
            counts[position[client]] += 1
    return counts


def participation_entropy(counts: ArrayLike, *, normalized: bool = True) -> float:
    """Return the entropy of the participation counts over clients.

    Parameters
    ----------
    counts : array (clients,)
        How often each client took part, as `participation` returns it.
    normalized : bool, default=True
        Divide by the maximum, log2 of the number of clients: 1 means that all clients took part
        equally often, 0 that one client did all the work. A federation of one client has 1.
        If False, the entropy is in bits.

    Examples
    --------
    >>> participation_entropy([3, 3, 3, 3]), participation_entropy([3, 3, 3, 3], normalized=False)
    (1.0, 2.0)
    >>> participation_entropy([5, 0])
    0.0
    """
    array = _row("counts", counts)
    if array.size == 0 or (array < 0).any() or not 0 < array.sum() < np.inf:
        raise ValueError("participation_entropy: counts must be non-negative and not all 0")
    share = array[array > 0] / array.sum()
    bits = max(0.0, -float((share * np.log2(share)).sum()))
    if not normalized:
        return bits
    return 1.0 if array.size == 1 else min(1.0, bits / float(np.log2(array.size)))


def _row(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    return array
