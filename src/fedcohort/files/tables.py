"""Tables as record batches of PyArrow: Parquet, CSV, Arrow, JSON Lines, Excel, SQLite, in memory.

Parquet does not go through a PyArrow dataset's scanner, which unpacks whole row groups, by default
a million rows. DuckDB's wheel reads neither Excel nor SQLite nor cp1252 without a download at run
time, and it takes decimal commas for text.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sqlite3
import zipfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import date
from functools import cached_property
from io import TextIOWrapper
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.bombs import check_arrow, check_unpacked, parquet_plan
from fedcohort.files.source import (
    MAX_TEXT,
    CsvOptions,
    Want,
    decompressed,
    kind_of,
    line_blocks,
    reading,
)

Kind = Literal["whole", "number", "text", "date", "empty", "other"]
Forced = Mapping[str, Literal["text", "number"]]
BLOCK = 4 << 20
BUFFER = 1 << 16
MAX_KEYS = 1 << 16
FIRST_ROWS = 1000  # of a sheet or a query, to tell the types
HEAD = 1 << 16  # letters of a CSV file that show how it is written
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
DELIMITERS = (",", ";", "\t", "|")
WORKBOOK = (LookupError, TypeError, AttributeError, AssertionError, SyntaxError)  # by openpyxl
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def open_table(data: Any, root: Path, want: Want) -> Table:
    """Open a file below `root`, an object with ``__arrow_c_stream__``, or a connection."""
    if isinstance(data, Path):
        return FORMATS[str(kind_of(data))](data, root, want)
    return (QueryTable if hasattr(data, "cursor") else MemoryTable)(data, root, want)


class Table:
    """A table, with the columns that the names of its folders give it.

    A format has `_schema` and `_stream`, its record batches. Where `as_written` is true, columns
    can be read as the texts that are written in the file.
    """

    as_written = False
    detected: tuple[str, ...] = ()

    def __init__(self, path: Any, root: Path, want: Want) -> None:
        self.path, self._want = path, want
        self.where = str(path) if isinstance(path, Path) else str(root)
        folders = path.relative_to(root).parts[:-1] if self.where != str(root) else ()
        pairs = (part.split("=", 1) for part in folders if "=" in part)
        self._given = {unquote(key): unquote(value) for key, value in pairs}

    def _schema(self) -> Any:
        raise NotImplementedError

    def _stream(self, columns: list[str], rows: int, forced: Forced) -> Any:
        raise NotImplementedError

    @property
    def rows(self) -> int | None:
        """Rows, where the file says so."""
        return None

    @cached_property
    def schema(self) -> Any:
        """Columns and types: of the file, then of the folders that it lies in."""
        with reading(self.where, pa.ArrowException):
            schema = self._schema()
            names = schema.names  # decodes them
        self._given = {n: value for n, value in self._given.items() if n not in names}
        for name in self._given:
            schema = schema.append(pa.field(name, pa.string()))
        return schema

    def kind(self, column: str) -> Kind:
        """Say what a column holds; DataError if there is none."""
        names = self.schema.names
        if column not in names:
            there = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise DataError(f"{self.where}: no column {column!r}; there are {there}")
        if names.count(column) > 1:
            raise DataError(f"{self.where}: two columns are called {column!r}")
        return kind_of_type(self.schema.field(column).type)

    def batches(self, columns: tuple[str, ...], rows: int, forced: Forced | None = None) -> Any:
        """Yield record batches of the columns, at most `rows` rows each.

        Where the first lines tell the type of a column, it may be forced: a number may have
        fractions later on, and a text is read as it is written.
        """
        inside = [c for c in columns if c in self.schema.names and c not in self._given]
        with reading(self.where, pa.ArrowException):
            for batch in self._stream(inside, rows, forced or {}):
                batch.validate(full=True)  # offsets and indexes of a damaged file lead anywhere
                for part in _within_memory(batch, rows):
                    given = {c: pa.repeat(value, len(part)) for c, value in self._given.items()}
                    arrays = [given[c] if c in given else _plain(part[c]) for c in columns]
                    yield pa.RecordBatch.from_arrays(arrays, names=list(columns))


class ParquetTable(Table):
    """A Parquet file, whose footer is checked first."""

    def _schema(self) -> Any:
        return pa.parquet.read_schema(self.path)

    @property
    def rows(self) -> int | None:
        """Rows, as the footer says."""
        with reading(self.where, pa.ArrowException):
            count: int = pa.parquet.read_metadata(self.path).num_rows
        return count

    def _stream(self, columns: list[str], rows: int, *_: Any) -> Any:
        rows, texts = parquet_plan(self.path, columns, rows)
        file = pa.parquet.ParquetFile(
            self.path, read_dictionary=texts, buffer_size=BUFFER, pre_buffer=False
        )
        return file.iter_batches(rows, columns=columns, use_threads=False)


class CsvTable(Table):
    """A text file of cells."""

    as_written = True

    @cached_property
    def dialect(self) -> Dialect:
        """How the file is written: as stated, or as its first lines show."""
        with reading(self.where, pa.ArrowException):
            return find_dialect(self.path, self._want.csv, self._want.null_values)

    @property
    def detected(self) -> tuple[str, ...]:  # type: ignore[override]
        """What of the dialect was not stated."""
        return self.dialect.detected

    def _schema(self) -> Any:
        return self._open({}, None).schema

    def _stream(self, columns: list[str], rows: int, forced: Forced) -> Any:
        booleans = {field.name for field in self.schema if pa.types.is_boolean(field.type)}
        numbers = [c for c in columns if forced.get(c) == "number" and c not in booleans]
        types = dict.fromkeys(numbers, pa.float64())
        types |= {c: pa.string() for c in columns if forced.get(c) == "text"}
        try:
            yield from self._open(types, columns)
        except pa.ArrowInvalid as error:
            raise DataError(f"{self.where}: cannot be read: {self._plain(str(error))}") from None

    def _plain(self, message: str) -> str:
        """Name the column that PyArrow counts, and say what can be done."""
        match = re.match(r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error", message)
        if match is None or int(match[1]) >= len(self.schema.names):
            return message[:300]
        column = self.schema.names[int(match[1])]
        where = f"column {column!r}" + (f", line {match[2]}" if match[2] else "")
        if "UTF8" in message:
            return f"{where}: not UTF-8; name the encoding, such as --csv encoding=cp1252"
        value = re.sub(r".*invalid value '(.*)'.*", r"\1", message, flags=re.S)[:300]
        return (
            f"{where}: {value!r} is not a number; name markers of missing values by --null-values"
        )

    def _open(self, types: dict[str, Any], columns: list[str] | None) -> Any:
        arrow, dialect = pa.csv, self.dialect
        return arrow.open_csv(
            self.path,
            read_options=arrow.ReadOptions(
                block_size=BLOCK,
                use_threads=False,
                encoding=dialect.encoding,
                column_names=list(dialect.names) or None,
            ),
            parse_options=arrow.ParseOptions(delimiter=dialect.delimiter),
            convert_options=arrow.ConvertOptions(
                column_types=types,
                include_columns=columns,
                null_values=["", *self._want.null_values],
                strings_can_be_null=True,
                # "" in quotes is a text, and elsewhere a missing value
                quoted_strings_can_be_null=self._want.text is None,
                decimal_point=dialect.decimal,
            ),
        )


class Dialect(NamedTuple):
    """How a CSV file is written; `detected` says what of it was not stated.

    `names` are given to the columns of a file without a header.
    """

    delimiter: str
    decimal: str
    encoding: str
    names: tuple[str, ...]
    detected: tuple[str, ...]


def find_dialect(path: Path, stated: CsvOptions, null_values: Sequence[str]) -> Dialect:
    """Detect delimiter, decimal mark, encoding and header from the first lines of a file.

    A delimiter is believed if it is the only one that cuts the first lines into equally many
    parts. Numbers with a comma count as decimal only where the delimiter is not a comma. An
    encoding is believed if the file begins with its mark; all else must be UTF-8. A first row of
    numbers and missing values is data, not names; one that counts (0, 1, 2, ...) could be either,
    so it is refused.
    """
    tabs = ".tsv" in path.name.lower()
    encoding, lines = _first_lines(path, stated.encoding)
    delimiter = stated.delimiter or ("\t" if tabs else _delimiter(lines))
    first, *others = [*csv.reader(lines, delimiter=delimiter)] or [[]]
    comma = delimiter != "," and _comma_is_decimal(others)
    decimal = stated.decimal or ("," if comma else ".")
    header = stated.header
    if header is None:
        quoted = any('"' in line for line in lines[:1])
        header = quoted or _is_header(path, first, decimal, null_values)
    names = () if header else tuple(f"c{i + 1}" for i in range(len(first)))
    detected = {
        f"encoding {encoding}": stated.encoding is None and encoding != "utf-8",
        f"delimiter {delimiter!r}": stated.delimiter is None and delimiter != "," and not tabs,
        "decimal comma": stated.decimal is None and comma,
        f"no header, so the columns are called c1 to c{len(names)}": names
        and stated.header is None,
    }
    said = tuple(text for text, holds in detected.items() if holds)
    return Dialect(delimiter, decimal, encoding, names, said)


def _first_lines(path: Path, encoding: str | None) -> tuple[str, list[str]]:
    """Return the encoding, as stated or as a mark tells, and lines that are not blank."""
    with decompressed(path) as file:
        head = file.read(4)
        marked = (name for mark, name in MARKS.items() if head.startswith(mark))
        encoding = encoding or next(marked, "utf-8")
        file.seek(0)
        try:
            with TextIOWrapper(file, encoding) as text:
                lines = text.read(HEAD).lstrip("\ufeff").splitlines()
        except LookupError:
            raise ConfigError(f"--csv encoding={encoding}: unknown to Python") from None
        except UnicodeDecodeError:
            raise DataError(
                f"{path}: the text is not {encoding.upper()}; name the right one, such as "
                "--csv encoding=cp1252 (Excel in Western Europe)"
            ) from None
    # The last line may be cut.
    return encoding, [line for line in lines[:50] if line.strip()][: min(20, len(lines) - 1) or 1]


def _is_header(path: Path, cells: Sequence[str], decimal: str, null_values: Sequence[str]) -> bool:
    """Whether the cells of the first row are names."""
    missing = ("", *null_values)
    filled = [c.strip().replace(decimal, ".") for c in cells if c.strip() not in missing]
    if not filled or not all(NUMBER.fullmatch(c) for c in filled):
        return True
    values = [float(c) for c in filled]
    if len(values) > 1 and all(b - a == 1 for a, b in pairwise(values)):
        raise DataError(
            f"{path}: the first row counts {filled[0]}, {filled[1]}, ...: say --csv "
            "header=true if these are names of columns, header=false if they are data"
        )
    return False


def _delimiter(lines: Sequence[str]) -> str:
    tables = {d: list(csv.reader(lines, delimiter=d)) for d in DELIMITERS}
    widths = {d: {len(row) for row in table} for d, table in tables.items()}
    even = [d for d, numbers in widths.items() if len(numbers) == 1 and min(numbers) > 1]
    return max(even, key=lambda d: _share_of_numbers(tables[d]), default=",")


def _share_of_numbers(rows: Sequence[Sequence[str]]) -> float:
    cells = [cell.strip().replace(",", ".") for row in rows for cell in row]
    return sum(NUMBER.fullmatch(cell) is not None for cell in cells) / len(cells)


def _comma_is_decimal(rows: Sequence[Sequence[str]]) -> bool:
    cells = [cell.strip() for row in rows for cell in row]
    comma, point = (
        any(re.fullmatch(rf"[-+]?\d+{mark}\d+([eE][-+]?\d+)?", c) for c in cells)
        for mark in (",", r"\.")
    )
    return comma and not point


class ArrowTable(Table):
    """An Arrow or Feather file, or an Arrow stream, whose batches are checked first."""

    def _schema(self) -> Any:
        return self._open(None).schema

    def _stream(self, columns: list[str], rows: int, *_: Any) -> Any:
        check_arrow(self.path, pa.ipc.MessageReader.open_stream(self._mapped()))
        return self._open([self.schema.get_field_index(c) for c in columns])

    def _open(self, fields: list[int] | None) -> Any:
        ipc = pa.ipc
        return ipc.open_stream(self._mapped(), options=ipc.IpcReadOptions(included_fields=fields))

    def _mapped(self) -> Any:
        """Return the file where its stream begins: a file is a stream with a mark and a footer."""
        mapped = pa.memory_map(str(self.path))
        mapped.seek(8 if mapped.read(6) == b"ARROW1" else 0)
        return mapped


class MemoryTable(Table):
    """A table of another library, or a stream, which can be read once."""

    _exhausted = False

    def _schema(self) -> Any:
        return self._reader().schema

    def _stream(self, columns: list[str], rows: int, *_: Any) -> Any:
        if self._exhausted:
            raise DataError(f"{self.where}: a stream can be read once; pass a table")
        self._exhausted = isinstance(self.path, pa.RecordBatchReader)
        return (batch.select(columns) for batch in self._reader())

    def _reader(self) -> Any:
        reader = pa.RecordBatchReader
        return self.path if isinstance(self.path, reader) else reader.from_stream(self.path)


class RowsTable(Table):
    """A format that gives rows of Python values; each batch has the types of its values."""

    as_written = True

    def _blocks(self, rows: int) -> Generator[Sequence[Sequence[Any]]]:
        """Yield the names of the columns as one row, then at most `rows` rows at a time."""
        raise NotImplementedError

    def _schema(self) -> Any:
        for batch in self._stream(None, FIRST_ROWS, {}):
            return batch.schema
        raise DataError(f"{self.where}: no rows")

    def _stream(self, columns: list[str] | None, rows: int, forced: Forced) -> Any:
        with closing(self._blocks(rows)) as blocks:
            (header,) = next(blocks, [()])
            names = ["" if name is None else str(name) for name in header]
            wanted = names if columns is None else columns
            places = range(len(names)) if columns is None else map(names.index, columns)
            pairs = [(place, forced.get(names[place]) == "text") for place in places]
            for block in blocks:
                arrays = [_array([row[i] for row in block], text) for i, text in pairs]
                yield pa.RecordBatch.from_arrays(arrays, names=wanted)


def _array(values: list[Any], as_text: bool) -> Any:
    if not as_text:
        try:
            return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            pass
    return pa.array([None if v is None else _written(v) for v in values], pa.string())


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, date) else str(value)


class JsonTable(Table):
    """JSON Lines: an object per line. PyArrow's reader ends the process at a line of null."""

    as_written = True

    def _schema(self) -> Any:
        first = next(self._objects(FIRST_ROWS), [])
        keys = dict.fromkeys(chain.from_iterable(first))
        if len(keys) > MAX_KEYS:
            raise ValueError(
                f"its first lines have {len(keys):,} keys; at most {MAX_KEYS:,} are read"
            )
        return pa.schema([(k, _array([row.get(k) for row in first], False).type) for k in keys])

    def _stream(self, columns: list[str], rows: int, forced: Forced) -> Any:
        for block in self._objects(rows):
            arrays = [
                _array([row.get(c) for row in block], forced.get(c) == "text") for c in columns
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=columns)

    def _objects(self, rows: int) -> Iterator[list[dict[str, Any]]]:
        for lines in line_blocks(self.path, rows, BLOCK):
            yield [_json_object(line) for line in lines]


