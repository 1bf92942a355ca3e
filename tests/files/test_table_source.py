"""Tables and texts against what was written into them, in every format."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import re
import sqlite3
import tracemalloc
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files import CsvOptions, Want, open_source
from fedcohort.files.columns import Column, SiteColumn
from fedcohort.files.propose import propose_spec
from fedcohort.files.source import MAX_LINE

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
    frame = table.to_pandas()
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path, row_group_size=3)
        case ".csv" | ".tsv":
            frame.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)
        case ".feather":
            frame.to_feather(path)
        case ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        case ".xlsx":
            frame.to_excel(path, index=False)
        case ".sqlite":
            with closing(sqlite3.connect(path)) as base:
                frame.to_sql("t", base, index=False)
        case _:
            opener = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
            with opener(path, table.schema) as file:
                file.write_table(table)
    return path


def rows(data, **want):
    blocks = list(open_source(data, Want(**want)).blocks())
    return np.concatenate([block.x for block in blocks])


FORMATS = ["parquet", "csv", "tsv", "feather", "arrow", "arrows", "jsonl", "xlsx", "sqlite"]


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return write(TABLE, tmp_path / f"data.{request.param}")


MEMORY = {
    "pyarrow": lambda: TABLE,
    "pandas": TABLE.to_pandas,  # and of a library that knows only the older protocol:
    "interchange": lambda: SimpleNamespace(__dataframe__=TABLE.to_pandas().__dataframe__),
    "stream": TABLE.to_reader,
}


@pytest.fixture(params=[*FORMATS, *MEMORY])
def table(request, tmp_path):
    """A file of every format, and tables in memory."""
    if request.param in MEMORY:
        return MEMORY[request.param]()
    return write(TABLE, tmp_path / f"data.{request.param}")


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_numbers_labels_and_clients(table, batch_rows):
    source = open_source(
        table, Want(columns=("b", "ok"), label="a", by="who", batch_rows=batch_rows)
    )
    blocks = list(source.blocks())
    assert any("no row has label 0" in line for line in source.reading.warnings())
    wanted = [TABLE[c].to_numpy().astype(float) for c in ("b", "ok")]
    assert np.array_equal(np.concatenate([b.x for b in blocks]), np.stack(wanted, axis=1))
    assert np.concatenate([b.y for b in blocks]).tolist() == [1, 2, 3, 4, 5]
    assert np.concatenate([b.clients for b in blocks]).tolist() == ["x", "y", "x", "z", "y"]


def test_only_the_first_row_of_a_person_counts(table):
    source = open_source(table, Want(columns=("a",), person="who", batch_rows=2))
    assert np.concatenate([b.x for b in source.blocks()]).ravel().tolist() == [1, 2, 4]
    assert source.reading.repeated == 2
    assert "people" in source.reading.facts()


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


def test_columns_of_texts(path):
    blocks = open_source(path, Want(text="note", nulls="drop")).blocks()
    texts = [text for b in blocks for text in b.x if text]  # in .xlsx, "" is an empty cell
    assert texts == ["to be", "or not", "to be", "that is"]


def test_decimals_are_numbers_and_lists_are_refused_with_what_to_do():
    money = [decimal.Decimal("1.25"), decimal.Decimal("-3.50")]
    assert rows(pa.table({"money": money})).tolist() == [[1.25], [-3.5]]
    with pytest.raises(DataError, match=r"'e' is list<.*np\.savez"):
        rows(pa.table({"e": [[1.0, 2.0], [3.0]]}), columns=("e",))


@pytest.mark.parametrize(("column", "missing"), [("a", float("nan")), ("y", None), ("who", None)])
def test_missing_values_are_named_or_dropped(column, missing):
    values = {"a": [1.0, 2.0, 3.0], "b": [0.0, 1.0, 2.0], "y": [0, 1, 2], "who": ["p", "q", "r"]}
    table = pa.table(values | {column: [values[column][0], missing, None]})
    want = {"columns": ("a", "b"), "label": "y", "by": "who"}
    with pytest.raises(DataError, match=f"column '{column}', row 1: .*missing.*--nulls drop"):
        rows(table, **want, batch_rows=2)
    (block,) = open_source(table, Want(**want, nulls="drop")).blocks()
    assert (block.x.tolist(), block.y.tolist(), block.clients.tolist()) == ([[1, 0]], [0], ["p"])


@pytest.mark.parametrize("label", [[0.5, 1.0], [-1, 0], [1e300, 0]])
def test_labels_are_whole_numbers_from_zero(label):
    with pytest.raises(DataError, match=r"column 'y', row 0: label .* whole numbers from 0"):
        rows(pa.table({"a": [1.0, 2.0], "y": label}), columns=("a",), label="y")


def test_what_cannot_be_used_is_named_with_its_type(path):
    for error, message, want in (
        (DataError, r"no column 'c'; there are a, b, who, ok, note", {"columns": ("c",)}),
        (DataError, r"'who' is (large_)?string; vectors hold numbers", {"columns": ("who",)}),
        (DataError, "string; --label", {"columns": ("a",), "label": "who"}),
        (ConfigError, "also one of the columns", {"columns": ("a",), "label": "a"}),
    ):
        with pytest.raises(error, match=message):
            open_source(path, Want(**want))


def test_dates_infinity_and_two_columns_of_one_name_are_no_numbers():
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(DataError, match="two columns are called 'a'"):
        open_source(twice, Want(columns=("a",)))
    odd = pa.table({"day": [datetime.date(2020, 1, 1)], "x": [float("inf")]})
    with pytest.raises(DataError, match=r"'day' is date32\[day\]"):
        open_source(odd, Want(columns=("day",)))
    with pytest.raises(DataError, match=r"column 'x', row 0: inf"):
        rows(odd, columns=("x",), nulls="drop")


def test_a_folder_of_files_and_folders_that_name_a_column(tmp_path):
    for site, values in (("a%20b", [1.0]), ("7", [2.0, 3.0])):
        (tmp_path / f"site={site}").mkdir()
        write(pa.table({"v": values}), tmp_path / f"site={site}" / "part-0.parquet")
    (tmp_path / "_SUCCESS").touch()
    source = open_source(tmp_path, Want(columns=("v",), by="site"))
    assert source.rows == 3
    found = {(c, v) for b in source.blocks() for c, v in zip(b.clients, b.x[:, 0], strict=True)}
    assert found == {("a b", 1.0), ("7", 2.0), ("7", 3.0)}
    write(pa.table({"w": [1.0]}), tmp_path / "z.parquet")
    with pytest.raises(DataError, match=r"z\.parquet: no column 'v'; there are w"):
        rows(tmp_path, columns=("v",))
    write(TABLE, tmp_path / "2.csv")
    with pytest.raises(DataError, match="of one kind"):
        open_source(tmp_path, Want())
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="found none"):
        open_source(tmp_path / "empty", Want())


@pytest.mark.parametrize(
    ("text", "csv", "found_out"),
    [
        ("a;b\n1,5;2\n2,25;3\n", CsvOptions(), ["delimiter ';'", "decimal comma"]),
        ("a\tb\n1.5\t2\n2.25\t3\n", CsvOptions(), [r"delimiter '\t'"]),
        ("\ufeffa,b\r\n1.5,2\r\n2.25,3\r\n", CsvOptions(), []),
        ('"a","b"\n"1.5",2\n2.25,3\n', CsvOptions(), []),
        ("a|b\n1.5|2\n2.25|3\n", CsvOptions(delimiter="|"), []),
        ("a;b\n1,5;2\n2,25;3\n", CsvOptions(";", ","), []),
    ],
)
def test_csv_as_excel_and_r_write_them(tmp_path, text, csv, found_out):
    (tmp_path / "t.csv").write_bytes(text.encode())
    source = open_source(tmp_path / "t.csv", Want(csv=csv))
    (block,) = source.blocks()
    assert block.x.tolist() == [[1.5, 2], [2.25, 3]]
    assert source.reading.assumed == found_out


def test_encodings(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("größe,b\n1,2\n".encode("cp1252"))
    with pytest.raises(DataError, match="encoding=cp1252"):
        open_source(path, Want())
    source = open_source(path, Want(csv=CsvOptions(encoding="cp1252")))
    assert [c.name for c in source.columns] == ["größe", "b"]
    path.write_bytes("a,b\n1,2\n3,4\n".encode("utf-16"))
    source = open_source(path, Want())
    assert next(iter(source.blocks())).x.tolist() == [[1, 2], [3, 4]]
    assert source.reading.assumed == ["encoding utf-16"]


@pytest.mark.parametrize(
    ("text", "options", "names"),
    [
        ("63,1,145.5\n67,?,160\n1,2,3\n", {}, ["c1", "c2", "c3"]),
        ("63;1,5\n67;2,5\n1;2\n", {}, ["c1", "c2"]),
        ("0,1,2\n67,1,160\n1,2,3\n", {"header": False}, ["c1", "c2", "c3"]),
        ("0,1,2\n67,1,160\n1,2,3\n", {"header": True}, ["0", "1", "2"]),
        ('"2019","2021"\n67,1\n1,2\n', {}, ["2019", "2021"]),
    ],
)
def test_a_first_row_of_numbers_is_data(tmp_path, text, options, names):
    (tmp_path / "t.csv").write_text(text)
    source = open_source(tmp_path / "t.csv", Want(csv=CsvOptions(**options), nulls="drop"))
    assert [c.name for c in source.columns] == names
    header = names[0] != "c1"
    list(source.blocks())
    assert source.reading.rows == 3 - header
    said = any("no header" in line for line in source.reading.assumed)
    assert said == (not header and "header" not in options)


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


def test_csv_columns_are_read_as_they_are_used(tmp_path):
    """Ids as they are written, and fractions after more whole numbers than types are told by."""
    (tmp_path / "ids.csv.gz").write_bytes(gzip.compress(b"id,v\n007,1\n7,2\n1.50,3\n"))
    (block,) = open_source(tmp_path / "ids.csv.gz", Want(columns=("v",), by="id")).blocks()
    assert block.clients.tolist() == ["007", "7", "1.50"]
    lines = ["v", *["1"] * 800_000, "2.5"]  # more than the block whose types are guessed
    (tmp_path / "data.csv").write_text("\n".join(lines))
    assert rows(tmp_path / "data.csv")[-1].tolist() == [2.5]


def test_what_was_left_out_is_said(tmp_path):
    path = tmp_path / "t.csv"

    def read(text):
        path.write_text(text)
        source = open_source(path, Want(nulls="drop"))
        list(source.blocks())
        return source.reading.facts(), source.reading.warnings()

    facts, warnings = read("id,a,name,c\n" + "".join(f"{i},{i % 3},n{i},5\n" for i in range(30)))
    assert facts["columns left out"] == "name: string is not a number"
    assert warnings[0] == "constant in all rows, so they tell nothing: c"
    assert warnings[1] == "look like identifiers and should not be hashed: id"
    facts, _ = read("a,b\n1,?\n2,3\nNA,NA\n4,5\n")
    assert facts["rows left out"] == "2 of 4, for missing values (b 2, a 1)"
    _, warnings = read("a,b\n1,2\n3,\n4,\n")
    assert any("only 1 of 3 rows are used" in line for line in warnings)


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


def test_a_stream_is_read_once():
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
    with pandas.ExcelWriter(tmp_path / "two.xlsx") as book:
        for name in ("first", "second"):
            TABLE.select(["a"]).to_pandas().to_excel(book, sheet_name=name, index=False)
    with pytest.raises(ConfigError, match="second"):
        open_source(tmp_path / "two.xlsx", Want())
    assert len(rows(tmp_path / "two.xlsx", table="first")) == 5


def test_a_query_over_a_connection_is_asked_anew_for_every_pass(tmp_path):
    path = write(TABLE, tmp_path / "data.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        source = open_source(connection, Want(by="who", table="SELECT b, who FROM t WHERE a > 2"))
        for _ in range(2):
            (block,) = source.blocks()
            assert block.x.tolist() == [[2.25], [4.0], [1e6]]
            assert block.clients.tolist() == ["x", "z", "y"]
        with pytest.raises(DataError, match="cannot be read: no such table: missing"):
            open_source(connection, Want(table="SELECT * FROM missing"))
        with pytest.raises(ConfigError, match="needs the query"):
            open_source(connection, Want())


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_sources_by_url(tmp_path):
    (tmp_path / "site=7").mkdir()
    write(TABLE, tmp_path / "site=7" / "data.parquet")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = rows(f"{url}/site=7/data.parquet", columns=("a",)).ravel().tolist()
        with pytest.raises(DataError, match=r"none\.csv: cannot be read: HTTP Error 404"):
            rows(f"{url}/none.csv")
        server.shutdown()
        thread.join()
    assert found == [1, 2, 3, 4, 5]
    # Buckets are copied by the same function of PyArrow as a folder.
    want = Want(columns=("a",), by="site", batch_rows=9)
    (block,) = open_source(tmp_path.as_uri(), want).blocks()
    assert set(block.clients) == {"7"}
    with pytest.raises(ConfigError, match=r"read by a query: psql"):
        rows("postgresql://host/base")


def test_values_of_several_types_in_a_sheet(tmp_path):
    day = datetime.datetime(2020, 1, 31)
    frame = pandas.DataFrame({"v": [1, "?", 2.5, None], "day": [day, day, day, None]})
    frame.to_excel(tmp_path / "data.xlsx", index=False)
    columns = Column("v", missing="drop"), Column("day", "date", since="2020-01-30")
    assert rows(tmp_path / "data.xlsx", columns=columns).tolist() == [[1, 1], [2.5, 1]]


def test_json_numbers_may_have_fractions_and_keys_may_be_missing(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = ['{"v": 1, "w": "x"}'] * 2_000
    path.write_text("\n".join([*lines, '{"v": 2.5, "new": [1]}', '{"w": "y"}']))
    found = rows(path, columns=("v",), nulls="drop")
    assert (len(found), found[-1].tolist()) == (2_001, [2.5])


@pytest.mark.parametrize("line", ["null", "1", '"x"', "[1]", '{"v": 1', r'{"\ud800": 1}'])
def test_json_lines_that_are_no_objects_are_named(line, tmp_path):
    """PyArrow's reader ends the process at a first line of null."""
    path = tmp_path / "data.jsonl"
    for text in (line, f'{{"v": 1}}\n{line}'):
        path.write_text(text)
        with pytest.raises(DataError, match=f"is not a JSON object: .*{re.escape(line[:2])}"):
            rows(path, columns=("v",))


