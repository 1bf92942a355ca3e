"""How a sketch is made, stated once for all sites: in a TOML file, or by options.

::

    [sketch]                 # hash = "srp", "pstable" or "minhash"; rows, bits, width, seed ...
    [privacy]                # epsilon, delta, neighbors, n, expect
    [missing]                # null_values = ["-9"], besides ?, NA and the empty text
    [label]                  # column, classes, weight
    [columns.age]            # kind, center, scale, levels, ...: see `files.columns.Column`

Nothing in a spec comes from the data of one site, so it can be shared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from fedcohort.exceptions import ConfigError, FedcohortError
from fedcohort.files.columns import Column, check_names
from fedcohort.files.source import NULL_VALUES, CsvOptions, Form, Nulls, Source, Want
from fedcohort.privacy.calibration import Neighbors
from fedcohort.privacy.planning import sketch_size
from fedcohort.privacy.release import Release, Size, noise_for
from fedcohort.sketch.race import ColumnCounts, RaceSketch
from fedcohort.sketch.transforms import Tokenizer, Transform
from fedcohort.storage import read_toml

Family = Literal["srp", "pstable", "minhash"]


@dataclass(frozen=True)
class HashOptions:
    """Hash family and size; None where it was left open.

    Parameters
    ----------
    hash : {"srp", "pstable", "minhash"}
    rows : int, optional
        By default 200, or what the privacy budget allows.
    bits, buckets, width
        Of srp; of minhash and pstable; of pstable.
    seed : int
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
    """The private release; none without epsilon.

    Parameters
    ----------
    epsilon, delta, neighbors, n
        As in `RaceSketch.privatize`.
    expect : int
        Records of a typical client, for which rows and bits are planned.
    explain : float
        Share of the budget for the columns one by one; 0 makes no sketches of single columns.
    """

    epsilon: float | None = None
    delta: float = 0.0
    neighbors: Neighbors = "add-remove"
    n: Size = "public"
    expect: int = 1000
    explain: float = 0.0

    def private(self, sketch: RaceSketch) -> RaceSketch:
        """Return the sketch with noise."""
        if self.epsilon is None:
            raise ValueError("a private release needs epsilon")
        share = self.explain or 0.5
        return sketch.privatize(self.epsilon, self.delta, self.neighbors, self.n, explain=share)

    def costs(self, sketch: RaceSketch) -> list[Release]:
        """Return the releases that `private` makes, for the budget."""
        if self.epsilon is None:
            raise ValueError("a private release needs epsilon")
        share = self.explain if sketch.marginals is not None else 0.0
        parts = [(sketch.rows, 1 - share)]
        if sketch.marginals is not None:
            parts.append((len(sketch.columns), share))
        return [
            noise_for(rows, self.epsilon * part, self.delta * part, self.neighbors)
            for rows, part in parts
        ]


