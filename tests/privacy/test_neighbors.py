"""One record more moves one count per row and column and nothing else: epsilon rests on it.

The record is as odd as can be. Where data with it are refused, that happens at the site, before
anything is released.
"""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pytest
from openpyxl import Workbook

from fedcohort.exceptions import DataError
from fedcohort.files.sketching import sketch_clients
from fedcohort.files.source import open_source
from fedcohort.files.spec import load_spec
from fedcohort.flower.client.data import Examples
from fedcohort.flower.client.privacy import sketch as sketch_of_client
from fedcohort.sketch.race import RaceSketch

SPEC = """
[sketch]
rows = 40
bits = 4
[privacy]
epsilon = 1.0
explain = 0.5
[columns.age]
kind = "number"
center = 50
scale = 10
[columns.city]
kind = "category"
levels = ["Zürich", "Köln", "01", "7", "100000", "12345678901"]
[columns.member]
kind = "boolean"
[columns.since]
kind = "date"
since = "2021-06-01"
weight = 0.01
[columns.note]
kind = "text"
slots = 4
"""
NAMES = ("age", "city", "member", "since", "note")
USUAL = [50, 7, 1, "2021-01-02", "n"]
CODES = [[40 + i, c, 1, f"2021-0{i + 1}-01", "x"] for i, c in enumerate((7, 100000, 12345678901))]
CITIES = [["40.5", c, "1", "2021-01-01", "a b"] for c in ("Zürich", "Köln", "01", "7", "Ulm")]
ODD = {  # the usual record, but for one value
    "age": ("abc", "50,25", "nan", "inf", 1e300, 2**62, 50.5, "", '"50"', True),
    "city": ("7.0", 0.5, -0.0, "", "Köln", 2**60, '"7"'),
    "member": ("true", "1.0", "yes", 0.0, ""),
    "since": ("2021-01-02 10:00:00", "02.01.2021", "2021-01-02T10:00:00+05:00", ""),
    "note": ("a,b,c,d", "a|b", '"a\nb"', "w " * 500, "", 5),
}


def moved(before, after):
    """The most that counts of one row, or of one column, differ."""
    both = [(before, after)]
    if before.marginals is not None:
        both.append((before.marginals, after.marginals))
    return max(int(np.abs(a.counts - b.counts).sum(axis=1).max()) for a, b in both)


def write_csv(path, rows):
    lines = [";".join(map(str, row)) for row in (NAMES, *rows)]
    path.write_text("\n".join(lines) + "\n")


def write_json(path, rows):
    path.write_text("".join(json.dumps(dict(zip(NAMES, row, strict=True))) + "\n" for row in rows))


def write_sheet(path, rows):
    book = Workbook()
    for row in (NAMES, *rows):
        book.active.append(row)
    book.save(path)


def write_base(path, rows):
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as base:
        base.execute(f"CREATE TABLE t ({','.join(NAMES)})")
        base.executemany("INSERT INTO t VALUES (?, ?, ?, ?, ?)", rows)
    base.close()


FORMATS = {
    "csv": (write_csv, CITIES),
    "jsonl": (write_json, CODES),
    "xlsx": (write_sheet, CODES),
    "sqlite": (write_base, CODES),
}


@pytest.mark.parametrize("ending", FORMATS)
def test_a_record_of_a_table_moves_no_other(ending, tmp_path):
    """In JSON Lines, .5 in one record made 12345678901 of another 1.2345678901e+10."""
    (tmp_path / "s.toml").write_text(SPEC)
    spec, (write, rows) = load_spec(tmp_path / "s.toml"), FORMATS[ending]

    def made(records):
        write(tmp_path / f"t.{ending}", records)
        source = open_source(tmp_path / f"t.{ending}", spec.want())
        return next(sketch_clients(source, spec.empty_sketch(source)))[1]

    before, compared = made(rows), 0
    for at, name in enumerate(NAMES):
        for value in ODD[name]:
            odd = [*USUAL[:at], value, *USUAL[at + 1 :]]
            for records in ([odd, *rows], [*rows, odd]):
                try:
                    after = made(records)
                except DataError:
                    continue
                assert after.spec == before.spec
                assert moved(before, after) <= 1, (name, value)
                compared += 1
    assert compared > 20


DOUBT = np.longdouble(2) ** -24 + np.longdouble(2) ** -60


@pytest.mark.parametrize(
    ("empty", "records", "odd"),
    [
        # Far vectors were rounded to 64 bits together with all others of the block.
        (
            RaceSketch.srp(dim=4, rows=200, bits=3),
            np.array([[1 + DOUBT, -1, 0, 0]], np.longdouble),
            np.array([[1e30, 0, 0, 0]], np.longdouble),
        ),
        # Joined with unsigned integers, others became fractions.
        (
            RaceSketch.minhash(rows=50, buckets=16),
            [np.array([2**53 + 1])],
            [np.array([1], np.uint64)],
        ),
        (RaceSketch.srp(dim=2, rows=50, bits=3), [[2**60 + 1, 3]], [[0.5, -1]]),
    ],
    ids=["long doubles", "unsigned tokens", "integers and fractions"],
)
def test_a_vector_or_set_moves_no_other(empty, records, odd):
    before, after = empty.empty_like(), empty.empty_like()
    before.add(records)
    after.add(np.concatenate([records, odd]) if isinstance(odd, np.ndarray) else records + odd)
    assert moved(before, after) == 1


@pytest.mark.parametrize("kind", ["srp", "minhash"])
def test_no_example_makes_a_private_client_fail(kind):
    """The server would see it: a client with a NaN answered with an error."""
    x, y = np.random.default_rng(0).integers(-3, 9, (4, 3)).astype("f4"), np.array([0, 1, 2, 1])
    options = {"rows": 20, "bits": 3, "hash": kind, "label_weight": 1.0}

    def made(x, y, private=True):
        return sketch_of_client(Examples((x, y)), options, classes=3, private=private)

    assert made(x, y) == made(x, y, private=False)
    for odd in ([np.nan] * 3, [np.inf, 0, -np.inf], [1e300] * 3, [7] * 3):
        for label in (-1, 1, 99):
            more = made(np.vstack([x, odd]), np.append(y, label))
            assert moved(made(x, y), more) == 1