def test_json_of_many_keys_takes_little_memory(tmp_path):
    """With a cell for each of 20,000 lines and keys it would take 3 GB."""
    path, keys = tmp_path / "data.jsonl", {f"k{i}": i for i in range(20_000)}
    path.write_text("\n".join([json.dumps(keys), *['{"k7": 1}'] * 20_000]))
    tracemalloc.start()
    assert len(rows(path, columns=("k7",))) == 20_001
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e8
    path.write_text("\n".join(json.dumps({f"{p}{i}": i for i in range(40_000)}) for p in "kl"))
    with pytest.raises(DataError, match="80,000 keys"):
        rows(path)


def test_dates_in_json_are_proposed_as_such(tmp_path):
    path = tmp_path / "data.jsonl"
    for day in ("2020-01-31", "2020-01-31T12:30:00", "31.01.2020"):
        path.write_text(json.dumps({"day": day}))
        assert 'kind = "date"' in propose_spec(path, None, Want())[0]


def test_json_ids_are_exact_and_lists_are_none(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"v": 1, "id": {2**53 + 1}, "l": [1]}}\n{{"v": 2, "id": "x", "l": []}}')
    (block,) = open_source(path, Want(columns=("v",), by="id")).blocks()
    assert block.clients.tolist() == [str(2**53 + 1), "x"]
    with pytest.raises(DataError, match="'l' is list"):
        open_source(path, Want(columns=("v",), by="l"))


