"""The sketches of many clients side by side, read a few rows at a time.

Write q for a client's counts / n. Its row r is an average of n one-hot vectors, so it scatters
around the true bucket probabilities p_r with E|q_r - p_r|^2 = (1 - |p_r|^2) / n: small clients
look far from everybody. (1 - |q_r|^2) / (n - 1) estimates that part without bias. Noise of
variance s on every count adds rows * buckets * s / n^2. The sum of both is the client's `energy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from fedcohort.signals.race import RaceSketch

Readings: TypeAlias = "NDArray[Any] | Sequence[RaceSketch]"
Floats = NDArray[np.float64]
CHUNK = 1 << 22  # numbers read at a time


def reading_dtype(rows: int, buckets: int, kind: DTypeLike) -> np.dtype[np.void]:
    """Return the form of a sketch as a signal: n, noise variance of a count, the counts."""
    return np.dtype([("n", "f8"), ("noise", "f8"), ("counts", kind, (rows, buckets))])


def reading(n: float, noise: float, counts: NDArray[np.int64]) -> NDArray[Any]:
    """Return a sketch as a signal, its counts in the smallest integers that fit."""
    low, high = int(counts.min()), int(counts.max())
    bits = next(b for b in (16, 32, 64) if -(1 << (b - 1)) <= low <= high < 1 << (b - 1))
    out = np.zeros((), reading_dtype(counts.shape[0], counts.shape[1], f"i{bits // 8}"))
    out["n"], out["noise"], out["counts"] = n, noise, counts
    return out


class Stack:
    """The sketches of N clients: stacked readings, or a sequence of sketches.

    Examples
    --------
    >>> one = np.zeros(1, reading_dtype(1, 2, "i2"))
    >>> one["n"], one["counts"] = 4, [[3, 1]]
    >>> Stack(one).energy().tolist()                     # (1 - (9 + 1) / 16) / 3
    [0.125]
    """

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
        self.n[~(self.n > 0)] = np.nan  # no data, no distribution

    def __len__(self) -> int:
        return len(self.n)

    def chunks(self) -> Iterator[tuple[slice, Floats]]:
        """Yield slices of rows and those rows of every client, normalized: (N, ..., buckets)."""
        step = max(1, CHUNK // (len(self) * self.buckets))
        for lo in range(0, self.rows, step):
            rows = slice(lo, min(lo + step, self.rows))
            if isinstance(self._tables, np.ndarray):
                part = self._tables[:, rows].astype(float)
            else:
                part = np.array([table[rows] for table in self._tables], float)
            part /= self.n[:, None, None]
            yield rows, part

    def energy(self) -> Floats:
        """What sampling and noise add to |q - p|^2, estimated without bias; NaN if n < 2."""
        squares = np.zeros(len(self))
        for _, q in self.chunks():
            squares += np.einsum("irb,irb->i", q, q)
        noise = self.rows * self.buckets * self.noise / self.n**2
        degrees = np.where(self.n >= 2, self.n - 1, np.nan)
        energy: Floats = (self.rows - squares + noise) / degrees + noise
        return energy

    def weights(self, center: str) -> Floats:
        """Return what each client weighs in the global sketch; nothing without data."""
        if center not in ("pooled", "mean"):
            raise ValueError(f"unknown center {center!r}; use 'pooled' or 'mean'")
        sizes = np.nan_to_num(self.n, nan=0.0)
        weights = sizes if center == "pooled" else (sizes > 0).astype(float)
        if not weights.any():
            raise ValueError("all sketches are empty")
        share: Floats = weights / weights.sum()
        return share

    def mixture(self, weights: Floats) -> Floats:
        """Return the weighted sum of the normalized sketches, (rows, buckets)."""
        out = np.empty((self.rows, self.buckets))
        used = np.flatnonzero(weights)
        for rows, q in self.chunks():
            out[rows] = np.tensordot(weights[used], q[used], axes=1)
        return out
