"""Data on disk as a source of blocks of rows, and a report of what was left out and why."""

from __future__ import annotations

import atexit
import bz2
import gzip
import lzma
import re
import shutil
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, count
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from fedcohort.exceptions import ConfigError, DataError, FedcohortError
from fedcohort.files.columns import Column, SiteColumn

Nulls = Literal["error", "drop"]
NARROW = 0.2  # scales: as wide as one bin of `marginals` around the center
DROWNING = 100  # times the range of a column, that of another one beside which it hardly counts
BLOCK_NUMBERS = 1 << 21  # numbers per block: 16 MB as float64
BLOCK_ROWS = 1 << 16
BLOCK_TEXTS = 4096
MAX_LINE = 1 << 20
MAX_TEXT = 1 << 26  # bytes of text that are held at a time
NULL_VALUES = ("?", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "NULL", "null")
DAMAGED = (  # what the readers of the standard library raise on a damaged file
    *(OSError, EOFError, ValueError, ArithmeticError, MemoryError, RuntimeError),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile),
)
IDENTIFIER = re.compile(r"(^|[_. -])(id|uuid|guid|mrn|row_?names?|index)$|^Unnamed: 0$", re.I)
ENDINGS = {
    "parquet": r"\.(parquet|pq)",
    "csv": r"\.(csv|tsv|data)(\.gz|\.bz2)?",
    "arrow": r"\.(arrow|arrows|feather|ipc)",
    "json": r"\.(jsonl|ndjson)(\.gz|\.bz2)?",
    "xlsx": r"\.xls[xm]",
    "sqlite": r"\.(sqlite3?|db)",
    "npy": r"\.npy",
    "npz": r"\.npz",
    "idx": r"[.-]idx\d?(-ubyte)?(\.gz)?",
    "text": r"\.(txt|text)(\.gz)?",
}
_ENDING = re.compile(f"(?:{'|'.join(f'(?P<{k}>{ending})' for k, ending in ENDINGS.items())})$")
READABLE = (
    ".csv, .tsv, .data, .parquet, .arrow, .feather, .jsonl, .xlsx, .sqlite, .npy, .npz, IDX "
    "(-idx3-ubyte, .idx) or .txt"
)
MISSING = (
    "the value is missing (null or NaN); choose --nulls drop, leave the column out, or use a spec, "
    "which marks it"
)
PANDAS = 'python -c \'import pandas; pandas.{}("FILE").to_parquet("data.parquet")\''
CONVERSIONS = {
    ".xls": "soffice --headless --convert-to xlsx FILE",
    ".ods": "soffice --headless --convert-to xlsx FILE",
    ".json": "jq -c '.[]' FILE > data.jsonl",
    ".sav": PANDAS.format("read_spss"),
    ".dta": PANDAS.format("read_stata"),
    ".sas7bdat": PANDAS.format("read_sas"),
    ".xpt": PANDAS.format("read_sas"),
    ".orc": PANDAS.format("read_orc"),
    ".h5": PANDAS.format("read_hdf"),
    ".rds": 'Rscript -e \'write.csv(readRDS("FILE"), "data.csv", row.names = FALSE)\'',
    ".duckdb": 'duckdb FILE -csv -c "SELECT * FROM t" | fedcohort sketch - ...',
    ".zip": "unzip FILE",
    ".xz": "xz --decompress FILE",
    ".zst": "zstd --decompress FILE",
    "postgresql": r'psql URL -c "\copy (SELECT ...) to stdout csv header" | fedcohort sketch - ...',
    "mysql": 'mysql --batch -e "SELECT ..." BASE > data.tsv',
}


@dataclass(frozen=True)
class CsvOptions:
    """How a CSV file is written; None is detected from its first lines, where that is safe."""

    delimiter: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    header: bool | None = None

    def __post_init__(self) -> None:
        for name, mark in (("delimiter", self.delimiter), ("decimal", self.decimal)):
            if mark is not None and not (len(mark) == 1 and mark.isascii()):
                raise ConfigError(f"--csv {name}={mark}: must be one ASCII character")


