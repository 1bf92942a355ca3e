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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from fedcohort.exceptions import ConfigError, FedcohortError
from fedcohort.files.columns import Column, SiteColumn, check_names
from fedcohort.files.source import NULL_VALUES, CsvOptions, Form, Nulls, Source, Want
from fedcohort.options import checked_options, parse_value, unknown
from fedcohort.privacy.noise import Neighbors
from fedcohort.privacy.release import Release, Size, noise_for, sketch_size
from fedcohort.sketch.race import ColumnCounts, RaceSketch
from fedcohort.sketch.transforms import Tokenizer, Transform
from fedcohort.storage import read_toml

Family = Literal["srp", "pstable", "minhash"]
T = TypeVar("T")


@dataclass(frozen=True)
class HashOptions:
    """Hash family and size: `bits` of srp, `buckets` of the others, `width` of pstable.

    What is left open is 200 rows of 64 buckets, or what the privacy budget allows.
    """

    hash: Family = "srp"
    rows: int | None = None
    bits: int | None = None
    buckets: int | None = None
    width: float | None = None
    seed: int = 0


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
        parts = [(sketch.rows, 1.0)]
        if sketch.marginals is not None:
            parts = [(sketch.rows, 1 - self.explain), (len(sketch.columns), self.explain)]
        epsilon = self.epsilon or 0.0
        return [noise_for(n, epsilon * s, self.delta * s, self.neighbors) for n, s in parts]


@dataclass(frozen=True)
class Limits:
    """What the values of a column of numbers must be, checked at the site, never sent."""

    min: float | None = None
    max: float | None = None
    unit: str | None = None


