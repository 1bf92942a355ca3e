"""Tables as sources: which columns make a row, and what their values become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.columns import Column, columns_width
from fedcohort.files.encode import count_others, encode, floats, texts, unpacked
from fedcohort.files.source import Block, Nulls, Place, Reading, Source, Want, missing_value
from fedcohort.files.table_file import Kind, TableFile, need_pyarrow

Bools = NDArray[np.bool_]
NUMBERS: tuple[Kind, ...] = ("whole", "number", "vector", "empty")
ANY: tuple[Kind, ...] = ("whole", "number", "text", "date", "empty")
ALLOWED: dict[str, tuple[Kind, ...]] = {
    "number": (*NUMBERS, "text"),
    "boolean": ("whole", "number", "text", "empty"),
    "category": ANY,
    "ordered": ANY,
    "date": ("date", "text", "empty"),
    "text": ("text", "empty"),
    "value": ("text", "whole", "number", "empty"),
    "vectors": NUMBERS,
    "texts": ("text", "empty"),
    "tokens": ("list",),
    "label": ("whole", "number"),
    "by": ("whole", "text"),
}
REMEDY = {
    "vectors": "vectors hold numbers; leave the column out, say in a spec what it holds, or "
    "compare rows as sets of column=value with --hash minhash",
    "texts": "--text takes a column of text or of lists of tokens",
    "value": "sets hold text, numbers and booleans",
    "tokens": "every file must have lists there",
    "label": "--label takes whole numbers from 0",
    "by": "--by takes text or whole numbers",
}
AS_WRITTEN = ("texts", "by", "boolean", "category", "ordered", "date", "text", "value")


class TableSource(Source):
    """Rows of tables; several files with the wanted columns follow each other.

    As vectors, columns become numbers as their `Column` says; without one, numbers and booleans
    (0 and 1) are taken as they are. As sets, each value is the token ``column=value``. A text
    column gives texts, or token sets if it holds lists. Folders named ``column=value`` give that
    column to the files inside.
    """

    def __init__(self, files: Sequence[Path], root: Path, want: Want) -> None:
        need_pyarrow()
        quoted = want.text is None  # "" in quotes is a text, and elsewhere a missing value
        self.files = [TableFile(p, root, want.csv, want.null_values, quoted) for p in files]
        self._want, self.reading = want, Reading()
        self.form = want.form
        self._tokens = False
        if want.text is not None:
            self._tokens = self.files[0].kind(want.text) == "list"
            self.form = "sets" if self._tokens else "texts"
            self.columns = (Column(want.text, "value"),)
        else:
            self.columns = tuple(map(self._column, self._named() or self._all_columns()))
        self._check_roles()
        self._check(self.files[0])
        self.dim = columns_width(self.columns) if self.form == "vectors" else 0
        if self.files[0].is_csv:
            self.reading.assumed += self.files[0].dialect.detected

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        """Rows in all, where the files say so."""
        counts = [table.rows for table in self.files]
        return None if None in counts else sum(n for n in counts if n is not None)

    def blocks(self) -> Iterator[Block]:
        """Yield vectors (n, dim), lists of texts or lists of token lists."""
        self.reading.clear()
        rows, uses = self._want.rows_for(self.dim), self._uses()
        as_text = [c for c, use in uses.items() if use in AS_WRITTEN]
        as_numbers = [c for c, use in uses.items() if use in ("number", "vectors", "label")]
        for table in self.files:
            self._check(table)
            first = 0
            for batch in table.batches(tuple(uses), rows, as_text, as_numbers):
                yield self._block(batch, Place(str(table.path), first))
                first += batch.num_rows

    def _named(self) -> list[str | Column]:
        """Return the columns asked for, patterns such as ``p*`` replaced by those they match."""
        table, found = self.files[0], list[str | Column]()
        for wanted in self._want.columns:
            if isinstance(wanted, Column):
                found.append(wanted)
                continue
            exact = wanted in table.names or not set(wanted) & set("*?[")
            matching = [c for c in table.names if fnmatchcase(c, wanted)]
            if not exact and not matching:
                table.kind(wanted)  # says which columns there are
            found += [wanted] if exact else matching
        names = [c.name if isinstance(c, Column) else c for c in found]
        if len(set(names)) < len(names):
            raise ConfigError(f"--columns {','.join(names)}: name each column once")
        return found

    def _all_columns(self) -> list[str | Column]:
        """Return every column that has the form, in the file's order; say which were left out."""
        table, taken = self.files[0], (self._want.label, self._want.by)
        use = "vectors" if self.form == "vectors" else "value"
        found = list[str | Column]()
        for name in table.names:
            if name in taken:
                continue
            if not name:
                self.reading.left_out["the column without a name"] = "row names, as R writes them"
            elif table.kind(name) in ALLOWED[use]:
                found.append(name)
            else:
                self.reading.left_out[name] = f"{table.type_name(name)} is not a number"
        if not found:
            raise DataError(f"{table.path}: no column holds numbers; {REMEDY[use]}")
        return found

    def _column(self, wanted: str | Column) -> Column:
        if isinstance(wanted, Column):
            return wanted
        if self.form != "vectors":
            return Column(wanted, "value")
        return Column(wanted, size=self.files[0].width(wanted), missing=self._want.nulls)

    def _uses(self) -> dict[str, str]:
        """Say what every column is used for: a column's kind, texts, tokens, label or by."""
        uses: dict[str, str] = {c.name: c.kind for c in self.columns}
        if self._want.text is not None:
            uses[self._want.text] = "tokens" if self._tokens else "texts"
        for role, name in (("label", self._want.label), ("by", self._want.by)):
            if name is not None:
                uses[name] = role
        return uses

    def _check_roles(self) -> None:
        hashed = {column.name for column in self.columns}
        for role, name in (("label", self._want.label), ("by", self._want.by)):
            if name in hashed:
                raise ConfigError(f"--{role} {name}: also one of the columns that are hashed")

    def _check(self, table: TableFile) -> None:
        stated = {c.name for c in self._want.columns if isinstance(c, Column)}
        for name, use in self._uses().items():
            kind = table.kind(name)
            if use == "number" and name not in stated:
                use = "vectors"
            written = use in AS_WRITTEN and table.is_csv and name in table.schema.names
            if kind not in ALLOWED[use] and not written:
                remedy = REMEDY.get(use, f"the spec says that it holds a {use}")
                raise DataError(
                    f"{table.path}: column {name!r} is {table.type_name(name)}; {remedy}"
                )

    def _block(self, batch: Any, place: Place) -> Block:
        x, keep, parts = self._content(batch, place)
        y = ids = None
        if self._want.label is not None:
            y, known = labels(batch[self._want.label], self._want.label, place, self._want.nulls)
            keep &= self._note(self._want.label, known)
        if self._want.by is not None:
            ids, known = client_ids(batch[self._want.by], self._want.by, place, self._want.nulls)
            keep &= self._note(self._want.by, known)
        self.reading.rows += len(keep)
        self.reading.kept += int(keep.sum())
        if keep.all():
            return Block(x, y, ids, parts)
        kept = x[keep] if isinstance(x, np.ndarray) else [x[i] for i in np.flatnonzero(keep)]
        left = [part.take(keep) for part in parts]
        return Block(kept, None if y is None else y[keep], None if ids is None else ids[keep], left)

    def _note(self, name: str, known: Bools) -> Bools:
        """Count the missing values of a label or client column."""
        if not known.all():
            self.reading.missing[name] += int((~known).sum())
        return known

    def _content(
        self, batch: Any, place: Place
    ) -> tuple[NDArray[Any] | list[Any], Bools, list[Any]]:
        names = [c.name for c in self.columns]
        want, name = self._want, names[0]
        if self.form == "vectors":
            arrays = [batch[c] for c in names]
            x, keep, parts = encode(self.columns, arrays, place, want.null_values, self.reading)
            for column, part in zip(self.columns, parts, strict=True):
                self.reading.look_at(column, part.order, ~part.missing)
            self.reading.others += count_others(self.columns, parts)
            return x, keep, parts
        if self._tokens:
            rows, keep = token_lists(batch[name], name, place, want.nulls)
        elif want.text is not None:
            values = unpacked(batch[name]).cast(need_pyarrow().string()).to_pylist()
            rows, keep = _filled(values, "", name, place, want.nulls)
        else:
            arrays = [texts(batch[c], want.null_values).to_pylist() for c in names]
            rows, keep = value_sets(names, arrays, place, want.nulls)
        if not keep.all():
            self.reading.missing["a hashed column"] += int((~keep).sum())
        return rows, keep, []


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


def value_sets(
    names: Sequence[str], columns: Sequence[list[Any]], place: Place, nulls: Nulls
) -> tuple[list[Any], Bools]:
    """Return rows as sets of ``column=value``; a missing value that counts as zero is absent."""
    keep = np.ones(len(columns[0]), bool)
    sets: list[list[str]] = [[] for _ in keep]
    for name, column in zip(names, columns, strict=True):
        values, known = _filled(column, None, name, place, nulls)
        keep &= known
        for tokens, value in zip(sets, values, strict=True):
            if value is not None:
                tokens.append(f"{name}={value}")
    return sets, keep


def labels(column: Any, name: str, place: Place, nulls: Nulls) -> tuple[NDArray[np.int64], Bools]:
    """Return whole numbers; a missing label never counts as zero."""
    values = floats(column)
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
    plain = unpacked(column).cast(need_pyarrow().string()).to_pylist()
    known = np.array([bool(value) for value in plain], bool)
    if not known.all() and nulls != "drop":
        raise missing_value(place, repr(name), int(np.argmin(known)))
    ids = np.empty(len(plain), object)
    ids[:] = plain
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