@dataclass(frozen=True)
class Want:
    """What to read of a file.

    Parameters
    ----------
    columns : tuple of str or Column
        Columns of a table, by name or pattern (``p*``), or arrays of an .npz file; none means
        every column of numbers. A `Column` also says what its values become.
    text : str, optional
        The column of texts.
    label, by, person : str, optional
        Columns with the class, the client and the person of a row; only the first row of each
        person counts.
    nulls : {"error", "drop"}
        What a missing value does: stop, or leave the row out.
    batch_rows : int, optional
        Rows read at a time; by default about 16 MB.
    table : str, optional
        The sheet of an .xlsx file; the table, or a SELECT, of a SQLite file; the SELECT of a
        connection.
    site : mapping of str to SiteColumn
        How this site writes a column of the spec.
    """

    columns: tuple[str | Column, ...] = ()
    text: str | None = None
    label: str | None = None
    by: str | None = None
    nulls: Nulls = "error"
    batch_rows: int | None = None
    null_values: tuple[str, ...] = NULL_VALUES
    csv: CsvOptions = CsvOptions()
    person: str | None = None
    table: str | None = None
    site: Mapping[str, SiteColumn] = field(default_factory=dict)

    def rows_for(self, dim: int) -> int:
        """How many rows to read at a time."""
        most = min(BLOCK_ROWS, BLOCK_NUMBERS // dim) if dim else BLOCK_TEXTS
        return self.batch_rows or max(1, most)

    def name_at_site(self, column: str) -> str:
        """Return how this site calls a column of the spec."""
        return self.site[column].column or column if column in self.site else column


@dataclass
class Reading:
    """What a pass over the data left out, what it assumed, and what looks wrong."""

    rows: int = 0
    kept: int = 0
    repeated: int = 0  # further rows of a person
    missing: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)  # values that are no public level
    left_out: dict[str, str] = field(default_factory=dict)  # columns, each with the reason
    assumed: list[str] = field(default_factory=list)  # such as the delimiter of the file
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    identifiers: list[str] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)  # columns of which the range is in scales
    label: str | None = None

    def clear(self) -> None:
        """Begin a further pass: counts start again."""
        self.rows = self.kept = self.repeated = 0
        self.missing, self.others = Counter(), Counter()

    def add(self, later: Reading) -> None:
        """Add what another pass, over later files of the same data, has read."""
        self.rows += later.rows
        self.kept += later.kept
        self.missing += later.missing
        self.others += later.others
        # Only the first block of a column tells whether it looks like an identifier.
        self.identifiers += [c for c in later.identifiers if c not in self.ranges]
        self.label, self.numbers = later.label, self.numbers | later.numbers
        for name, span in later.ranges.items():
            self._widen(name, *span)

    def look_at(self, column: Column, values: NDArray[np.float64]) -> None:
        """Remember the range of a column, and whether its first block looks like an identifier."""
        if len(values):
            if column.name not in self.ranges and _identifies(column, values):
                self.identifiers.append(column.name)
            self._widen(column.name, float(values.min()), float(values.max()))
        if column.kind == "number":
            self.numbers.add(column.name)
        if column.kind == "category" and column.levels:
            self.others += Counter({column.name: int((values == len(column.levels)).sum())})

    def count(self, keep: NDArray[Any], label: str | None, y: NDArray[np.int64] | None) -> None:
        """Count rows and those that are kept; remember the range of their labels."""
        self.rows += len(keep)
        self.kept += int(keep.sum())
        if label is not None and y is not None and keep.any():
            self.label = label
            self._widen(label, float(y[keep].min()), float(y[keep].max()))

    def _widen(self, name: str, low: float, high: float) -> None:
        before = self.ranges.get(name, (low, high))
        self.ranges[name] = min(low, before[0]), max(high, before[1])

    def facts(self) -> dict[str, str]:
        """Return what a person must know about the data that were read."""
        lost, missing = self.rows - self.kept - self.repeated, _counted(self.missing)
        facts = {
            "columns left out": "; ".join(f"{c}: {why}" for c, why in self.left_out.items()),
            "people": self.repeated
            and f"{self.kept:,}; {self.repeated:,} further rows of theirs left out",
            "rows left out": lost and f"{lost:,} of {self.rows:,}, for missing values ({missing})",
            "missing values": "" if lost else missing,
            "other levels": self.others and f"{_counted(self.others)}: not among the public levels",
            "detected": "; ".join(self.assumed),
        }
        return {key: str(value) for key, value in facts.items() if value}

    def warnings(self) -> list[str]:
        """Return what makes a sketch of these data useless or misleading."""
        widths = {c: high - low for c, (low, high) in self.ranges.items() if c != self.label}
        constant = ", ".join(c for c, width in widths.items() if not width)
        numbers = {c: width for c, width in widths.items() if c in self.numbers and width}
        narrow = ", ".join(c for c, width in numbers.items() if width < NARROW)
        widest = max(numbers, key=lambda c: numbers[c], default="")
        drowned = ", ".join(c for c in numbers if numbers[c] < numbers[widest] / DROWNING)
        identifiers, few = ", ".join(self.identifiers), self.kept + self.repeated < self.rows / 2
        lowest = 0 if self.label is None else self.ranges[self.label][0]
        messages = {
            f"only {self.kept:,} of {self.rows:,} rows are used, because others have missing "
            f"values: leave out the columns that miss most ({_counted(self.missing, 3)}), or "
            "use a spec, which marks missing values instead": few,
            f"constant in all rows, so they tell nothing: {constant}": constant,
            f"vary by less than {NARROW:g} scales, so what differs there hardly counts and is "
            f"not explained: {narrow}; state a smaller scale": narrow,
            f"{widest} varies more than {DROWNING} times as much, so these columns hardly "
            f"count beside it: {drowned}; state a center and a scale of each in a spec": drowned,
            f"look like identifiers and should not be hashed: {identifiers}": identifiers,
            f"no row has label 0, the lowest {self.label!r} is {lowest:g}: "
            "labels count from 0, so if yours count from 1, class 0 stays empty": lowest > 0,
        }
        return [message for message, holds in messages.items() if holds]


