"""One table on disk, read a few rows at a time (needs PyArrow).

Parquet goes through ParquetFile and not through a PyArrow dataset's scanner: the scanner unpacks
whole row groups, which by default are a million rows, while this reader unpacks page by page.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.finding import kind_of
from fedcohort.files.parquet import reading_plan
from fedcohort.files.source import NULL_VALUES, CsvOptions

Kind = Literal["whole", "number", "vector", "text", "list", "date", "empty", "other"]
CSV_BLOCK = 4 << 20
BUFFER = 1 << 16
MAX_BATCH = 1 << 26  # bytes of text that a batch may take when its dictionaries are unpacked
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
DELIMITERS = (",", ";", "\t", "|")
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def need_pyarrow() -> Any:
    """Import PyArrow, or say how to get it."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "tables need PyArrow, which is not installed: pip install 'fedcohort[files]'"
        ) from None
    return pyarrow


@contextmanager
def reading(path: Path, names: Sequence[str] = ()) -> Iterator[None]:
    """Turn what PyArrow raises on a damaged file into a DataError; `names` are its columns."""
    pa = need_pyarrow()
    try:
        yield
    except DataError:
        raise
    except UnicodeDecodeError:
        raise DataError(f"{path}: cannot be read: a name or a text in it is not UTF-8") from None
    except (pa.lib.ArrowException, OSError, EOFError, SystemError, MemoryError) as error:
        raise DataError(f"{path}: cannot be read: {_plain(str(error), names)[:300]}") from None