def _json_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
        if "\\u" in line:
            json.dumps(value, ensure_ascii=False).encode()  # half a character is refused
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"a line is not a JSON object: {line[:60]!r}")
    return value


class SheetTable(RowsTable):
    """A sheet of an Excel file, whose first row has the names."""

    def _blocks(self, rows: int) -> Generator[Sequence[Sequence[Any]]]:
        from openpyxl import load_workbook

        with reading(self.where, *WORKBOOK):
            with zipfile.ZipFile(self.path) as archive:
                unpacked = sum(member.file_size for member in archive.infolist())
                check_unpacked(self.path, "the workbook", unpacked)
            with closing(load_workbook(self.path, read_only=True, data_only=True)) as book:
                sheet = _choice(self.where, "sheets", book.sheetnames, self._want.table)
                every = book[sheet].iter_rows(values_only=True)
                filled = (row for row in every if any(value is not None for value in row))
                yield list(islice(filled, 1))
                while block := list(islice(filled, rows)):
                    yield block


class QueryTable(RowsTable):
    """What a SELECT gives over a DB-API connection; it is executed again for every pass."""

    def _blocks(self, rows: int) -> Generator[Sequence[Sequence[Any]]]:
        if self._want.table is None:
            raise ConfigError("a connection needs the query: Want(table='SELECT ...')")
        # A driver has errors of its own.
        with reading(self.where, Exception), closing(self.path.cursor()) as cursor:
            cursor.execute(self._want.table)
            yield from _fetched(cursor, rows)