def _identifies(column: Column, values: NDArray[np.float64]) -> bool:
    """Whether whole numbers, all different, are those of a counter or carry an id's name."""
    if column.kind != "number" or len(values) < 10:
        return False
    original = values * column.scale + column.center
    whole = np.rint(original)
    if not np.allclose(whole, original, 1e-5, 1e-6) or len(np.unique(whole)) < len(whole):
        return False
    dense = np.ptp(whole) < 2 * len(whole)
    return bool(dense or len(whole) > 1000 or IDENTIFIER.search(column.name))


def _counted(counts: Counter[str], most: int | None = None) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common(most))


class Block(NamedTuple):
    """Some rows, with their labels and clients; `parts` are the columns one by one (`Encoded`)."""

    x: Any
    y: NDArray[np.int64] | None = None
    clients: NDArray[np.object_] | None = None
    parts: Sequence[Any] = ()

    def take(self, keep: NDArray[np.bool_]) -> Block:
        """Return the rows that are kept."""
        if keep.all():
            return self
        x = self.x[keep] if isinstance(self.x, np.ndarray) else [*compress(self.x, keep)]
        y = None if self.y is None else self.y[keep]
        clients = None if self.clients is None else self.clients[keep]
        return Block(x, y, clients, [part.take(keep) for part in self.parts])


