"""What ``fedcohort sketch`` does with its options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedcohort.exceptions import ConfigError, FedcohortError
from fedcohort.files import Source, Want, open_source
from fedcohort.files.finding import kind_of
from fedcohort.files.sketching import columns_name
from fedcohort.files.source import Form, Nulls
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Tokenizer, Transform


@dataclass(frozen=True)
class Shape:
    """Hash family and size; None where it was left open."""

    hash: str
    rows: int | None
    bits: int | None
    buckets: int | None
    width: float | None
    seed: int


@dataclass(frozen=True)
class Labels:
    """Whether there are labels, how many classes, and what a label weighs."""

    given: bool
    classes: int | None
    weight: float


@dataclass(frozen=True)
class Preparation:
    """What happens to the data before they are hashed."""

    center: str | None
    scale: str | None
    labels: Labels
    analyzer: str
    ngrams: str


@dataclass(frozen=True)
class Privacy:
    """The release, none without epsilon."""

    epsilon: float | None
    delta: float
    neighbors: str
    n: str
    expect: int


def choose_hash(data: Path, hash: str | None, text: str | None) -> str:
    """Return the family: the one asked for, or the one that fits the data."""
    texts = text is not None or kind_of(data) == "text"
    return str(hash or ("minhash" if texts else "srp"))


def split(columns: str | None) -> tuple[str, ...]:
    """Read names by comma.

    Examples
    --------
    >>> split("age, height")
    ('age', 'height')
    """
    return tuple(name.strip() for name in (columns or "").split(",") if name.strip())


def open_data(
    data: Path,
    hash: str,
    columns: tuple[str, ...],
    text: str | None,
    label: str | None,
    by: str | None,
    nulls: str,
    batch_rows: int | None,
) -> Source:
    """Open the data in the form that the hash family takes."""
    if text is not None and (hash != "minhash" or columns):
        raise ConfigError(f"--text {text}: goes with --hash minhash and without --columns")
    if hash == "minhash" and label is not None:
        raise ConfigError("--label: minhash takes no labels; name the label among --columns")
    form: Form = "sets" if hash == "minhash" else "vectors"
    want = Want(form, columns, text, label, by, cast("Nulls", str(nulls)), batch_rows)
    return open_source(data, want)


def empty_sketch(
    source: Source, shape: Shape, preparation: Preparation, privacy: Privacy
) -> RaceSketch:
    """Return the sketch that all sites with these options begin with."""
    _refuse_idle(shape, preparation, privacy)
    with user_values():
        rows, bits = _size(source, shape, privacy)
        if shape.hash == "minhash":
            tokens = _tokenizer(preparation) if source.form == "texts" else None
            return RaceSketch.minhash(rows, shape.buckets or 1 << bits, shape.seed, tokens)
        step = _transform(source, preparation, unit=shape.hash == "srp")
        if shape.hash == "srp":
            return RaceSketch.srp(source.dim, rows, bits, shape.seed, transform=step)
        width = 2.0 if shape.width is None else shape.width
        buckets = shape.buckets or 1 << bits
        return RaceSketch.pstable(source.dim, rows, width, buckets, shape.seed, step)


def _refuse_idle(shape: Shape, preparation: Preparation, privacy: Privacy) -> None:
    """Refuse options that would do nothing: somebody believes that they do."""
    family = shape.hash
    labels = preparation.labels
    numbers = preparation.center is not None or preparation.scale is not None
    idle = {
        "--bits belongs to --hash srp; use --buckets": shape.bits is not None and family != "srp",
        "--buckets belongs to minhash and pstable; use --bits": shape.buckets is not None
        and family == "srp",
        "--width belongs to --hash pstable": shape.width is not None and family != "pstable",
        "--center and --scale are for numbers, not for minhash": numbers and family == "minhash",
        "--label and --classes go together": labels.given != (labels.classes is not None),
        "--delta needs --epsilon": privacy.epsilon is None and privacy.delta != 0,
        "--n private needs --epsilon": privacy.epsilon is None and privacy.n != "public",
    }
    for message, wrong in idle.items():
        if wrong:
            raise ConfigError(message)


def _size(source: Source, shape: Shape, privacy: Privacy) -> tuple[int, int]:
    """Return rows and bits: as given, as a privacy budget allows, or the usual 200 and 6.

    A plan is made for a public number of records, so that all sites get sketches of one size.
    """
    from fedcohort.privacy.planning import plan

    rows, bits = 200, 6
    if privacy.epsilon is not None and (shape.rows is None or shape.bits is None):
        dim = source.dim if shape.hash == "srp" else None
        made = plan(
            privacy.expect, privacy.epsilon, privacy.delta, dim, cast("Any", privacy.neighbors)
        )
        rows, bits = made.rows, made.bits
    return (
        rows if shape.rows is None else shape.rows,
        bits if shape.bits is None else shape.bits,
    )


def _transform(source: Source, preparation: Preparation, unit: bool) -> Transform:
    labels = preparation.labels
    return Transform(
        embedding=columns_name(source.columns) if source.columns else None,
        function=np.asarray if source.columns else None,
        center=constants("--center", preparation.center, 0.0, source.columns),
        scale=constants("--scale", preparation.scale, 1.0, source.columns),
        unit=unit and labels.given,
        classes=labels.classes or 0,
        label_weight=labels.weight if labels.given else 0.0,
    )


def _tokenizer(preparation: Preparation) -> Tokenizer:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", preparation.ngrams)
    if not found:
        raise ConfigError(f"--ngrams {preparation.ngrams}: write 2, or 1-3")
    low, high = found[1], found[2] or found[1]
    return Tokenizer(cast("Any", preparation.analyzer), (int(low), int(high)))


def constants(option: str, text: str | None, default: float, columns: tuple[str, ...]) -> Any:
    """Read public constants: a number, numbers by comma, or a JSON file.

    The file holds a number, a list, or an object that gives each column its number.
    """
    if text is None:
        return default
    try:
        given = [float(part) for part in text.split(",")]
        return given[0] if len(given) == 1 else given
    except ValueError:
        pass
    try:
        held = json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {text}: neither numbers nor a JSON file ({error})") from None
    if not isinstance(held, dict):
        return held
    missing = [c for c in columns if c not in held]
    if missing or not columns:
        lacking = ", ".join(missing[:5]) or "the columns, which have no names"
        raise ConfigError(f"{option} {text}: no numbers for {lacking}")
    return [held[c] for c in columns]


@contextmanager
def user_values() -> Iterator[None]:
    """Turn the ValueError of a wrong option into a one-line answer."""
    try:
        yield
    except FedcohortError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
