from __future__ import annotations

import numpy as np
import pytest

from fedcohort.datasets import load
from fedcohort.exceptions import DataError


def write_cifar(root):
    folder = root / "cifar10"
    folder.mkdir(parents=True)
    for i, name in enumerate(["test_batch", *(f"data_batch_{k}" for k in range(1, 6))]):
        records = np.random.default_rng(i).integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def test_cifar_round_trip(tmp_path):
    folder = write_cifar(tmp_path)
    data = load("cifar10", tmp_path)
    raw = np.concatenate(
        [np.fromfile(folder / f"data_batch_{i}.bin", dtype=np.uint8) for i in range(1, 6)]
    ).reshape(-1, 3073)
    assert data.x.shape == (20, 3, 32, 32)
    assert np.array_equal(data.y, raw[:, 0])
    planes = raw[:, 1:].reshape(-1, 3, 32, 32)
    assert np.array_equal(data.x, planes.astype(np.float32) / np.float32(255))
    assert len(data.y_test) == 4
    kept = load("cifar10", tmp_path, dtype="uint8").x
    assert np.array_equal(kept, planes)
    assert kept.flags.writeable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"\0" * 3072, "3072 bytes are not a number of whole records"),
        (b"\0" * 3073 + b"\x0a" + b"\0" * 3072, "record 1 has label 10"),
        (b"\0" * (3073 * 10_001), "longer than 30730000 bytes"),
    ],
)
def test_damaged_cifar_files(content, message, tmp_path):
    (write_cifar(tmp_path) / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load("cifar10", tmp_path)
    assert "data_batch_3.bin" in str(caught.value)
    assert "records of 3073 bytes" in str(caught.value)
