from __future__ import annotations

import json
import struct
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcohort import storage
from fedcohort.exceptions import InvalidCheckpoint

plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)
arrays = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.uint8]), hnp.array_shapes(min_dims=0, max_dims=2)
)
keys = st.one_of(st.text(max_size=4), st.sampled_from(["__array__", "__dict__"]))
trees = st.recursive(
    st.one_of(plain, arrays),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@settings(max_examples=60)
@given(st.dictionaries(keys, trees, max_size=4))
def test_what_is_saved_comes_back(tmp_path, state):
    storage.save(tmp_path / "x", state)
    assert same(storage.load(tmp_path / "x"), state)


@pytest.mark.parametrize(
    ("state", "culprit"),
    [
        ({"a": {1: 2}}, "state.a has the key 1"),
        ({"a": [object()]}, r"state.a\[0\] is a object"),
        ({"a": np.array([None])}, "state.a is an array of Python objects"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, state, culprit):
    with pytest.raises(TypeError, match=culprit):
        storage.save(tmp_path / "x", state)
    assert not list(tmp_path.iterdir())


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(InvalidCheckpoint, match="no such checkpoint"):
        storage.load(path)
    storage.save(path, {"a": np.arange(100)})
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidCheckpoint, match="not a whole checkpoint"):
            storage.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("state.json", '{"format": "another", "state": {}}')
    with pytest.raises(InvalidCheckpoint, match="format 'another'"):
        storage.load(path)


def archive_of(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def state_json(tree):
    return json.dumps({"format": storage.FORMAT, "state": tree})


def npy_file(header, values=b""):
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + values


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"state.json": "not JSON"},
        {"state.json": "[" * 100_000},
        {"state.json": "[]"},
        {"state.json": state_json({"__dict__": []})},
        {"state.json": state_json({"__dict__": {"a": {"__array__": 0}}})},
        *(
            {"state.json": state_json({"__dict__": {"a": {"__array__": 0}}}), "0.npy": content}
            for content in (
                b"\x93NUMPY\x09\x00",
                npy_file("-" * 3500 + "1"),
                npy_file("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"12345678"),
                npy_file("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }", b""),
                npy_file("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", b"12345678"),
                npy_file("{'descr': '<f8', 'fortran_order': False, 'shape': (1<<40,), }"),
                npy_file("{'descr': ('<f8', (99999999,)), 'fortran_order': 0, 'shape': (9,), }"),
            )
        ),
    ],
)
def test_any_other_content_of_a_valid_archive_is_refused(tmp_path, members):
    archive_of(tmp_path / "x", members)
    with pytest.raises(InvalidCheckpoint, match=str(tmp_path / "x")):
        storage.load(tmp_path / "x")


def test_a_compressed_member_cannot_take_memory(tmp_path):
    """100 MB of zeros in a file of 100 kB: refused before anything is unpacked."""
    zeros = npy_file(
        "{'descr': '|u1', 'fortran_order': False, 'shape': (100000000,), }", bytes(10**8)
    )
    archive_of(
        tmp_path / "x",
        {"state.json": state_json({"__dict__": {"a": {"__array__": 0}}}), "0.npy": zeros},
        zipfile.ZIP_DEFLATED,
    )
    del zeros
    tracemalloc.start()
    with pytest.raises(InvalidCheckpoint, match="a member is compressed"):
        storage.load(tmp_path / "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10**7


def test_equal_states_give_equal_files_on_any_clock(tmp_path, monkeypatch):
    """Zip archives cannot hold years before 1980, and need not hold the time at all."""
    storage.save(tmp_path / "now", {"a": np.arange(3)})
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(0))
    storage.save(tmp_path / "1970", {"a": np.arange(3)})
    assert (tmp_path / "now").read_bytes() == (tmp_path / "1970").read_bytes()


def test_a_state_that_does_not_fit_is_an_invalid_checkpoint(tmp_path):
    for error in (KeyError("x"), IndexError(), TypeError("no"), AttributeError("x")):

        def load_state_dict(state, error=error):
            raise error

        with pytest.raises(InvalidCheckpoint, match="does not fit"):
            storage.restore(tmp_path, load_state_dict, {})


def test_loaded_arrays_can_be_written(tmp_path):
    storage.save(tmp_path / "x", {"a": np.arange(3), "f": np.asfortranarray(np.eye(2))})
    state = storage.load(tmp_path / "x")
    state["a"][0] = 7
    assert state["a"].tolist() == [7, 1, 2]
    assert state["f"].tolist() == [[1, 0], [0, 1]]
