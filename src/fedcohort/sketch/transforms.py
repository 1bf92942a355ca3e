"""What happens to data before they are hashed, by public constants that a sketch's header states.

Constants computed from the data of one client would differ from others', and give the data away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcohort.options import NonNegative, Range, check_fields


@dataclass(frozen=True)
class Transform:
    """Prepare vectors: center and scale, unit length, append the label; in this order.

    Parameters
    ----------
    embedding : str, optional
        A name for what made the vectors, such as a network; sketches of other names are unlike.
    center, scale : float or sequence of float
        x becomes (x - center) / scale. Sign projections see angles only, and vectors with positive
        entries all point the same way unless they are centered.
    unit : bool
        Divide each vector by its length; the zero vector stays.
    classes, label_weight : int, float
        With labels: how many there are, each a column appended to x, and what stands in that of the
        sample's label; 1 gives it as much weight as a vector of unit length.

    Examples
    --------
    >>> step = Transform(center=1.0, unit=True, classes=2, label_weight=0.5)
    >>> step.apply(np.array([[1.0, 3.0]]), np.array([1])).tolist()
    [[0.0, 1.0, 0.0, 0.5]]
    """

    embedding: str | None = None
    center: Any = 0.0
    scale: Any = 1.0
    unit: bool = False
    classes: Annotated[int, Range(0, 1 << 16)] = 0
    label_weight: NonNegative = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "transform")
        for name in ("center", "scale"):
            object.__setattr__(self, name, _constant(name, getattr(self, name)))
        if not np.all(np.asarray(self.scale) > 0):
            raise ValueError("transform: scale must be above 0")
        if (self.label_weight > 0) != (self.classes > 0):
            raise ValueError(
                f"transform: label_weight={self.label_weight} and classes={self.classes}: "
                "give both above 0, or neither"
            )

    def width(self, dim: int) -> int:
        """Columns of prepared vectors, after checking that the constants fit `dim` columns."""
        for name in ("center", "scale"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != dim:
                raise ValueError(f"transform: {name} has {len(value)} numbers for dim={dim}")
        return dim + self.classes

    def apply(self, x: NDArray[Any], y: NDArray[Any] | None = None) -> NDArray[Any]:
        """Prepare a dense block; a row in which a number overflows is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):  # inf / inf
            if self.center != 0.0 or self.scale != 1.0:
                x = (x - np.asarray(self.center)) / np.asarray(self.scale)
            if self.unit:
                x = unit_length(x)
        if not self.classes:
            return x
        if y is None:
            raise ValueError(f"this sketch hashes {self.classes} labels too: call add(X, y)")
        if y.dtype.kind not in "iu" or (len(y) and not 0 <= y.min() <= y.max() < self.classes):
            raise ValueError(f"labels must be whole numbers from 0 to {self.classes - 1}")
        one_hot = (y[:, None] == np.arange(self.classes)).astype(float)
        return np.concatenate([x, one_hot * self.label_weight], axis=1)

    def spec(self) -> dict[str, Any]:
        """Return what the header states: only what differs from doing nothing."""
        spec = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {f.name: spec[f.name] for f in fields(self) if spec[f.name] != f.default}


@dataclass(frozen=True)
class Tokenizer:
    """Turn texts into token sets with scikit-learn's analyzers.

    The analyzer gives words of two letters or more, characters, or characters within word bounds;
    `ngrams` are the shortest and the longest run of them that makes a token.

    Examples
    --------
    >>> Tokenizer("word").sets(["To be, or not to be"])
    [['to', 'be', 'or', 'not', 'to', 'be']]
    """

    analyzer: Literal["word", "char", "char_wb"] = "word"
    ngrams: tuple[int, int] = (1, 1)
    lowercase: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "tokenizer")
        if len(self.ngrams) != 2 or not 1 <= self.ngrams[0] <= self.ngrams[1]:
            raise ValueError(f"tokenizer: ngrams={self.ngrams!r} must be two numbers, 1 or more")

    @cached_property
    def _analyze(self) -> Callable[[str], list[str]]:
        from sklearn.feature_extraction.text import CountVectorizer

        vectorizer = CountVectorizer(
            analyzer=self.analyzer, ngram_range=self.ngrams, lowercase=self.lowercase
        )
        return vectorizer.build_analyzer()  # type: ignore[no-any-return]

    def sets(self, texts: Iterable[str]) -> list[list[str]]:
        """Return the tokens of each text."""
        return [self._analyze(text) for text in texts]

    def spec(self) -> dict[str, Any]:
        """Return what the header states."""
        return asdict(self) | {"ngrams": list(self.ngrams)}


def transform_from(spec: Any) -> Transform | Tokenizer:
    """Rebuild a transform from its `spec`; ValueError or TypeError for anything else."""
    return Tokenizer(**spec) if "analyzer" in spec else Transform(**spec)


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Say in full how two sketches' specs differ: hash, transform and columns."""
    messages, a, b = [], _parts(mine), _parts(theirs)
    for part in dict.fromkeys((*a, *b)):
        if part in a and part in b:
            pairs = [(key, a[part].get(key), b[part].get(key)) for key in a[part] | b[part]]
            messages += [f"{part} {key}: {x!r} is not {y!r}" for key, x, y in pairs if x != y]
        else:
            messages.append(f"{part}: only in the {'first' if part in a else 'second'}")
    if not messages and list(a) != list(b):
        messages.append("the same columns in another order")
    return "; ".join((*messages, "make all sketches with the same settings"))


def _parts(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    columns = {f"column {c['name']!r}": c for c in spec.get("columns", [])}
    return {"hash": spec.get("hash", {}), "transform": spec.get("transform", {}), **columns}


def unit_length(x: NDArray[Any]) -> NDArray[np.float64]:
    """Divide each row by its length, summed in a fixed order so that machines agree."""
    x = x.astype(np.float64)
    peak = np.abs(x).max(axis=1, keepdims=True, initial=0)
    x /= np.where(peak > 0, peak, 1)  # squares neither overflow nor vanish
    squares = x * x
    while squares.shape[1] > 1:
        half = (squares.shape[1] + 1) // 2
        rest = squares[:, half:]
        squares = squares[:, :half].copy()
        squares[:, : rest.shape[1]] += rest
    length = np.sqrt(squares) if squares.shape[1] else np.ones((len(x), 1))
    return x / np.where(length > 0, length, 1)


def _constant(name: str, value: Any) -> float | tuple[float, ...]:
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" or array.ndim > 1 or not np.isfinite(array).all():
        raise ValueError(f"transform: {name} must be a finite number, or one per column")
    numbers = array.astype(np.float64)
    return float(numbers) if array.ndim == 0 else tuple(numbers.tolist())
