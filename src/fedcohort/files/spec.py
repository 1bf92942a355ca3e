"""How a sketch is made, stated once for all sites: in a TOML file, or by options.

::

    [sketch]                 # hash = "srp", "pstable" or "minhash"; rows, bits, width, seed ...
    [privacy]                # epsilon, delta, neighbors, n, expect, explain
    [missing]                # null_values = ["-9"], besides ?, NA and the empty text
    [label]                  # column, classes, weight
    [person]                 # column: only the first row of each person counts
    [columns.age]            # kind, center, scale, levels, ...: see `files.columns.Column`;
                             # min, max, unit: see `Limits`

Nothing in a spec comes from the data of one site, so it can be shared. What differs at one site is
in a file of its own, which stays there::

    [missing]                # further null_values of this site
    [columns.age]            # column, codes, format, factor: see `files.columns.SiteColumn`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from fedcohort.exceptions import ConfigError
from fedcohort.files.columns import Column, SiteColumn
from fedcohort.files.source import NULL_VALUES, Source, Want
from fedcohort.options import Count, Positive, checked_options, unknown
from fedcohort.privacy.noise import Neighbors
from fedcohort.privacy.release import Release, Size, noise_for, sketch_size
from fedcohort.sketch.race import ColumnCounts, RaceSketch
from fedcohort.sketch.transforms import Tokenizer, Transform
from fedcohort.storage import read_toml

T = TypeVar("T")


@dataclass(frozen=True)
class HashOptions:
    """Hash family and size: `bits` of srp, `buckets` of the others, `width` of pstable.

    What is left open is 200 rows of 64 buckets, or what the privacy budget allows. `center` and
    `scale` are for all numbers that no spec describes, `analyzer` and `ngrams` for texts.
    """

    hash: Literal["srp", "pstable", "minhash"] = "srp"
    rows: Count | None = None
    bits: Count | None = None
    buckets: Count | None = None
    width: float | None = None
    seed: int = 0
    center: float = 0.0
    scale: Positive = 1.0
    analyzer: Literal["word", "char", "char_wb"] = "word"
    ngrams: tuple[int, ...] = (1, 1)


@dataclass(frozen=True)
class LabelOptions:
    """The column of classes, how many there are at all sites, and what a label weighs."""

    column: str | None = None
    classes: int | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class ReleaseOptions:
    """The private release, as in `RaceSketch.privatize`; none without epsilon.

    Rows and bits are planned for `expect` records. `explain` is the share of the budget for the
    columns one by one; 0 makes no histograms of them.
    """

    epsilon: float | None = None
    delta: float = 0.0
    neighbors: Neighbors = "add-remove"
    n: Size = "public"
    expect: int = 1000
    explain: float = 0.0

    def private(self, sketch: RaceSketch) -> RaceSketch:
        """Return the sketch with noise."""
        budget = self.epsilon or 0.0, self.delta
        return sketch.privatize(*budget, self.neighbors, self.n, explain=self.explain or 0.5)

    def costs(self, sketch: RaceSketch) -> list[Release]:
        """Return the releases that `private` makes, for the budget."""
        parts, epsilon = [(sketch.rows, 1.0)], self.epsilon or 0.0
        if sketch.marginals is not None:
            parts = [(sketch.rows, 1 - self.explain), (len(sketch.columns), self.explain)]
        return [noise_for(n, epsilon * s, self.delta * s, self.neighbors) for n, s in parts]


@dataclass(frozen=True)
class Limits:
    """What the values of a column of numbers must be, checked at the site, never sent."""

    min: float | None = None
    max: float | None = None
    unit: str | None = None


@dataclass(frozen=True)
class SketchSpec:
    """How all sites make their sketches."""

    hash: HashOptions = HashOptions()
    label: LabelOptions = LabelOptions()
    release: ReleaseOptions = ReleaseOptions()
    columns: tuple[str | Column, ...] = ()  # what is hashed; none means every column of numbers
    text: str | None = None  # with minhash: the column of texts
    null_values: tuple[str, ...] = ()  # further markers of missing values
    person: str | None = None  # the column of people; only the first row of each counts
    limits: Mapping[str, Limits] = field(default_factory=dict)  # of columns, for `check_data`

    def __post_init__(self) -> None:
        size, label, release = self.hash, self.label, self.release
        constants, family = (size.center, size.scale) != (0, 1), size.hash
        stated = any(isinstance(column, Column) for column in self.columns)
        idle = {
            "bits belongs to hash srp; use buckets": size.bits and family != "srp",
            "buckets belongs to minhash and pstable; use bits": size.buckets and family == "srp",
            "width belongs to hash pstable": size.width is not None and family != "pstable",
            "center and scale are for numbers, not for minhash": constants and family == "minhash",
            "center and scale belong to the sections [columns.NAME] of a spec": constants
            and stated,
            "--label and --classes go together": (label.column is None) != (label.classes is None),
            "--label: minhash takes no labels": family == "minhash" and label.column is not None,
            "hash minhash is for texts: use --text, or srp or pstable for columns": family
            == "minhash"
            and self.columns,
            "delta needs --epsilon": release.epsilon is None and release.delta != 0,
            "n=private needs --epsilon": release.epsilon is None and release.n != "public",
            "explain takes a share from 0 to below 1": not 0 <= release.explain < 1,
        }
        for message in (message for message, wrong in idle.items() if wrong):
            raise ConfigError(message)

    @property
    def digest(self) -> str:
        """A short name of the spec, for the headers of its sketches."""
        text = json.dumps(asdict(replace(self, limits={})), sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def want(self, site: Path | None = None, **how: Any) -> Want:
        """Return what to read of a site's data.

        The TOML file `site` says how the site writes its columns; `how` are further fields of
        `Want`: clients, missing values, tables.
        """
        markers, label = (*NULL_VALUES, *self.null_values), self.label.column
        want = Want(self.columns, self.text, label, person=self.person, null_values=markers, **how)
        return want if site is None else _want_at_site(site, want)

    def empty_sketch(self, source: Source) -> RaceSketch:
        """Return the sketch that all sites with this spec begin with.

        The columns of the source get the constants that hold for all of them.
        """
        if (source.form == "texts") != (self.hash.hash == "minhash"):
            raise ConfigError("texts need hash=minhash, and numbers srp or pstable")
        if self.release.epsilon is not None and source.columns and not (self.columns or self.text):
            # A header must not depend on a record, so the data cannot choose the columns.
            raise ConfigError("--epsilon needs --columns or --spec: name what is hashed")
        center, scale = self.hash.center, self.hash.scale
        if (center, scale) != (0, 1):
            source.columns = tuple(replace(c, center=center, scale=scale) for c in source.columns)
        size, (rows, bits), step = self.hash, self._size(source), self._transform(source)
        buckets, ngrams = size.buckets or 1 << bits, cast(tuple[int, int], size.ngrams)
        if size.hash == "minhash":
            tokens = Tokenizer(size.analyzer, ngrams)
            empty = RaceSketch.minhash(rows, buckets, size.seed, tokens)
        elif size.hash == "srp":
            empty = RaceSketch.srp(source.dim, rows, bits, size.seed, transform=step)
        else:
            width = 2.0 if size.width is None else size.width
            empty = RaceSketch.pstable(source.dim, rows, width, buckets, size.seed, step)
        if source.form == "vectors":
            empty.columns = tuple(column.spec() for column in source.columns)
        if self.release.explain:
            if not empty.columns:
                raise ConfigError("explain compares the columns of a table, as srp or pstable")
            empty.marginals = ColumnCounts.empty(len(source.columns))
        return empty

    def _size(self, source: Source) -> tuple[int, int]:
        """Return rows and bits: as given, as a privacy budget allows, or the usual 200 and 6."""
        size, release = self.hash, self.release
        rows, bits = 200, 6
        if release.epsilon is not None and (size.rows is None or size.bits is None):
            dim = source.dim if size.hash == "srp" else None
            joint = 1 - release.explain
            budget = release.epsilon * joint, release.delta * joint
            rows, bits, *_ = sketch_size(release.expect, *budget, dim, release.neighbors)
        return size.rows or rows, size.bits or bits

    def _transform(self, source: Source) -> Transform:
        label, table = self.label, bool(source.columns)
        return Transform(
            center=0.0 if table else self.hash.center,
            scale=1.0 if table else self.hash.scale,
            unit=self.hash.hash == "srp" and label.column is not None,
            classes=label.classes or 0,
            label_weight=label.weight if label.column is not None else 0.0,
        )


def spec_from_settings(settings: Mapping[str, Any], **more: Any) -> SketchSpec:
    """Make a spec of keys of [sketch] and [privacy], and of `more` fields of `SketchSpec`."""
    sizes, every = ({f.name for f in fields(kind)} for kind in (HashOptions, ReleaseOptions))
    for key in settings:
        if key not in sizes | every:
            raise unknown("key", key, sorted(sizes | every), "of --set")
    size = _checked("--set", HashOptions, {k: settings[k] for k in settings if k in sizes})
    release = _checked("--set", ReleaseOptions, {k: settings[k] for k in settings if k in every})
    return SketchSpec(hash=size, release=release, **more)


def load_spec(path: Path) -> SketchSpec:
    """Read a spec from a TOML file; ConfigError names the key that is wrong."""
    with _named(path, (*SECTIONS, "columns")) as content:
        if not isinstance(content.get("columns"), Mapping) or not content["columns"]:
            raise ConfigError("a spec needs a section [columns.NAME] per column that is hashed")
        columns, limits = _columns(content["columns"])
        parts = {
            part: _checked(f"[{section}]", maker, content.get(section, {}))
            for section, (part, maker) in SECTIONS.items()
        }
        return SketchSpec(columns=columns, limits=limits, **parts)


def _want_at_site(path: Path, want: Want) -> Want:
    """Read how a site writes the columns that a spec wants, from a TOML file."""
    names = [c.name for c in want.columns if isinstance(c, Column)]
    names += [name for name in (want.label, want.person) if name is not None]
    with _named(path, ("columns", "missing")) as content:
        written = {}
        for name, options in content.get("columns", {}).items():
            if name not in names:
                raise unknown("column", name, names, "of the spec")
            written[name] = _checked(f"[columns.{name}]", SiteColumn, options)
        markers = _checked("[missing]", _markers, content.get("missing", {}))
    return replace(want, site=written, null_values=(*want.null_values, *markers))


@contextmanager
def _named(path: Path, sections: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Read a TOML file of these sections; what is wrong with its content names it."""
    content = read_toml(path)
    try:
        for section in content:
            if section not in sections:
                raise unknown("section", section, sections)
        yield content
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _checked(owner: str, maker: Callable[..., T], options: Any) -> T:
    if not isinstance(options, Mapping):
        raise ConfigError(f"{owner} must be a section")
    return maker(**checked_options(owner, maker, options))