@dataclass(frozen=True)
class SketchSpec:
    """How all sites make their sketches.

    Parameters
    ----------
    hash, label, release
        See there.
    columns : tuple of str or Column
        What is hashed; none means every column of numbers.
    text : str, optional
        With minhash: the column of texts, or of lists of tokens.
    tokenizer : Tokenizer
        What a token of a text is.
    null_values : tuple of str
        Further markers of missing values.
    center, scale
        Public constants for all columns: a number, one per column, or by column name.
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

    def __post_init__(self) -> None:
        family, size, label = self.hash.hash, self.hash, self.label
        if family not in get_args(Family):
            raise ConfigError(f"hash={family!r}: use one of {', '.join(get_args(Family))}")
        constants = not (_is(self.center, 0.0) and _is(self.scale, 1.0))
        private = self.release.epsilon is not None
        idle = {
            "--bits belongs to --hash srp; use --buckets": size.bits is not None
            and family != "srp",
            "--buckets belongs to minhash and pstable; use --bits": size.buckets is not None
            and family == "srp",
            "--width belongs to --hash pstable": size.width is not None and family != "pstable",
            "--center and --scale are for numbers, not for minhash": constants
            and family == "minhash",
            "--label and --classes go together": (label.column is None) != (label.classes is None),
            "--label: minhash takes no labels; name the label among --columns": family == "minhash"
            and label.column is not None,
            "--delta needs --epsilon": not private and self.release.delta != 0,
            "--n private needs --epsilon": not private and self.release.n != "public",
            "--explain takes a share from 0 to below 1": not 0 <= self.release.explain < 1,
        }
        for message, wrong in idle.items():
            if wrong:
                raise ConfigError(message)
        if self.text is not None and (family != "minhash" or self.columns):
            raise ConfigError(f"--text {self.text}: goes with --hash minhash and without --columns")

    @property
    def digest(self) -> str:
        """A short name of the spec, for the headers of its sketches."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def want(
        self,
        by: str | None = None,
        nulls: Nulls = "error",
        batch_rows: int | None = None,
        csv: CsvOptions | None = None,
    ) -> Want:
        """Return what to read of a site's data."""
        form: Form = "sets" if self.hash.hash == "minhash" else "vectors"
        return Want(
            form,
            self.columns,
            self.text,
            self.label.column,
            by,
            nulls,
            batch_rows,
            (*NULL_VALUES, *self.null_values),
            csv or CsvOptions(),
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
        center = by_column("--center", self.center, names)
        scale = by_column("--scale", self.scale, names)
        if _is(center, 0.0) and _is(scale, 1.0):
            return
        with user_values():
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
                made = RaceSketch.minhash(rows, size.buckets or 1 << bits, size.seed, tokens)
            elif size.hash == "srp":
                step = self._transform(source)
                made = RaceSketch.srp(source.dim, rows, bits, size.seed, transform=step)
            else:
                width = 2.0 if size.width is None else size.width
                step, buckets = self._transform(source), size.buckets or 1 << bits
                made = RaceSketch.pstable(source.dim, rows, width, buckets, size.seed, step)
        made.columns = tuple(column.spec() for column in source.columns)
        if self.release.explain:
            if not source.columns or source.form != "vectors":
                raise ConfigError("--explain compares the columns of a table, as srp or pstable")
            made.marginals = ColumnCounts.empty(len(source.columns))
        return made

    def _size(self, source: Source) -> tuple[int, int]:
        """Return rows and bits: as given, as a privacy budget allows, or the usual 200 and 6.

        The size is planned for a public number of records, so that it is the same at all sites.
        """
        size, release = self.hash, self.release
        rows, bits = 200, 6
        if release.epsilon is not None and (size.rows is None or size.bits is None):
            dim = source.dim if size.hash == "srp" else None
            joint = 1 - release.explain
            budget = release.epsilon * joint, release.delta * joint
            made = sketch_size(release.expect, *budget, dim, release.neighbors)
            rows, bits = made.rows, made.bits
        return (
            rows if size.rows is None else size.rows,
            bits if size.bits is None else size.bits,
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
        what = option.removeprefix("--")
        raise ConfigError(f"transform: {what} has {len(constant)} numbers for dim={len(names)}")
    return constant


def read_constants(option: str, text: str | None, default: float) -> Any:
    """Read public constants: a number, comma-separated numbers, or a JSON file.

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
        return json.loads(Path(text).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {text}: neither numbers nor a JSON file ({error})") from None


@contextmanager
def user_values() -> Iterator[None]:
    """Turn the ValueError of a wrong option into a one-line answer."""
    try:
        yield
    except FedcohortError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None


TEXTS = ("hash", "neighbors", "n", "column")
SECTIONS = ("sketch", "privacy", "missing", "label", "columns")


def load_spec(path: Path) -> SketchSpec:
    """Read a spec from a TOML file; ConfigError names the key that is wrong."""
    held = read_toml(path)
    try:
        return spec_from(held)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def spec_from(held: Mapping[str, Any]) -> SketchSpec:
    """Make a spec of the sections of a TOML file."""
    unknown = sorted(set(held) - set(SECTIONS))
    if unknown:
        raise ConfigError(f"unknown section [{unknown[0]}]; there are {', '.join(SECTIONS)}")
    missing = _section(held, "missing", ("null_values",)).get("null_values", [])
    if not isinstance(missing, list) or not all(isinstance(m, (str, int, float)) for m in missing):
        raise ConfigError(f"[missing] null_values={missing!r} must be a list of texts")
    columns = held.get("columns", {})
    if not isinstance(columns, Mapping) or not columns:
        raise ConfigError("a spec needs a section [columns.NAME] per column that is hashed")
    return SketchSpec(
        HashOptions(**_section(held, "sketch", _names(HashOptions))),
        LabelOptions(**_section(held, "label", _names(LabelOptions))),
        ReleaseOptions(**_section(held, "privacy", _names(ReleaseOptions))),
        _columns(columns, minhash=_section(held, "sketch", None).get("hash") == "minhash"),
        null_values=tuple(str(m) for m in missing),
    )


def _names(options: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(options))


def _section(held: Mapping[str, Any], name: str, allowed: tuple[str, ...] | None) -> dict[str, Any]:
    section = held.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"[{name}] must be a section")
    for key in section if allowed is not None else ():
        if key not in cast("tuple[str, ...]", allowed):
            raise ConfigError(f"[{name}] has no key {key!r}; it has {', '.join(allowed or ())}")
    for key, value in section.items():
        kind = {"null_values": list}.get(key, str if key in TEXTS else (int, float))
        if not isinstance(value, kind) or isinstance(value, bool):
            what = "text" if key in TEXTS else "a list" if kind is list else "a number"
            raise ConfigError(f"[{name}] {key}={value!r} must be {what}")
    return dict(section)


def _columns(held: Mapping[str, Any], minhash: bool) -> tuple[Column, ...]:
    """Make the columns; say of all numbers at once which constants are still to be given."""
    allowed = set(_names(Column)) - {"name"}
    made, open_ = [], []
    for name, options in held.items():
        if not isinstance(options, dict):
            raise ConfigError(f"[columns.{name}] must be a section")
        if unknown := sorted(set(options) - allowed):
            known = ", ".join(sorted(allowed))
            raise ConfigError(f"[columns.{name}] has no key {unknown[0]!r}; it has {known}")
        options = {"kind": "value"} if minhash else {"missing": "indicator", **options}
        kind = options.get("kind", "number")
        if kind == "number" and not {"center", "scale"} <= options.keys():
            open_.append(name)
        elif kind in ("category", "ordered") and "levels" in options:
            options["levels"] = tuple(_level(level) for level in options["levels"])
        if name not in open_:
            made.append(Column(name, **options))
    if open_:
        raise ConfigError(
            f"give center and scale, public constants, to the numbers {', '.join(open_)}"
        )
    check_names(made)
    return tuple(made)


def _level(level: Any) -> str:
    """Return a level as text, in the way values are read: 1.0 is 1."""
    if isinstance(level, bool):
        return str(level).lower()
    if isinstance(level, float) and level.is_integer():
        return str(int(level))
    return str(level)
