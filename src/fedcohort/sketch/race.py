"""The one-pass distribution sketch: a small, mergeable summary of a client's data.

A repeated array of count estimators (RACE): row r counts how many samples each bucket of hash
function r received. Divided by the number of samples, the rows are histograms of the data under
random partitions, and their distances tell how the distributions differ. The sum of the sketches of
all clients is the sketch of all their data together.

References
----------
Liu, Xu, Coleman, Shrivastava: One-Pass Distribution Sketch for Measuring Data Heterogeneity in
Federated Learning (paper 0), algorithms 1 and 4.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcohort.exceptions import ConfigError, IncompatibleSketches, InvalidSketch
from fedcohort.privacy.noise import Neighbors
from fedcohort.privacy.release import Release, Size, release
from fedcohort.signals.forms import sketch_reading
from fedcohort.sketch import file
from fedcohort.sketch.hashing import SRP, HashFamily, MinHash, PStable, family_from, tally
from fedcohort.sketch.transforms import Tokenizer, Transform, difference, transform_from
from fedcohort.storage import write_atomically

BINS = 16  # of the histogram of a single column
PUBLIC_ORIGIN = ("spec", "merged")  # of a sketch's origin, what was not computed from its data


@dataclass(eq=False)
class _Counts:
    """Counts of n records, (rows, buckets): exact, or noisy as the release says."""

    counts: NDArray[np.int64]
    n: int | float = 0
    release: Release | None = None

    @property
    def noise(self) -> float:
        """Variance of the noise on every count, 0 unless private."""
        return 0.0 if self.release is None else self.release.variance

    @property
    def fourth(self) -> float:
        """Fourth cumulant of that noise."""
        return 0.0 if self.release is None else self.release.fourth

    def _stated(self) -> dict[str, Any]:
        return {"n": self.n, "release": self.release and asdict(self.release)}


class ColumnCounts(_Counts):
    """Histograms of single columns: records per column and public bin, (columns, 16)."""

    @classmethod
    def empty(cls, columns: int) -> ColumnCounts:
        """Return histograms without records."""
        return cls(np.zeros((columns, BINS), np.int64))

    def add(self, bins: NDArray[np.int64]) -> None:
        """Count records, given the bin of each in every column, (n, columns)."""
        for i, column in enumerate(bins.T):
            self.counts[i] += np.bincount(column, minlength=BINS)
        self.n += len(bins)


class RaceSketch(_Counts):
    """A distribution sketch; make one with `srp`, `minhash` or `pstable`.

    `family`, the hash functions, and `transform`, what happens to the data first, make sketches
    alike or unlike. `counts` (rows, buckets) and perhaps `n` are noisy in a private sketch, as
    `release` says. Of a table, `columns` states each column (see `files.columns`), and `marginals`
    counts each by itself. `origin` holds the digest of a spec, or how many sketches were merged.

    Examples
    --------
    >>> from fedcohort.sketch.distances import distance
    >>> a = RaceSketch.srp(dim=2, rows=100, bits=4, seed=0)
    >>> b = a.empty_like()
    >>> a.add([[1.0, 0.1], [2.0, 0.1]])
    >>> b.add([[0.1, 1.0], [0.0, 3.0], [-0.1, 1.0]])
    >>> distance(a, b) > distance(a, a) == 0
    True
    >>> (a + b).n
    5
    """

    def __init__(self, family: HashFamily, transform: Transform | Tokenizer | None = None) -> None:
        super().__init__(np.zeros((family.rows, family.buckets), np.int64))
        self.family = family
        self.rows, self.buckets = family.rows, family.buckets
        self.transform = Transform() if transform is None else transform
        self.columns: tuple[dict[str, Any], ...] = ()
        self.marginals: ColumnCounts | None = None
        self.origin: dict[str, Any] = {}

    @classmethod
    def srp(
        cls,
        dim: int,
        rows: int = 1000,
        bits: int = 6,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> Self:
        """Sketch of dense vectors by angle; see `hashing.SRP`. Labels add to `dim`."""
        return cls(SRP(_width(transform, dim), rows, bits, seed), transform)

    @classmethod
    def minhash(
        cls, rows: int = 200, buckets: int = 64, seed: int = 0, transform: Tokenizer | None = None
    ) -> Self:
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
    ) -> Self:
        """Sketch of vectors by Euclidean distance; see `hashing.PStable`. Labels add to `dim`."""
        return cls(PStable(_width(transform, dim), rows, width, buckets, seed), transform)

    @property
    def labeled(self) -> bool:
        """Whether labels are hashed with the samples."""
        return isinstance(self.transform, Transform) and self.transform.classes > 0

    @property
    def private(self) -> bool:
        """Whether the counts are noisy."""
        return self.release is not None

    @property
    def total_release(self) -> Release | None:
        """What protects joint counts and single columns together; None if exact."""
        if self.release is None:
            return None
        parts = self._releases.values()
        total = {k: sum(getattr(r, k) for r in parts) for k in ("epsilon", "delta", "rho")}
        return replace(self.release, **total)

    @property
    def _releases(self) -> dict[str, Release]:
        names = "the joint counts", f"{len(self.columns)} single columns"
        parts = zip(names, self._tables, strict=False)
        return {name: table.release for name, table in parts if table.release is not None}

    @property
    def _tables(self) -> list[_Counts]:
        """The joint counts, and those of single columns if there are any."""
        return [self] if self.marginals is None else [self, self.marginals]

    @property
    def spec(self) -> dict[str, Any]:
        """Hash functions, transform and columns as plain values; equal in sketches alike."""
        spec: dict[str, Any] = {"hash": self.family.spec(), "transform": self.transform.spec()}
        return spec | ({"columns": list(self.columns)} if self.columns else {})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaceSketch):
            return NotImplemented
        mine, theirs = (s.header() | {"origin": {}} for s in (self, other))
        return mine == theirs and np.array_equal(self._flat_counts, other._flat_counts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        total = self.total_release
        private = "" if total is None else f", {total.budget()}"
        size = f"{self.rows} x {self.buckets}"
        return f"{type(self).__name__}({self.family.name}, {size}, n={self.n:g}{private})"

    def empty_like(self) -> Self:
        """Return an empty sketch of the same hash functions, transform and columns."""
        out = type(self)(self.family, self.transform)
        out.columns = self.columns
        out.marginals = None if self.marginals is None else ColumnCounts.empty(len(self.columns))
        return out

    def check_alike(self, other: RaceSketch) -> None:
        """Raise IncompatibleSketches unless both were made with the same settings."""
        if self.spec != other.spec:
            raise IncompatibleSketches(difference(self.spec, other.spec))

    def add(self, x: Any, y: ArrayLike | None = None) -> None:
        """Count samples in (algorithm 1). On an error nothing is added.

        Parameters
        ----------
        x : array or sparse matrix (n, dim), or iterable of token sets
            Any real dtype, memory-mapped files too. An array (n, a, b) is flattened. MinHash takes
            iterables of strings or integers; a 0/1 or sparse matrix, whose rows are the sets of
            their columns that are not 0; or texts if the sketch has a Tokenizer.
        y : array of int (n,), optional
            Labels, if the transform hashes them.
        """
        if self.release is not None:
            raise ValueError("a private sketch takes no more data; add first, then privatize")
        counts, n = tally(self.family, self.transform, x, y)
        self.counts += counts
        self.n += n

    def __add__(self, other: RaceSketch) -> Self:
        self.check_alike(other)
        exact = [s.n for s in (self, other) if s.release is None]
        if len(exact) == 1 and exact[0]:
            raise IncompatibleSketches("a private and an exact one: their sum would protect nobody")
        out = self.empty_like()
        if other.marginals is None:
            out.marginals = None
        for total, a, b in zip(out._tables, self._tables, other._tables, strict=False):
            total.counts, total.n = a.counts + b.counts, a.n + b.n
            total.release = a.release or b.release
            if a.release is not None and b.release is not None:
                total.release = a.release.join(b.release)
        return out

    def normalized(self) -> NDArray[np.float64]:
        """Counts / n, each row a histogram; ValueError for an empty sketch."""
        if not self.n > 0:
            raise ValueError(f"a sketch of n={self.n:g} samples has no distribution; add data")
        return self.counts / self.n

    def reading(self) -> NDArray[Any]:
        """Return the sketch as a signal: n, noise and counts in the smallest integers that fit."""
        return sketch_reading(self.n, self.noise, self.counts)

    def privatize(
        self,
        epsilon: float,
        delta: float = 0.0,
        neighbors: Neighbors = "add-remove",
        n: Size = "public",
        rng: np.random.Generator | None = None,
        explain: float = 0.5,
    ) -> Self:
        """Return a copy with noise that protects single records; see `privacy.release`.

        Where the sketch holds its columns one by one as well, they take the share `explain` of
        the budget and the joint counts the rest.
        """
        if self.release is not None:
            raise ValueError("already private: privatize the exact sketch, once")
        if self.marginals is not None and not 0 < explain < 1:
            raise ValueError(f"explain={explain} must be a share between 0 and 1")
        out = self.empty_like()
        out.origin = {k: v for k, v in self.origin.items() if k in PUBLIC_ORIGIN}
        shares = [1.0] if self.marginals is None else [explain, 1 - explain]
        for noisy, exact, share in zip(out._tables[::-1], self._tables[::-1], shares, strict=True):
            budget = epsilon * share, delta * share
            noisy.counts, noisy.release = release(exact.counts, *budget, neighbors, n, rng)
            hidden = n == "private"
            noisy.n = float(noisy.counts.sum()) / len(noisy.counts) if hidden else exact.n
        return out

    def claim(self) -> str:
        """Say in one line what is protected in all, what is public, and by which noise."""
        total = self.total_release
        if total is None:
            return "exact: no noise protects single records"
        parts = self._releases.items()
        noise = [f"{r.mechanism} noise on {what} ({r.budget()})" for what, r in parts]
        return total.claim(" and ".join(noise) if len(noise) > 1 else "")

    def header(self) -> dict[str, Any]:
        """Return what a file says about the sketch, as plain values."""
        header = {**self.spec, **self._stated()}
        if self.marginals is not None:
            header["marginals"] = self.marginals._stated()
        return {**header, "origin": self.origin} if self.origin else header

    def to_bytes(self) -> bytes:
        """Return the sketch as a file's content; see `sketch.file`."""
        return file.pack(self.header(), self._flat_counts)

    @property
    def _flat_counts(self) -> NDArray[np.int64]:
        return np.concatenate([table.counts.ravel() for table in self._tables])

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a file's content; InvalidSketch for anything else."""
        header, packed = file.unpack(data)
        single = header.get("marginals")
        try:
            family, columns = family_from(header.get("hash")), _columns(header)
            transform, origin = transform_from(header.get("transform")), header.get("origin", {})
            released, single_released = _release(header), _release(single or {})
            if not isinstance(origin, dict):
                raise ValueError("the origin must be an object")
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise InvalidSketch(f"the header is wrong: {error}") from None
        cells = family.rows * family.buckets
        more = 0 if single is None else len(columns) * BINS
        flat = file.unpack_counts(packed, header.get("width"), cells + more)
        out = cls(family, transform)
        out.columns, out.origin, out.release = columns, origin, released
        out.counts = flat[:cells].reshape(out.counts.shape)
        out.n = file.checked_n(header.get("n"), out.counts, out.private)
        if single is not None:
            counts = flat[cells:].reshape(-1, BINS)
            n = file.checked_n(single.get("n"), counts, single_released is not None)
            out.marginals = ColumnCounts(counts, n, single_released)
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all."""
        write_atomically(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read one file; see `from_bytes`."""
        return cls.from_bytes(file.read(path))


