from __future__ import annotations

import numpy as np
import pytest

from fedcohort.datasets import Dataset
from fedcohort.exceptions import ConfigError


class TestStandardized:
    def test_constants_a_channel(self):
        x = np.ones((2, 3, 4, 4), np.float32)
        data = Dataset("toy", x, np.array([0, 1]), x[:1], np.array([0]), classes=2)
        out = data.standardized(mean=(1, 0, 2), std=(1, 2, 4)).x
        assert out[0, :, 0, 0].tolist() == [0.0, 0.5, -0.25]
        assert out.dtype == np.float32

    def test_published_constants_fit(self):
        from fedcohort.datasets import load

        data = load("digits").standardized()
        # Constants are rounded to 4 digits and belong to all digits, not to this split of them.
        assert abs(data.x.mean()) < 3e-3
        assert abs(data.x.std() - 1) < 3e-3

    def test_unknown_constants_and_integers_are_refused(self):
        x = np.ones((2, 4), np.float32)
        data = Dataset("toy", x, np.array([0, 1]), x[:1], np.array([0]), classes=2)
        with pytest.raises(ConfigError, match="toy: no published mean"):
            data.standardized()
        whole = Dataset(
            "toy", x.astype(int), np.array([0, 1]), x[:1].astype(int), np.array([0]), classes=2
        )
        with pytest.raises(ConfigError, match="only float samples"):
            whole.standardized(0, 1)
