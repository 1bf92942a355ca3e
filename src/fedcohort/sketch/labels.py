"""A target with uniform labels, from sketches that hash labels, without any public data.

A sketch hashes each input of unit length with its one-hot label beside it. Query it with a label
alone: a record of this label meets the query in a row with probability a, one of another label with
probability b = 2^-bits. Both follow from the angles, whatever the input. So the density at the
query is b + (a - b) p(label), and a server that holds only sketches can read off label shares. A
regression of the sketches on the shares gives a sketch per label, and their mean is the target.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedcohort.rounds import ClientId
from fedcohort.signals.table import Signals
from fedcohort.sketch.distances import Readings, Stack
from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

Array = NDArray[np.float64]


class UniformLabels:
    """The federation's data as they would look with as many records of each label.

    Parameters
    ----------
    empty : RaceSketch
        A sketch made as the clients' are: sign projections of unit vectors with labels.

    Examples
    --------
    >>> step = Transform(unit=True, classes=2, label_weight=2.0)
    >>> empty = RaceSketch.srp(4, rows=200, bits=4, transform=step)
    >>> sketch = empty.empty_like()
    >>> x = np.random.default_rng(0).standard_normal((400, 4))
    >>> sketch.add(x, (np.arange(400) >= 100).astype(int))                  # 1 of 4 has label 0
    >>> UniformLabels(empty).shares([sketch]).round(1).tolist()
    [[0.2, 0.8]]
    """

    def __init__(self, empty: RaceSketch) -> None:
        step, family = empty.transform, empty.family
        if not (isinstance(step, Transform) and isinstance(family, SRP) and step.classes):
            raise ValueError("UniformLabels: sketches must hash labels by SRP (label_weight > 0)")
        if not step.unit:
            raise ValueError("UniformLabels: sketches must be of vectors of unit length")
        self.empty, self.classes = empty, step.classes
        queries = np.zeros((self.classes, family.dim))
        queries[:, family.dim - self.classes :] = step.label_weight * np.eye(self.classes)
        self.codes = np.asarray(family.codes(queries))  # (rows, classes)
        bits, angle = math.log2(family.buckets), math.atan2(1.0, step.label_weight)
        self.same, self.other = (1 - angle / math.pi) ** bits, 0.5**bits
        self._kept: tuple[int, Array] | None = None

    def __repr__(self) -> str:
        return f"UniformLabels({self.empty!r})"

    def shares(self, readings: Readings) -> Array:
        """Estimate the label shares of each client, (N, classes); each row sums to 1."""
        stack = Stack(readings)
        density = np.zeros((len(stack), self.classes))
        for rows, q in stack.chunks():
            codes = self.codes[rows]
            density += q[:, np.arange(len(codes))[:, None], codes].sum(axis=1)
        shares = np.maximum((density / stack.rows - self.other) / (self.same - self.other), 0.0)
        total = shares.sum(axis=1, keepdims=True)
        return np.where(total > 0, shares / np.where(total > 0, total, 1.0), 1 / self.classes)

    def of(self, readings: Readings) -> Array:
        """Return the target (rows, buckets): the mean over labels of the sketch of each label."""
        stack, shares = Stack(readings), self.shares(readings)
        sizes = np.nan_to_num(stack.n)
        normal = shares.T @ (sizes[:, None] * shares)
        normal += 1e-6 * np.trace(normal) / self.classes * np.eye(self.classes)
        weights = np.linalg.solve(normal, np.ones(self.classes) / self.classes)
        return stack.mixture((shares @ weights) * sizes)

    def target(self, signals: Signals, clients: tuple[ClientId, ...], version: int) -> Array:
        """Return the target of all clients seen, kept until `version` changes."""
        if self._kept is None or self._kept[0] != version:
            _, readings = signals.read("race_sketch", clients)
            self._kept = version, self.of(readings[readings["n"] > 0])
        return self._kept[1]
