"""Readings are checked and stacked without harm, whatever a client sends."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedcohort.signals import table
from fedcohort.signals.catalog import SIGNALS
from fedcohort.signals.forms import Numbers, Sketch, sketch_reading
from fedcohort.signals.table import Signals

BAD = [1e16, -1e16, 1.7e308, np.nan, np.inf, "text", [1.0], 1j, 10**400, np.bool_(True)]
GOOD = {f"g{i}": kind(i) for i, kind in enumerate((int, float, np.int8, np.float32, np.array))}


@pytest.mark.parametrize("bad", [*BAD, BAD, None], ids=str)
def test_numbers_outside_their_form_are_dropped_and_change_nothing_for_others(bad):
    signals, bads = Signals(), bad if bad is BAD else [bad]
    some = {f"bad{i}": one for i, one in enumerate(bads)}
    assert signals.record("loss", {**some, **GOOD}, 0, Numbers()) == tuple(GOOD)
    assert signals.values("loss", tuple(GOOD)).tolist() == [0, 1, 2, 3, 4]
    assert signals.dropped["loss"] == (0 if bad is None else len(bads))


def test_many_numbers_are_checked_at_once_as_one_by_one():
    values = np.random.default_rng(0).choice([0.0, 1.5, np.nan, 1e300, -3.0, 7.0], 200)
    form, fast, slow = Numbers(dtype="i8", low=0, high=100), Signals(), Signals()
    kept = fast.record("n", {f"{i}": v for i, v in enumerate(values)}, 0, form)
    for i, value in enumerate(values):
        slow.record("n", {f"{i}": np.array(value)}, 0, form)
    assert kept == slow.known("n", tuple(f"{i}" for i in range(200)))
    assert kept == tuple(f"{i}" for i, v in enumerate(values) if v in (0, 7))
    assert fast.dropped == slow.dropped


@pytest.mark.parametrize("large", [1e200, [1e200, 1.0]])
def test_what_the_dtype_cannot_hold_is_dropped(large):
    """A user's own range may be wider than the numbers that are stored."""
    form, signals = Numbers((None,) * np.ndim(large), "f4", -1e300, 1e300), Signals()
    assert signals.record("x", {"a": np.zeros_like(large), "b": large}, 0, form) == ("a",)


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


def checked(form, reading):
    """One reading in the declared dtype, or None."""
    if not form.fits(reading.dtype, reading.shape):
        return None
    kept, values = form.checked_together(reading[None])
    return values[0] if kept.all() else None


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
    alone = {i: checked(form, r) for i, r in sketches}
    assert [i for i, r in alone.items() if r is not None] == list(sound)
    shapes = Counter(r["counts"].shape for r in sound.values()).most_common()
    assume(len(shapes) < 2 or shapes[0][1] > shapes[1][1])  # a tie may end either way
    kept = [i for i, r in sound.items() if r["counts"].shape == shapes[0][0]]
    signals = Signals()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "_TOGETHER", together)
        found = signals.record("s", {str(i): r for i, r in enumerate(readings)}, 0, form)
    assert found == tuple(map(str, kept))
    assert signals.dropped["s"] == len(answered) - len(kept)
    for i, stored in zip(kept, signals.values("s", found), strict=True):
        for own in (stored, alone[i]):
            held = tuple(own[name].tolist() for name in ("n", "noise", "counts"))
            assert held == as_stated(readings[i])
    if kept:
        widest = max((alone[i].dtype for i in kept), key=lambda dtype: dtype.itemsize)
        assert signals.values("s", found).dtype == widest


def test_a_sketch_without_noise_is_no_sketch():
    bad = np.zeros((), [("n", "f8"), ("counts", "i2", (2, 2))])
    good = sketch_reading(3, 0.0, np.array([[2, 1], [3, 0]]))
    assert Signals().record("s", {"a": bad, "b": good}, 0, Sketch(2, 2)) == ("b",)


@pytest.mark.parametrize("name", SIGNALS)
def test_every_example_has_the_form_of_its_signal(name):
    form = SIGNALS[name].form({"k": 7, "rows": 3, "bits": 4})
    for seed in range(5):
        example = form.example(np.random.default_rng(seed))
        found = checked(form, example)
        assert found is not None
        assert found.dtype == example.dtype
        assert form.max_bytes is None or example.nbytes <= form.max_bytes