class SqliteTable(RowsTable):
    """A table of a SQLite file, or what a SELECT gives."""

    def _blocks(self, rows: int) -> Generator[Sequence[Sequence[Any]]]:
        uri = f"{self.path.resolve().as_uri()}?mode=ro"
        with reading(self.where, sqlite3.Error), closing(sqlite3.connect(uri, uri=True)) as base:
            base.execute("PRAGMA trusted_schema = OFF")
            yield from _fetched(base.execute(self._query(base)), rows)

    def _query(self, base: sqlite3.Connection) -> str:
        if self._want.table is not None and re.match(r"(select|with)\s", self._want.table, re.I):
            return self._want.table
        listed = base.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        name = _choice(self.where, "tables", [row[0] for row in listed], self._want.table)
        quoted = name.replace('"', '""')
        return f'SELECT * FROM "{quoted}"'


def _fetched(cursor: Any, rows: int) -> Iterator[Sequence[Sequence[Any]]]:
    yield [[field[0] for field in cursor.description or ()]]
    while block := cursor.fetchmany(rows):
        yield block


FORMATS: dict[str, type[Table]] = {
    "parquet": ParquetTable,
    "csv": CsvTable,
    "arrow": ArrowTable,
    "json": JsonTable,
    "xlsx": SheetTable,
    "sqlite": SqliteTable,
}


