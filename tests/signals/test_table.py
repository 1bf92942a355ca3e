from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.signals.forms import Numbers
from fedcohort.signals.table import Signals

SKETCH = np.dtype([("n", "f8"), ("counts", "i2", (2, 3))])


def test_the_latest_reading_counts():
    signals = Signals()
    signals.record("loss", {"a": 1.0, "b": 2.0}, stamp=0)
    signals.record("loss", {"b": 5.0, "c": 7.0}, stamp=4)
    assert signals.values("loss", ("c", "b", "a")).tolist() == [7.0, 5.0, 1.0]
    assert signals.rounds("loss", ("a", "b", "c", "d")).tolist() == [0, 4, 4, -1]


def test_the_majority_of_the_first_batch_fixes_the_form():
    signals = Signals()
    kept = signals.record(
        "x", {"hostile": np.zeros((9, 9)), "a": np.zeros(3), "b": np.ones(3)}, stamp=0
    )
    assert kept == ("a", "b")
    assert signals.dropped["x"] == 1


@pytest.mark.parametrize(
    "bad", [np.nan, [1.0, np.inf], "text", {"no": "number"}, [[1], [1, 2]], b"bytes", 1j]
)
def test_what_is_no_finite_number_is_dropped_and_counted(bad):
    signals = Signals()
    assert signals.record("x", {"a": bad}, stamp=0) == ()
    assert signals.dropped["x"] == 1
    assert signals.known("x", ("a",)) == ()


@pytest.mark.parametrize("large", [1e200, [1e200, 1.0]])
def test_what_the_dtype_cannot_hold_is_dropped(large):
    """A user's own range may be wider than the numbers that are stored."""
    form = Numbers((None,) * np.ndim(large), "f4", -1e300, 1e300)
    signals = Signals()
    assert signals.record("x", {"a": np.zeros_like(large), "b": large}, 0, form) == ("a",)
    assert signals.dropped["x"] == 1


def test_structured_readings_stack_and_widen():
    signals = Signals()
    small = np.zeros((), SKETCH)
    small["n"], small["counts"] = 4, 7
    wide = np.zeros((), [("n", "f8"), ("counts", "i4", (2, 3))])
    wide["counts"] = 70_000
    signals.record("s", {"a": small}, stamp=0)
    signals.record("s", {"b": wide}, stamp=1)
    values = signals.values("s", ("a", "b"))
    assert values["counts"].shape == (2, 2, 3)
    assert values["counts"][1].max() == 70_000
    assert values["counts"][0].max() == 7


def test_readings_cannot_be_changed_from_outside():
    signals = Signals()
    signals.record("x", {"a": np.zeros(2), "b": np.zeros(2)}, stamp=0)
    _, values = signals.read("x", ("a", "b"))
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.floats(allow_nan=True), max_size=6),
        max_size=8,
    )
)
def test_the_table_agrees_with_a_dict(batches):
    signals, expected = Signals(), {}
    for stamp, batch in enumerate(batches):
        signals.record("x", batch, stamp)
        expected |= {c: (v, stamp) for c, v in batch.items() if np.isfinite(v)}
    everybody = tuple("abcdefg")
    positions, values = signals.read("x", everybody)
    assert {everybody[i]: v for i, v in zip(positions, values, strict=True)} == {
        c: v for c, (v, _) in expected.items()
    }
    copy = Signals()
    copy.load_state_dict(signals.state_dict())
    assert copy.rounds("x", everybody).tolist() == [expected.get(c, (0, -1))[1] for c in everybody]


def test_lookups_of_many_clients_stay_right_while_clients_join():
    """The lookups of the last tuples are kept; an outdated one would miss newcomers."""
    signals, expected = Signals(), {}
    everybody = tuple(f"c{i:04d}" for i in range(900))
    groups = [everybody, everybody[:600], everybody[300:]]  # more than are kept
    rng = np.random.default_rng(0)
    for stamp in range(12):
        joined = rng.choice(everybody, 80, replace=False).tolist()
        signals.record(("x", "y")[stamp % 2], dict.fromkeys(joined, float(stamp)), stamp)
        if stamp % 2 == 0:
            expected |= dict.fromkeys(joined, stamp)
        for clients in groups:
            assert signals.rounds("x", clients).tolist() == [expected.get(c, -1) for c in clients]