class Source(ABC):
    """Data that can be read block by block, as often as needed."""

    form: Literal["vectors", "texts"] = "vectors"
    dim: int = 0  # numbers of a vector
    columns: tuple[Column, ...] = ()  # of a table
    rows: int | None = None  # where the files say so
    reading: Reading

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield all rows, from the first."""


def open_source(data: Any, want: Want) -> Source:
    """Open a data file, a folder of files of one kind, a URL, a table in memory or a query.

    A table is any object with ``__arrow_c_stream__`` (of pandas, Polars, PyArrow, DuckDB, ADBC) or
    ``__dataframe__``. A query is ``Want(table="SELECT ...")`` with a DB-API connection, such as one
    to PostgreSQL.
    """
    if not hasattr(data, "__arrow_c_stream__") and hasattr(data, "__dataframe__"):
        from pyarrow.interchange import from_dataframe

        data = from_dataframe(data)
    if hasattr(data, "__arrow_c_stream__") or hasattr(data, "cursor"):
        return open_files([data], Path("the table"), want)
    root = local_copy(str(data))
    return open_files(find_files(root), root, want)


def local_copy(data: str) -> Path:
    """Return a path; what is read from a URL or, as ``-``, standard input is copied to one.

    Data are read in passes. A copy is deleted when this process ends.
    """
    url = urlsplit(data)
    if data != "-" and "://" not in data:
        return Path(data)
    if command := CONVERSIONS.get(url.scheme):
        raise ConfigError(f"{data}: a database is read by a query: {command}")
    folder = tempfile.mkdtemp(prefix="fedcohort-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder, "stdin.csv" if data == "-" else Path(url.path).name)
    with reading(data):
        if data == "-":
            with copy.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        elif url.scheme in ("http", "https"):
            with urllib.request.urlopen(data, timeout=60) as response, copy.open("wb") as file:
                shutil.copyfileobj(response, file)
        else:
            import pyarrow.fs

            pyarrow.fs.copy_files(data, str(copy))
    return copy


def open_files(files: Sequence[Any], root: Path, want: Want, skip: int = 0) -> Source:
    """Open files of one kind below `root`; the first `skip` only say what the others hold."""
    kind = kind_of(files[0]) if isinstance(files[0], Path) else "table"
    if kind == "text":
        return TextSource(files[skip:], want)
    if kind in ("npy", "npz", "idx"):
        from fedcohort.files.arrays import ArraySource

        return ArraySource(files, want, skip)
    from fedcohort.files.table_source import TableSource

    return TableSource(files, root, want, skip)


def kind_of(path: Path) -> str | None:
    """Return the kind of a file by its name, None for an unknown one."""
    return match.lastgroup if (match := _ENDING.search(path.name.lower())) else None


def find_files(root: Path) -> list[Path]:
    """Return the file itself, or the sorted data files of a folder, which must be of one kind."""
    if not root.exists():
        raise DataError(f"{root}: no such file or folder")
    if root.is_file():
        if kind_of(root) is None:
            command = CONVERSIONS.get(root.suffix.lower())
            remedy = f"; convert it: {command}" if command else f"; known are {READABLE}"
            raise DataError(f"{root}: unknown kind of file{remedy}")
        return [root]
    hidden = re.compile(r"(^|/)[._]")
    files = [
        path
        for path in sorted(root.rglob("*"))
        if not hidden.search(path.relative_to(root).as_posix()) and path.is_file() and kind_of(path)
    ]
    kinds = {kind_of(p): p for p in files}
    if len(kinds) != 1:
        there = " and ".join(str(p) for p in kinds.values()) or "none"
        raise DataError(f"{root}: a folder must hold data files of one kind; found {there}")
    return files


class Place(NamedTuple):
    """Where a block lies: its file, and its first row there."""

    path: str
    first: int

    def error(self, column: str | int, wrong: NDArray[np.bool_], why: str = MISSING) -> DataError:
        """Name the first row that is wrong."""
        row = self.first + int(np.argmax(wrong))
        return DataError(f"{self.path}: column {column!r}, row {row}: {why}")


@contextmanager
def reading(where: Any, *more: type[Exception]) -> Iterator[None]:
    """Turn what a damaged file raises into a DataError; `more` is what its parser adds."""
    damage: tuple[type[Exception], ...] = (*DAMAGED, *more)
    try:
        yield
    except (FedcohortError, UnicodeEncodeError):  # the latter: the file's own name
        raise
    except UnicodeDecodeError:
        raise DataError(f"{where}: cannot be read: a name or a text in it is not UTF-8") from None
    except damage as error:
        why = str(error)[:300] or "it ends too early"
        raise DataError(f"{where}: cannot be read: {why}") from error


def decompressed(path: Path) -> IO[bytes]:
    """Open a file, through gzip or bzip2 if its name ends in .gz or .bz2."""
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    file: IO[bytes] = opener(path, "rb")
    return file


class TextSource(Source):
    """Lines of UTF-8 files, plain or .gz, as texts; blank lines are left out."""

    form = "texts"

    def __init__(self, files: Sequence[Path], want: Want) -> None:
        for column in (want.text, want.label, want.by, want.person):
            if column is not None:
                raise ConfigError(f"{files[0]}: a text file has no columns, such as {column!r}")
        self._files, self._rows, self.reading = files, want.rows_for(0), Reading()

    def blocks(self) -> Iterator[Block]:
        """Yield lists of lines."""
        for path in self._files:
            yield from map(Block, line_blocks(path, self._rows))


def line_blocks(path: Path, rows: int, most: int = MAX_TEXT) -> Iterator[list[str]]:
    """Yield the lines of a file that are not blank, some `rows` or `most` letters at a time."""
    block, size = list[str](), 0
    for line in _lines(path):
        block.append(line)
        size += len(line)
        if len(block) == rows or size > most:
            yield block
            block, size = [], 0
    if block:
        yield block


def _lines(path: Path) -> Iterator[str]:
    with reading(path), decompressed(path) as file:
        for number in count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                raise DataError(f"{path}: line {number} is longer than {MAX_LINE} bytes")
            try:
                text = line.decode("utf-8").strip()
            except UnicodeDecodeError:
                raise DataError(f"{path}: line {number} is not UTF-8 text") from None
            if text:
                yield text