def _markers(null_values: tuple[Any, ...] = ()) -> tuple[str, ...]:
    return tuple(map(str, null_values))


def _person(column: str | None = None) -> str | None:
    return column


#: The field of a spec that each section of the file makes.
SECTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "sketch": ("hash", HashOptions),
    "privacy": ("release", ReleaseOptions),
    "missing": ("null_values", _markers),
    "label": ("label", LabelOptions),
    "person": ("person", _person),
}


def _columns(content: Mapping[str, Any]) -> tuple[tuple[Column, ...], dict[str, Limits]]:
    """Make the columns; say of all numbers at once which constants are still to be given."""
    columns, limits, left_open = [], {}, []
    for name, options in content.items():
        owner = f"[columns.{name}]"
        if not isinstance(options, dict):
            raise ConfigError(f"{owner} must be a section")
        given = {"missing": "indicator", "name": name, **options}
        local = {f.name: given.pop(f.name) for f in fields(Limits) if f.name in given}
        if local:
            limits[name] = _checked(owner, Limits, local)
        if isinstance(given.get("levels"), list):
            given["levels"] = [_level(level) for level in given["levels"]]
        if given.get("kind", "number") == "number" and not {"center", "scale"} <= given.keys():
            checked_options(owner, Column, given)
            left_open.append(name)
        else:
            columns.append(_checked(owner, Column, given))
    if left_open:
        raise ConfigError(
            f"give center and scale, public constants, to the numbers {', '.join(left_open)}"
        )
    return tuple(columns), limits


def _level(level: Any) -> str:
    if isinstance(level, bool):
        return str(level).lower()
    return str(int(level) if isinstance(level, float) and level.is_integer() else level)
