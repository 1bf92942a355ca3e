"""Tables as sources: which columns make a row, and what numbers their values become.

Encoders return all records of a batch, by the public parameters of `Column` alone; a missing value
is NaN (numbers) or marked in `missing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.columns import PERIODS, Column, SiteColumn, columns_width
from fedcohort.files.source import Block, Place, Reading, Source, Want
from fedcohort.files.tables import Kind, Table, open_table

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
NUMBERS: tuple[Kind, ...] = ("whole", "number", "empty")
ANY: tuple[Kind, ...] = ("whole", "number", "text", "date", "empty")
ALLOWED: dict[str, tuple[Kind, ...]] = {
    "number": (*NUMBERS, "text"),
    "boolean": ("whole", "number", "text", "empty"),
    "category": ANY,
    "ordered": ANY,
    "date": ("date", "text", "empty"),
    "text": ("text", "empty"),
    "vectors": NUMBERS,
    "label": ("whole", "number"),
    "by": ("whole", "text"),
    "person": ("whole", "text"),
}
REMEDY = {
    "vectors": "vectors hold numbers; leave the column out, say in a spec what it holds, or save "
    "lists of numbers as an array: np.savez('data.npz', x=lists)",
    "label": "--label takes whole numbers from 0",
    "by": "--by takes text or whole numbers",
    "person": "a person has an id of text or whole numbers",
}
AS_WRITTEN = ("by", "person", "boolean", "category", "ordered", "date", "text")
MAX_WHOLE = 2.0**53  # from here on, fractions do not hold every whole number
APART = 2**-0.5  # two one-hot vectors times this are 1 apart
TRUE, FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
PART_OF: dict[str, Callable[[Any], Any]] = {  # numbers from 0
    "yearday": lambda stamps: pc.subtract(pc.day_of_year(stamps), 1),
    "month": lambda stamps: pc.subtract(pc.month(stamps), 1),
    "weekday": pc.day_of_week,
    "hour": pc.hour,
}


class TableSource(Source):
    """Rows of tables; several files with the wanted columns follow each other.

    Without a `Column`, numbers and booleans (0 and 1) are taken as they are. A text column gives
    texts. The first `skip` files only say what the others hold.
    """

    def __init__(self, files: Sequence[Any], root: Path, want: Want, skip: int = 0) -> None:
        tables = [open_table(file, root, want) for file in files]
        self._first, self._tables = tables[0], tables[skip:]
        self._want, self.reading = want, Reading()
        self._people: set[bytes] = set()
        if want.text is not None:
            self.form = "texts"
            self.columns = (Column(want.text, "text", slots=1),)
        else:
            chosen = self._named() if want.columns else self._all_columns()
            self.columns = tuple(
                c if isinstance(c, Column) else Column(c, missing=want.nulls) for c in chosen
            )
            self.dim = columns_width(self.columns)
        roles = {"label": want.label, "by": want.by, "person": want.person}
        self._roles = {r: want.name_at_site(name) for r, name in roles.items() if name is not None}
        self._names = [want.name_at_site(column.name) for column in self.columns]
        self._uses = self._find_uses()
        self._check(self._first)
        self.reading.assumed += self._first.detected

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        """Rows in all, where the files say so."""
        counts = [table.rows for table in self._tables if table.rows is not None]
        return sum(counts) if len(counts) == len(self._tables) else None

    def blocks(self) -> Iterator[Block]:
        """Yield vectors (n, dim), or lists of texts."""
        self.reading.clear()
        self._people.clear()
        rows = self._want.rows_for(self.dim)
        forced: dict[str, Literal["text", "number"]] = {
            c: "text" if use in AS_WRITTEN else "number" for c, use in self._uses.items()
        }
        for table in self._tables:
            self._check(table)
            first = 0
            for batch in table.batches(tuple(self._uses), rows, forced):
                yield self._block(batch, Place(table.where, first))
                first += batch.num_rows

    def _named(self) -> list[str | Column]:
        """Return the columns asked for, patterns such as ``p*`` replaced by those they match."""
        chosen, names = list[str | Column](), self._first.schema.names
        for wanted in self._want.columns:
            exact = isinstance(wanted, Column) or wanted in names or not set(wanted) & set("*?[")
            matching = [wanted] if exact else [n for n in names if fnmatchcase(n, str(wanted))]
            if not matching:
                self._first.kind(str(wanted))  # says which columns there are
            chosen += matching
        stated = [c.name if isinstance(c, Column) else c for c in chosen]
        if len(set(stated)) < len(stated):
            raise ConfigError(f"--columns {','.join(stated)}: name each column once")
        return chosen

    def _all_columns(self) -> list[str]:
        """Return every column of numbers, in the file's order; say which were left out."""
        table, usable, left_out = self._first, list[str](), self.reading.left_out
        taken = (self._want.label, self._want.by, self._want.person)
        for name in (c for c in table.schema.names if c not in taken):
            if not name:
                left_out["the column without a name"] = "row names, as R writes them"
            elif table.kind(name) in NUMBERS:
                usable.append(name)
            else:
                left_out[name] = f"{table.schema.field(name).type} is not a number"
        if not usable:
            raise DataError(f"{table.where}: no column holds numbers; {REMEDY['vectors']}")
        return usable

    def _find_uses(self) -> dict[str, str]:
        """Return what each column at this site is used for."""
        stated = {c.name for c in self._want.columns if isinstance(c, Column)}
        uses: dict[str, str] = {
            name: "vectors" if c.kind == "number" and c.name not in stated else c.kind
            for name, c in zip(self._names, self.columns, strict=True)
        }
        if len(uses) < len(self.columns):
            raise ConfigError("two columns of the spec are one column at this site")
        for role, name in self._roles.items():
            if name in uses:
                raise ConfigError(f"--{role} {name}: also one of the columns that are hashed")
        return uses | {name: role for role, name in self._roles.items()}

    def _check(self, table: Table) -> None:
        for name, use in self._uses.items():
            allowed = table.kind(name) in ALLOWED[use]
            kind = table.schema.field(name).type
            written = use in AS_WRITTEN and table.as_written and not pa.types.is_nested(kind)
            if not allowed and not written:
                remedy = REMEDY.get(use, f"it should hold a {use}")
                raise DataError(f"{table.where}: column {name!r} is {kind}; {remedy}")

    def _block(self, batch: Any, place: Place) -> Block:
        x, keep, parts = self._content(batch, place)
        y = ids = None
        for role, name in self._roles.items():
            if role == "label":
                y, present = labels(batch[name], name, place)
            else:
                names = np.array(written(batch[name]).to_pylist(), object)
                present = names.astype(bool)
                ids = names if role == "by" else ids
            keep &= self._present(present, name, place)
            if role == "person":
                keep &= self._first_rows(names, keep)
        self.reading.count(keep, self._want.label, y)
        return Block(x, y, ids, parts).take(keep)

    def _content(self, batch: Any, place: Place) -> tuple[Any, Bools, list[Encoded]]:
        """Return the vectors or texts of a batch, which to keep, and the columns one by one."""
        keep = np.ones(len(batch), bool)
        if self.form == "texts":
            texts = batch[self._names[0]]
            present = texts.is_valid().to_numpy(zero_copy_only=False)
            return texts.to_pylist(), self._present(present, self._names[0], place), []
        out, parts, start = np.zeros((len(batch), self.dim)), [], 0
        for column, name in zip(self.columns, self._names, strict=True):
            part = _at_site(column, batch[name], place, self._want)
            parts.append(part)
            if part.missing.any():
                self.reading.missing[column.name] += int(part.missing.sum())
                if column.missing == "error":
                    raise place.error(column.name, part.missing)
                part.values[np.isnan(part.values)] = 0.0
                if column.missing == "drop":
                    keep &= ~part.missing
            self.reading.look_at(column, part.order[~part.missing])
            own = out[:, start : start + column.width]
            with np.errstate(over="ignore"):
                np.multiply(part.values, column.weight, out=own[:, : part.values.shape[1]])
            if column.missing == "indicator":
                own[:, -1] = part.missing * column.weight
            constants = (
                f"center = {column.center}, scale = {column.scale}, weight = {column.weight}"
            )
            _refuse_infinite(own, column, place, f"too large for {constants}")
            start += column.width
        return out, keep, parts

    def _present(self, present: Bools, name: str, place: Place) -> Bools:
        """Refuse missing values, or count those whose rows are dropped."""
        if not present.all():
            if self._want.nulls == "error":
                raise place.error(name, ~present)
            self.reading.missing[name] += int((~present).sum())
        return present.copy()

    def _first_rows(self, people: NDArray[np.object_], keep: Bools) -> Bools:
        first = np.zeros(len(people), bool)
        for row in np.flatnonzero(keep).tolist():
            person = hashlib.blake2b(people[row].encode(), digest_size=12).digest()
            first[row] = person not in self._people
            self._people.add(person)
        self.reading.repeated += int(keep.sum() - first.sum())
        return first


