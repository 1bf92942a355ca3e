"""How far the distances of a whole federation may be off, as squared MMD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedcohort.signals.race import RaceSketch
from fedcohort.signals.uncertainty import noise_variance, sampling_variance

Floats = NDArray[np.float64]


def errors_to_global(sketches: Sequence[RaceSketch]) -> Floats:
    """Return the standard error of each client's squared distance to all data together, (N,).

    A client is a part w of the whole, so its distance to the whole is (1 - w) times that to the
    rest, with which it shares nothing. The scatter of a client's records is estimated from the
    client and, where that is more, from all data together: three equal records show none.
    """
    counts = np.sum([s.counts for s in sketches], axis=0)
    n = float(sum(s.n for s in sketches))
    variance = sum(s.noise for s in sketches)
    fourth = sum(0.0 if s.release is None else s.release.fourth for s in sketches)
    kept = next((s.release for s in sketches if s.release is not None), None)
    trace = _trace(sketches)
    rest, errors = sketches[0].empty_like(), np.empty(len(sketches))
    for i, s in enumerate(sketches):
        own = 0.0 if s.release is None else s.release.fourth
        rest.counts, rest.n = counts - s.counts, n - s.n
        if kept is not None:
            left = max(variance - s.noise, 0.0), max(fourth - own, 0.0)
            rest.release = replace(kept, variance=left[0], fourth=left[1])
        usual = 2 * trace * (s.rows * (1 / s.n + 1 / rest.n)) ** 2
        squared = noise_variance(s, rest) + max(sampling_variance(s, rest), usual)
        errors[i] = (1 - s.n / n) ** 2 * np.sqrt(squared) / s.rows
    return errors


def pair_errors(sketches: Sequence[RaceSketch]) -> Floats:
    """Return the standard error of every squared distance if there were no difference, (N, N).

    Sampling: with the bucket probabilities p of all data together, a row of the gap between two
    clients has covariance (1 / n_i + 1 / n_j) (diag(p) - pp'), and its square's standard error is
    sqrt(2 trace) of the square of that; the mean over rows scatters at most as much. Noise: each
    cell's, as in `fedcohort.signals.uncertainty`.
    """
    n = np.array([s.n for s in sketches], float)
    rows, buckets = sketches[0].counts.shape
    inverse = _sums(1 / n)
    noise = _sums(np.array([s.noise for s in sketches]) / n**2)
    fourth = _sums(
        np.array([0 if s.release is None else s.release.fourth for s in sketches]) / n**4
    )
    noisy = 4 * noise * rows * inverse + rows * buckets * (2 * noise**2 + fourth)
    errors: Floats = np.sqrt(2 * _trace(sketches) * inverse**2 + noisy / rows**2)
    return errors


def _trace(sketches: Sequence[RaceSketch]) -> float:
    """Return the mean over rows of trace((diag(p) - pp')^2)."""
    p = np.maximum(np.sum([s.counts for s in sketches], axis=0), 0).astype(float)
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1)
    second, third = (p**2).sum(axis=1), (p**3).sum(axis=1)
    return float((second - 2 * third + second**2).mean())


def _sums(values: Floats) -> Floats:
    sums: Floats = values[:, None] + values
    return sums


def tightened(squares: Floats, errors: Floats) -> Floats:
    """Return the errors of exact sketches, no larger than the federation itself shows.

    `pair_errors` lets rows move together fully, which overstates the scatter several times for
    most data. A squared distance is below zero by chance alone, so twice the root mean square of
    those below zero (in units of `errors`) is at least one standard deviation of chance, be it
    symmetric or as skewed as a single squared Gaussian. With fewer than ten such pairs, the
    errors stay as they are.
    """
    pairs = np.triu_indices(len(squares), 1)
    units = squares[pairs] / errors[pairs]
    below = units[units < 0]
    if len(below) < 10:
        return errors
    return errors * min(1.0, 2 * float(np.sqrt((below**2).mean())))