@pytest.mark.parametrize("suffix", ["parquet", "feather", "arrow", "xlsx", "sqlite", "jsonl"])
def test_damaged_files(tmp_path, suffix):
    path = write(TABLE, tmp_path / f"data.{suffix}")
    whole = path.read_bytes()
    for cut in (b"", b"garbage" * 20, whole[: len(whole) // 2]):  # more is done in tests/soak
        path.write_bytes(cut)
        with pytest.raises(DataError, match="data"):
            rows(path, columns=("a",))


def test_our_own_mistakes_are_not_called_damage(path, monkeypatch):
    """A TypeError in this package was "cannot be read: a header in it is damaged"."""
    monkeypatch.setattr("fedcohort.files.tables._within_memory", None)
    with pytest.raises(TypeError, match="not callable"):
        rows(path, columns=("a",))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.sav", "read_spss"),
        ("a.json", "jq"),
        ("a.xls", "soffice"),
        ("a.docx", "unknown kind of file; known are"),
        ("none.csv", "no such file"),
    ],
)
def test_other_files_are_refused_with_the_line_that_converts_them(tmp_path, name, message):
    if name != "none.csv":
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / name, Want())


def test_a_site_writes_columns_in_its_own_way():
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


def lines(path, **want):
    return [line for b in open_source(path, Want(**want)).blocks() for line in b.x]


def test_lines_are_texts_and_blank_ones_are_left_out(tmp_path):
    content = "To be,\n\n  or not ü to be \r\nlast without end"
    (tmp_path / "a.txt").write_text(content, "utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content.encode()))
    wanted = ["To be,", "or not ü to be", "last without end"]
    assert lines(tmp_path / "a.txt", batch_rows=2) == wanted
    assert lines(tmp_path) == 2 * wanted
    with pytest.raises(ConfigError, match="no columns, such as 'who'"):
        lines(tmp_path / "a.txt", by="who")
    # 80 MB in 80 kB are not held at a time.
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"x" * (MAX_LINE - 1) + b"\n") * 80)
    assert max(len(b.x) for b in open_source(tmp_path / "c.txt.gz", Want()).blocks()) < 70


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"short\n" + b"x" * (MAX_LINE + 1), r"a\.txt: line 2 is longer"),
        ("a.txt", "fine\nnicht schön".encode("latin-1"), "line 2 is not UTF-8"),
        ("a.txt.gz", gzip.compress(b"some text " * 99, mtime=0)[:-12], "cannot be read"),
    ],
)
def test_lines_that_are_no_text(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        lines(tmp_path / name)
