from __future__ import annotations

import numpy as np
import pytest

from fedcohort.datasets import load


def test_digits_are_scikit_learns_split_once_and_for_all():
    from sklearn.datasets import load_digits

    data, again = load(), load("digits")
    assert np.array_equal(data.x_test, again.x_test)
    assert data.x.dtype == np.float32
    assert (data.x.min(), data.x.max()) == (0.0, 1.0)
    raw = load_digits()
    ours = np.concatenate([data.x, data.x_test]).reshape(1797, -1) * 16
    assert np.array_equal(np.sort(ours, axis=0), np.sort(raw.data, axis=0))
    shares = np.bincount(data.y_test) / np.bincount(raw.target)
    assert shares == pytest.approx(0.2, abs=0.003)
