"""One table on disk, read a few rows at a time (needs PyArrow).

Parquet goes through ParquetFile and not through a PyArrow dataset's scanner: the scanner unpacks
whole row groups, which by default are a million rows, while this reader unpacks page by page.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.finding import kind_of

Kind = Literal["whole", "number", "vector", "text", "list", "empty", "other"]
CSV_BLOCK = 4 << 20
BUFFER = 1 << 16


def need_pyarrow() -> Any:
    """Import PyArrow, or say how to get it."""
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "tables need PyArrow, which is not installed: pip install 'fedcohort[files]'"
        ) from None
    return pyarrow


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what PyArrow raises on a damaged file into a DataError."""
    pa = need_pyarrow()
    try:
        yield
    except DataError:
        raise
    except (pa.lib.ArrowException, OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {str(error)[:300]}") from None


class TableFile:
    """A Parquet, CSV or Arrow file, with the columns that the names of its folders give it."""

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self._format = kind_of(path)
        folders = path.relative_to(root).parts[:-1] if path != root else ()
        pairs = (part.split("=", 1) for part in folders if "=" in part)
        self._given = {unquote(key): unquote(value) for key, value in pairs}

    @cached_property
    def schema(self) -> Any:
        """Columns and types that the file holds."""
        pa = need_pyarrow()
        with reading(self.path):
            if self._format == "parquet":
                return pa.parquet.read_schema(self.path)
            if self._format == "csv":
                return self._checked(self._csv({}, None).schema)
            return self._ipc(None).schema

    @property
    def names(self) -> list[str]:
        """All columns."""
        return [*self.schema.names, *(n for n in self._given if n not in self.schema.names)]

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
        if column not in self.names:
            there = ", ".join(self.names[:20]) + (", ..." if len(self.names) > 20 else "")
            raise DataError(f"{self.path}: no column {column!r}; there are {there}")
        if column not in self.schema.names:
            return "whole" if re.fullmatch(r"-?\d{1,18}", self._given[column]) else "text"
        if len(self.schema.get_all_field_indices(column)) > 1:
            raise DataError(f"{self.path}: two columns are called {column!r}")
        return kind_of_type(self.schema.field(column).type)

    def reads_as_text(self, column: str) -> bool:
        """Whether the column can be read as it is written."""
        return self._format == "csv" and column in self.schema.names

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
        inside = column in self.schema.names
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
        inside = [c for c in columns if c in self.schema.names]
        with reading(self.path):
            for batch in self._stream(inside, rows, as_text, as_numbers):
                for first in range(0, batch.num_rows, rows):
                    yield self._complete(batch.slice(first, rows), columns, as_text)

    def _stream(
        self,
        columns: list[str],
        rows: int,
        as_text: Collection[str],
        as_numbers: Collection[str],
    ) -> Any:
        pa = need_pyarrow()
        if self._format == "parquet":
            file = pa.parquet.ParquetFile(self.path, buffer_size=BUFFER, pre_buffer=False)
            return file.iter_batches(rows, columns=columns, use_threads=False)
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
            if column in self.schema.names:
                arrays.append(batch.column(column))
                continue
            value: str | int = self._given[column]
            if column not in as_text and self.kind(column) == "whole":
                value = int(value)
            arrays.append(pa.repeat(value, batch.num_rows))
        return pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _csv(self, types: dict[str, Any], columns: list[str] | None) -> Any:
        csv = need_pyarrow().csv
        tabs = self.path.name.lower().split(".")[-1] == "tsv" or ".tsv." in self.path.name.lower()
        return csv.open_csv(
            self.path,
            read_options=csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False),
            parse_options=csv.ParseOptions(delimiter="\t" if tabs else ","),
            convert_options=csv.ConvertOptions(column_types=types, include_columns=columns),
        )

    def _checked(self, schema: Any) -> Any:
        if schema.names and all(re.fullmatch(r"[-+.\deE]+", name) for name in schema.names):
            raise DataError(f"{self.path}: the first line holds numbers, not names of columns")
        return schema

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
    return "empty" if is_.is_null(kind) else "other"
