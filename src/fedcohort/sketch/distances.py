"""Distances between the normalized sketches of many clients, read a few rows at a time.

Write q for a client's counts / n. Kinds of distance between sketches a and b:

- ``frobenius``: the root of the summed squares of a - b (paper 0, section 3.2.2);
- ``mmd``: the squared maximum mean discrepancy of the kernel "probability to meet in a row". It is
  unbiased, so it can be negative.

Row r of q, an average of n one-hot vectors, scatters around the true bucket probabilities p_r with
E|q_r - p_r|^2 = (1 - |p_r|^2) / n, estimated without bias by (1 - |q_r|^2) / (n - 1): small clients
look far from everybody. Noise of variance s on every count adds rows * buckets * s / n^2. The sum
of both is the client's *error variance*.

Debiased, which is the default, a squared Frobenius distance loses the error variance of each side.
It is then rows times the squared MMD in expectation, and its root is 0 where chance left it
negative. Clients without data get NaN; debiased, so do those of one record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedcohort.sketch.race import RaceSketch

Readings = NDArray[Any] | Sequence[RaceSketch]
Floats = NDArray[np.float64]
CHUNK = 1 << 22  # numbers read at a time
Kind = Literal["frobenius", "mmd"]


def error_variance(squares: Floats, n: Floats, noise: Floats, rows: int, buckets: int) -> Floats:
    """What sampling and noise add to |q - p|^2, estimated from |q|^2 without bias; NaN if n < 2."""
    noisy = rows * buckets * noise / n**2
    degrees = np.where(n >= 2, n - 1, np.nan)
    return np.asarray((rows - squares + noisy) / degrees + noisy)


class Stack:
    """The sketches of N clients, given as stacked readings or as a sequence of sketches."""

    def __init__(self, readings: Readings) -> None:
        if isinstance(readings, np.ndarray):
            stacked = np.atleast_1d(readings)
            self.n, self.noise = stacked["n"].astype(float), stacked["noise"].astype(float)
            self._tables: Any = stacked["counts"]
        else:
            for other in readings[1:]:
                readings[0].check_alike(other)
            self.n = np.array([s.n for s in readings], float)
            self.noise = np.array([s.noise for s in readings], float)
            self._tables = [s.counts for s in readings]
        if not len(self.n):
            raise ValueError("no sketches to compare")
        self.rows, self.buckets = self._tables[0].shape
        self.n[~(self.n >= 1)] = np.nan  # no data, no distribution

    def __len__(self) -> int:
        return len(self.n)

    def chunks(self) -> Iterator[tuple[slice, Floats]]:
        """Yield slices of rows and those rows of every client, normalized: (N, ..., buckets)."""
        step = max(1, CHUNK // (len(self) * self.buckets))
        for lo in range(0, self.rows, step):
            rows = slice(lo, lo + step)
            part = np.array([table[rows] for table in self._tables], float)
            part /= self.n[:, None, None]
            yield rows, part

    def error_variance(self) -> Floats:
        """Return the error variance of each client, NaN if n < 2."""
        return error_variance(self.squares_to(), self.n, self.noise, self.rows, self.buckets)

    def squares_to(self, center: Floats | None = None) -> Floats:
        """Return each client's squared Frobenius distance to a center (rows, buckets), or to 0."""
        total = np.zeros(len(self))
        for rows, q in self.chunks():
            if center is not None:
                q -= center[rows]
            total += np.einsum("irb,irb->i", q, q)
        return total

    def debiased_squares_to(self, mixture: Floats, weights: Floats) -> Floats:
        """Return each client's debiased squared MMD to a `mixture` of these clients.

        The error variance of sum_i w_i q_i - q_j is sum_i w_i^2 e_i + (1 - 2 w_j) e_j.
        """
        error = self.error_variance()
        excess = np.nansum(weights**2 * error) + (1 - 2 * weights) * error
        return np.asarray((self.squares_to(mixture) - excess) / self.rows)

    def mixture(self, weights: Floats) -> Floats:
        """Return the weighted sum of the normalized sketches, (rows, buckets)."""
        out = np.empty((self.rows, self.buckets))
        used = np.flatnonzero(weights)
        for rows, q in self.chunks():
            out[rows] = np.tensordot(weights[used], q[used], axes=1)
        return out


def distance(a: RaceSketch, b: RaceSketch, kind: Kind = "frobenius", debias: bool = True) -> float:
    """Distance between two sketches; ValueError if one is empty, or too small to be debiased."""
    value = float(distance_matrix([a, b], kind, debias)[0, 1])
    if np.isnan(value):
        raise ValueError(f"no {kind} distance between sketches of n={a.n:g} and n={b.n:g} samples")
    return value


def distance_matrix(readings: Readings, kind: Kind = "frobenius", debias: bool = True) -> Floats:
    """Distance between every two clients, (N, N); `debias` removes sample size and noise."""
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind {kind!r}; use frobenius or mmd")
    if kind == "mmd" and not debias:
        raise ValueError("mmd is debiased by definition; use kind='frobenius' for the raw distance")
    stack = Stack(readings)
    full = np.flatnonzero(~np.isnan(stack.n))
    products = _products(stack, full)  # from the mean, so that like numbers lose no digits
    lengths = np.diag(products)
    out = np.maximum(lengths[:, None] + lengths - 2 * products, 0)
    if debias:
        error = stack.error_variance()
        out -= error[:, None] + error
    out = out / stack.rows if kind == "mmd" else np.sqrt(np.maximum(out, 0))
    np.fill_diagonal(out, np.where(np.isnan(np.diag(out)), np.nan, 0.0))
    return out


def squares_to_global(readings: Readings) -> Floats:
    """Debiased squared MMD between every client and all data together, (N,)."""
    stack = Stack(readings)
    if np.isnan(stack.n).all():
        raise ValueError("all sketches are empty")
    weights = np.nan_to_num(stack.n) / np.nansum(stack.n)
    return stack.debiased_squares_to(stack.mixture(weights), weights)


def gram(readings: Readings) -> Floats:
    """Mean over rows of the inner products of normalized sketches, (N, N), without bias.

    (w - v)' G (w - v) estimates the squared MMD between mixtures of weights w and v.
    """
    stack = Stack(readings)
    inner: Floats = (_products(stack) - np.diag(stack.error_variance())) / stack.rows
    return inner


def _products(stack: Stack, around: Sequence[int] | NDArray[np.int64] = ()) -> Floats:
    """Inner products of the sketches, as seen from the mean of those `around`, or from 0."""
    out = np.zeros((len(stack), len(stack)))
    for _, q in stack.chunks():
        if len(around):
            q -= q[around].mean(axis=0)
        flat = q.reshape(len(q), -1)
        out += flat @ flat.T
    return out