@dataclass(frozen=True)
class SketchSpec:
    """How all sites make their sketches.

    Parameters
    ----------
    columns : tuple of str or Column
        What is hashed; none means every column of numbers.
    text : str, optional
        With minhash: the column of texts, or of lists of tokens.
    null_values : tuple of str
        Further markers of missing values.
    center, scale
        Public constants for all columns: a number, one per column, or by column name.
    person : str, optional
        Column with the person of a row; only the first row of each counts.
    limits : mapping of str to Limits
        By column, for `files.check`.
    """

    hash: HashOptions = HashOptions()
    label: LabelOptions = LabelOptions()
    release: ReleaseOptions = ReleaseOptions()
    columns: tuple[str | Column, ...] = ()
    text: str | None = None
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    null_values: tuple[str, ...] = ()
    center: Any = 0.0
    scale: Any = 1.0
    person: str | None = None
    limits: Mapping[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        family, size, label = self.hash.hash, self.hash, self.label
        constants = not (_is(self.center, 0.0) and _is(self.scale, 1.0))
        private = self.release.epsilon is not None
        idle = {
            "bits belongs to hash srp; use buckets": size.bits is not None and family != "srp",
            "buckets belongs to minhash and pstable; use bits": size.buckets is not None
            and family == "srp",
            "width belongs to hash pstable": size.width is not None and family != "pstable",
            "center and scale are for numbers, not for minhash": constants and family == "minhash",
            "--label and --classes go together": (label.column is None) != (label.classes is None),
            "--label: minhash takes no labels; name the label among --columns": family == "minhash"
            and label.column is not None,
            "delta needs --epsilon": not private and self.release.delta != 0,
            "n=private needs --epsilon": not private and self.release.n != "public",
            "explain takes a share from 0 to below 1": not 0 <= self.release.explain < 1,
        }
        for message, wrong in idle.items():
            if wrong:
                raise ConfigError(message)
        if self.text is not None and (family != "minhash" or self.columns):
            raise ConfigError(f"--text {self.text}: goes with hash=minhash and without --columns")

    @property
    def digest(self) -> str:
        """A short name of the spec, for the headers of its sketches."""
        stated = asdict(replace(self, limits={}))
        text = json.dumps({k: v for k, v in stated.items() if v != {}}, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def want(
        self,
        by: str | None = None,
        nulls: Nulls = "error",
        csv: CsvOptions | None = None,
        table: str | None = None,
        site: Site | None = None,
    ) -> Want:
        """Return what to read of a site's data."""
        form: Form = "sets" if self.hash.hash == "minhash" else "vectors"
        site = site or Site()
        return Want(
            form,
            self.columns,
            self.text,
            self.label.column,
            by,
            nulls,
            null_values=(*NULL_VALUES, *self.null_values, *site.null_values),
            csv=csv or CsvOptions(),
            person=self.person,
            table=table,
            site=site.columns,
        )

    def settle(self, source: Source) -> None:
        """Give the columns of a table the constants that hold for all of them.

        With epsilon, columns and their widths are stated, never found in the data: what a header
        tells would else depend on single records.
        """
        if self.release.epsilon is not None and source.columns and self.text is None:
            stated = {c.name for c in self.columns if isinstance(c, Column)}
            if not self.columns:
                raise ConfigError("--epsilon needs --columns or --spec: name what is hashed")
            for column in source.columns:
                if column.size > 1 and column.name not in stated:
                    raise ConfigError(
                        f"--epsilon: column {column.name!r} holds lists; state their size in a spec"
                    )
        if not source.columns or self.hash.hash == "minhash":
            return
        names = [column.name for column in source.columns]
        center = by_column("center", self.center, names)
        scale = by_column("scale", self.scale, names)
        if _is(center, 0.0) and _is(scale, 1.0):
            return
        source.columns = tuple(
            replace(column, center=_pick(center, i), scale=_pick(scale, i))
            for i, column in enumerate(source.columns)
        )

    def empty_sketch(self, source: Source) -> RaceSketch:
        """Return the sketch that all sites with this spec begin with."""
        size = self.hash
        with user_values():
            rows, bits = self._size(source)
            if size.hash == "minhash":
                tokens = self.tokenizer if source.form == "texts" else None
                empty = RaceSketch.minhash(rows, size.buckets or 1 << bits, size.seed, tokens)
            elif size.hash == "srp":
                step = self._transform(source)
                empty = RaceSketch.srp(source.dim, rows, bits, size.seed, transform=step)
            else:
                width = 2.0 if size.width is None else size.width
                step, buckets = self._transform(source), size.buckets or 1 << bits
                empty = RaceSketch.pstable(source.dim, rows, width, buckets, size.seed, step)
        empty.columns = tuple(column.spec() for column in source.columns)
        if self.release.explain:
            if not source.columns or source.form != "vectors":
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
            planned = sketch_size(release.expect, *budget, dim, release.neighbors)
            rows, bits = planned.rows, planned.bits
        return size.rows if size.rows is not None else rows, (
            size.bits if size.bits is not None else bits
        )

    def _transform(self, source: Source) -> Transform:
        label, table = self.label, bool(source.columns)
        return Transform(
            center=0.0 if table else self.center,
            scale=1.0 if table else self.scale,
            unit=self.hash.hash == "srp" and label.column is not None,
            classes=label.classes or 0,
            label_weight=label.weight if label.column is not None else 0.0,
        )


def _is(value: Any, default: float) -> bool:
    return isinstance(value, (int, float)) and value == default


def _pick(constant: Any, i: int) -> float:
    return float(constant[i] if isinstance(constant, Sequence) else constant)


def by_column(option: str, constant: Any, names: Sequence[str]) -> Any:
    """Return one number for all columns, or a list with one number per column."""
    if isinstance(constant, Mapping):
        missing = [c for c in names if c not in constant]
        if missing or not names:
            lacking = ", ".join(missing) or "the columns, which have no names"
            raise ConfigError(f"{option}: no numbers for {lacking}")
        return [constant[c] for c in names]
    if isinstance(constant, Sequence) and len(constant) != len(names):
        raise ConfigError(f"{option} has {len(constant)} numbers for dim={len(names)}")
    return constant


def read_constants(option: str, text: str) -> Any:
    """Read public constants: a number, comma-separated numbers, or a JSON file.

    The file holds a number, a list, or an object that gives each column its number.
    """
    try:
        given = [float(part) for part in text.split(",")]
        return given[0] if len(given) == 1 else given
    except ValueError:
        pass
    try:
        return json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{option}={text}: neither numbers nor a JSON file ({error})") from None


@contextmanager
def user_values() -> Iterator[None]:
    """Turn the ValueError of a wrong option into a one-line answer."""
    try:
        yield
    except FedcohortError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None


def _checked(owner: str, maker: Callable[..., T], options: Any) -> T:
    if not isinstance(options, Mapping):
        raise ConfigError(f"{owner} must be a section")
    return maker(**checked_options(owner, maker, options))


def spec_from_settings(
    settings: Mapping[str, str],
    columns: Sequence[str] = (),
    text: str | None = None,
    label: LabelOptions | None = None,
    epsilon: float | None = None,
    null_values: tuple[str, ...] = (),
    texts: bool = False,
) -> SketchSpec:
    """Make a spec of ``--set key=value`` and of the options that a command has.

    Keys are those of the sections [sketch] and [privacy] of a file, and label_weight, center,
    scale, analyzer and ngrams. `texts` says whether the data are texts, for minhash.

    Examples
    --------
    >>> spec_from_settings({"rows": "50", "delta": "1e-6"}, epsilon=1.0).hash.rows
    50
    """
    given = {key: parse_value(value) for key, value in settings.items()}
    family = {"hash": "minhash"} if texts or text is not None else {}
    more: dict[str, Any] = {}
    for option in ("center", "scale"):
        if option in given:
            more[option] = read_constants(option, settings[option])
            given.pop(option)
    if "ngrams" in given:
        given["ngrams"] = _ngrams(settings["ngrams"])
    if "label_weight" in given:
        label = _checked(
            "--set",
            LabelOptions,
            {**asdict(label or LabelOptions()), "weight": given.pop("label_weight")},
        )
    parts: dict[Any, dict[str, Any]] = {
        HashOptions: family,
        ReleaseOptions: {"epsilon": epsilon},
        Tokenizer: {},
    }
    keys = {name: maker for maker in parts for name in maker.__dataclass_fields__}
    for key, value in given.items():
        if key not in keys or key == "epsilon":
            raise unknown("key", key, [*keys, "center", "scale", "label_weight"], "of --set")
        parts[keys[key]][key] = value
    with user_values():
        hashing, release, tokenizer = (_checked("--set", *part) for part in parts.items())
    label = label or LabelOptions()
    return SketchSpec(hashing, label, release, tuple(columns), text, tokenizer, null_values, **more)


def _ngrams(text: str) -> tuple[int, int]:
    shortest, _, longest = text.partition("-")
    try:
        return int(shortest), int(longest or shortest)
    except ValueError:
        raise ConfigError(f"ngrams={text}: write 2, or 1-3") from None


SECTIONS = ("sketch", "privacy", "missing", "label", "person", "columns")


def load_spec(path: Path) -> SketchSpec:
    """Read a spec from a TOML file; ConfigError names the key that is wrong."""
    content = read_toml(path)
    try:
        return spec_from(content)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def spec_from(content: Mapping[str, Any]) -> SketchSpec:
    """Make a spec of the sections of a TOML file."""
    for section in content:
        if section not in SECTIONS:
            raise unknown("section", section, SECTIONS)
    hashing = _checked("[sketch]", HashOptions, content.get("sketch", {}))
    columns = content.get("columns", {})
    if not isinstance(columns, Mapping) or not columns:
        raise ConfigError("a spec needs a section [columns.NAME] per column that is hashed")
    return SketchSpec(
        hashing,
        _checked("[label]", LabelOptions, content.get("label", {})),
        _checked("[privacy]", ReleaseOptions, content.get("privacy", {})),
        _columns(columns, minhash=hashing.hash == "minhash"),
        null_values=_null_values(content),
        person=_checked("[person]", LabelOptions, content.get("person", {})).column,
        limits={
            name: _checked(f"[columns.{name}]", Limits, _some(options, LIMITS))
            for name, options in columns.items()
            if not LIMITS.isdisjoint(options)
        },
    )


LIMITS = frozenset(Limits.__dataclass_fields__)


def _some(options: Mapping[str, Any], keys: frozenset[str], inside: bool = True) -> dict[str, Any]:
    return {key: value for key, value in options.items() if (key in keys) == inside}


def _null_values(content: Mapping[str, Any]) -> tuple[str, ...]:
    def missing(null_values: tuple[Any, ...] = ()) -> tuple[str, ...]:
        return tuple(map(str, null_values))

    return _checked("[missing]", missing, content.get("missing", {}))


def _columns(content: Mapping[str, Any], minhash: bool) -> tuple[Column, ...]:
    """Make the columns; say of all numbers at once which constants are still to be given."""
    columns, open_ = [], []
    for name, options in content.items():
        owner = f"[columns.{name}]"
        if not isinstance(options, dict):
            raise ConfigError(f"{owner} must be a section")
        given = _some(options, LIMITS, inside=False)
        given = {"kind": "value"} if minhash else {"missing": "indicator", **given}
        if isinstance(given.get("levels"), list):
            given["levels"] = [_level(level) for level in given["levels"]]
        given = checked_options(owner, Column, {**given, "name": name})
        if given.get("kind", "number") == "number" and not {"center", "scale"} <= given.keys():
            open_.append(name)
        else:
            columns.append(Column(**given))
    if open_:
        raise ConfigError(
            f"give center and scale, public constants, to the numbers {', '.join(open_)}"
        )
    check_names(columns)
    return tuple(columns)


def _level(level: Any) -> str:
    if isinstance(level, bool):
        return str(level).lower()
    if isinstance(level, float) and level.is_integer():
        return str(int(level))
    return str(level)


@dataclass(frozen=True)
class Site:
    """What differs at one site: how it writes columns, and further markers of missing values."""

    columns: Mapping[str, SiteColumn] = field(default_factory=dict)
    null_values: tuple[str, ...] = ()


def load_site(path: Path, spec: SketchSpec) -> Site:
    """Read how a site writes the columns of a spec from a TOML file."""
    content = read_toml(path)
    names = [c.name for c in spec.columns if isinstance(c, Column)]
    names += [name for name in (spec.label.column, spec.person) if name is not None]
    try:
        for section in content:
            if section not in ("columns", "missing"):
                raise unknown("section", section, ("columns", "missing"))
        columns = content.get("columns", {})
        for name in columns:
            if name not in names:
                raise unknown("column", name, names, "of the spec")
        mapped = {name: _checked(f"[columns.{name}]", SiteColumn, c) for name, c in columns.items()}
        return Site(mapped, _null_values(content))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from None
