"""Mixed columns -> vectors, against values worked out by hand."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fedcohort.exceptions import DataError
from fedcohort.files import Want, open_source
from fedcohort.files.columns import Column
from fedcohort.files.table_source import text_slot

HALF = 2**-0.5
SINCE = Column("a", "date", since="2020-01-01")


def vectors(values, column, **want):
    source = open_source(pa.table({column.name: values}), Want(columns=(column,), **want))
    return np.concatenate([block.x for block in source.blocks()]).round(12).tolist()


def test_numbers_with_weight_and_indicator():
    column = Column("a", center=10, scale=2, weight=3, missing="indicator")
    assert vectors([12.0, None, 10.0], column) == [[3, 0], [0, 3], [0, 0]]
    assert vectors([12.0, -9.0], column, null_values=("-9",)) == [[3, 0], [0, 3]]
    assert vectors(["1.5", "?", "2"], Column("a", missing="drop")) == [[1.5], [2.0]]


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
def test_numbers_that_overflow_are_named_with_the_constants(values, constants):
    kind = "date" if "since" in constants else "number"
    column = Column("a", **{"kind": kind, "missing": "drop", **constants})
    with pytest.raises(DataError, match=r"column 'a', row 1: too large for center .* weight = "):
        vectors(values, column)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [np.uint64(0x7FF0000000000001), np.uint16(0x7C01)])
def test_a_signaling_nan_is_a_missing_value(bits):
    values = np.array([bits, 0], bits.dtype).view(f"f{bits.nbytes}")
    assert vectors(values, Column("a", missing="drop")) == [[0.0]]
    with pytest.raises(DataError, match="column 'a', row 0: the value is missing"):
        vectors(values, Column("a"))


@pytest.mark.filterwarnings("error")
def test_dates_at_the_ends_of_time():
    """Differences of 64-bit seconds wrapped around, so the first moment came after the last."""
    ends = pa.table({"a": pa.array([-(2**63), 2**63 - 1, 86400], pa.timestamp("s"))})
    (block,) = open_source(ends, Want(columns=(SINCE,))).blocks()
    wanted = [-(2**63) / 86400, 2**63 / 86400, 1 - 18262]
    assert block.parts[0].order == pytest.approx(wanted, rel=1e-9)


def test_categories_have_other_and_unknown():
    column = Column("a", "category", levels=("x", "y"), missing="indicator")
    found = vectors(["y", "z", None, " x ", "NA"], column)
    wanted = [[0, HALF, 0, 0], [0, 0, HALF, 0], [0, 0, 0, 1], [HALF, 0, 0, 0], [0, 0, 0, 1]]
    assert np.allclose(found, wanted)
    hashed = vectors(["x", "y", "x"], Column("a", "category", slots=8))
    assert [row.index(max(row)) for row in hashed] == [text_slot(t, 8) for t in "xyx"]


@pytest.mark.parametrize("values", [[1, 1], [1.0, 1.0], ["1", "1.0"], ["1.000", "1"]])
def test_whole_and_fractional_numbers_are_the_same_value(values):
    column = Column("a", "category", levels=("1", "2.5"))
    assert np.allclose(vectors(values, column), [[HALF, 0, 0]] * 2)


def test_booleans_ordered_levels_and_texts():
    assert vectors([True, False], Column("a", "boolean")) == [[0.5], [-0.5]]
    assert vectors(["Yes", "n", "1"], Column("a", "boolean")) == [[0.5], [-0.5], [0.5]]
    ordered = Column("a", "ordered", levels=("low", "mid", "high"))
    assert vectors(["mid", "low", "high"], ordered) == [[0], [-0.5], [0.5]]
    with pytest.raises(DataError, match=r"column 'a', row 1: 'huge' is not one of low, mid, high"):
        vectors(["mid", "huge"], ordered)
    words = np.array(vectors(["to be", "be to", "not"], Column("a", "text", slots=16)))
    assert np.array_equal(words[0], words[1])
    assert np.allclose(np.linalg.norm(words, axis=1), HALF)


def test_dates_cyclic_or_since():
    days = [datetime.date(2020, 1, 1), datetime.date(2020, 7, 2), None]
    since = Column("a", "date", since="2020-01-01", scale=183, missing="indicator")
    assert np.allclose(vectors(days, since), [[0, 0], [1, 0], [0, 1]])
    first, second = vectors(days[:2], Column("a", "date", parts=("yearday",)))
    assert np.linalg.norm(np.subtract(first, second)) == pytest.approx(1, abs=1e-4)
    written = Column("a", "date", since="2020-01-01", format="%d/%m/%Y")
    assert vectors(["03/01/2020"], written) == vectors(["2020-01-03"], SINCE) == [[2]]
    with pytest.raises(DataError, match="a date is not written as"):
        vectors(["3.1.20"], SINCE)


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
    ("options", "message"),
    [
        ({"kind": "color"}, "kind='color'"),
        ({"center": float("nan")}, "center=nan"),
        ({"center": 10**400}, "center="),
        ({"weight": -1}, "weight=-1"),
        ({"kind": "category"}, "either its public levels or slots"),
        ({"kind": "category", "levels": "ab"}, "levels='ab'"),
        ({"kind": "category", "levels": ("a", "a")}, "each level once"),
        ({"kind": "ordered", "levels": ("a",)}, "two levels or more"),
        ({"kind": "date"}, "either parts"),
        ({"kind": "date", "parts": ("century",)}, "century"),
        ({"kind": "date", "since": "soon"}, "since='soon': must be a date"),
        ({"kind": "text"}, "text needs slots"),
    ],
)
def test_columns_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Column("a", **options)
