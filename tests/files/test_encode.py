"""Mixed columns -> vectors, against values worked out by hand."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedcohort.exceptions import DataError
from fedcohort.files import CsvOptions, Want, open_source
from fedcohort.files.columns import Column, columns_from_spec
from fedcohort.files.table_source import text_slot

HALF = 2**-0.5


def vectors(tmp_path, values, column, name="t.parquet", **want):
    path = tmp_path / name
    pq.write_table(pa.table({column.name: values}), path)
    source = open_source(path, Want(columns=(column,), **want))
    return np.concatenate([block.x for block in source.blocks()]).round(12).tolist()


def test_numbers_with_weight_and_indicator(tmp_path):
    column = Column("a", center=10, scale=2, weight=3, missing="indicator")
    assert vectors(tmp_path, [12.0, None, 10.0], column) == [[3, 0], [0, 3], [0, 0]]
    assert vectors(tmp_path, [12.0, -9.0], column, null_values=("-9",)) == [[3, 0], [0, 3]]
    texts = Column("a", missing="drop")
    assert vectors(tmp_path, ["1.5", "?", "2"], texts) == [[1.5], [2.0]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("values", "constants"),
    [
        ([1.0, 1e308], {"scale": 0.001}),
        ([1.0, 1e308], {"center": -1.7e308}),
        ([1.0, 1e300], {"weight": 1e10}),
        ([None, datetime.date(2020, 1, 31)], {"scale": 1e-308, "since": "2020-01-01"}),
    ],
)
def test_numbers_that_overflow_are_named_with_the_constants(tmp_path, values, constants):
    kind = "date" if "since" in constants else "number"
    column = Column("a", **{"kind": kind, "missing": "drop", **constants})
    with pytest.raises(DataError, match=r"column 'a', row 1: too large for center .* weight = "):
        vectors(tmp_path, values, column)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [np.uint64(0x7FF0000000000001), np.uint16(0x7C01)])
def test_a_signaling_nan_is_a_missing_value(tmp_path, bits):
    values = np.array([bits, 0], bits.dtype).view(f"f{bits.nbytes}")
    assert np.isnan(values[0])
    assert vectors(tmp_path, values, Column("a", missing="drop")) == [[0.0]]
    with pytest.raises(DataError, match="column 'a', row 0: the value is missing"):
        vectors(tmp_path, values, Column("a"))


def orders(tmp_path, values, column):
    path = tmp_path / "t.arrow"
    table = pa.table({"a": values})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    (block,) = open_source(path, Want(columns=(column,))).blocks()
    return block.parts[0].order


@pytest.mark.filterwarnings("error")
def test_dates_at_the_ends_of_time(tmp_path):
    """Differences of 64-bit seconds wrapped around, so the first moment came after the last."""
    for since in ("1900-01-01", "2020-01-01"):
        start = (datetime.date.fromisoformat(since) - datetime.date(1970, 1, 1)).days
        ends = pa.array([-(2**63), 2**63 - 1, 86400], pa.timestamp("s"))
        found = orders(tmp_path, ends, Column("a", "date", since=since))
        assert found == pytest.approx([-(2**63) / 86400, 2**63 / 86400, 1 - start], rel=1e-9)


def test_categories_have_other_and_unknown(tmp_path):
    column = Column("a", "category", levels=("x", "y"), missing="indicator")
    found = vectors(tmp_path, ["y", "z", None, " x ", "NA"], column)
    wanted = [[0, HALF, 0, 0], [0, 0, HALF, 0], [0, 0, 0, 1], [HALF, 0, 0, 0], [0, 0, 0, 1]]
    assert np.allclose(found, wanted)
    apart = np.linalg.norm(np.subtract(found[0], found[3]))
    assert apart == pytest.approx(1)  # two categories are `weight` apart
    hashed = vectors(tmp_path, ["x", "y", "x"], Column("a", "category", slots=8))
    assert [row.index(max(row)) for row in hashed] == [text_slot(t, 8) for t in "xyx"]


def test_whole_and_fractional_numbers_are_the_same_value(tmp_path):
    column = Column("a", "category", levels=("1", "2.5"))
    for values in ([1, 1], [1.0, 1.0], ["1", "1.0"], ["1.000", "01"[1:]]):
        assert np.allclose(vectors(tmp_path, values, column), [[HALF, 0, 0]] * 2)
    assert np.allclose(vectors(tmp_path, [2.5], column), [[0, HALF, 0]])


def test_booleans_ordered_levels_and_texts(tmp_path):
    assert vectors(tmp_path, [True, False], Column("a", "boolean")) == [[0.5], [-0.5]]
    assert vectors(tmp_path, ["Yes", "n", "1"], Column("a", "boolean")) == [[0.5], [-0.5], [0.5]]
    ordered = Column("a", "ordered", levels=("low", "mid", "high"))
    assert vectors(tmp_path, ["mid", "low", "high"], ordered) == [[0], [-0.5], [0.5]]
    with pytest.raises(DataError, match=r"column 'a', row 1: 'huge' is not one of low, mid, high"):
        vectors(tmp_path, ["mid", "huge"], ordered)
    words = np.array(vectors(tmp_path, ["to be", "be to", "not"], Column("a", "text", slots=16)))
    assert np.array_equal(words[0], words[1])
    assert np.allclose(np.linalg.norm(words, axis=1), HALF)


def test_dates_cyclic_or_since(tmp_path):
    days = [datetime.date(2020, 1, 1), datetime.date(2020, 7, 2), None]
    since = Column("a", "date", since="2020-01-01", scale=183, missing="indicator")
    assert np.allclose(vectors(tmp_path, days, since), [[0, 0], [1, 0], [0, 1]])
    cyclic = Column("a", "date", parts=("yearday",))
    first, second = vectors(tmp_path, days[:2], cyclic)
    assert np.linalg.norm(np.subtract(first, second)) == pytest.approx(1, abs=1e-4)
    written = Column("a", "date", since="2020-01-01", format="%d/%m/%Y")
    assert vectors(tmp_path, ["03/01/2020"], written) == [[2]]
    assert vectors(tmp_path, ["2020-01-03"], Column("a", "date", since="2020-01-01")) == [[2]]
    with pytest.raises(DataError, match="a date is not written as"):
        vectors(tmp_path, ["3.1.20"], Column("a", "date", since="2020-01-01"))


def test_all_kinds_side_by_side_equal_in_csv_and_parquet(tmp_path):
    table = pa.table(
        {
            "n": [1.5, 2.0, None, 4.0],
            "b": ["yes", "no", "yes", None],
            "c": ["x", "y", "?", "w"],
            "d": ["2020-01-05", "2021-06-07", "", "2020-02-02"],
            "t": ["a word", "two words", "a word", "none"],
        }
    )
    columns = (
        Column("n", center=2, scale=2, missing="indicator"),
        Column("b", "boolean", missing="indicator"),
        Column("c", "category", levels=("x", "y"), missing="indicator"),
        Column("d", "date", parts=("month", "weekday"), missing="indicator"),
        Column("t", "text", slots=8),
    )
    pq.write_table(table, tmp_path / "t.parquet")
    pa.csv.write_csv(table, tmp_path / "t.csv")
    found = []
    for name in ("t.parquet", "t.csv"):
        source = open_source(tmp_path / name, Want(columns=columns, batch_rows=3))
        found.append(np.concatenate([block.x for block in source.blocks()]))
        assert source.dim == found[-1].shape[1] == sum(c.width for c in columns)
        assert source.reading.missing == {"n": 1, "b": 1, "c": 1, "d": 1}
        assert source.reading.others == {"c": 1}
    assert np.array_equal(*found)


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
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    source = open_source(path, Want(csv=csv))
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


def test_what_was_left_out_is_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("id,a,name,c\n" + "".join(f"{i},{i % 3},n{i},5\n" for i in range(30)))
    source = open_source(path, Want())
    list(source.blocks())
    assert source.reading.facts()["columns left out"] == "name: string is not a number"
    warnings = source.reading.warnings()
    assert warnings[0] == "constant in all rows, so they tell nothing: c"
    assert warnings[1] == "look like identifiers and should not be hashed: id"
    path.write_text("a,b\n1,?\n2,3\nNA,NA\n4,5\n")
    source = open_source(path, Want(nulls="drop"))
    assert sum(len(block.x) for block in source.blocks()) == 2
    said = source.reading.facts()["rows left out"]
    assert said == "2 of 4, for missing values (b 2, a 1)"
    path.write_text("a,b\n1,2\n3,\n4,\n")
    source = open_source(path, Want(nulls="drop"))
    list(source.blocks())
    assert any("only 1 of 3 rows are used" in line for line in source.reading.warnings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "color"}, "kind='color'"),
        ({"scale": 0}, "scale=0"),
        ({"center": float("nan")}, "center=nan"),
        ({"center": 10**400}, "center="),
        ({"kind": "category"}, "either its public levels or slots"),
        ({"kind": "category", "levels": "ab"}, "levels='ab'"),
        ({"kind": "ordered", "levels": ("a",)}, "two levels or more"),
        ({"kind": "date"}, "either parts"),
        ({"kind": "date", "parts": ("century",)}, "century"),
        ({"kind": "date", "since": "soon"}, "must be a date"),
        ({"kind": "text"}, "text needs slots"),
        ({"weight": -1}, "weight=-1"),
        ({"levels": ("a", "a"), "kind": "category"}, "each level once"),
    ],
)
def test_columns_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Column("a", **options)


def test_a_column_is_named_once():
    with pytest.raises(ValueError, match="named twice"):
        columns_from_spec([{"name": "a"}, {"name": "a"}])
