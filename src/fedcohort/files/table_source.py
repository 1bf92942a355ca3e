"""Tables as sources: which columns make a row, and what their values become."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.columns import Column, columns_width
from fedcohort.files.encode import encode, floats, unpacked, written
from fedcohort.files.source import Block, Place, Reading, Source, Want
from fedcohort.files.tables import Kind, Table, open_table

Bools = NDArray[np.bool_]
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


class TableSource(Source):
    """Rows of tables; several files with the wanted columns follow each other.

    Columns become numbers as their `Column` says; without one, numbers and booleans (0 and 1) are
    taken as they are. A text column gives texts. Folders named ``column=value`` give that column
    to the files inside. The first `skip` files only say what the others hold.
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
            self.columns = tuple(map(self._column, self._named() or self._all_columns()))
            self.dim = columns_width(self.columns)
        self._check_roles()
        self._check(self._first)
        self.reading.assumed += self._first.detected

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        """Rows in all, where the files say so."""
        counts = [table.rows for table in self._tables]
        return None if None in counts else sum(n for n in counts if n is not None)

    def blocks(self) -> Iterator[Block]:
        """Yield vectors (n, dim), or lists of texts."""
        self.reading.clear()
        self._people.clear()
        rows, uses = self._want.rows_for(self.dim), self._uses()
        forced: dict[str, Literal["text", "number"]] = {
            c: "text" if use in AS_WRITTEN else "number" for c, use in uses.items()
        }
        for table in self._tables:
            self._check(table)
            first = 0
            for batch in table.batches(tuple(uses), rows, forced):
                yield self._block(batch, Place(table.where, first))
                first += batch.num_rows

    def _named(self) -> list[str | Column]:
        """Return the columns asked for, patterns such as ``p*`` replaced by those they match."""
        table, chosen = self._first, list[str | Column]()
        for wanted in self._want.columns:
            if isinstance(wanted, Column):
                chosen.append(wanted)
                continue
            exact = wanted in table.names or not set(wanted) & set("*?[")
            matching = [c for c in table.names if fnmatchcase(c, wanted)]
            if not exact and not matching:
                table.kind(wanted)  # says which columns there are
            chosen += [wanted] if exact else matching
        names = [c.name if isinstance(c, Column) else c for c in chosen]
        if len(set(names)) < len(names):
            raise ConfigError(f"--columns {','.join(names)}: name each column once")
        return chosen

    def _all_columns(self) -> list[str | Column]:
        """Return every column of numbers, in the file's order; say which were left out."""
        table, usable = self._first, list[str | Column]()
        taken = (self._want.label, self._want.by, self._want.person)
        for name in (c for c in table.names if c not in taken):
            if not name:
                self.reading.left_out["the column without a name"] = "row names, as R writes them"
            elif table.kind(name) in NUMBERS:
                usable.append(name)
            else:
                self.reading.left_out[name] = f"{table.type_name(name)} is not a number"
        if not usable:
            raise DataError(f"{table.where}: no column holds numbers; {REMEDY['vectors']}")
        return usable

    def _column(self, wanted: str | Column) -> Column:
        if isinstance(wanted, Column):
            return wanted
        return Column(wanted, missing=self._want.nulls)

    def _uses(self) -> dict[str, str]:
        """Return what each column at this site is used for."""
        name = self._want.name_at_site
        uses: dict[str, str] = {name(c.name): c.kind for c in self.columns}
        return uses | {name(column): role for role, column in self._roles()}

    def _roles(self) -> list[tuple[str, str]]:
        want = self._want
        roles = (("label", want.label), ("by", want.by), ("person", want.person))
        return [(role, name) for role, name in roles if name is not None]

    def _check_roles(self) -> None:
        hashed = {self._want.name_at_site(column.name) for column in self.columns}
        if len(hashed) < len(self.columns):
            raise ConfigError("two columns of the spec are one column at this site")
        for role, name in self._roles():
            if self._want.name_at_site(name) in hashed:
                raise ConfigError(f"--{role} {name}: also one of the columns that are hashed")

    def _check(self, table: Table) -> None:
        stated = {
            self._want.name_at_site(c.name) for c in self._want.columns if not isinstance(c, str)
        }
        for name, use in self._uses().items():
            kind = table.kind(name)
            if use == "number" and name not in stated:
                use = "vectors"
            written = use in AS_WRITTEN and table.as_written and name in table.inside
            if kind not in ALLOWED[use] and not written:
                remedy = REMEDY.get(use, f"it should hold a {use}")
                raise DataError(
                    f"{table.where}: column {name!r} is {table.type_name(name)}; {remedy}"
                )

    def _block(self, batch: Any, place: Place) -> Block:
        x, keep, parts = self._content(batch, place)
        y = ids = None
        for role, column in self._roles():
            name = self._want.name_at_site(column)
            if role == "label":
                y, present = labels(batch[name], name, place)
            else:
                plain = written(batch[name])
                names = np.array(plain.to_pylist(), object)
                present = names.astype(bool)
                ids = names if role == "by" else ids
            keep &= self._present(present, name, place)
            if role == "person":
                keep &= self._first_rows(names, keep)
        self.reading.count(keep, self._want.label, y)
        if keep.all():
            return Block(x, y, ids, parts)
        kept = x[keep] if isinstance(x, np.ndarray) else [x[i] for i in np.flatnonzero(keep)]
        left = [part.take(keep) for part in parts]
        return Block(kept, None if y is None else y[keep], None if ids is None else ids[keep], left)

    def _content(
        self, batch: Any, place: Place
    ) -> tuple[NDArray[Any] | list[Any], Bools, list[Any]]:
        want = self._want
        names = [want.name_at_site(c.name) for c in self.columns]
        if self.form == "vectors":
            arrays = [batch[c] for c in names]
            return encode(self.columns, arrays, place, want.null_values, self.reading, want.site)
        texts = unpacked(batch[names[0]]).cast(pa.string())
        present = texts.is_valid().to_numpy(zero_copy_only=False)
        return texts.to_pylist(), self._present(present, names[0], place), []

    def _present(self, present: Bools, name: str, place: Place) -> Bools:
        """Refuse missing values, or count those whose rows are dropped."""
        if not present.all():
            if self._want.nulls == "error":
                raise place.missing(repr(name), int(np.argmin(present)))
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
    whole = (values == np.floor(values)) & (values >= 0) & (values < 2**53)
    if not whole.all():
        row = int(np.argmin(whole))
        raise DataError(
            f"{place.path}: column {name!r}, row {place.first + row}: label {values[row]:g}; "
            "labels must be whole numbers from 0"
        )
    return values.astype(np.int64), present