def labels(column: Any, name: str, place: Place) -> tuple[NDArray[np.int64], Bools]:
    """Return whole numbers, and which are present."""
    values = floats(column)
    present = ~np.isnan(values)
    values = np.where(present, values, 0)
    wrong = (values != np.floor(values)) | (values < 0) | (values >= MAX_WHOLE)
    if wrong.any():
        first = values[wrong.argmax()]
        raise place.error(name, wrong, f"label {first:g}; labels must be whole numbers from 0")
    return values.astype(np.int64), present


class Encoded(NamedTuple):
    """One column of a batch.

    `values` (n, own width) is without weight and indicator; `order` (n,) is a number by which
    records can be put into the bins of a histogram: normalized, or the index of a level.
    """

    values: Floats
    missing: Bools
    order: Floats

    def take(self, rows: NDArray[Any]) -> Encoded:
        """Return some records."""
        return Encoded(self.values[rows], self.missing[rows], self.order[rows])


def _at_site(column: Column, array: Any, place: Place, want: Want) -> Encoded:
    """Encode a column, which a site may write in its own way."""
    site, markers = want.site.get(column.name, SiteColumn()), want.null_values
    if site.codes:
        array = _recoded(texts(array, markers), site.codes)
    if site.factor != 1:  # (x * factor - center) / scale
        center, scale = column.center / site.factor, column.scale / site.factor
        column = replace(column, center=center, scale=scale)
    if site.format is not None:
        column = replace(column, format=site.format)
    if column.kind == "number":
        return _number(column, array, place, markers)
    if column.kind == "date":
        return _date(column, _timestamps(column, array, place, markers))
    plain = texts(array, markers)
    return ENCODERS[column.kind](column, plain, plain.is_null().to_numpy(False), place)


