"""Measures of a run: label balance of its cohorts, rounds to a target, participation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import entr

from fedcohort.exceptions import UnknownClient


def gemd(label_counts: ArrayLike, selected: Sequence[int]) -> float:
    """Group earth mover's distance between the labels of a cohort and of all clients.

    Eq. 15 of FL-DP3S (paper 4): the L1 distance, from 0 to 2, between the label distributions of
    the cohort's pooled data and all clients' pooled data. `label_counts` (clients, classes) are
    numbers of examples, and `selected` the rows of the cohort's clients.

    Examples
    --------
    >>> counts = [[10, 0], [0, 10], [5, 5]]
    >>> gemd(counts, [0, 1]), gemd(counts, [0])
    (0.0, 1.0)
    """
    counts = np.asarray(label_counts, dtype=np.float64)
    cohort, everyone = counts[list(selected)].sum(axis=0), counts.sum(axis=0)
    if not cohort.sum() > 0:
        raise ValueError(f"gemd: the selected clients {list(selected)} hold no examples")
    return float(np.abs(cohort / cohort.sum() - everyone / everyone.sum()).sum())


def rounds_to_target(accuracy: ArrayLike, target: float) -> int | None:
    """Count the rounds until the accuracy first reaches the target; None if it never does.

    Rounds without a measurement are NaN. If the first round reaches the target, it is 1.

    Examples
    --------
    >>> rounds_to_target([0.2, float("nan"), 0.7, 0.6], 0.6)
    3
    >>> rounds_to_target([0.2, 0.3], 0.6) is None
    True
    """
    reached = np.flatnonzero(np.asarray(accuracy, np.float64) >= target)
    return int(reached[0]) + 1 if reached.size else None


def participation(selections: Iterable[Iterable[str]], clients: Sequence[str]) -> NDArray[np.int64]:
    """Count how often each client was selected, in the order of `clients`."""
    counts = Counter(chain.from_iterable(selections))
    if unknown := counts.keys() - set(clients):
        raise UnknownClient(f"participation: {min(unknown)!r} was selected but is not a client")
    return np.array([counts[client] for client in clients], np.int64)


def participation_entropy(counts: ArrayLike) -> float:
    """Return the entropy of participation counts, from 0 (all work by one) to 1 (all equal)."""
    array = np.asarray(counts, np.float64)
    if (array < 0).any() or not 0 < array.sum() < np.inf:
        raise ValueError("participation_entropy: counts must be non-negative and not all 0")
    nats = float(entr(array / array.sum()).sum())
    return 1.0 if array.size == 1 else min(1.0, nats / math.log(array.size))