def _width(transform: Transform | None, dim: int) -> int:
    if transform is None:
        return dim
    if not isinstance(transform, Transform):
        raise ValueError(f"vectors take a Transform, not a {type(transform).__name__}")
    return transform.width(dim)


def _release(stated: Mapping[str, Any]) -> Release | None:
    content = stated.get("release")
    return None if content is None else Release(**content)


def _columns(header: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Check that columns are objects with a name each; `files.columns` knows the rest."""
    columns, single = header.get("columns", []), header.get("marginals")
    if not isinstance(columns, list) or not all(isinstance(c, dict) for c in columns):
        raise ValueError("columns must be a list of objects")
    names = [c.get("name") for c in columns]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("each column must have a name of its own")
    if single is not None and not (columns and isinstance(single, dict)):
        raise ValueError("marginals must be an object, beside columns")
    return tuple(columns)


def empty_sketch(
    options: Mapping[str, Any],
    x: NDArray[Any],
    *,
    classes: int = 0,
    center: Any = None,
    tokens: bool = False,
) -> RaceSketch:
    """Return an empty sketch for samples like `x`, made as the options of ``race_sketch`` say.

    They are rows, bits, seed, label_weight, center and hash. "auto" hashes `tokens` by MinHash,
    which uses neither labels nor a center, and vectors by sign projections of unit length. It
    refuses rows of whole numbers that are not known to be tokens.
    """
    rows, bits, seed = int(options["rows"]), int(options["bits"]), int(options.get("seed", 0))
    kind = options.get("hash", "auto")
    if kind == "auto":
        if x.dtype.kind in "iu" and x.ndim == 2 and not tokens:
            raise ConfigError(
                "hash='auto': rows of whole numbers could be tokens or vectors; state "
                "hash='minhash' for tokens or hash='srp' for vectors"
            )
        kind = "minhash" if tokens else "srp"
    if kind == "minhash":
        return RaceSketch.minhash(rows, 1 << bits, seed)
    weight = float(options.get("label_weight", 0.0))
    if bool(options.get("center")) != (center is not None):
        raise ConfigError("a centered sketch needs the public center, and only that one")
    if weight and classes < 2:
        raise ConfigError(f"label_weight={weight}: state the number of labels (classes=...)")
    classes, center = classes if weight else 0, 0.0 if center is None else center
    transform = Transform(center=center, unit=True, classes=classes, label_weight=weight)
    return RaceSketch.srp(int(np.prod(x.shape[1:])), rows, bits, seed, transform)


def token_sets(x: NDArray[Any], check: bool = True) -> list[NDArray[Any]]:
    """Return rows of integer tokens as sets for `RaceSketch.add`.

    Rows of zeros and ones alone could be a 0/1 matrix, whose sets are of columns: ConfigError.
    """
    if check and x.size and x.min() >= 0 and x.max() <= 1:
        raise ConfigError(
            "hash='minhash': all inputs are 0 or 1, which could be tokens or marks of columns; "
            "give the numbers of the columns that are 1, or use hash='srp'"
        )
    return list(x.reshape(len(x), -1).astype(np.int64))


def pooled(sketches: Iterable[RaceSketch]) -> RaceSketch:
    """Return the sketch of all data together: the sum of counts."""
    return reduce(operator.add, sketches)