def _recoded(plain: Any, codes: Mapping[str, str]) -> Any:
    """Replace texts; others stay."""
    index = pc.index_in(plain, value_set=pa.array(list(codes), pa.string()))
    return pc.coalesce(pa.array(list(codes.values())).take(index), plain)


def _number(column: Column, array: Any, place: Place, markers: Sequence[str]) -> Encoded:
    is_text = pa.types.is_string(array.type)
    try:
        raw = floats(texts(array, markers) if is_text else array).copy()
    except pa.lib.ArrowInvalid as error:
        raise DataError(f"{place.path}: column {column.name!r}: not a number: {error}") from None
    for marker in markers:
        with suppress(ValueError):
            raw[raw == float(marker)] = np.nan
    _refuse_infinite(raw[:, None], column, place, "inf")
    return _scaled(raw, column)


def _scaled(raw: Floats, column: Column) -> Encoded:
    with np.errstate(over="ignore", invalid="ignore"):
        order = (raw - column.center) / column.scale
    return Encoded(order[:, None].copy(), np.isnan(order), order)


def _refuse_infinite(raw: NDArray[Any], column: Column, place: Place, problem: str) -> None:
    infinite = np.isinf(raw).any(axis=1)
    if infinite.any():
        raise place.error(column.name, infinite, problem)


def floats(array: Any) -> Floats:
    """Return a column as numbers, NaN where there is none."""
    values: Floats = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return values


def texts(array: Any, markers: Sequence[str]) -> Any:
    """Return a column as texts without spaces around them; null for a marker of a missing value.

    63.0 is written 63, so that a value is the same wherever a column was read as whole numbers
    and wherever as fractions.
    """
    plain = pc.utf8_trim_whitespace(written(array))
    if pa.types.is_string(array.type):
        plain = pc.replace_substring_regex(plain, r"^(-?\d+)\.0+$", r"\1")
    missing = pc.is_in(plain, value_set=pa.array(["", *markers], pa.string()))
    return pc.if_else(missing, pa.scalar(None, pa.string()), plain)


