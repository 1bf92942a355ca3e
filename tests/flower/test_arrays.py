"""Models as vectors and back; updates that lie about themselves."""

from __future__ import annotations

import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedcohort.exceptions import DataError
from fedcohort.flower.wire import (
    checked,
    dtypes_of,
    flatten,
    in_dtypes,
    payload,
    unflatten,
)


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


def test_a_sound_update_is_accepted():
    assert checked(model(3.0), model()).tolist() == flatten(model(3.0)).tolist()
    column_major = ArrayRecord(dict(model()))
    column_major["fc.weight"] = Array(np.asfortranarray(np.arange(6, dtype="f4").reshape(2, 3)))
    assert checked(column_major, model())[:6].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_any_real_dtype_is_accepted(dtype):
    """Clients answer in their own dtypes; averages of counters are float64."""
    record = ArrayRecord({k: Array(np.asarray(a.numpy(), dtype)) for k, a in model(3.0).items()})
    assert checked(record, model()).tolist() == flatten(model(3.0)).tolist()


def test_arrays_may_come_in_another_order():
    backwards = ArrayRecord(dict(reversed(list(model(3.0).items()))))
    assert checked(backwards, model()).tolist() == flatten(model(3.0)).tolist()


def test_models_are_sent_in_the_dtypes_that_the_app_started_with():
    averaged = ArrayRecord(
        {k: Array(np.asarray(a.numpy() + 0.6, np.float64)) for k, a in model().items()}
    )
    cast = in_dtypes(averaged, dtypes_of(model()))
    assert dtypes_of(cast) == dtypes_of(model())
    assert cast["fc.count"].numpy() == 5  # truncated, as load_state_dict does
    assert in_dtypes(model(), dtypes_of(model())) == model()


def lie(name, array):
    record = ArrayRecord(dict(model()))
    record[name] = array
    return record


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def zipped():
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(2, np.float32))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (lie("fc.bias", Array(np.array([1.0, np.nan], np.float32))), "not finite"),
        (lie("fc.bias", Array(np.array([np.inf, 0.0], np.float32))), "not finite"),
        (lie("fc.bias", Array(np.zeros(3, np.float32))), "fc.bias"),
        (lie("fc.bias", Array(np.zeros(2, np.complex64))), "real numbers"),
        (lie("fc.bias", Array(np.array([1e300, 0.0]))), "not finite"),
        (lie("fc.count", Array(np.array(np.nan))), "not finite"),
        (lie("fc.bias", Array("nonsense", (2,), "numpy.ndarray", npy(np.zeros(2)))), "says"),
        (lie("fc.other", Array(np.zeros(2, np.float32))), "named"),
        (lie("fc.bias", Array("float32", (2,), "numpy.ndarray", b"")), "cannot be read"),
        (lie("fc.bias", Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY")), "cannot be read"),
        (lie("fc.bias", Array("float32", (2,), "numpy.ndarray", zipped())), "cannot be read"),
        (lie("fc.bias", Array("float32", (2,), "pickle", npy(np.zeros(2, "f4")))), "serialized"),
        (lie("fc.bias", Array("float32", (2,), "numpy.ndarray", npy(np.zeros(3, "f4")))), "says"),
        (lie("fc.bias", Array("float32", (2,), "numpy.ndarray", npy(np.zeros(2)))), "says"),
        (lie("fc.bias", Array("float32", (2,), "numpy.ndarray", bytes(10**6))), "cannot be read"),
        (
            lie("fc.bias", Array("float32", (2,), "numpy.ndarray", npy(np.zeros(2, "f4"))[:-1])),
            "claims",
        ),
    ],
)
def test_updates_that_are_none_are_refused(record, reason):
    with pytest.raises(DataError, match=reason):
        checked(record, model())


def test_a_header_that_claims_billions_takes_no_memory():
    honest = npy(np.zeros(2, np.float32))
    header = honest[:128].replace(b"(2,), }", b"(2000000000,), }")[:128]
    record = lie("fc.bias", Array("float32", (2,), "numpy.ndarray", header + bytes(8)))
    with pytest.raises(DataError, match="claims"):
        checked(record, model())
