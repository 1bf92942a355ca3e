"""Readings and models survive the trip; what else arrives is refused before memory is taken."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.flower.conftest import claim, npy

from fedcohort.exceptions import DataError
from fedcohort.flower.wire import (
    Request,
    checked,
    dtypes_of,
    flatten,
    from_bytes,
    in_dtypes,
    payload,
    refused,
    to_bytes,
    unflatten,
)
from fedcohort.signals.table import Signals

DTYPES = [
    "<i2",
    "<i8",
    "|u1",
    "<f4",
    "<f8",
    "|b1",
    ">f4",
    ">i4",
    [("n", "<i8"), ("c", "<f4", (3, 2))],
]
PLAIN = hnp.arrays(
    st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
)


@given(PLAIN)
def test_plain_readings_come_back_as_they_were(reading):
    found = from_bytes(to_bytes(reading), limit=reading.nbytes)
    assert (found.dtype, found.shape) == (reading.dtype, reading.shape)
    assert found.tobytes() == reading.tobytes()  # fields that are NaN equal nothing


@pytest.mark.parametrize(
    "data",
    [
        b"12345678",
        None,
        to_bytes(np.zeros(2))[:-1],
        to_bytes(np.zeros(1000)),
        to_bytes(np.zeros((), "<c8")),
        to_bytes(np.zeros((), "<U2")),
        to_bytes(np.zeros((), "<m8[s]")),
        to_bytes(np.zeros((), [("n", "<c8")])),
        claim("|O", ()),
        claim("<f8", (-1,)),
        claim("<f8", (2,)),
        claim("<f8", (1 << 40, 1 << 40)),
        npy("[" * 900),
    ],
)
def test_other_content_is_refused(data):
    with pytest.raises(DataError):
        from_bytes(data, limit=100)


SIZES = st.sampled_from([0, 1, 2, 2**31, 2**40 - 1, 2**63]) | st.integers(-1, 9)
FIELDS = st.lists(st.tuples(st.text(max_size=2), st.sampled_from(DTYPES), st.tuples(SIZES)))


@given(
    st.sampled_from([b"", b"12345678"]),
    st.sampled_from([*DTYPES, "|O", "<U2", ""]) | FIELDS,
    st.lists(SIZES, max_size=5).map(tuple),
)
def test_shapes_with_zeros_and_extremes_are_read_or_refused(data, dtype, shape):
    """Zero bytes once claimed the shape (0, 2^40-1, 2^40-1, 2^40-1) and stopped every server."""
    with contextlib.suppress(DataError):
        assert from_bytes(claim(dtype, shape, data), limit=64).nbytes == len(data)


def test_a_reading_that_is_too_large_takes_no_memory():
    data = bytes(50_000_000)
    tracemalloc.start()
    with pytest.raises(DataError, match="at most 1000"):
        from_bytes(data, limit=1000)
    opaque = refused(data)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert opaque.nbytes == len(data)


@pytest.mark.parametrize("data", [b"", b"x", b"12345678"])
def test_refused_bytes_are_dropped_and_counted_even_if_they_come_first(data):
    signals = Signals()
    assert signals.record("loss", {"a": refused(data)}, 0) == ()
    assert signals.dropped == {"loss": 1}
    assert signals.record("loss", {"b": 0.5}, 1) == ("b",)


REQUEST = Request(3, 7, "v", "weights", ("loss",), {"loss": {"k": 1, "kind": "x"}}, "cmfl")


def test_a_request_comes_back_as_it_was():
    assert Request.from_json(REQUEST.to_json()) == REQUEST


@pytest.mark.parametrize(
    "changed",
    [{"round": 2**64}, {"seed": -2}, {"signals": [3]}, {"options": {"loss": {"k": []}}},
     {"options": {"loss": 3}}, {"client": 3}, {"remember": 1}, {"other": 1}],
    ids=str,
)  # fmt: skip
def test_other_requests_are_refused(changed):
    for text in (json.dumps(json.loads(REQUEST.to_json()) | changed), "[]", "", None):
        with pytest.raises(DataError):
            Request.from_json(text)


# --- models --------------------------------------------------------------------------------------


def model(fill=1.0):
    weight = np.full((2, 3), fill, np.float32)
    return ArrayRecord(
        {
            "fc.weight": Array(weight),
            "fc.count": Array(np.array(5, np.int64)),
            "fc.bias": Array(np.arange(2, dtype=np.float32)),
        }
    )


def test_vectors_hold_the_floating_arrays_in_order():
    flat = flatten(model())
    assert flat.tolist() == [1.0] * 6 + [0.0, 1.0]
    back = unflatten(flat * 2, model())
    assert back["fc.weight"].numpy().tolist() == [[2.0] * 3] * 2
    assert back["fc.count"].numpy() == 5 and back["fc.count"].dtype == "int64"
    assert payload(model()) == 24 + 8 + 8


def changed(how):
    return ArrayRecord({name: Array(how(array.numpy())) for name, array in model(3.0).items()})


SOUND = {
    "same": model(3.0),
    "reversed": ArrayRecord(dict(reversed(list(model(3.0).items())))),
    "column-major": changed(lambda a: np.asfortranarray(a) if a.ndim else a),
    # Clients answer in their own dtypes; averages of counters are float64.
    **{d: changed(lambda a, d=d: a.astype(d)) for d in ("f8", "f2", "i4")},
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_update_is_accepted(name):
    assert checked(SOUND[name], model()).tolist() == flatten(model(3.0)).tolist()


def test_models_are_sent_in_the_dtypes_that_the_app_started_with():
    averaged = ArrayRecord(
        {k: Array(np.asarray(a.numpy() + 0.6, np.float64)) for k, a in model().items()}
    )
    cast = in_dtypes(averaged, dtypes_of(model()))
    assert dtypes_of(cast) == dtypes_of(model())
    assert cast["fc.count"].numpy() == 5  # truncated, as load_state_dict does
    assert in_dtypes(model(), dtypes_of(model())) == model()


def claimed(dtype, values, stype="numpy.ndarray"):
    return Array(dtype, (2,), stype, values if isinstance(values, bytes) else to_bytes(values))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Array(np.array([1.0, np.nan], np.float32)), "not finite"),
        (Array(np.array([np.inf, 0.0], np.float32)), "not finite"),
        (Array(np.array([1e300, 0.0])), "not finite"),
        (Array(np.zeros(3, np.float32)), "fc.bias"),
        (Array(np.zeros(2, np.complex64)), "real numbers"),
        (claimed("nonsense", np.zeros(2)), "says"),
        (claimed("float32", b""), "cannot be read"),
        (claimed("float32", np.zeros(2, "f4"), "pickle"), "serialized"),
        (claimed("float32", np.zeros(3, "f4")), "says"),
        (claimed("float32", np.zeros(2)), "says"),
        (claimed("float32", claim("<f4", (2 * 10**9,))), "claims"),
    ],
)
def test_updates_that_are_none_are_refused(array, reason):
    with pytest.raises(DataError, match=reason):
        checked(ArrayRecord({**model(), "fc.bias": array}), model())


def test_names_and_counters_are_checked_too():
    with pytest.raises(DataError, match="named"):
        checked(ArrayRecord({**model(), "fc.other": Array(np.zeros(2))}), model())
    with pytest.raises(DataError, match="not finite"):
        checked(ArrayRecord({**model(), "fc.count": Array(np.array(np.nan))}), model())