def _choice(where: str, what: str, names: Sequence[str], wanted: str | None) -> str:
    if wanted in names:
        return str(wanted)
    if wanted is None and len(names) == 1:
        return names[0]
    if not names:
        raise DataError(f"{where}: it has no {what}")
    raise ConfigError(f"{where}: choose with --table one of its {what}: {', '.join(names[:20])}")


def _within_memory(batch: Any, rows: int) -> Iterator[Any]:
    if batch.num_rows > rows:
        for first in range(0, batch.num_rows, rows):
            yield from _within_memory(batch.slice(first, rows), rows)
    elif batch.num_rows > 1 and sum(map(_text_bytes, batch.columns)) > MAX_TEXT:
        yield from _within_memory(batch, (batch.num_rows + 1) // 2)
    elif batch.num_rows:
        yield batch


def _plain(array: Any) -> Any:
    """Return a column without a dictionary, and texts in the one usual type."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.string()) if kind_of_type(array.type) == "text" else array


def _text_bytes(array: Any) -> int:
    """How many bytes the texts of a column take without their dictionary."""
    if kind_of_type(array.type) != "text":
        return 0
    if pa.types.is_dictionary(array.type):
        lengths = _lengths(array.dictionary)
        return int(lengths[array.indices.drop_null().to_numpy()].sum())
    return int(_lengths(array).sum())


def _lengths(texts: Any) -> Any:
    if pa.types.is_string_view(texts.type):  # many of which may show the same bytes
        views = np.frombuffer(texts.buffers()[1] or b"", np.int32).reshape(-1, 4)
        return views[texts.offset : texts.offset + len(texts), 0].astype(np.int64)
    return pc.binary_length(texts).fill_null(0).to_numpy().astype(np.int64)


def kind_of_type(kind: Any) -> Kind:
    """Sort PyArrow's types by what can be done with them."""
    is_ = pa.types
    if is_.is_dictionary(kind):
        kind = kind.value_type
    if is_.is_integer(kind) or is_.is_boolean(kind):
        return "whole"
    if is_.is_floating(kind) or is_.is_decimal(kind):
        return "number"
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return "text"
    if is_.is_date(kind) or is_.is_timestamp(kind):
        return "date"
    return "empty" if is_.is_null(kind) else "other"
