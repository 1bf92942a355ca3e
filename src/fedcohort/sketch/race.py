"""The one-pass distribution sketch: a small, mergeable summary of a client's data.

A repeated array of count estimators (RACE): row r counts how many samples each bucket of hash
function r received. Normalized by the number of samples, the rows are histograms of the data
under random partitions, and their distances tell how the distributions differ. The sum of the
sketches of all clients is the sketch of all their data together.

References
----------
Liu, Xu, Coleman, Shrivastava: One-Pass Distribution Sketch for Measuring Data Heterogeneity in
Federated Learning (paper 0), algorithms 1 and 4.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, IncompatibleSketches
from fedcohort.files.columns import Column, column_difference
from fedcohort.files.marginals import Marginals
from fedcohort.privacy.calibration import Neighbors
from fedcohort.privacy.release import Release, Size, release
from fedcohort.signals.forms import sketch_reading
from fedcohort.sketch import file
from fedcohort.sketch.counting import blocks_of, prepare, tally
from fedcohort.sketch.distances import (
    Floats,
    Stack,
    distance,
    distance_matrix,
    distances_to,
    distances_to_global,
    gram,
    normalized,
)
from fedcohort.sketch.hashing import SRP, HashFamily, MinHash, PStable
from fedcohort.sketch.transforms import Tokenizer, Transform, difference, num_label_columns
from fedcohort.storage import write_atomically


class StoredSketch:
    """Hash functions, transform, columns, counts, number of samples, and the private release.

    `origin` holds what a file says about how it came about (the digest of a spec, how many
    sketches were merged, references of the page). It does not make sketches unlike.
    """

    def __init__(
        self,
        family: HashFamily,
        transform: Transform | Tokenizer | None = None,
        columns: Sequence[Column] = (),
    ) -> None:
        self.family = family
        self.transform = Transform() if transform is None else transform
        self.columns = tuple(columns)
        self.origin: dict[str, Any] = {}
        self.marginals: Marginals | None = None
        self.counts: NDArray[np.int64] = np.zeros((family.rows, family.buckets), np.int64)
        self.n: int | float = 0
        self.release: Release | None = None

    @property
    def rows(self) -> int:
        """Number of hash functions."""
        return self.family.rows

    @property
    def buckets(self) -> int:
        """Buckets of a row."""
        return self.family.buckets

    @property
    def noise(self) -> float:
        """Variance of the noise on every count, 0 unless private."""
        return 0.0 if self.release is None else self.release.variance

    @property
    def labeled(self) -> bool:
        """Whether labels are hashed with the samples."""
        return isinstance(self.transform, Transform) and self.transform.classes > 0

    @property
    def private(self) -> bool:
        """Whether the counts are noisy."""
        return self.release is not None

    @property
    def spec(self) -> dict[str, Any]:
        """Hash functions and transform as plain values; equal in sketches that are alike."""
        stated: dict[str, Any] = {"hash": self.family.spec(), "transform": self.transform.spec()}
        if self.columns:
            stated["columns"] = [column.spec() for column in self.columns]
        return stated

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredSketch):
            return NotImplemented
        same = self.n == other.n and self.release == other.release and self.spec == other.spec
        same = same and self.marginals == other.marginals
        return same and bool(np.array_equal(self.counts, other.counts))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        private = "" if self.release is None else f", epsilon={self.release.epsilon:g}"
        size = f"{self.rows} x {self.buckets}"
        return f"{type(self).__name__}({self.family.name}, {size}, n={self.n:g}{private})"

    def empty_like(self) -> Self:
        """Return an empty sketch of the same hash functions and transform."""
        out = type(self)(self.family, self.transform, self.columns)
        out.marginals = None if self.marginals is None else Marginals(self.columns)
        return out

    def check_alike(self, other: StoredSketch) -> None:
        """Raise IncompatibleSketches unless hash functions and transform are the same."""
        if self.columns != other.columns:
            raise IncompatibleSketches(
                column_difference(self.columns, other.columns) or "other columns"
            )
        if self.family != other.family or self.transform != other.transform:
            raise IncompatibleSketches(difference(self.spec, other.spec))

    def header(self) -> dict[str, Any]:
        """Return what a file says about the sketch, as plain values."""
        private = None if self.release is None else self.release.spec()
        stated = {**self.spec, "n": self.n, "release": private}
        if self.marginals is not None:
            made = self.marginals.release
            own = None if made is None else made.spec()
            stated["marginals"] = {"n": self.marginals.n, "release": own}
        return {**stated, "origin": self.origin} if self.origin else stated

    def to_bytes(self) -> bytes:
        """Return the sketch as a file's content; see `sketch.file`."""
        if self.marginals is None:
            return file.pack(self.header(), self.counts)
        both = np.concatenate([self.counts.ravel(), self.marginals.counts.ravel()])
        return file.pack(self.header(), both)

    @classmethod
    def from_bytes(cls, data: bytes, embedding: Callable[[Any], Any] | None = None) -> Self:
        """Read a file's content; InvalidSketch for anything else.

        `embedding` is the function whose name the file holds, needed to add or query.
        """
        parts = file.parse(data, embedding)
        out = cls(parts.family, parts.transform, parts.columns)
        out.counts, out.n, out.release = parts.counts, parts.n, parts.release
        out.origin, out.marginals = parts.origin, parts.marginals
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all."""
        write_atomically(path, self.to_bytes())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], embedding: Callable[[Any], Any] | None = None
    ) -> Self:
        """Read one file; see `from_bytes`."""
        return cls.from_bytes(file.read(path), embedding)


PUBLIC_ORIGIN = ("spec", "merged")  # of a sketch's origin, what was not computed from its data

__all__ = [
    "RaceSketch",
    "distance",
    "distance_matrix",
    "distances_to",
    "distances_to_global",
    "empty_sketch",
    "gram",
    "mean_sketch",
    "normalized",
    "pooled",
]


class RaceSketch(StoredSketch):
    """A distribution sketch; make one with `srp`, `minhash` or `pstable`.

    Parameters
    ----------
    family : HashFamily
        The hash functions.
    transform : Transform or Tokenizer, optional
        What happens to the data first; part of what makes sketches alike.

    Attributes
    ----------
    counts : int64 array (rows, buckets)
        Raw counts, noisy in a private sketch.
    n : int or float
        Number of samples; an estimate in a private sketch that hides it.
    release : Release or None
        How the sketch was made private.

    Examples
    --------
    >>> a = RaceSketch.srp(dim=2, rows=100, bits=4, seed=0)
    >>> b = a.empty_like()
    >>> a.add([[1.0, 0.1], [2.0, 0.1]])
    >>> b.add([[0.1, 1.0], [0.0, 3.0], [-0.1, 1.0]])
    >>> distance(a, b) > distance(a, a) == 0
    True
    >>> (a + b).n, ((a + b) - b) == a
    (5, True)
    """

    @classmethod
    def srp(
        cls,
        dim: int,
        rows: int = 1000,
        bits: int = 6,
        seed: int = 0,
        family: Literal["fast", "dense"] = "fast",
        transform: Transform | None = None,
    ) -> RaceSketch:
        """Sketch of dense vectors by angle; see `hashing.SRP`. Labels add to `dim`."""
        wide = dim + num_label_columns(transform, dim)
        return cls(SRP(wide, rows, bits, seed, family), transform)

    @classmethod
    def minhash(
        cls, rows: int = 200, buckets: int = 64, seed: int = 0, transform: Tokenizer | None = None
    ) -> RaceSketch:
        """Sketch of token sets by Jaccard similarity, or of texts with a Tokenizer."""
        if transform is not None and not isinstance(transform, Tokenizer):
            raise ValueError(f"token sets take a Tokenizer, not a {type(transform).__name__}")
        return cls(MinHash(rows, buckets, seed), transform)

    @classmethod
    def pstable(
        cls,
        dim: int,
        rows: int = 200,
        width: float = 2.0,
        buckets: int = 64,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> RaceSketch:
        """Sketch of vectors by Euclidean distance; see `hashing.PStable`. Labels add to `dim`."""
        wide = dim + num_label_columns(transform, dim)
        return cls(PStable(wide, rows, float(width), buckets, seed), transform)

    def add(self, x: Any, y: ArrayLike | None = None) -> None:
        """Count samples in (algorithm 1). On an error nothing is added.

        Parameters
        ----------
        x : array or sparse matrix (n, dim), or iterable of token sets
            Any real dtype, memory-mapped files too. An array (n, a, b) is flattened. MinHash
            takes iterables of strings or integers, the rows of a sparse matrix, or texts if the
            sketch has a Tokenizer.
        y : array of int (n,), optional
            Labels, if the transform hashes them.
        """
        if self.release is not None:
            raise ValueError("a private sketch takes no more data; add first, then privatize")
        blocks = blocks_of(self.family, self.transform, x, y)
        counts, n = tally(self.family, blocks, prepare)
        self.counts += counts
        self.n += n

    def merge(self, other: RaceSketch) -> None:
        """Add another client's counts to these.

        ``a + b`` and ``a - b`` return new sketches; b must be a part of a to be subtracted, and
        takes its noise with it.
        """
        merged = self + other
        self.counts, self.n, self.release = merged.counts, merged.n, merged.release
        self.marginals = merged.marginals

    def __add__(self, other: RaceSketch) -> RaceSketch:
        return self._combine(other, 1)

    def __sub__(self, other: RaceSketch) -> RaceSketch:
        return self._combine(other, -1)

    def _combine(self, other: RaceSketch, sign: int) -> RaceSketch:
        self.check_alike(other)
        out = self.empty_like()
        out.release = self._combined_release(other, sign)
        out.counts = self.counts + sign * other.counts
        out.n = self.n + sign * other.n
        out.marginals = self._combined_marginals(other, sign)
        if out.release is None and out.counts.min() < 0:
            raise ValueError("cannot subtract: the second sketch is not a part of the first")
        return out

    def _combined_marginals(self, other: RaceSketch, sign: int) -> Marginals | None:
        """Combine the columns one by one, where both sketches hold them."""
        mine, theirs = self.marginals, other.marginals
        if mine is None or theirs is None:
            return None
        made = mine.release or theirs.release
        if mine.release is not None and theirs.release is not None:
            parts = mine.release, theirs.release
            made = parts[0].joined(parts[1]) if sign > 0 else parts[0].without(parts[1])
        return mine.combined(theirs, sign, made)

    def _combined_release(self, other: RaceSketch, sign: int) -> Release | None:
        mine, theirs = self.release, other.release
        if mine is not None and theirs is not None:
            return mine.joined(theirs) if sign > 0 else mine.without(theirs)
        exact = [s for s in (self, other) if s.release is None]
        if len(exact) == 1 and exact[0].n:
            raise IncompatibleSketches(
                "a private and an exact sketch: their sum would protect nobody"
            )
        return mine or theirs

    def normalized(self) -> Floats:
        """Counts / n, each row a histogram; ValueError for an empty sketch."""
        if not self.n > 0:
            raise ValueError(
                f"a sketch of n={self.n:g} samples has no distribution; add data first"
            )
        return self.counts / self.n

    def reading(self) -> NDArray[Any]:
        """Return the sketch as a signal: n, noise and counts in the smallest integers that fit."""
        return sketch_reading(self.n, self.noise, self.counts)

    def density(self, x: Any, estimator: Estimator = "mean", y: ArrayLike | None = None) -> Floats:
        """Kernel density of the data at given samples (algorithm 4).

        The kernel is the probability to meet in a row, so densities lie between 0 and 1.

        Parameters
        ----------
        x, y
            As in `add`.
        estimator : {"mean", "median-of-means", "median"}
            Over the rows. The paper's plain median does not converge to the kernel density, whose
            mean over rows is unbiased; the median of means is also robust against single rows.
        """
        q = self.normalized()
        rows = np.arange(self.rows)[:, None]
        blocks = blocks_of(self.family, self.transform, x, y)
        parts = [over_rows(q[rows, self.family.codes(prepare(b))], estimator) for b in blocks]
        return np.concatenate(parts) if parts else np.empty(0)

    def privatize(
        self,
        epsilon: float,
        delta: float = 0.0,
        neighbors: Neighbors = "add-remove",
        n: Size = "public",
        rng: np.random.Generator | None = None,
        explain: float = 0.5,
    ) -> RaceSketch:
        """Return a copy with noise that protects single records; see `privacy.release`.

        Where the sketch holds its columns one by one as well, they take the share `explain` of
        the budget and the joint counts the rest.
        """
        if self.release is not None:
            raise ValueError("already private: privatize the exact sketch, once")
        if not self.family.independent:
            raise ValueError(
                "family='dense' cannot be made private: rounding lets one record move others to "
                "another bucket, so the noise would be too small; use family='fast'"
            )
        out = self.empty_like()
        out.origin = {k: v for k, v in self.origin.items() if k in PUBLIC_ORIGIN}
        if self.marginals is not None:
            if not 0 < explain < 1:
                raise ValueError(f"explain={explain} must be a share between 0 and 1")
            part = epsilon * explain, delta * explain
            out.marginals = self.marginals.private(*part, neighbors, n, rng)
            epsilon, delta = epsilon - part[0], delta - part[1]
        out.counts, out.release = release(self.counts, epsilon, delta, neighbors, n, rng)
        out.n = self.n if n == "public" else float(out.counts.sum()) / self.rows
        return out


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


def empty_sketch(
    options: Mapping[str, Any], x: NDArray[Any], *, classes: int = 0, center: Any = None
) -> RaceSketch:
    """Return an empty sketch for samples like `x`, made as the options of ``race_sketch`` say.

    Parameters
    ----------
    options : mapping
        rows, bits, seed, label_weight, center and hash. "auto" hashes rows of integers (n, window),
        which are tokens, by MinHash, and all else by sign projections of unit vectors. MinHash
        uses neither labels nor a center.
    x : array
        Some samples: their dtype and shape decide.
    classes : int
        Number of labels, where they are hashed.
    center : array, optional
        The public center, where inputs are centered.

    Examples
    --------
    >>> empty_sketch({"rows": 10, "bits": 3}, np.zeros((1, 4)))
    RaceSketch(srp, 10 x 8, n=0)
    >>> empty_sketch({"rows": 10, "bits": 3}, np.zeros((1, 80), np.int64))
    RaceSketch(minhash, 10 x 8, n=0)
    """
    rows, bits, seed = int(options["rows"]), int(options["bits"]), int(options.get("seed", 0))
    kind = options.get("hash", "auto")
    if kind == "auto":
        kind = "minhash" if x.dtype.kind in "iu" and x.ndim == 2 else "srp"
    if kind == "minhash":
        return RaceSketch.minhash(rows, 1 << bits, seed)
    weight = float(options.get("label_weight", 0.0))
    if bool(options.get("center")) != (center is not None):
        raise ConfigError("a centered sketch needs the public center, and only that one")
    if weight and classes < 2:
        raise ConfigError(f"label_weight={weight}: state the number of labels (classes=...)")
    transform = Transform(
        center=0.0 if center is None else center,
        unit=True,
        classes=classes if weight else 0,
        label_weight=weight,
    )
    return RaceSketch.srp(int(np.prod(x.shape[1:])), rows, bits, seed, transform=transform)


def pooled(sketches: Iterable[RaceSketch]) -> RaceSketch:
    """Return the sketch of all data together: the sum of counts."""
    total: RaceSketch | None = None
    for sketch in sketches:
        total = sketch if total is None else total + sketch
    if total is None:
        raise ValueError("no sketches to pool")
    return total


def mean_sketch(sketches: Sequence[RaceSketch]) -> Floats:
    """Return the paper's global sketch: the unweighted mean of the normalized sketches."""
    stack = Stack(sketches)
    return stack.mixture(stack.weights("mean"))
