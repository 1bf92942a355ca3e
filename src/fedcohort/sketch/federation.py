"""The sketch of the whole federation, summed up as clients are first seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import ClientId
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]

_BLOCK = 1 << 18  # numbers handled at a time: they stay in the processor's cache


@dataclass
class GlobalSketch:
    """Sums over every client seen so far, also over those that left: all a policy remembers.

    Each sketch enters once, when it arrives, so that a round costs what is new.
    """

    until: int = -1
    clients: int = 0
    n: float = 0.0
    counts: Array | None = None
    shapes: Array | None = None
    pooled_energy: float = 0.0
    mean_energy: float = 0.0

    def include(self, signals: Signals, available: Sequence[ClientId], round_number: int) -> None:
        """Add the sketches that arrived since the last call."""
        fresh = np.flatnonzero(signals.rounds("race_sketch", available) > self.until)
        self.until = max(self.until, round_number)
        if not fresh.size:
            return
        clients = (
            available if fresh.size == len(available) else [available[i] for i in fresh.tolist()]
        )
        _, readings = signals.read("race_sketch", clients)
        for part in _blocks(readings):
            self._add(readings[part])

    def _add(self, readings: NDArray[Any]) -> None:
        filled = readings["n"] > 0
        if not filled.any():
            return
        readings = readings if filled.all() else readings[filled]
        shape, n = readings["counts"].shape[1:], readings["n"]
        q = _normalized(readings)
        energy = np.nan_to_num(_energy(readings, q))
        if self.counts is None or self.shapes is None:
            self.counts, self.shapes = np.zeros(shape), np.zeros(shape)
        self.clients += len(n)
        self.n += float(n.sum())
        self.counts = self.counts + (n @ q).reshape(shape)
        self.shapes = self.shapes + q.sum(axis=0).reshape(shape)
        self.pooled_energy += float(n**2 @ energy)
        self.mean_energy += float(energy.sum())

    def center(self, kind: str) -> Array:
        """Return the sketch of all data together ("pooled"), or the mean of sketches ("mean")."""
        if self.counts is None or self.shapes is None:
            raise ValueError("GlobalSketch: no client has sent a sketch yet")
        return self.counts / self.n if kind == "pooled" else self.shapes / self.clients

    def share(self, n: Array, kind: str) -> Array:
        """Return what clients of the given sizes weigh in the center."""
        return n / self.n if kind == "pooled" else np.full(n.size, 1 / self.clients)

    def distances(self, readings: NDArray[Any], center: str, kind: str, debias: bool) -> Array:
        """Distance of each client to the center; NaN where there is none.

        `kind` is "frobenius" or "row-l2"; `debias` removes from the square what sample size and
        noise add to it, each client being part of the center.
        """
        goal = self.center(center)
        result = np.full(len(readings), np.nan)
        for part in _blocks(readings):
            n = readings["n"][part]
            with np.errstate(divide="ignore", invalid="ignore"):  # empty clients: NaN below
                q = _normalized(readings[part])
            gap = (q - goal.ravel()).reshape(len(n), *goal.shape)
            squares = np.einsum("irb,irb->ir", gap, gap)
            if debias:
                excess = self._excess(n, center, _energy(readings[part], q))
                total = np.maximum(squares.sum(axis=1) - excess, 0.0)
                far = np.sqrt(total / (1 if kind == "frobenius" else len(goal)))
            elif kind == "frobenius":
                far = np.sqrt(squares.sum(axis=1))
            else:
                far = np.sqrt(squares).mean(axis=1)
            result[part] = np.where(n > 0, far, np.nan)
        return result

    def _excess(self, n: Array, center: str, energy: Array) -> Array:
        """Energy of the difference between a client and a center that it is part of."""
        if center == "pooled":
            whole = self.pooled_energy / self.n**2
        else:
            whole = self.mean_energy / self.clients**2
        return whole + (1 - 2 * self.share(n, center)) * energy


def _normalized(readings: NDArray[Any]) -> Array:
    """Counts over n, a row a client."""
    q = readings["counts"].reshape(len(readings), -1).astype(np.float64)
    q *= (1 / readings["n"])[:, None]
    return np.asarray(q)


def _energy(readings: NDArray[Any], q: Array) -> Array:
    """What sampling and noise add to a client's squared distance; NaN if n < 2 (see `Stack`)."""
    rows, buckets = readings["counts"].shape[1:]
    n = np.where(readings["n"] >= 2, readings["n"], np.nan)
    noise = rows * buckets * readings["noise"] / n**2
    squares = np.einsum("ij,ij->i", q, q)
    return np.asarray((rows - squares + noise) / (n - 1) + noise)


def _blocks(readings: NDArray[Any]) -> Iterator[slice]:
    """Runs of clients whose sketches are handled together."""
    step = max(1, _BLOCK // int(np.prod(readings.dtype["counts"].shape)))
    for start in range(0, len(readings), step):
        yield slice(start, start + step)
