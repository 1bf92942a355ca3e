"""Readings are checked and stacked without harm, whatever a client sends."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.signals import table
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.forms import (
    MAX_NUMBER,
    Numbers,
    Sketch,
    sketch_dtype,
    sketch_reading,
)
from fedcohort.signals.table import Signals, cast, common_dtype

WIDTHS = """
import numpy as np
from fedcohort.policies import SketchMatch
from fedcohort.session import Session
from fedcohort.signals.forms import sketch_dtype

def sketch(client, number):
    # Clients of 50 records among some of 40,000 and one that sends int64 for no reason.
    n = 40_000 if number % 7 == 3 else 50
    out = np.zeros((), sketch_dtype(10, 64, "i8" if number == 5 else "i4" if n > 9999 else "i2"))
    out["n"], out["counts"][:, number % 64] = n, n
    return out

for repeat in range(20):
    ids = [f"{i:03d}" for i in range(60)]
    session = Session(SketchMatch(), cohort_size=5, seed=repeat)
    for present in (ids[:3], ids[:20], ids):
        there = session.begin(
            present, lambda name, clients: {c: sketch(c, int(c)) for c in clients}
        )
        session.finish({}, there.clients)
    _, values = session.signals.read("race_sketch", tuple(ids))
    assert values.dtype.itemsize == sketch_dtype(10, 64, "i4").itemsize, values.dtype
    assert (values["counts"].sum(axis=2) == values["n"][:, None]).all()
"""


def test_counts_of_different_widths_do_not_corrupt_memory():
    # NumPy 2.0 to 2.4 promote such dtypes to too few bytes: the process died in half of the runs.
    subprocess.run([sys.executable, "-c", WIDTHS], check=True)


@given(st.sampled_from(["i2", "i4", "i8"]), st.sampled_from(["i2", "i4", "i8"]))
def test_a_common_dtype_holds_both(first, second):
    wide = max(first, second)
    both = common_dtype(sketch_dtype(3, 5, first), sketch_dtype(3, 5, second))
    assert both == sketch_dtype(3, 5, wide)
    one = np.zeros(4, sketch_dtype(3, 5, first))
    one["n"], one["counts"] = 7, 9
    moved = cast(one, both)
    assert moved.nbytes == 4 * both.itemsize
    assert (moved["counts"] == 9).all()
    assert (moved["n"] == 7).all()


@pytest.mark.parametrize(
    "bad",
    [1e16, -1e16, 1.7e308, np.nan, np.inf, "text", [1.0], 1j, None],
)
def test_a_number_outside_its_form_is_dropped(bad):
    signals = Signals()
    kept = signals.record("loss", {"a": bad, "b": 0.5}, 0, Numbers())
    assert kept == ("b",)
    assert signals.values("loss", ("b",)).tolist() == [0.5]
    assert signals.dropped["loss"] == (bad is not None)


def test_many_numbers_are_checked_at_once_as_one_by_one():
    rng = np.random.default_rng(0)
    values = rng.choice([0.0, 1.5, np.nan, 1e300, -3.0, 7.0], 200)
    ids = [f"{i}" for i in range(200)]
    form = Numbers(dtype="i8", low=0, high=100)
    fast, slow = Signals(), Signals()
    kept = fast.record("n", dict(zip(ids, values, strict=True)), 0, form)
    for client, value in zip(ids, values, strict=True):
        slow.record("n", {client: np.array([value]).reshape(())}, 0, form)
    assert kept == tuple(c for c in ids if slow.known("n", (c,)))
    assert kept == tuple(c for c, v in zip(ids, values, strict=True) if v in (0, 7))
    assert fast.dropped == slow.dropped


def test_one_reading_that_is_not_a_number_changes_nothing_for_the_others():
    """Numbers of every kind beside texts, arrays and integers that no array can hold."""
    good = {f"g{i}": kind(i) for i, kind in enumerate((int, float, np.int8, np.float32, np.array))}
    bad = {"text": "1", "list": [1.0], "huge": 10**400, "complex": 1j, "flag": np.bool_(True)}
    mixed, alone = Signals(), Signals()
    assert mixed.record("loss", {**bad, **good, "none": None}, 0, Numbers()) == tuple(good)
    alone.record("loss", good, 0, Numbers())
    assert mixed.values("loss", tuple(good)).tolist() == [0, 1, 2, 3, 4]
    assert (
        mixed.values("loss", tuple(good)).tobytes() == alone.values("loss", tuple(good)).tobytes()
    )
    assert mixed.dropped["loss"] == len(bad)


def hostile_sketches():
    good = sketch_reading(3, 0.0, np.array([[2, 1], [3, 0]]))
    for field, value in [("n", 1e300), ("n", np.nan), ("noise", 1e308), ("noise", -1.0)]:
        bad = good.copy()
        bad[field] = value
        yield bad
    yield sketch_reading(3, 0.0, np.array([[2, 2], [3, 0]]))  # more than n
    yield sketch_reading(3, 1.0, np.array([[2**60, 1], [3, 0]]))
    yield sketch_reading(3, 0.0, np.array([[1, 1, 1], [3, 0, 0]]))
    yield np.zeros((), [("n", "f8"), ("counts", "i2", (2, 2))])


@pytest.mark.parametrize("bad", list(hostile_sketches()), ids=str)
def test_a_sketch_outside_its_form_is_dropped(bad):
    signals = Signals()
    good = sketch_reading(3, 0.0, np.array([[2, 1], [3, 0]]))
    assert signals.record("s", {"a": bad, "b": good}, 0, Sketch(2, 2)) == ("b",)


NUMBERS = ("f2", "f4", "f8", ">f8", "i1", "i8", "u1", "u8")
COUNTS = ("i1", "i2", ">i2", "i4", "i8", "u1", "u8")
EXTREMES = (0, 1, 2, 3, 127, 2**15, 2**31, 2**40, 2**40 + 1, 2**63 - 1, -1, -(2**40), -(2**63))


@st.composite
def any_sketches(draw):
    """Valid sketches of all widths, extreme numbers, any bits (NaN, infinity), other shapes."""
    shape = draw(st.sampled_from([(2, 2), (2, 2), (2, 2), (2, 3), (1, 4)]))
    fields = [("n", draw(st.sampled_from(NUMBERS))), ("noise", draw(st.sampled_from(NUMBERS)))]
    dtype = np.dtype([*fields, ("counts", draw(st.sampled_from(COUNTS)), shape)])
    if draw(st.booleans()):
        bits = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
        return np.frombuffer(bits, dtype).reshape(())
    reading, extremes = np.zeros((), dtype), st.sampled_from(EXTREMES)
    with np.errstate(over="ignore"):
        reading["noise"] = np.array(draw(st.just(0) | extremes)).astype(dtype["noise"])
        row = draw(st.lists(extremes, min_size=shape[1], max_size=shape[1]))
        reading["counts"] = np.array(row).astype(dtype["counts"].base)
        n = draw(st.just(reading["counts"][0].sum()) | extremes)
        reading["n"] = np.array(n).astype(dtype["n"])
    return reading


def as_stated(reading):
    """What `Sketch` states, in Python's exact numbers: n, noise and counts of a sketch, or None."""
    n, noise, counts = (reading[name].tolist() for name in ("n", "noise", "counts"))
    cells = [count for row in counts for count in row]
    if not (abs(n) <= 2**40 and 0 <= noise <= 2**40 and max(map(abs, cells)) <= 2**40):
        return None
    if noise == 0 and any(sum(row) != n for row in counts):
        return None
    return n if n >= 1 else 0, noise, counts


