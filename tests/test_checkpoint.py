from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcohort import checkpoint
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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.dictionaries(keys, trees, max_size=4))
def test_what_is_saved_comes_back(tmp_path, state):
    checkpoint.save(tmp_path / "x", state)
    assert same(checkpoint.load(tmp_path / "x"), state)


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
        checkpoint.save(tmp_path / "x", state)
    assert not list(tmp_path.iterdir())


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(InvalidCheckpoint, match="no such checkpoint"):
        checkpoint.load(path)
    checkpoint.save(path, {"a": np.arange(100)})
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(InvalidCheckpoint, match="not a whole checkpoint"):
            checkpoint.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("state.json", '{"format": "another", "state": {}}')
    with pytest.raises(InvalidCheckpoint, match="format 'another'"):
        checkpoint.load(path)


def test_a_pickled_array_is_never_loaded(tmp_path):
    path = tmp_path / "x"
    with zipfile.ZipFile(path, "w") as archive:
        tree = '{"__dict__": {"a": {"__array__": 0}}}'
        archive.writestr("state.json", f'{{"format": "{checkpoint.FORMAT}", "state": {tree}}}')
        with archive.open("0.npy", "w") as part:
            np.lib.format.write_array(part, np.array([{}]), allow_pickle=True)
    with pytest.raises(InvalidCheckpoint, match="not a whole checkpoint"):
        checkpoint.load(path)


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    path = tmp_path / "x"
    checkpoint.save(path, {"i": -1, "a": np.zeros(200_000)})
    writer = f"""
        import numpy as np
        from fedcohort import checkpoint
        for i in range(100_000):
            checkpoint.save({str(path)!r}, {{"i": i, "a": np.full(200_000, float(i))}})
    """
    first = path.stat().st_ino
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(writer)])
    deadline = time.monotonic() + 120
    while path.stat().st_ino == first and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    state = checkpoint.load(path)
    assert state["i"] >= 0, "the writer never got to write"
    assert (state["a"] == state["i"]).all()
