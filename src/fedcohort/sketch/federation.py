"""The sketch of the whole federation: summed up as clients arrive, shrunk, with even labels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import ClientId
from fedcohort.signals.table import Signals
from fedcohort.sketch.distances import Stack, error_variance
from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

Array = NDArray[np.float64]

MAX_SIZE_RATIO = 10  # sizes above this many times the median are not believed
MIN_SIZES = 10  # a median of fewer says little
UNLIMITED = 2.0**62
_BLOCK = 1 << 18  # numbers handled at a time: they stay in the processor's cache


def largest_believed(sizes: NDArray[Any]) -> float:
    """Return the largest believed size; a client must not take over by claiming 2^40 examples."""
    if len(sizes) < MIN_SIZES:
        return UNLIMITED
    return MAX_SIZE_RATIO * max(float(np.median(sizes)), 1.0)


@dataclass
class GlobalSketch:
    """Sums over the newest sketch of every client seen so far, including clients that left.

    A round costs only what is new. If a client sends its sketch again, the sums are computed anew.
    """

    until: int = -1  # the last round whose sketches are included
    seen: dict[ClientId, int] = field(default_factory=dict)  # with the round of the first sketch
    changes: int = 0  # what is derived from the sums can be kept until this changes
    clients: int = 0  # with data
    n: float = 0.0
    counts: Array | None = None  # sums of the counts, (rows, buckets)
    shapes: Array | None = None  # and of the normalized sketches
    cap: float = UNLIMITED  # a client of more records counts as this many
    capped_at: int = 0  # for how many clients the cap was settled

    def include(
        self, signals: Signals, available: Sequence[ClientId], round_number: int
    ) -> tuple[ClientId, ...]:
        """Add the sketches that arrived since the last call; return who sent its first one."""
        fresh = np.flatnonzero(signals.rounds("race_sketch", available) > self.until)
        self.until = max(self.until, round_number)
        if not fresh.size:
            return ()
        arrived = [available[i] for i in fresh.tolist()]
        new = tuple(c for c in arrived if c not in self.seen)
        self.seen.update(dict.fromkeys(new, round_number))
        self.changes += 1
        if self._settle_cap(signals) or len(new) < len(arrived):
            self.clients, self.n, self.counts, self.shapes = 0, 0.0, None, None
            self._add(signals, tuple(self.seen))
        else:
            self._add(signals, new)
        return new

    def _settle_cap(self, signals: Signals) -> bool:
        """Set the cap again when twice as many clients were seen; say whether it matters."""
        if len(self.seen) < max(MIN_SIZES, 2 * self.capped_at):
            return False
        n = signals.read("race_sketch", tuple(self.seen))[1]["n"]
        before, self.capped_at, self.cap = self.cap, len(self.seen), largest_believed(n)
        return bool((n > min(before, self.cap)).any())

    def _add(self, signals: Signals, clients: tuple[ClientId, ...]) -> None:
        _, readings = signals.read("race_sketch", clients)
        for block in blocks(readings):
            part = readings[block]
            part = part[part["n"] > 0]
            if not len(part):
                continue
            n, large = part["n"], part["n"] > self.cap
            q = part["counts"] * (1 / n)[:, None, None]
            self.clients += len(n)
            self.n += float(np.minimum(n, self.cap).sum())
            # Whole numbers, and no BLAS: the sums are the same on any machine and with any NumPy.
            counts = part["counts"].sum(axis=0, dtype=np.float64)
            if large.any():
                counts += (np.rint(self.cap * q[large]) - part["counts"][large]).sum(axis=0)
            self.shapes = q.sum(axis=0) if self.shapes is None else self.shapes + q.sum(axis=0)
            self.counts = counts if self.counts is None else self.counts + counts

    def center(self, kind: str) -> Array:
        """Return the sketch of all data together ("pooled"), or the mean of sketches ("mean")."""
        if self.counts is None or self.shapes is None:
            raise ValueError("GlobalSketch: no client has sent a sketch yet")
        return self.counts / self.n if kind == "pooled" else self.shapes / self.clients


def shrink(readings: NDArray[Any], center: Array) -> tuple[NDArray[np.float32], Array, bool]:
    """Shrink each sketch toward the center by the share of it that is sampling error and noise.

    With v_i the error variance of sketch i and t the variance between clients, sketch i keeps
    s_i = t / (t + v_i) of its difference from the center, and t (1 - s_i) remains unknown (the
    posterior of empirical Bayes). Returns the differences, what is unknown, and whether clients
    differ: t is two standard errors above 0. All clients must have data.
    """
    q, error, distances = _center_readings(readings, center)
    spread, doubt = variance_between(distances, error)
    keep = spread / (spread + error)
    q *= keep.astype(np.float32)[:, None]
    return q, spread * (1 - keep), spread > 2 * doubt


def precise_mean(readings: NDArray[Any], center: Array) -> Array:
    """Return the mean of what clients' data look like, where a sketch counts by its precision.

    The noise of a few small clients' private sketches would dominate the plain mean, `center`,
    which stays where all are equally noisy. All clients must have data.
    """
    n = readings["n"]
    if not np.ptp(readings["noise"] / n**2):
        return center
    for _ in range(2):
        _, error, distances = _center_readings(readings, center)
        weights = 1 / (variance_between(distances, error)[0] + error) / n
        counts = readings["counts"].reshape(len(n), -1)
        center = ((weights / (weights @ n)) @ counts).reshape(center.shape)
    return center


def errors(readings: NDArray[Any], squares: Array, center: Array) -> Array:
    """Return the error variance of sketches with data, given their squared lengths."""
    n = readings["n"]
    noisy = center.size * readings["noise"] / n**2
    error = error_variance(squares, n, readings["noise"], *center.shape)
    alone = noisy + len(center) - float((center**2).sum())  # one record does not show its scatter
    return np.asarray(np.where(np.isnan(error), alone, np.maximum(error, noisy)))


def _center_readings(
    readings: NDArray[Any], center: Array
) -> tuple[NDArray[np.float32], Array, Array]:
    """Return the normalized sketches less the center, their error variances and squares."""
    counts, scale = readings["counts"].reshape(len(readings), -1), 1 / readings["n"]
    q = np.empty(counts.shape, np.float32)
    before, after = np.empty(len(q)), np.empty(len(q))
    for part in blocks(readings):
        rows = np.multiply(counts[part], scale[part, None].astype(np.float32), out=q[part])
        before[part] = np.einsum("ij,ij->i", rows, rows)
        rows -= center.ravel().astype(np.float32)
        after[part] = np.einsum("ij,ij->i", rows, rows)
    return q, errors(readings, before, center), after


def variance_between(squares: Array, errors: Array) -> tuple[float, float]:
    """Estimate the variance between clients, above 0, and the standard error of the estimate.

    The mean of (squared distance to the center) - error, where clients count by their precision,
    1 / (variance + error)^2, is found by iteration.
    """
    floor, beyond = 1e-6 * float(errors.mean()) + 1e-12, squares - errors
    spread, precision = max(float(beyond.mean()), floor), np.ones(len(errors))
    for _ in range(20):
        precision = 1 / (spread + errors) ** 2
        precision /= precision.sum()
        spread = max(float(precision @ beyond), floor)
    doubt = math.sqrt(float(precision**2 @ (beyond - precision @ beyond) ** 2))
    return spread, doubt


def blocks(readings: NDArray[Any]) -> Iterator[slice]:
    """Yield runs of clients whose sketches are handled together."""
    step = max(1, _BLOCK // int(np.prod(readings.dtype["counts"].shape)))
    for start in range(0, len(readings), step):
        yield slice(start, start + step)


class UniformLabels:
    """The federation's data as they would look with as many records of each label.

    `empty` is made as the clients' sketches: sign projections of unit vectors with labels. A label
    alone, as a query, meets a record of this label in a row with probability a, and one of another
    with b = 2^-bits, by their angles; so the density at the query is b + (a - b) p(label). A
    regression of the sketches on these shares gives a sketch per label; their mean is the target.
    """

    def __init__(self, empty: RaceSketch) -> None:
        step, family = empty.transform, empty.family
        if not (isinstance(step, Transform) and isinstance(family, SRP)):
            raise ValueError("UniformLabels: sketches must be of vectors, by srp")
        if not (step.unit and step.classes):
            raise ValueError("UniformLabels: hash vectors of unit length with their labels")
        self.empty, self.classes = empty, step.classes
        queries = np.zeros((self.classes, family.dim))
        queries[:, family.dim - self.classes :] = step.label_weight * np.eye(self.classes)
        self.codes = np.asarray(family.codes(queries))  # (rows, classes)
        bits, angle = math.log2(family.buckets), math.atan2(1.0, step.label_weight)
        self.same, self.other = (1 - angle / math.pi) ** bits, 0.5**bits
        self._kept: tuple[int, Array] | None = None

    def __repr__(self) -> str:
        return f"UniformLabels({self.empty!r})"

    def shares(self, stack: Stack) -> Array:
        """Estimate the label shares of each client, (N, classes); each row sums to 1."""
        density = np.zeros((len(stack), self.classes))
        for rows, q in stack.chunks():
            codes = self.codes[rows]
            density += q[:, np.arange(len(codes))[:, None], codes].sum(axis=1)
        shares = np.maximum((density / stack.rows - self.other) / (self.same - self.other), 0.0)
        total = shares.sum(axis=1, keepdims=True)
        return np.where(total > 0, shares / np.where(total > 0, total, 1.0), 1 / self.classes)

    def target(self, signals: Signals, clients: tuple[ClientId, ...], version: int) -> Array:
        """Return the target (rows, buckets) of all clients seen, kept until `version` changes."""
        if self._kept is None or self._kept[0] != version:
            _, readings = signals.read("race_sketch", clients)
            stack = Stack(readings[readings["n"] > 0])
            shares = self.shares(stack)
            normal = shares.T @ (stack.n[:, None] * shares)
            normal += 1e-6 * np.trace(normal) / self.classes * np.eye(self.classes)
            weights = np.linalg.solve(normal, np.ones(self.classes) / self.classes)
            self._kept = version, stack.mixture((shares @ weights) * stack.n)
        return self._kept[1]
