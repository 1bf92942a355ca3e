"""Data of one's own, and public constants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.datasets import Dataset, from_arrays, load
from fedcohort.datasets.base import holdout
from fedcohort.exceptions import ConfigError, DataError

X = np.arange(40, dtype=float).reshape(20, 2)
Y = np.arange(20) % 3
NAN = X.copy()
NAN[4, 1] = np.nan


def test_given_test_data_is_kept_and_types_are_made_alike():
    ids = np.repeat([7, 10], 10)
    data = from_arrays(X, Y, ids, X[:3], Y[:3], test_client_ids=["7", "7", "10"], name="mine")
    assert repr(data).startswith("Dataset('mine', 20 + 3 samples of shape (2,), 3 classes")
    assert (data.x.dtype, data.y.dtype) == (np.float32, np.int64)
    assert data.client_ids.tolist() == ["7"] * 10 + ["10"] * 10
    assert from_arrays(X.astype(np.int32), Y).x.dtype == np.int64
    assert from_arrays(X.astype(np.uint8), Y).x.dtype == np.uint8


def test_without_test_data_a_part_of_each_client_or_class_is_held_out():
    ids = ["a"] * 10 + ["b"] * 9 + ["c"]
    data, again, other = (from_arrays(X, Y, ids, test_fraction=0.3, seed=s) for s in (1, 1, 2))
    assert data.test_client_ids.tolist() == ["a"] * 3 + ["b"] * 3
    assert data.client_ids.tolist() == ["a"] * 7 + ["b"] * 6 + ["c"]
    assert np.array_equal(data.x_test, again.x_test)
    assert not np.array_equal(data.x_test, other.x_test)
    rows = np.concatenate([data.x, data.x_test])[:, 0]
    assert np.array_equal(np.sort(rows), X[:, 0])
    by_class = from_arrays(X, Y, test_fraction=0.5)
    assert np.bincount(by_class.y_test).tolist() == [4, 4, 3]
    assert by_class.client_ids is None


@pytest.mark.parametrize(
    ("arguments", "options", "culprit"),
    [
        ((NAN, Y), {}, r"x\[4\]"),
        ((X, Y[:5]), {}, "x 20, y 5"),
        ((X, Y, ["a"]), {}, "client ids 1"),
        ((X[:, 0], Y), {}, r"shape \(20,\)"),
        ((np.full((20, 2), "a"), Y), {}, "x must be numbers"),
        ((X, Y.astype(float)), {}, "y .*float64"),
        ((X, ["cat"] * 20), {}, "np.unique"),
        ((X, Y + 1), {}, "smallest label is 1"),
        ((X, Y), {"classes": 2}, "2 classes"),
        ((X, Y, None, X), {}, "y_test"),
        ((X, Y, None, X, Y[1:]), {}, "unequal lengths: x_test 20, y_test 19"),
        ((X, Y, None, X[:, :1], Y), {}, r"x_test \(1,\)"),
        ((X, Y, [0.5] * 20), {}, r"client_ids\[0\]=0.5"),
        ((X, Y, [""] * 20), {}, "client_ids"),
        ((X, Y, ["\ud800"] * 20), {}, "client_ids"),
        ((X, Y, np.zeros((20, 1))), {}, "ids"),
        ((X, Y), {"test_fraction": 1.0}, "test_fraction=1.0"),
        ((X[:0], Y[:0]), {}, "no training samples"),
    ],
)
def test_bad_arrays_are_refused(arguments, options, culprit):
    with pytest.raises(DataError, match=culprit):
        from_arrays(*arguments, **options)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 0.99))
def test_holdout_takes_its_fraction_of_each_group(groups, fraction):
    mask = holdout(groups, fraction, np.random.default_rng(0))
    for group in set(groups):
        rows = np.array(groups) == group
        expected = min(int(np.floor(rows.sum() * fraction + 0.5)), rows.sum() - 1)
        assert mask[rows].sum() == expected


def test_standardizing_by_given_and_by_published_constants():
    x, y = np.ones((2, 3, 4, 4), np.float32), np.array([0, 1])
    data = Dataset("toy", x, y, x[:1], y[:1], classes=2)
    out = data.standardized(mean=(1, 0, 2), std=(1, 2, 4)).x
    assert out[0, :, 0, 0].tolist() == [0.0, 0.5, -0.25]
    assert out.dtype == np.float32
    digits = load("digits").standardized()  # constants of all digits, rounded to 4 places
    assert abs(digits.x.mean()) < 3e-3
    assert abs(digits.x.std() - 1) < 3e-3
    with pytest.raises(ConfigError, match="toy"):
        data.standardized()
    whole = Dataset("toy", x.astype(int), y, x[:1].astype(int), y[:1], classes=2)
    with pytest.raises(ConfigError, match="float"):
        whole.standardized(0, 1)
