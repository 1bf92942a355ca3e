"""The one-pass distribution sketch: a small, mergeable summary of a client's data.

A repeated array of count estimators (RACE): row r counts how many samples each bucket of hash
function r received. Normalized by the number of samples, the rows are histograms of the data
under random partitions, and their distances tell how the distributions differ.

References
----------
Liu, Xu, Coleman, Shrivastava: One-Pass Distribution Sketch for Measuring Data Heterogeneity in
Federated Learning (paper 0), algorithms 1 and 4.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import UnlikeSketches
from fedcohort.signals.calibration import Neighbors
from fedcohort.signals.counting import tally
from fedcohort.signals.density import Estimator, over_rows
from fedcohort.signals.distances import (
    distance,
    distance_matrix,
    distances_to,
    distances_to_global,
    gram,
    normalized,
)
from fedcohort.signals.global_sketch import mean_sketch, pooled
from fedcohort.signals.hashing import SRP, MinHash, PStable
from fedcohort.signals.inputs import blocks_of, prepare
from fedcohort.signals.privacy import Release, Size, release
from fedcohort.signals.stack import Floats, reading
from fedcohort.signals.stored import StoredSketch
from fedcohort.signals.transforms import Tokenizer, Transform, appended

__all__ = [
    "RaceSketch",
    "distance",
    "distance_matrix",
    "distances_to",
    "distances_to_global",
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
        wide = dim + appended(transform, dim)
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
        wide = dim + appended(transform, dim)
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
        if out.release is None and out.counts.min() < 0:
            raise ValueError("cannot subtract: the second sketch is not a part of the first")
        return out

    def _combined_release(self, other: RaceSketch, sign: int) -> Release | None:
        mine, theirs = self.release, other.release
        if mine is not None and theirs is not None:
            return mine.joined(theirs) if sign > 0 else mine.without(theirs)
        exact = [s for s in (self, other) if s.release is None]
        if len(exact) == 1 and exact[0].n:
            raise UnlikeSketches("a private and an exact sketch: their sum would protect nobody")
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
        return reading(self.n, self.noise, self.counts)

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
    ) -> RaceSketch:
        """Return a copy with noise that protects single records; see `privacy.release`."""
        if self.release is not None:
            raise ValueError("already private: privatize the exact sketch, once")
        out = self.empty_like()
        out.counts, out.release = release(self.counts, epsilon, delta, neighbors, n, rng)
        out.n = self.n if n == "public" else float(out.counts.sum()) / self.rows
        return out
