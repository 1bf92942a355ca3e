"""Sketches of files equal sketches of the arrays they hold, whatever the blocks."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedcohort.exceptions import DataError, IncompatibleSketches, InvalidSketch
from fedcohort.files import Want, open_source
from fedcohort.files.columns import Column, columns_of
from fedcohort.files.sketching import (
    FileNames,
    client_names,
    load_alike,
    load_sketch,
    sketch_clients,
    sketch_files,
)
from fedcohort.sketch.hashing import SRP
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Transform

RNG = np.random.default_rng(1)
X = RNG.normal(size=(90, 3))
WHO = RNG.choice(["a", "b", "c", "d"], 90)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "data.parquet"
    columns = {name: X[:, i] for i, name in enumerate("uvw")}
    pq.write_table(pa.table({**columns, "who": WHO, "y": np.arange(90) % 3}), path)
    return path


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_blocks_change_nothing(table, batch_rows):
    empty = RaceSketch.srp(3, rows=20, bits=4)
    whole = empty.empty_like()
    whole.add(X)
    heard = []
    want = Want(columns=("u", "v", "w"), batch_rows=batch_rows)
    ((_, made),) = sketch_clients(open_source(table, want), empty, heard.append)
    assert made == whole
    assert sum(heard) == 90
    assert empty.n == 0


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 100])
def test_each_client_gets_its_own_rows_in_as_many_passes_as_memory_asks_for(table, at_once):
    step = Transform(unit=True, classes=3, label_weight=1.0)
    empty = RaceSketch.srp(3, rows=10, bits=3, transform=step)
    source = open_source(table, Want(columns=("u", "v", "w"), by="who", label="y", batch_rows=11))
    made = dict(sketch_clients(source, empty, memory=at_once * empty.counts.nbytes))
    assert set(made) == set("abcd")
    for client, sketch in made.items():
        own = empty.empty_like()
        own.add(X[client == WHO], (np.arange(90) % 3)[client == WHO])
        assert sketch == own


def test_no_rows_and_labels_beyond_the_classes(table):
    one = RaceSketch.srp(1, rows=2)
    none = pa.table({"u": pa.array([], pa.float64()), "who": pa.array([], "str")})
    with pytest.raises(DataError, match="no rows"):
        list(sketch_clients(open_source(none, Want(columns=("u",), by="who")), one))
    two = RaceSketch.srp(1, rows=2, transform=Transform(classes=2, label_weight=1.0))
    with pytest.raises(DataError, match="whole numbers from 0 to 1"):
        list(sketch_clients(open_source(table, Want(columns=("u",), label="y")), two))


def test_the_header_states_the_columns_in_full(tmp_path):
    odd = Column("a"), Column('odd "name", ü', "category", levels=("x", "y"), missing="indicator")
    made, wrong = RaceSketch(SRP(5, rows=4)), RaceSketch(SRP(4, rows=4))
    made.columns = wrong.columns = tuple(column.spec() for column in odd)
    made.add(np.ones((3, 5)))
    assert RaceSketch.from_bytes(made.to_bytes()) == made
    assert columns_of(RaceSketch.from_bytes(made.to_bytes())) == odd
    wrong.save(tmp_path / "wrong.sketch")
    with pytest.raises(InvalidSketch, match="columns of 5 numbers"):
        load_sketch(tmp_path / "wrong.sketch")
    wrong.columns = ({"name": "a"}, {"name": "a"})
    wrong.save(tmp_path / "wrong.sketch")
    with pytest.raises(InvalidSketch, match="name of its own"):
        load_sketch(tmp_path / "wrong.sketch")


@example(["../../x", "..", "CON", "a\x00b", "A\x00b", ""])
@given(st.lists(st.text(max_size=300), min_size=1, max_size=30, unique=True))
def test_file_names_are_safe_and_differ(clients):
    names = FileNames()
    made = [names.of(client) for client in clients]
    assert len({name.lower() for name in made}) == len(clients)
    for name in made:
        assert re.fullmatch(r"(?!CON\.)[A-Za-z0-9_][-\w.]{0,121}\.sketch", name, re.ASCII)


def test_names_come_from_the_index_and_fall_back_to_files(tmp_path):
    paths = [tmp_path / "a-1.sketch", tmp_path / "b.sketch"]
    assert client_names(paths) == ["a-1", "b"]
    (tmp_path / "clients.json").write_text(json.dumps({"a-1.sketch": "../a", "b.sketch": 7}))
    assert client_names(paths) == ["../a", "b"]
    for other in ("[]", "no json", "[" * 9999):
        (tmp_path / "clients.json").write_text(other)
        assert client_names(paths) == ["a-1", "b"]
    twins = [tmp_path / "x" / "s.sketch", tmp_path / "y" / "s.sketch"]
    assert client_names(twins) == [str(p) for p in twins]


def sketch(tmp_path, name, columns=("a", "b"), seed=0):
    made = RaceSketch(SRP(2, rows=4, seed=seed))
    made.columns = tuple(Column(column).spec() for column in columns)
    made.add([[1.0, 2.0]])
    made.save(tmp_path / name)
    return tmp_path / name


def test_unlike_sketches_are_named_with_what_differs(tmp_path):
    a = sketch(tmp_path, "a.sketch")
    swapped = sketch(tmp_path, "swapped.sketch", ("b", "a"))
    other = sketch(tmp_path, "other.sketch", ("c", "d"))
    seed = sketch(tmp_path, "seed.sketch", seed=1)
    for path, message in (
        (swapped, "same columns in another order"),
        (other, "column 'a': only in the first; .*column 'd': only in the second"),
        (seed, "hash seed: 0 is not 1"),
    ):
        with pytest.raises(IncompatibleSketches, match=rf"a\.sketch and .*{path.name}.*{message}"):
            list(load_alike([a, path]))
    assert [s.n for _, s in load_alike([a, sketch(tmp_path, "same.sketch")])] == [1, 1]


def test_files_that_are_no_sketches(tmp_path):
    path = sketch(tmp_path, "a.sketch")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InvalidSketch, match=r"a\.sketch: "):
        load_sketch(path)
    with pytest.raises(DataError, match=r"none\.sketch: cannot be read: No such file"):
        load_sketch(tmp_path / "none.sketch")
    with pytest.raises(DataError, match="given twice"):
        sketch_files([path, tmp_path / "." / "a.sketch"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.sketch files"):
        sketch_files([tmp_path / "empty"])
