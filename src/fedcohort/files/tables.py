"""Columns of a record batch as what sketches take: vectors, texts, sets, labels, client ids.

Each function returns the values of all rows and which rows to keep.

Tables as sources: which columns make a row, and what their values become.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.source import Block, Nulls, Place, Source, Want, fill, missing_value
from fedcohort.files.table_file import Kind, TableFile, need_pyarrow

Bools = NDArray[np.bool_]


def vectors(
    columns: Sequence[Any], widths: Sequence[int], place: Place, nulls: Nulls
) -> tuple[NDArray[Any], Bools]:
    """Return numbers, booleans and lists of `widths` numbers as float64 (n, sum of widths)."""
    out = np.full((len(columns[0]), sum(widths)), np.nan)
    start = 0
    for name, column, width in zip(place.names, columns, widths, strict=True):
        if "list" in str(column.type):
            _spread(column, out[:, start : start + width], name, place)
        else:
            out[:, start] = _floats(column)
        start += width
    names = [n for n, width in zip(place.names, widths, strict=True) for _ in range(width)]
    return fill(out, place._replace(names=names), nulls)


def _spread(column: Any, out: NDArray[Any], name: str, place: Place) -> None:
    """Write lists of equal length into `out`; rows without a list stay as they are."""
    known = column.is_valid().to_numpy(zero_copy_only=False)
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    wrong = known & (lengths != out.shape[1])
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"{place.path}: column {name!r}, row {place.first + row}: a list of "
            f"{lengths[row]:g} numbers, not {out.shape[1]}"
        )
    out[known] = _floats(column.drop_null().flatten()).reshape(-1, out.shape[1])


def texts(column: Any, name: str, place: Place, nulls: Nulls) -> tuple[list[Any], Bools]:
    """Return texts; a missing one that counts as zero is the empty text."""
    return _filled(_as_text(column), "", name, place, nulls)


def token_lists(column: Any, name: str, place: Place, nulls: Nulls) -> tuple[list[Any], Bools]:
    """Return lists of tokens; a missing one that counts as zero is the empty set."""
    rows, keep = _filled(column.to_pylist(), [], name, place, nulls)
    for row, tokens in enumerate(rows):
        if keep[row] and not all(isinstance(t, (str, int)) for t in tokens):
            raise DataError(
                f"{place.path}: column {name!r}, row {place.first + row}: a token must be text or "
                "a whole number"
            )
    return rows, keep


def value_sets(columns: Sequence[Any], place: Place, nulls: Nulls) -> tuple[list[Any], Bools]:
    """Return rows as sets of ``column=value``; a missing value that counts as zero is absent."""
    keep = np.ones(len(columns[0]), bool)
    sets: list[list[str]] = [[] for _ in keep]
    for name, column in zip(place.names, columns, strict=True):
        values, known = _filled(_as_text(column, True), None, name, place, nulls)
        keep &= known
        for tokens, value in zip(sets, values, strict=True):
            if value is not None:
                tokens.append(f"{name}={value}")
    return sets, keep


def labels(column: Any, name: str, place: Place, nulls: Nulls) -> tuple[NDArray[np.int64], Bools]:
    """Return whole numbers; a missing label never counts as zero."""
    values = _floats(column)
    known = ~np.isnan(values)
    if not known.all() and nulls != "drop":
        raise missing_value(place, repr(name), int(np.argmin(known)))
    values = np.where(known, values, 0)
    whole = (values == np.floor(values)) & (values >= 0) & (values < 2**53)
    if not whole.all():
        row = int(np.argmin(whole))
        raise DataError(
            f"{place.path}: column {name!r}, row {place.first + row}: label {values[row]:g}; "
            "labels must be whole numbers from 0"
        )
    return values.astype(np.int64), known


def client_ids(
    column: Any, name: str, place: Place, nulls: Nulls
) -> tuple[NDArray[np.object_], Bools]:
    """Return names of clients; a missing one is an error unless its row is dropped."""
    values = _as_text(column, True)
    known = np.array([value is not None for value in values], bool)
    if not known.all() and nulls != "drop":
        raise missing_value(place, repr(name), int(np.argmin(known)))
    ids = np.empty(len(values), object)
    ids[:] = values
    return ids, known


def _filled(
    values: list[Any], zero: Any, name: str, place: Place, nulls: Nulls
) -> tuple[list[Any], Bools]:
    known = np.array([value is not None for value in values], bool)
    if known.all():
        return values, known
    if nulls == "error":
        raise missing_value(place, repr(name), int(np.argmin(known)))
    filled = [zero if value is None else value for value in values]
    return filled, known if nulls == "drop" else np.ones(len(values), bool)


def _floats(column: Any) -> NDArray[np.float64]:
    """Return a column as numbers, NaN where there is none."""
    plain = _plain(column).cast(need_pyarrow().float64(), safe=False)
    values: NDArray[np.float64] = plain.to_numpy(zero_copy_only=False)
    return values


def _as_text(column: Any, empty_is_missing: bool = False) -> list[str | None]:
    values: list[str | None] = _plain(column).cast(need_pyarrow().string()).to_pylist()
    return [value or None for value in values] if empty_is_missing else values


def _plain(column: Any) -> Any:
    """Unpack a column of categories to its values."""
    is_dictionary = need_pyarrow().types.is_dictionary(column.type)
    return column.dictionary_decode() if is_dictionary else column


ALLOWED: dict[str, tuple[Kind, ...]] = {
    "vectors": ("whole", "number", "vector", "empty"),
    "texts": ("text", "empty"),
    "sets": ("text", "whole", "empty"),
    "tokens": ("list",),
    "label": ("whole", "number"),
    "by": ("whole", "text"),
}
REMEDY = {
    "vectors": "vectors hold numbers; leave the column out, give it numbers, or compare rows as "
    "sets of column=value with --hash minhash",
    "texts": "--text takes a column of text or of lists of tokens",
    "sets": "sets hold text, whole numbers and booleans; for other numbers use --hash srp",
    "tokens": "every file must have lists there",
    "label": "--label takes whole numbers from 0",
    "by": "--by takes text or whole numbers",
}


class TableSource(Source):
    """Rows of tables; several files with the wanted columns follow each other.

    As vectors, numbers and booleans (0 and 1) are taken. As sets, each value of text, whole
    number or boolean is the token ``column=value``. A text column gives texts, or token sets if
    it holds lists. Folders named ``column=value`` give that column to the files inside.
    """

    def __init__(self, files: Sequence[Path], root: Path, want: Want) -> None:
        need_pyarrow()
        self.files = [TableFile(path, root) for path in files]
        self._want = want
        self._use: dict[str, str] = {}
        self.form = want.form
        if want.text is not None:
            lists = self.files[0].kind(want.text) == "list"
            self.form = "sets" if lists else "texts"
            self.columns, use = (want.text,), "tokens" if lists else "texts"
        else:
            self.columns, use = self._expanded() or self._all_columns(), self.form
        if len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"--columns {','.join(self.columns)}: name each column once")
        self._use = dict.fromkeys(self.columns, use)
        for role, column in (("label", want.label), ("by", want.by)):
            if column in self._use:
                raise ConfigError(f"--{role} {column}: also one of the columns that are hashed")
            if column is not None:
                self._use[column] = role
        self._check(self.files[0])
        self._widths = [self.files[0].width(c) for c in self.columns]
        self.dim = sum(self._widths) if self.form == "vectors" else 0

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        """Rows in all, where the files say so."""
        counts = [table.rows for table in self.files]
        return None if None in counts else sum(n for n in counts if n is not None)

    def blocks(self) -> Iterator[Block]:
        """Yield vectors (n, dim), lists of texts or lists of token lists."""
        rows = self._want.rows_for(self.dim)
        as_text = [c for c, use in self._use.items() if use in ("texts", "by")]
        as_numbers = [c for c, use in self._use.items() if use in ("vectors", "label")]
        for table in self.files:
            self._check(table)
            first = 0
            for batch in table.batches(tuple(self._use), rows, as_text, as_numbers):
                yield self._block(batch, Place(str(table.path), first, self.columns))
                first += batch.num_rows

    def _expanded(self) -> tuple[str, ...]:
        """Return the columns asked for, patterns such as ``p*`` replaced by those they match."""
        found: list[str] = []
        for name in self._want.columns:
            exact = name in self.files[0].names or not set(name) & set("*?[")
            matching = [c for c in self.files[0].names if fnmatchcase(c, name)]
            if not exact and not matching:
                self.files[0].kind(name)  # says which columns there are
            found += [name] if exact else matching
        return tuple(found)

    def _all_columns(self) -> tuple[str, ...]:
        """Return every column that has the form, in the file's order."""
        table, taken = self.files[0], (self._want.label, self._want.by)
        allowed = ALLOWED[self.form]
        found = [c for c in table.names if c not in taken and table.kind(c) in allowed]
        if not found:
            raise DataError(f"{table.path}: no column holds numbers; {REMEDY[self.form]}")
        return tuple(found)

    def _check(self, table: TableFile) -> None:
        for column, use in self._use.items():
            as_written = use in ("texts", "by") and table.reads_as_text(column)
            if table.kind(column) not in ALLOWED[use] and not as_written:
                kind = table.type_name(column)
                raise DataError(f"{table.path}: column {column!r} is {kind}; {REMEDY[use]}")

    def _block(self, batch: Any, place: Place) -> Block:
        x, keep = self._content(batch, place)
        y = ids = None
        if self._want.label is not None:
            y, known = labels(batch[self._want.label], self._want.label, place, self._want.nulls)
            keep &= known
        if self._want.by is not None:
            ids, known = client_ids(batch[self._want.by], self._want.by, place, self._want.nulls)
            keep &= known
        if keep.all():
            return Block(x, y, ids)
        kept = x[keep] if isinstance(x, np.ndarray) else [x[i] for i in np.flatnonzero(keep)]
        return Block(kept, None if y is None else y[keep], None if ids is None else ids[keep])

    def _content(self, batch: Any, place: Place) -> tuple[NDArray[Any] | list[Any], Bools]:
        use, nulls = self._use[self.columns[0]], self._want.nulls
        if use == "vectors":
            return vectors([batch[c] for c in self.columns], self._widths, place, nulls)
        if use == "sets":
            return value_sets([batch[c] for c in self.columns], place, nulls)
        read = texts if use == "texts" else token_lists
        return read(batch[self.columns[0]], self.columns[0], place, nulls)