@pytest.mark.filterwarnings("error")
@given(
    st.lists(any_sketches() | st.sampled_from([None, "text", 1.5]), max_size=12),
    st.sampled_from([Sketch(2, 2), Sketch()]),
    st.sampled_from([1, 100, 1 << 20]),
)
def test_many_sketches_are_checked_at_once_as_one_by_one(readings, form, together):
    answered = {i: r for i, r in enumerate(readings) if r is not None}
    sketches = [(i, r) for i, r in answered.items() if isinstance(r, np.ndarray)]
    shaped = [(i, r) for i, r in sketches if form == Sketch() or r["counts"].shape == (2, 2)]
    sound = {i: r for i, r in shaped if as_stated(r) is not None}
    alone = {i: form.checked(r) for i, r in sketches}
    assert [i for i, r in alone.items() if r is not None] == list(sound)
    shapes = Counter(r["counts"].shape for r in sound.values())
    kept = [i for i, r in sound.items() if r["counts"].shape == shapes.most_common(1)[0][0]]
    signals = Signals()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_TOGETHER", together)
        found = signals.record("s", {str(i): r for i, r in enumerate(readings)}, 0, form)
    assert found == tuple(map(str, kept))
    assert signals.dropped["s"] == len(answered) - len(kept)
    for i, stored in zip(kept, signals.values("s", found), strict=True):
        wanted = as_stated(readings[i])
        for own in (stored, alone[i]):
            assert tuple(own[name].tolist() for name in ("n", "noise", "counts")) == wanted
    if kept:
        widest = max((alone[i].dtype for i in kept), key=lambda dtype: dtype.itemsize)
        assert signals.values("s", found).dtype == widest


def test_a_later_majority_corrects_the_length_of_a_vector():
    signals = Signals()
    form = Numbers((None,))
    signals.record("x", {"liar": np.zeros(9)}, 0, form)
    kept = signals.record("x", {"a": np.zeros(3), "b": np.ones(3)}, 1, form)
    assert kept == ("a", "b")
    assert signals.known("x", ("liar", "a", "b")) == ("a", "b")
    assert signals.record("x", {"liar": np.zeros(9)}, 2, form) == ()
    assert signals.dropped["x"] == 2


OPTIONS = {"k": 7, "rows": 3, "bits": 4}


@pytest.mark.parametrize("name", SIGNALS)
def test_every_example_has_the_form_of_its_signal(name):
    form = SIGNALS[name].form(OPTIONS)
    for seed in range(5):
        example = form.example(np.random.default_rng(seed))
        checked = form.checked(example)
        assert checked is not None
        assert checked.dtype == example.dtype
        if form.max_bytes is not None:
            assert example.nbytes <= form.max_bytes


def test_the_square_of_the_largest_number_fits_float32():
    assert np.isfinite(np.float32(MAX_NUMBER) ** 2 * np.float32(1e6))
