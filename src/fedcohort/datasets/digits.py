"""Scikit-learn's 1,797 handwritten digits of 8x8 pixels, which need no file."""

from __future__ import annotations

import numpy as np

from fedcohort.datasets.base import Dataset, holdout
from fedcohort.datasets.files import Folder
from fedcohort.rounds import stream


def read(folder: Folder) -> Dataset:
    """Return the digits, scaled from 0..16 to [0, 1]; a fifth of each class is for testing.

    The test set of 359 is drawn once and for all, with a fixed seed.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = (raw.images[:, None] / 16.0).astype(np.float32)
    y = raw.target.astype(np.int64)
    test = holdout(y, 0.2, stream(0, "digits", "test"))
    return Dataset(folder.name, x[~test], y[~test], x[test], y[test], classes=10)
