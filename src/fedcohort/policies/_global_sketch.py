"""The sketch of the whole federation, summed up as clients are first seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import ClientId
from fedcohort.signals.stack import Stack
from fedcohort.signals.table import Signals

Array = NDArray[np.float64]

_BLOCK = 1 << 22  # numbers handled at a time: memory stays flat with a million clients


@dataclass
class GlobalSketch:
    """Sums over every client seen so far, also over those that left: all a policy remembers.

    Each sketch enters once, when it arrives, so that a round costs what is new.
    """

    until: int = -1
    clients: int = 0
    n: float = 0.0
    noise: float = 0.0
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
        _, readings = signals.read("race_sketch", tuple(available[i] for i in fresh.tolist()))
        for part in blocks(readings[readings["n"] > 0]):
            self._add(part)

    def _add(self, readings: NDArray[Any]) -> None:
        n, counts = readings["n"], readings["counts"].astype(np.float64)
        if self.counts is None or self.shapes is None:
            self.counts, self.shapes = np.zeros(counts.shape[1:]), np.zeros(counts.shape[1:])
        self.clients += len(n)
        self.n += float(n.sum())
        self.counts = self.counts + counts.sum(axis=0)
        self.shapes = self.shapes + np.tensordot(1 / n, counts, axes=1)
        energy = np.nan_to_num(Stack(readings).energy())
        self.pooled_energy += float(n**2 @ energy)
        self.mean_energy += float(energy.sum())

    def center(self, kind: str) -> Array:
        """Return the sketch of all data together ("pooled"), or the mean of sketches ("mean")."""
        if self.counts is None or self.shapes is None:
            raise ValueError("GlobalSketch: no client has sent a sketch yet")
        return self.counts / self.n if kind == "pooled" else self.shapes / self.clients

    def share(self, n: Array, kind: str) -> Array:
        """Return what clients of the given sizes weigh in the centre."""
        return n / self.n if kind == "pooled" else np.full(n.size, 1 / self.clients)

    def distances(self, readings: NDArray[Any], center: str, kind: str, debias: bool) -> Array:
        """Distance of each client to the centre; NaN where there is none.

        `kind` is "frobenius" or "row-l2"; `debias` removes from the square what sample size and
        noise add to it, each client being part of the centre.
        """
        goal = self.center(center)
        result = np.full(len(readings), np.nan)
        filled = np.flatnonzero(readings["n"] > 0)
        for at, part in zip(blocks(filled, readings), blocks(readings[filled]), strict=True):
            gap = part["counts"] / part["n"][:, None, None] - goal
            squares = np.einsum("irb,irb->ir", gap, gap)
            if debias:
                total = np.maximum(squares.sum(axis=1) - self._excess(part, center), 0.0)
                result[at] = np.sqrt(total / (1 if kind == "frobenius" else len(goal)))
            elif kind == "frobenius":
                result[at] = np.sqrt(squares.sum(axis=1))
            else:
                result[at] = np.sqrt(squares).mean(axis=1)
        return result

    def _excess(self, readings: NDArray[Any], center: str) -> Array:
        """Energy of the difference between a client and a centre that it is part of."""
        own = Stack(readings).energy()
        if center == "pooled":
            whole = self.pooled_energy / self.n**2
        else:
            whole = self.mean_energy / self.clients**2
        return whole + (1 - 2 * self.share(readings["n"], center)) * own


def blocks(values: NDArray[Any], like: NDArray[Any] | None = None) -> Iterator[NDArray[Any]]:
    """Cut `values` into runs of clients whose sketches (those of `like`) fit in memory at once."""
    shape = (values if like is None else like).dtype["counts"].shape
    step = max(1, _BLOCK // int(np.prod(shape)))
    for start in range(0, len(values), step):
        yield values[start : start + step]
