from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.signals.forms import Numbers
from fedcohort.signals.table import Signals


def test_the_majority_fixes_the_length_of_a_vector():
    signals, form = Signals(), Numbers((None,))
    batch = {"liar": np.zeros(9), "a": np.zeros(3), "b": np.ones(3)}
    assert signals.record("x", batch, 0, form) == ("a", "b")
    assert signals.dropped["x"] == 1
    signals.record("y", {"liar": np.zeros(9)}, 0, form)  # corrected by a later majority
    assert signals.record("y", {"a": np.zeros(3), "b": np.ones(3)}, 1, form) == ("a", "b")
    assert signals.known("y", ("liar", "a", "b")) == ("a", "b")
    assert signals.record("y", {"liar": np.zeros(9)}, 2, form) == ()
    assert signals.dropped["y"] == 2


def test_structured_readings_stack_and_widen():
    signals = Signals()
    for client, width, count in (("a", "i2", 7), ("b", "i4", 70_000)):
        reading = np.zeros((), [("n", "f8"), ("noise", "f8"), ("counts", width, (2, 3))])
        reading["n"], reading["counts"] = 3 * count, count
        signals.record("race_sketch", {client: reading}, stamp=0)
    values = signals.values("race_sketch", ("a", "b"))
    assert values["counts"].max(axis=(1, 2)).tolist() == [7, 70_000]


def test_readings_cannot_be_changed_from_outside():
    signals = Signals()
    signals.record("loss", {"a": 0.0, "b": 0.0}, stamp=0)
    _, values = signals.read("loss", ("a", "b"))
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcdef"), st.floats(-1e15, 1e15) | st.just(np.nan), max_size=6
        ),
        max_size=8,
    )
)
def test_the_table_agrees_with_a_dict(batches):
    signals, expected = Signals(), {}
    for stamp, batch in enumerate(batches):
        signals.record("loss", batch, stamp)
        expected |= {c: (v, stamp) for c, v in batch.items() if np.isfinite(v)}
    everybody = tuple("abcdefg")
    copy = Signals()
    copy.load_state_dict(signals.state_dict())
    for one in (signals, copy):
        positions, values = one.read("loss", everybody)
        known = {everybody[i]: v for i, v in zip(positions, values, strict=True)}
        assert known == {c: v for c, (v, _) in expected.items()}
        stamps = [expected.get(c, (0, -1))[1] for c in everybody]
        assert one.rounds("loss", everybody).tolist() == stamps


def test_lookups_of_many_clients_stay_right_while_clients_join():
    """The lookups of the last tuples are kept; an outdated one would miss newcomers."""
    signals, expected = Signals(), {}
    everybody = tuple(f"c{i:04d}" for i in range(900))
    groups = [everybody, everybody[:600], everybody[300:]]  # more than are kept
    rng = np.random.default_rng(0)
    for stamp in range(12):
        joined = rng.choice(everybody, 80, replace=False).tolist()
        signals.record(("loss", "duration")[stamp % 2], dict.fromkeys(joined, float(stamp)), stamp)
        if stamp % 2 == 0:
            expected |= dict.fromkeys(joined, stamp)
        for clients in groups:
            assert signals.rounds("loss", clients).tolist() == [
                expected.get(c, -1) for c in clients
            ]
