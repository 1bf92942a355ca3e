"""Tables as sources: which columns make a row, and what their values become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.columns import (
    Bools,
    client_ids,
    labels,
    texts,
    token_lists,
    value_sets,
    vectors,
)
from fedcohort.files.source import Block, Place, Source, Want
from fedcohort.files.table_file import Kind, TableFile, need_pyarrow

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