def _plain(message: str, names: Sequence[str]) -> str:
    """Name the column of a CSV file that PyArrow counts, and say what can be done."""
    found = re.match(r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error", message)
    if found is None or int(found[1]) >= len(names):
        return message
    where = f"column {names[int(found[1])]!r}" + (f", line {found[2]}" if found[2] else "")
    if "UTF8" in message:
        return f"{where}: not UTF-8; name the encoding, such as --encoding cp1252"
    value = re.search(r"invalid value '(.*)'", message, re.S)
    if value is None:
        return f"{where}: {message}"
    return f"{where}: {value[1]!r} is not a number; name markers of missing values by --null-values"


class TableFile:
    """A Parquet, CSV or Arrow file, with the columns that the names of its folders give it."""

    def __init__(
        self,
        path: Path,
        root: Path,
        csv: CsvOptions | None = None,
        null_values: Sequence[str] = NULL_VALUES,
        quoted_nulls: bool = True,
    ) -> None:
        self.path, self._quoted_nulls = path, quoted_nulls
        self._csv_options, self._null_values = csv or CsvOptions(), null_values
        self._format = kind_of(path)
        folders = path.relative_to(root).parts[:-1] if path != root else ()
        pairs = (part.split("=", 1) for part in folders if "=" in part)
        self._given = {unquote(key): unquote(value) for key, value in pairs}
        self._kinds: dict[str, Kind] = {}

    @cached_property
    def schema(self) -> Any:
        """Columns and types that the file holds."""
        pa = need_pyarrow()
        with reading(self.path):
            if self._format == "parquet":
                schema = pa.parquet.read_schema(self.path)
            elif self._format == "csv":
                schema = self._csv({}, None).schema
            else:
                schema = self._ipc(None).schema
            schema.names  # noqa: B018 - decodes them
            return schema

    @cached_property
    def names(self) -> list[str]:
        """All columns."""
        return [*self.schema.names, *(n for n in self._given if n not in self._inside)]

    @cached_property
    def _inside(self) -> frozenset[str]:
        """The columns that the file itself holds."""
        return frozenset(self.schema.names)

    @property
    def rows(self) -> int | None:
        """Rows, where the file says so."""
        if self._format != "parquet":
            return None
        with reading(self.path):
            count: int = need_pyarrow().parquet.read_metadata(self.path).num_rows
        return count

    def kind(self, column: str) -> Kind:
        """Say what a column holds; DataError if there is none."""
        if column not in self._kinds:
            self._kinds[column] = self._kind(column)
        return self._kinds[column]

    def _kind(self, column: str) -> Kind:
        if column not in self._inside and column not in self._given:
            there = ", ".join(self.names[:20]) + (", ..." if len(self.names) > 20 else "")
            raise DataError(f"{self.path}: no column {column!r}; there are {there}")
        if column not in self._inside:
            return "whole" if re.fullmatch(r"-?\d{1,18}", self._given[column]) else "text"
        if len(self.schema.get_all_field_indices(column)) > 1:
            raise DataError(f"{self.path}: two columns are called {column!r}")
        return kind_of_type(self.schema.field(column).type)

    @property
    def is_csv(self) -> bool:
        """Whether the file is text, whose columns can be read as they are written."""
        return self._format == "csv"

    def width(self, column: str) -> int:
        """How many numbers of a vector a column gives: 1, or the length of its first list."""
        if self.kind(column) != "vector":
            return 1
        kind = self.schema.field(column).type
        if need_pyarrow().types.is_fixed_size_list(kind):
            return int(kind.list_size)
        for batch in self.batches((column,), 1):
            if (first := batch[column][0].as_py()) is not None:
                return len(first)
        return 1

    def type_name(self, column: str) -> str:
        """Name a column's type for a message."""
        inside = column in self._inside
        return str(self.schema.field(column).type) if inside else "text"

    def batches(
        self,
        columns: tuple[str, ...],
        rows: int,
        as_text: Collection[str] = (),
        as_numbers: Collection[str] = (),
    ) -> Any:
        """Yield record batches of the columns, at most `rows` rows each.

        In a CSV file, the first lines tell the type of a column; `as_numbers` may have fractions
        later on, and `as_text` is read as it is written.
        """
        inside = [c for c in columns if c in self._inside]
        with reading(self.path, self.schema.names):
            for batch in self._stream(inside, rows, as_text, as_numbers):
                batch.validate(full=True)  # offsets and indexes of a damaged file lead anywhere
                for part in _within_memory(batch, rows):
                    yield self._complete(part, columns, as_text)

    def _stream(
        self,
        columns: list[str],
        rows: int,
        as_text: Collection[str],
        as_numbers: Collection[str],
    ) -> Any:
        pa = need_pyarrow()
        if self._format == "parquet":
            plan = reading_plan(self.path, columns, rows)
            file = pa.parquet.ParquetFile(
                self.path, read_dictionary=plan.texts, buffer_size=BUFFER, pre_buffer=False
            )
            return file.iter_batches(plan.rows, columns=columns, use_threads=False)
        if self._format == "csv":
            forced = {c: pa.string() for c in columns if c in as_text}
            for c in as_numbers:
                if c in columns and not pa.types.is_boolean(self.schema.field(c).type):
                    forced[c] = pa.float64()
            return self._csv(forced, columns)
        return self._ipc(columns)

    def _complete(self, batch: Any, columns: tuple[str, ...], as_text: Collection[str]) -> Any:
        """Add the columns that the folders give."""
        pa = need_pyarrow()
        arrays = []
        for column in columns:
            if column in self._inside:
                arrays.append(batch.column(column))
                continue
            value: str | int = self._given[column]
            if column not in as_text and self.kind(column) == "whole":
                value = int(value)
            arrays.append(pa.repeat(value, batch.num_rows))
        return pa.RecordBatch.from_arrays(arrays, names=list(columns))

    @cached_property
    def dialect(self) -> Dialect:
        """How a CSV file is written: as stated, or as its first lines show."""
        with reading(self.path):
            return find_dialect(self.path, self._csv_options, self._null_values)

    def _csv(self, types: dict[str, Any], columns: list[str] | None) -> Any:
        arrow, found = need_pyarrow().csv, self.dialect
        return arrow.open_csv(
            self.path,
            read_options=arrow.ReadOptions(
                block_size=CSV_BLOCK,
                use_threads=False,
                encoding=found.encoding,
                column_names=list(found.names) or None,
            ),
            parse_options=arrow.ParseOptions(delimiter=found.delimiter),
            convert_options=arrow.ConvertOptions(
                column_types=types,
                include_columns=columns,
                null_values=["", *self._null_values],
                strings_can_be_null=True,
                quoted_strings_can_be_null=self._quoted_nulls,
                decimal_point=found.decimal,
            ),
        )

    def _ipc(self, columns: list[str] | None) -> Any:
        pa = need_pyarrow()
        mapped = pa.memory_map(str(self.path))
        whole = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        fields = None if columns is None else [self.schema.get_field_index(c) for c in columns]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        if not whole:
            return pa.ipc.open_stream(mapped, options=options)
        file = pa.ipc.open_file(mapped, options=options)
        if columns is None:
            return file
        return (file.get_batch(i) for i in range(file.num_record_batches))


def _within_memory(batch: Any, rows: int) -> Iterator[Any]:
    """Cut a batch into parts of at most `rows` rows whose texts take little memory."""
    if batch.num_rows > rows:
        for first in range(0, batch.num_rows, rows):
            yield from _within_memory(batch.slice(first, rows), rows)
    elif batch.num_rows > 1 and sum(map(_text_bytes, batch.columns)) > MAX_BATCH:
        yield from _within_memory(batch, (batch.num_rows + 1) // 2)
    elif batch.num_rows:
        yield batch


def _text_bytes(array: Any) -> int:
    """Return how many bytes the texts of a column take without their dictionary."""
    pa = need_pyarrow()
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        array = array.flatten()
    if not pa.types.is_dictionary(array.type):
        return int(array.nbytes) if kind_of_type(array.type) == "text" else 0
    if not pa.types.is_string(array.type.value_type):
        return 0
    lengths = pa.compute.binary_length(array.dictionary)
    return pa.compute.sum(lengths.take(array.indices)).as_py() or 0


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
    head = _beginning(path)
    detected = []
    encoding = stated.encoding
    if encoding is None:
        encoding = next((name for mark, name in MARKS.items() if head.startswith(mark)), "utf-8")
        if encoding != "utf-8":
            detected.append(f"encoding {encoding}")
    lines = _lines(path, head, encoding)
    named = ".tsv" in path.name.lower()
    delimiter = stated.delimiter or ("\t" if named else _delimiter(lines))
    if stated.delimiter is None and not named and delimiter != ",":
        detected.append(f"delimiter {delimiter!r}")
    decimal = stated.decimal or "."
    if stated.decimal is None and delimiter != "," and _comma_is_decimal(lines, delimiter):
        decimal = ","
        detected.append("decimal comma")
    first = lines[0] if lines else ""
    cells = next(csv.reader([first], delimiter=delimiter), [])
    header = stated.header
    if header is None:
        header = _is_header(path, first, cells, decimal, null_values)
        if not header:
            detected.append(f"no header, so the columns are called c1 to c{len(cells)}")
    names = () if header else tuple(f"c{i + 1}" for i in range(len(cells)))
    return Dialect(delimiter, decimal, encoding, names, tuple(detected))


def _is_header(
    path: Path, line: str, cells: Sequence[str], decimal: str, null_values: Sequence[str]
) -> bool:
    """Whether the first row holds names: text, or in quotes."""
    known = [c.strip().replace(decimal, ".") for c in cells if c.strip() not in ("", *null_values)]
    if not known or '"' in line or not all(NUMBER.fullmatch(c) for c in known):
        return True
    values = [float(c) for c in known]
    if len(values) > 1 and all(b - a == 1 for a, b in pairwise(values)):
        raise DataError(
            f"{path}: the first row counts {known[0]}, {known[1]}, ...: say --header if these are "
            "names of columns, --no-header if they are data"
        )
    return False


def _beginning(path: Path) -> bytes:
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opener(path, "rb") as file:
        return bytes(file.read(BUFFER))


def _lines(path: Path, head: bytes, encoding: str) -> list[str]:
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except LookupError:
        raise ConfigError(f"--encoding {encoding}: Python knows no encoding of that name") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{path}: the text is not {encoding.upper()}; name the right one, such as "
            "--encoding cp1252 (Excel in Western Europe)"
        ) from None
    lines = text.lstrip("\ufeff").splitlines()
    return [line for line in lines[:50] if line.strip()][: max(1, min(20, len(lines) - 1))]


def _delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter that cuts all lines into equally many parts, else a comma.

    Of several, the one that leaves most numbers: ``63;1,5`` is 63 and 1.5, not 63;1 and 5.
    """
    counts = {d: {_outside_quotes(line).count(d) for line in lines} for d in DELIMITERS}
    even = [d for d, found in counts.items() if len(found) == 1 and min(found) > 0]
    return max(even, key=lambda d: _share_of_numbers(lines, d), default=",")


def _share_of_numbers(lines: Sequence[str], delimiter: str) -> float:
    cells = [cell.strip(' "').replace(",", ".") for line in lines for cell in line.split(delimiter)]
    return sum(NUMBER.fullmatch(cell) is not None for cell in cells) / len(cells)


def _outside_quotes(line: str) -> str:
    return re.sub(r'"[^"]*"', "", line)


def _comma_is_decimal(lines: Sequence[str], delimiter: str) -> bool:
    cells = [cell.strip(' "') for line in lines[1:] for cell in line.split(delimiter)]
    with_comma = [c for c in cells if re.fullmatch(r"[-+]?\d+,\d+([eE][-+]?\d+)?", c)]
    with_point = [c for c in cells if re.fullmatch(r"[-+]?\d+\.\d+([eE][-+]?\d+)?", c)]
    return bool(with_comma) and not with_point


def kind_of_type(kind: Any) -> Kind:
    """Sort PyArrow's types by what can be done with them."""
    is_ = need_pyarrow().types
    if is_.is_dictionary(kind):
        kind = kind.value_type
    if is_.is_integer(kind) or is_.is_boolean(kind):
        return "whole"
    if is_.is_floating(kind) or is_.is_decimal(kind):
        return "number"
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return "text"
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
        return "vector" if is_.is_floating(kind.value_type) else "list"
    if is_.is_date(kind) or is_.is_timestamp(kind):
        return "date"
    return "empty" if is_.is_null(kind) else "other"
