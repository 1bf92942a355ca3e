"""What a sketch is made of, and how that goes to bytes and files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fedcohort.atomic import write_atomically
from fedcohort.exceptions import UnlikeSketches
from fedcohort.signals import sketch_file
from fedcohort.signals.hashing import HashFamily
from fedcohort.signals.privacy import Release
from fedcohort.signals.transforms import Tokenizer, Transform, difference


class StoredSketch:
    """Hash functions, transform, counts, number of samples, and how they were made private."""

    def __init__(self, family: HashFamily, transform: Transform | Tokenizer | None = None) -> None:
        self.family = family
        self.transform = Transform() if transform is None else transform
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
    def private(self) -> bool:
        """Whether the counts are noisy."""
        return self.release is not None

    @property
    def spec(self) -> dict[str, Any]:
        """Hash functions and transform as plain values; equal in sketches that are alike."""
        return {"hash": self.family.spec(), "transform": self.transform.spec()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredSketch):
            return NotImplemented
        same = self.n == other.n and self.release == other.release and self.spec == other.spec
        return same and bool(np.array_equal(self.counts, other.counts))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        private = "" if self.release is None else f", epsilon={self.release.epsilon:g}"
        size = f"{self.rows} x {self.buckets}"
        return f"{type(self).__name__}({self.family.name}, {size}, n={self.n:g}{private})"

    def empty_like(self) -> Self:
        """Return an empty sketch of the same hash functions and transform."""
        return type(self)(self.family, self.transform)

    def check_alike(self, other: StoredSketch) -> None:
        """Raise UnlikeSketches unless hash functions and transform are the same."""
        if self.family != other.family or self.transform != other.transform:
            raise UnlikeSketches(difference(self.spec, other.spec))

    def header(self) -> dict[str, Any]:
        """Return what a file says about the sketch, as plain values."""
        private = None if self.release is None else self.release.spec()
        return {**self.spec, "n": self.n, "release": private}

    def to_bytes(self) -> bytes:
        """Return the sketch as a file's content; see `sketch_file`."""
        return sketch_file.pack(self.header(), self.counts)

    @classmethod
    def from_bytes(cls, data: bytes, embedding: Callable[[Any], Any] | None = None) -> Self:
        """Read a file's content; InvalidSketch for anything else.

        `embedding` is the function whose name the file holds, needed to add or query.
        """
        parts = sketch_file.parse(data, embedding)
        out = cls(parts.family, parts.transform)
        out.counts, out.n, out.release = parts.counts, parts.n, parts.release
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all."""
        write_atomically(path, self.to_bytes())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], embedding: Callable[[Any], Any] | None = None
    ) -> Self:
        """Read one file; see `from_bytes`."""
        return cls.from_bytes(sketch_file.read(path), embedding)
