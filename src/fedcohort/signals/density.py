"""Estimators of a density from the values that the rows of a sketch give (algorithm 4)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedcohort.signals.stack import Floats

Estimator = Literal["mean", "median-of-means", "median"]


def over_rows(values: Floats, estimator: Estimator) -> Floats:
    """Combine the rows' values, (rows, n).

    The mean is unbiased and converges with the rows. The median of means of 2 log2(rows) + 1
    groups converges too, and bears single wild rows. The plain median, which the paper writes,
    converges to the median of a row's value: something else.

    Examples
    --------
    >>> values = np.array([[0.0], [0.0], [0.0], [0.4]])
    >>> [float(over_rows(values, e)[0]) for e in ("mean", "median")]
    [0.1, 0.0]
    """
    if estimator == "mean":
        return np.asarray(values.mean(axis=0))
    if estimator == "median":
        return np.asarray(np.median(values, axis=0))
    if estimator == "median-of-means":
        groups = min(len(values), 2 * int(np.log2(len(values))) + 1)
        means = [part.mean(axis=0) for part in np.array_split(values, groups)]
        return np.asarray(np.median(means, axis=0))
    raise ValueError(f"unknown estimator {estimator!r}; use mean, median-of-means or median")
