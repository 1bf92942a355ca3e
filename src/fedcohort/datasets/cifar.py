"""CIFAR-10, in the six files of its binary version."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcohort.datasets.base import Dataset, Pixels, pixels
from fedcohort.datasets.files import Folder, damaged, read_all

SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
MOST = 10_000
HOLDS = f"at most {MOST} records of {RECORD} bytes: a label of 0 to 9, then red, green, blue planes"


def read(folder: Folder, *, dtype: Pixels = "float32") -> Dataset:
    """Read images (samples, 3, 32, 32) and labels."""
    train = np.concatenate([_batch(folder, f"data_batch_{i}.bin") for i in range(1, 6)])
    x, y = _split(train, dtype)
    x_test, y_test = _split(_batch(folder, "test_batch.bin"), dtype)
    return Dataset(folder.name, x, y, x_test, y_test, classes=10)


def _split(
    records: NDArray[np.uint8], dtype: Pixels
) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    return pixels(records[:, 1:].reshape(-1, *SHAPE), dtype), records[:, 0].astype(np.int64)


def _batch(folder: Folder, name: str) -> NDArray[np.uint8]:
    path = folder.file(name, holds=HOLDS)
    data = read_all(path, MOST * RECORD, HOLDS)
    if not data or len(data) % RECORD:
        raise damaged(path, f"its {len(data)} bytes are not a number of whole records", HOLDS)
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)
    if records[:, 0].max() > 9:
        row = int(records[:, 0].argmax())
        raise damaged(path, f"record {row} has label {records[row, 0]}", HOLDS)
    return records
