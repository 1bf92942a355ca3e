from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.datasets import from_arrays
from fedcohort.datasets.base import holdout
from fedcohort.exceptions import DataError

X = np.arange(40, dtype=float).reshape(20, 2)
Y = np.arange(20) % 3


def toy(**options):
    return from_arrays(X, Y, test_fraction=0, **options)


def test_given_test_data_is_kept_and_types_are_made_alike():
    ids = np.repeat([7, 10], 10)
    data = from_arrays(X, Y, ids, X[:3], Y[:3], test_client_ids=["7", "7", "10"], name="own")
    assert (data.name, data.classes, data.sample_shape) == ("own", 3, (2,))
    assert data.x.dtype == np.float32
    assert data.y.dtype == np.int64
    assert data.client_ids is not None
    assert data.client_ids.tolist() == ["7"] * 10 + ["10"] * 10
    assert len(data.y_test) == 3
    tokens = from_arrays(X.astype(np.int32), Y, test_fraction=0)
    assert tokens.x.dtype == np.int64
    bytes_ = from_arrays(X.astype(np.uint8), Y, test_fraction=0)
    assert bytes_.x.dtype == np.uint8


def test_without_test_data_a_part_of_each_client_is_held_out():
    ids = ["a"] * 10 + ["b"] * 9 + ["c"]
    data, again = (from_arrays(X, Y, ids, test_fraction=0.3, seed=s) for s in (1, 1))
    assert data.test_client_ids is not None
    assert data.client_ids is not None
    assert data.test_client_ids.tolist() == ["a"] * 3 + ["b"] * 3
    assert data.client_ids.tolist() == ["a"] * 7 + ["b"] * 6 + ["c"]
    assert np.array_equal(data.x_test, again.x_test)
    rows = np.concatenate([data.x, data.x_test])[:, 0]
    assert np.array_equal(np.sort(rows), X[:, 0])
    other = from_arrays(X, Y, ids, test_fraction=0.3, seed=2)
    assert not np.array_equal(data.x_test, other.x_test)


def test_without_clients_a_part_of_each_class_is_held_out():
    data = from_arrays(X, Y, test_fraction=0.5)
    assert np.bincount(data.y_test).tolist() == [4, 4, 3]
    assert data.client_ids is None


NAN = X.copy()
NAN[4, 1] = np.nan


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((NAN, Y), {}, r"x\[4\] holds NaN"),
        ((X, Y[:5]), {}, "unequal lengths: x 20, y 5"),
        ((X, Y, ["a"]), {}, "client ids 1"),
        ((X[:, 0], Y), {}, r"x must be numbers of shape \(samples, ...\)"),
        ((np.full((20, 2), "a"), Y), {}, "x must be numbers"),
        ((X, Y.astype(float)), {}, "y must be one row of integers, not float64"),
        ((X, ["cat"] * 20), {}, "np.unique"),
        ((X, Y - 1), {}, "labels from -1 to 1"),
        ((X, Y), {"classes": 2}, "with 2 classes"),
        ((X, Y, None, X), {}, "both x_test and y_test"),
        ((X, Y, None, X[:, :1], Y), {}, r"those of x_test \(1,\)"),
        ((X, Y, None, X, Y + 3), {"classes": 3}, "y_test has labels"),
        ((X, Y, [0.5] * 20), {}, r"client_ids\[0\]=0.5"),
        ((X, Y, [""] * 20), {}, "client_ids"),
        ((X, Y, ["\ud800"] * 20), {}, "client_ids .* cannot be encoded as UTF-8"),
        ((X, Y, np.zeros((20, 1))), {}, "one row of ids"),
        ((X, Y), {"test_fraction": 1.0}, "test_fraction=1.0"),
        ((X[:0], Y[:0]), {}, "no training samples"),
    ],
)
def test_bad_arrays_are_refused(arguments, options, message):
    with pytest.raises(DataError, match=message):
        from_arrays(*arguments, **options)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 0.99))
def test_holdout_takes_its_fraction_of_each_group(groups, fraction):
    mask = holdout(groups, fraction, np.random.default_rng(0))
    for group in set(groups):
        rows = np.array(groups) == group
        expected = min(int(np.floor(rows.sum() * fraction + 0.5)), rows.sum() - 1)
        assert mask[rows].sum() == expected


def test_the_repr_says_what_it_is():
    assert repr(toy()) == "Dataset('arrays', 20 + 0 samples of shape (2,), 3 classes)"


def test_labels_that_start_at_1_are_refused_unless_classes_are_stated():
    x, y = np.zeros((4, 1)), np.array([1, 2, 3, 1])
    with pytest.raises(DataError, match="smallest label is 1"):
        from_arrays(x, y)
    with pytest.raises(DataError, match="smallest label is 1"):
        from_arrays(x, y, x_test=x, y_test=y)
    assert from_arrays(x, y, classes=4).classes == 4
