from __future__ import annotations

import numpy as np
import pytest

MNIST_CLASSES = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.fixture
def mnist_like():
    """Return a function that makes labels in MNIST's proportions, one in `scale` of them."""

    def labels(scale=10):
        ordered = np.repeat(np.arange(10), [n // scale for n in MNIST_CLASSES])
        return np.random.default_rng(7).permutation(ordered)

    return labels