def written(array: Any) -> Any:
    """Return a column as texts, whole numbers in digits although they were read as fractions."""
    plain = array.cast(pa.string())
    if not pa.types.is_floating(array.type):
        return plain
    whole = pc.and_(pc.equal(pc.floor(array), array), pc.less(pc.abs(array), MAX_WHOLE))
    digits = pc.if_else(whole, array, pa.scalar(None, array.type)).cast(pa.int64())
    return pc.coalesce(digits.cast(pa.string()), plain)


def _codes(plain: Any, levels: Sequence[str]) -> NDArray[np.int64]:
    """Return the level of each text, -1 for none."""
    index = pc.index_in(plain, value_set=pa.array(list(levels), pa.string()), skip_nulls=True)
    codes: NDArray[np.int64] = index.fill_null(-1).to_numpy(False).astype(np.int64)
    return codes


def _category(column: Column, plain: Any, missing: Bools, place: Place) -> Encoded:
    if column.levels:
        codes = _codes(plain, column.levels)
        codes[codes < 0] = len(column.levels)
    else:
        packed = plain.dictionary_encode()
        slot = np.array([text_slot(t, column.slots) for t in packed.dictionary.to_pylist()] + [0])
        codes = slot[packed.indices.fill_null(-1).to_numpy(False)]
    values = np.zeros((len(codes), column.slots or len(column.levels) + 1))
    rows = np.flatnonzero(~missing)
    values[rows, codes[rows]] = APART
    return Encoded(values, missing, codes.astype(float))


@lru_cache(maxsize=1 << 16)
def text_slot(text: str, slots: int) -> int:
    """Return the slot of a text: public, and equal on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % slots


def _ordered(column: Column, plain: Any, missing: Bools, place: Place) -> Encoded:
    """Encode levels from -0.5 to 0.5: those of the column, or false and true."""
    levels: Sequence[str] = column.levels
    if column.kind == "boolean":
        truths = dict.fromkeys(TRUE, "true") | dict.fromkeys(FALSE, "false")
        plain, levels = _recoded(pc.utf8_lower(plain), truths), ("false", "true")
    codes = _codes(plain, levels)
    unknown = (codes < 0) & ~missing
    if unknown.any():
        first = plain[int(np.argmax(unknown))].as_py()
        allowed = ", ".join(column.levels) or "true, false, yes, no, 1, 0"
        raise place.error(column.name, unknown, f"{first!r} is not one of {allowed}")
    values = np.where(missing, 0.0, codes / (len(levels) - 1) - 0.5)
    return Encoded(values[:, None], missing, codes.astype(float))


def _date(column: Column, stamps: Any) -> Encoded:
    missing = stamps.is_null().to_numpy(False)
    if column.since is not None:
        start = np.datetime64(column.since, "s").astype(float)
        return _scaled((floats(stamps.cast(pa.int64())) - start) / 86400, column)
    numbers = [PART_OF[p](stamps).fill_null(0).to_numpy(False).astype(float) for p in column.parts]
    angles = 2 * np.pi * np.stack(numbers, axis=1) / [PERIODS[part] for part in column.parts]
    circles = np.stack([np.cos(angles), np.sin(angles)], axis=2).reshape(len(missing), -1) / 2
    return Encoded(np.where(missing[:, None], 0.0, circles), missing, numbers[0])


def _timestamps(column: Column, array: Any, place: Place, markers: Sequence[str]) -> Any:
    kind = pa.timestamp("s")
    if pa.types.is_temporal(array.type) and not pa.types.is_time(array.type):
        return array.cast(kind, safe=False)
    plain = texts(array, markers)
    try:
        if column.format is not None:
            return pc.strptime(plain, format=column.format, unit="s")
        return plain.cast(kind)
    except pa.lib.ArrowInvalid as error:
        written = column.format or "ISO 8601 (2020-01-31)"
        raise DataError(
            f"{place.path}: column {column.name!r}: a date is not written as {written}: {error}"
        ) from None


def _text(column: Column, plain: Any, missing: Bools, place: Place) -> Encoded:
    from sklearn.feature_extraction.text import HashingVectorizer

    hasher = HashingVectorizer(n_features=column.slots, norm="l2", alternate_sign=True)
    values: Floats = hasher.transform(plain.fill_null("").to_pylist()).toarray()
    order = np.abs(values).argmax(axis=1).astype(float)
    return Encoded(values * APART, missing, order)


ENCODERS: dict[str, Callable[[Column, Any, Bools, Place], Encoded]] = {
    "boolean": _ordered,
    "category": _category,
    "ordered": _ordered,
    "text": _text,
}
