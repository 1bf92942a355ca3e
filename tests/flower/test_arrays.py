"""Models as vectors and back; updates that lie about themselves."""

from __future__ import annotations

import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedcohort.exceptions import DataError
from fedcohort.flower.wire import checked, dtypes_of, flatten, in_dtypes, payload, unflatten


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


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def zipped():
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(2, np.float32))
    return stream.getvalue()


def claimed(dtype, content, stype="numpy.ndarray"):
    return Array(dtype, (2,), stype, content)


BILLIONS = npy(np.zeros(2, "f4"))[:128].replace(b"(2,), }", b"(2000000000,), }")[:128] + bytes(8)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Array(np.array([1.0, np.nan], np.float32)), "not finite"),
        (Array(np.array([np.inf, 0.0], np.float32)), "not finite"),
        (Array(np.array([1e300, 0.0])), "not finite"),
        (Array(np.zeros(3, np.float32)), "fc.bias"),
        (Array(np.zeros(2, np.complex64)), "real numbers"),
        (claimed("nonsense", npy(np.zeros(2))), "says"),
        (claimed("float32", b""), "cannot be read"),
        (claimed("float32", b"\x93NUMPY"), "cannot be read"),
        (claimed("float32", zipped()), "cannot be read"),
        (claimed("float32", npy(np.zeros(2, "f4")), "pickle"), "serialized"),
        (claimed("float32", npy(np.zeros(3, "f4"))), "says"),
        (claimed("float32", npy(np.zeros(2))), "says"),
        (claimed("float32", npy(np.zeros(2, "f4"))[:-1]), "claims"),
        (claimed("float32", BILLIONS), "claims"),
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
