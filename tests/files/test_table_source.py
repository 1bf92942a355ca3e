"""Tables against what was written into them, in every format."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import sqlite3
from contextlib import closing, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from fedcohort.exceptions import ConfigError, DataError, FedcohortError
from fedcohort.files import CsvOptions, Want, open_source
from fedcohort.files.columns import Column, SiteColumn

TABLE = pa.table(
    {
        "a": [1, 2, 3, 4, 5],
        "b": [0.5, -1.0, 2.25, 4.0, 1e6],
        "who": ["x", "y", "x", "z", "y"],
        "ok": [True, False, True, True, False],
        "note": ["to be", "or not", "", "to be", "that is"],
    }
)


def write(table, path):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    elif path.suffix == ".tsv":
        options = pyarrow.csv.WriteOptions(delimiter="\t")
        pyarrow.csv.write_csv(table, path, options)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in table.to_pylist()))
    elif path.suffix == ".xlsx":
        book = openpyxl.Workbook()
        book.active.append(table.column_names)
        for row in table.to_pylist():
            book.active.append(list(row.values()))
        book.save(path)
    elif path.suffix == ".sqlite":
        with closing(sqlite3.connect(path)) as base, base:
            base.execute(f"CREATE TABLE t ({', '.join(table.column_names)})")
            marks = ", ".join("?" * table.num_columns)
            rows_ = [tuple(row.values()) for row in table.to_pylist()]
            base.executemany(f"INSERT INTO t VALUES ({marks})", rows_)
    else:
        opener = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
        with opener(path, table.schema) as file:
            file.write_table(table)
    return path


def rows(path, **want):
    blocks = list(open_source(path, Want(**want)).blocks())
    return np.concatenate([block.x for block in blocks])


FORMATS = ["parquet", "csv", "tsv", "feather", "arrow", "arrows", "jsonl", "xlsx", "sqlite"]


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return write(TABLE, tmp_path / f"data.{request.param}")


class Interchange:
    """A frame of a library that knows only ``__dataframe__``."""

    def __init__(self, frame):
        self._frame = frame

    def __dataframe__(self, **options):
        return self._frame.__dataframe__(**options)


@pytest.fixture(params=[*FORMATS, "pyarrow", "pandas", "interchange", "stream"])
def table(request, tmp_path):
    """A file of every format, and tables in memory."""
    memory = {"pyarrow": lambda: TABLE, "pandas": TABLE.to_pandas, "stream": TABLE.to_reader}
    memory["interchange"] = lambda: Interchange(TABLE.to_pandas())
    if request.param in memory:
        return memory[request.param]()
    return write(TABLE, tmp_path / f"data.{request.param}")


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_numbers_and_booleans_make_vectors(table, batch_rows):
    found = rows(table, columns=("b", "a", "ok"), batch_rows=batch_rows)
    wanted = [TABLE[c].to_numpy().astype(float) for c in ("b", "a", "ok")]
    assert np.array_equal(found, np.stack(wanted, axis=1))


def test_by_default_all_columns_of_numbers_in_the_file_s_order(path):
    source = open_source(path, Want(by="who"))
    assert [c.name for c in source.columns] == ["a", "b", "ok"]
    assert source.rows == (5 if path.suffix == ".parquet" else None)


def test_patterns_of_columns():
    table = TABLE.append_column("a*", TABLE["a"])
    assert [c.name for c in open_source(table, Want(columns=("o*", "[b]"))).columns] == ["ok", "b"]
    assert [c.name for c in open_source(table, Want(columns=("a*",))).columns] == ["a*"]
    with pytest.raises(DataError, match=r"no column 'x\*'; there are a, b"):
        open_source(table, Want(columns=("x*",)))
    with pytest.raises(ConfigError, match="each column once"):
        open_source(table, Want(columns=("b", "[b]")))


def test_labels_and_clients(table):
    source = open_source(table, Want(columns=("b",), label="a", by="who", batch_rows=2))
    blocks = list(source.blocks())
    assert np.concatenate([b.y for b in blocks]).tolist() == [1, 2, 3, 4, 5]
    assert np.concatenate([b.clients for b in blocks]).tolist() == ["x", "y", "x", "z", "y"]


def test_texts(path):
    blocks = open_source(path, Want(text="note", nulls="drop")).blocks()
    texts = [text for b in blocks for text in b.x if text]  # in .xlsx, "" is an empty cell
    assert texts == ["to be", "or not", "to be", "that is"]


def test_csv_columns_are_read_as_they_are_used(tmp_path):
    """Ids as they are written, and fractions after more whole numbers than types are told by."""
    (tmp_path / "ids.csv.gz").write_bytes(gzip.compress(b"id,v\n007,1\n7,2\n1.50,3\n"))
    (block,) = open_source(tmp_path / "ids.csv.gz", Want(columns=("v",), by="id")).blocks()
    assert block.clients.tolist() == ["007", "7", "1.50"]
    path = tmp_path / "data.csv"
    lines = ["v", *["1"] * 800_000, "2.5"]  # more than the block whose types are guessed
    path.write_text("\n".join(lines))
    assert rows(path)[-1].tolist() == [2.5]


def test_decimals(tmp_path):
    table = pa.table(
        {
            "money": pa.array([decimal.Decimal("1.25"), decimal.Decimal("-3.50")]),
        }
    )
    path = write(table, tmp_path / "data.parquet")
    assert rows(path).tolist() == [[1.25], [-3.5]]


def test_lists_are_refused_with_what_to_do(tmp_path):
    path = write(pa.table({"e": [[1.0, 2.0], [3.0]]}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"'e' is list<.*np\.savez"):
        rows(path, columns=("e",))


def test_missing_values_name_column_and_row(tmp_path):
    table = pa.table({"a": [1, 2, 3, None], "b": [1, 2, 3, 4]})
    path = write(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"column 'a', row 3: .*missing.*--nulls drop"):
        list(open_source(path, Want(batch_rows=2)).blocks())


def test_missing_values_dropped(tmp_path):
    table = pa.table(
        {
            "a": [1.0, None, 3.0, float("nan")],
            "b": [None, 2.0, 3.0, 4.0],
            "y": [0, 1, 2, 3],
            "who": ["p", "q", "r", "s"],
        }
    )
    path = write(table, tmp_path / "data.parquet")
    want = {"columns": ("a", "b"), "label": "y", "by": "who"}
    dropped = [b for b in open_source(path, Want(**want, nulls="drop")).blocks() if len(b.x)]
    assert [b.x.tolist() for b in dropped] == [[[3, 3]]]
    assert (dropped[0].y.tolist(), dropped[0].clients.tolist()) == ([2], ["r"])


@pytest.mark.parametrize("column", ["y", "who"])
def test_a_missing_label_or_client(tmp_path, column):
    table = pa.table({"a": [1.0, 2.0], "y": [0, 1], "who": ["p", "q"]})
    table = table.set_column(
        table.schema.get_field_index(column), column, pa.array([None, table[column][1].as_py()])
    )
    path = write(table, tmp_path / "data.parquet")
    want = {"columns": ("a",), "label": "y", "by": "who"}
    with pytest.raises(DataError, match=f"column '{column}', row 0"):
        list(open_source(path, Want(**want)).blocks())
    (block,) = open_source(path, Want(**want, nulls="drop")).blocks()
    assert block.x.tolist() == [[2.0]]


@pytest.mark.parametrize("label", [[0.5, 1.0], [-1, 0], [1e300, 0]])
def test_labels_are_whole_numbers_from_zero(tmp_path, label):
    path = write(pa.table({"a": [1.0, 2.0], "y": label}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"column 'y', row 0: label .* whole numbers from 0"):
        list(open_source(path, Want(columns=("a",), label="y")).blocks())


def test_what_cannot_be_used_is_named_with_its_type(path, tmp_path):
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(DataError, match="two columns are called 'a'"):
        open_source(write(twice, tmp_path / "twice.parquet"), Want(columns=("a",)))
    odd = pa.table({"day": [datetime.date(2020, 1, 1)], "x": [float("inf")]})
    with pytest.raises(DataError, match=r"'day' is date32\[day\]"):
        open_source(odd, Want(columns=("day",)))
    with pytest.raises(DataError, match=r"column 'x', row 0: inf"):
        rows(odd, columns=("x",), nulls="drop")
    with pytest.raises(DataError, match=r"no column 'c'; there are a, b, who, ok, note"):
        open_source(path, Want(columns=("c",)))
    with pytest.raises(DataError, match=r"'who' is string; vectors hold numbers"):
        open_source(path, Want(columns=("who",)))
    with pytest.raises(DataError, match="'who' is string; --label"):
        open_source(path, Want(columns=("a",), label="who"))
    with pytest.raises(ConfigError, match="also one of the columns"):
        open_source(path, Want(columns=("a",), label="a"))
    with pytest.raises(ConfigError, match="each column once"):
        open_source(path, Want(columns=("a", "a")))


def test_a_folder_of_files_and_folders_that_name_a_column(tmp_path):
    for site, values in (("a%20b", [1.0]), ("7", [2.0, 3.0])):
        folder = tmp_path / f"site={site}"
        folder.mkdir()
        write(pa.table({"v": values}), folder / "part-0.parquet")
    (tmp_path / "_SUCCESS").touch()
    source = open_source(tmp_path, Want(columns=("v",), by="site"))
    assert source.rows == 3
    found = {(c, v) for b in source.blocks() for c, v in zip(b.clients, b.x[:, 0], strict=True)}
    assert found == {("a b", 1.0), ("7", 2.0), ("7", 3.0)}


def test_a_folder_names_the_file_that_lacks_a_column(tmp_path):
    write(pa.table({"v": [1.0]}), tmp_path / "1.parquet")
    write(pa.table({"w": [1.0]}), tmp_path / "2.parquet")
    with pytest.raises(DataError, match=r"2\.parquet: no column 'v'; there are w"):
        rows(tmp_path)


def test_a_folder_of_two_kinds_is_refused(tmp_path):
    write(TABLE, tmp_path / "1.parquet")
    write(TABLE, tmp_path / "2.csv")
    with pytest.raises(DataError, match="of one kind"):
        open_source(tmp_path, Want())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="found none"):
        open_source(tmp_path / "empty", Want())


def test_csv_that_is_none(tmp_path):
    path = tmp_path / "data.csv"
    for content, message in (
        ("", "cannot be read"),
        ("a,b\n1,2\n3\n", "cannot be read.*Expected 2 columns"),
        ("0,1,2\n3.5,1,2\n", "the first row counts 0, 1, .*header=true.*header=false"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            rows(path)


def test_a_large_row_group_is_not_unpacked_at_once(tmp_path):
    table = pa.table({f"c{i}": np.random.default_rng(i).normal(size=1_000_000) for i in range(4)})
    path = tmp_path / "data.parquet"
    pq.write_table(table, path, row_group_size=1_000_000)
    del table
    before = pa.total_allocated_bytes()
    most = 0
    for _ in open_source(path, Want(batch_rows=10_000)).blocks():
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 16e6  # the row group holds 32 MB; a column's open page and dictionary about 2


@pytest.mark.parametrize(
    ("text", "options", "names"),
    [
        ("63,1,145.5\n67,?,160\n1,2,3\n", {}, ["c1", "c2", "c3"]),
        ("63;1,5\n67;2,5\n1;2\n", {}, ["c1", "c2"]),
        ("0,1,2\n67,1,160\n1,2,3\n", {"header": False}, ["c1", "c2", "c3"]),
        ("0,1,2\n67,1,160\n1,2,3\n", {"header": True}, ["0", "1", "2"]),
        ('"2019","2021"\n67,1\n1,2\n', {}, ["2019", "2021"]),
        ("a,b\n67,1\n1,2\n", {"header": False}, None),
    ],
)
def test_a_first_row_of_numbers_is_data(tmp_path, text, options, names):
    (tmp_path / "t.csv").write_text(text)
    want = Want(csv=CsvOptions(**options), nulls="drop")
    if names is None:  # then a and b are data, and no column holds numbers
        with pytest.raises(DataError, match="no column holds numbers"):
            open_source(tmp_path / "t.csv", want)
        return
    source = open_source(tmp_path / "t.csv", want)
    assert [c.name for c in source.columns] == names
    header = names[0] != "c1"
    list(source.blocks())
    assert source.reading.rows == 3 - header
    said = any("no header" in line for line in source.reading.assumed)
    assert said == (not header and "header" not in options)


def test_a_stream_is_read_once(tmp_path):
    source = open_source(TABLE.to_reader(), Want(columns=("a",)))
    assert sum(len(block.x) for block in source.blocks()) == 5
    with pytest.raises(DataError, match="once"):
        list(source.blocks())


def test_sheets_tables_and_queries_are_chosen_by_name(tmp_path):
    path = write(TABLE, tmp_path / "data.sqlite")
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("CREATE TABLE other AS SELECT a * 10 AS a FROM t WHERE a > 3")
    with pytest.raises(ConfigError, match="--table"):
        open_source(path, Want())
    assert rows(path, table="other").tolist() == [[40], [50]]
    assert rows(path, table="SELECT b FROM t WHERE who = 'y'").tolist() == [[-1.0], [1e6]]
    for query in ("DELETE FROM t", "WITH x AS (SELECT 1) DELETE FROM t"):
        with pytest.raises((ConfigError, DataError), match="sqlite"):
            rows(path, table=query)
    assert rows(path, table="SELECT count(*) AS n FROM t").tolist() == [[5]]
    book = openpyxl.Workbook()
    book.create_sheet("second").append(["a"])
    book["second"].append([7])
    book.save(tmp_path / "data.xlsx")
    with pytest.raises(ConfigError, match="second"):
        open_source(tmp_path / "data.xlsx", Want())
    assert rows(tmp_path / "data.xlsx", table="second").tolist() == [[7]]


def test_a_query_over_a_connection_is_asked_anew_for_every_pass(tmp_path):
    path = write(TABLE, tmp_path / "data.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        source = open_source(connection, Want(by="who", table="SELECT b, who FROM t WHERE a > 2"))
        for _ in range(2):
            (block,) = source.blocks()
            assert block.x.tolist() == [[2.25], [4.0], [1e6]]
            assert block.clients.tolist() == ["x", "z", "y"]
        with pytest.raises(DataError, match="the query fails: no such table: missing"):
            open_source(connection, Want(table="SELECT * FROM missing"))
        with pytest.raises(ConfigError, match="needs the query"):
            open_source(connection, Want())


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path):
    """A folder, and the URL at which it is served."""
    handler = partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_sources_by_url(served):
    folder, url = served
    (folder / "site=7").mkdir()
    write(TABLE, folder / "site=7" / "data.parquet")
    assert rows(f"{url}/site=7/data.parquet", columns=("a",)).ravel().tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(DataError, match=r"none\.csv: cannot be read: HTTP Error 404"):
        rows(f"{url}/none.csv")
    # Buckets are copied by the same function of PyArrow as a folder.
    (block,) = open_source(folder.as_uri(), Want(columns=("a",), by="site", batch_rows=9)).blocks()
    assert set(block.clients) == {"7"}
    with pytest.raises(ConfigError, match=r"read by a query: psql"):
        rows("postgresql://host/base")


def test_values_of_several_types_in_a_sheet(tmp_path):
    book = openpyxl.Workbook()
    day = datetime.datetime(2020, 1, 31)
    for row in (["v", "day"], [1, day], ["?", day], [2.5, day], [None, None]):
        book.active.append(row)
    book.save(tmp_path / "data.xlsx")
    columns = Column("v", missing="drop"), Column("day", "date", since="2020-01-30")
    assert rows(tmp_path / "data.xlsx", columns=columns).tolist() == [[1, 1], [2.5, 1]]


def test_json_numbers_may_have_fractions_and_keys_may_be_missing(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = ['{"v": 1, "w": "x"}'] * 300_000
    path.write_text("\n".join([*lines, '{"v": 2.5, "new": [1]}', '{"w": "y"}']))
    found = rows(path, columns=("v",), nulls="drop")
    assert (len(found), found[-1].tolist()) == (300_001, [2.5])
    path.write_text('{"v": 1}\nno json\n')
    with pytest.raises(DataError, match="jsonl"):
        rows(path)


@pytest.mark.parametrize("suffix", ["parquet", "feather", "arrow", "xlsx", "sqlite", "jsonl"])
def test_damaged_files(tmp_path, suffix):
    path = write(TABLE, tmp_path / f"data.{suffix}")
    whole = path.read_bytes()
    rng = np.random.default_rng(3)
    for cut in (b"", b"garbage" * 20, whole[: len(whole) // 2]):
        path.write_bytes(cut)
        with pytest.raises(DataError, match="data"):
            rows(path, columns=("a",))
    for _ in range(200 if suffix in ("xlsx", "sqlite", "jsonl") else 0):  # others: tests/soak
        data = bytearray(whole)
        for at in rng.integers(len(data), size=4):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        with suppress(FedcohortError):
            rows(path, columns=("a",))


@pytest.mark.parametrize(
    ("name", "command"), [("a.sav", "read_spss"), ("a.json", "jq"), ("a.xls", "soffice")]
)
def test_other_files_are_refused_with_the_line_that_converts_them(tmp_path, name, command):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=command):
        open_source(tmp_path / name, Want())


def test_a_site_writes_columns_in_its_own_way(tmp_path):
    """Names, codes, dates and units: the same vectors as from a table that follows the spec."""
    columns = (
        Column("height", center=170, scale=10),
        Column("sex", "category", levels=("f", "m")),
        Column("day", "date", since="2020-01-01"),
    )
    day = [datetime.date(2020, 1, 3), datetime.date(2020, 2, 1)]
    usual = pa.table({"height": [165.1, 177.8], "sex": ["f", "m"], "day": day})
    other = pa.table(
        {"inches": ["65", "70"], "Geschlecht": [2, 1], "Tag": ["03.01.2020", "01.02.2020"]}
    )
    site = {
        "height": SiteColumn("inches", factor=2.54),
        "sex": SiteColumn("Geschlecht", codes={"1": "m", "2": "f"}),
        "day": SiteColumn("Tag", format="%d.%m.%Y"),
    }
    assert np.allclose(rows(usual, columns=columns), rows(other, columns=columns, site=site))


def test_only_the_first_row_of_a_person_counts(table):
    source = open_source(table, Want(columns=("a",), person="who", batch_rows=2))
    assert np.concatenate([b.x for b in source.blocks()]).ravel().tolist() == [1, 2, 4]
    assert source.reading.repeated == 2
    assert "people" in source.reading.facts()


def test_labels_from_1_are_said_to_leave_class_0_empty(table):
    source = open_source(table, Want(columns=("b",), label="a"))
    list(source.blocks())
    assert any("label 0" in line for line in source.reading.warnings())
