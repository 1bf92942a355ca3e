from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from fedcohort.datasets import load
from fedcohort.exceptions import DataError


def test_digits_are_scikit_learns_split_once_and_for_all():
    from sklearn.datasets import load_digits

    data, again, raw = load(), load("digits"), load_digits()
    assert np.array_equal(data.x_test, again.x_test)
    ours = np.concatenate([data.x, data.x_test]).reshape(1797, -1) * 16
    assert np.array_equal(np.sort(ours, axis=0), np.sort(raw.data, axis=0))
    shares = np.bincount(data.y_test) / np.bincount(raw.target)
    assert shares == pytest.approx(0.2, abs=0.003)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_round_trip(name, published, tmp_path):
    folder = published(name)
    data = load(name, tmp_path)
    assert np.array_equal(data.x[:, 0], published.images.astype(np.float32) / np.float32(255))
    assert np.array_equal(data.y_test, published.labels)
    for path in list(folder.iterdir()):  # uncompressed files do as well
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert np.array_equal(load(name, tmp_path).x, data.x)


def test_damaged_idx_files_are_named(published, tmp_path):
    folder, good = published("mnist"), published.idx(published.images)
    damaged = {
        "checksum": gzip.compress(good)[:-8] + bytes(4) + gzip.compress(good)[-4:],
        "wrong shape": gzip.compress(published.idx(published.images[:, :, :20])),
        "no images": gzip.compress(published.idx(published.images[:0])),
        "absurd count": gzip.compress(struct.pack(">4I", 2051, 2**32 - 1, 28, 28)),
        "fewer images": gzip.compress(published.idx(published.images[:5])),
    }
    for content in damaged.values():
        (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
        with pytest.raises(DataError, match=f"{folder}.*must contain IDX"):
            load("mnist", tmp_path)
    published("mnist")
    wrong = gzip.compress(published.idx(np.full(12, 10, np.uint8)))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(wrong)
    with pytest.raises(DataError, match="label 10"):
        load("mnist", tmp_path)


def test_cifar_round_trip(published, tmp_path):
    folder = published("cifar10")
    data = load("cifar10", tmp_path)
    files = [folder / f"data_batch_{i}.bin" for i in range(1, 6)]
    raw = np.concatenate([np.fromfile(f, np.uint8) for f in files]).reshape(-1, 3073)
    assert np.array_equal(data.y, raw[:, 0])
    planes = raw[:, 1:].reshape(-1, 3, 32, 32)
    assert np.array_equal(data.x, planes.astype(np.float32) / np.float32(255))
    assert len(data.y_test) == 4


@pytest.mark.parametrize("content", [b"", bytes(3072), b"\x0a" + bytes(3072)])
def test_damaged_cifar_files_are_named(content, published, tmp_path):
    """Nothing, no whole record, a label of 10."""
    (published("cifar10") / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_3\.bin.*records of 3073 bytes"):
        load("cifar10", tmp_path)


def test_femnist_round_trip(published, tmp_path):
    published("femnist")
    data, test = load("femnist", tmp_path), published.femnist["is_test"]
    expected = published.images[~test].astype(np.float32) / np.float32(255)  # not inverted
    assert np.array_equal(data.x[:, 0], expected)
    assert data.classes == 62
    assert data.client_ids.tolist() == ["f0001_00"] * 3 + ["f0002_11"] * 3 + ["f0003_22"] * 3
    assert data.test_client_ids.tolist() == ["f0001_00", "f0002_11", "f0003_22"]
    assert data.y_test.tolist() == [15, 35, 55]


@pytest.mark.parametrize(
    ("array", "value"),
    [
        ("is_test", None),
        ("images", np.zeros((12, 28, 28), np.float32)),
        ("label", np.full(12, 62, np.uint8)),
        ("writer", np.full(12, 3, np.uint16)),
        ("writer_ids", np.array(["a", "b", "c"], dtype=object)),  # never unpickled
    ],
)
def test_damaged_femnist_arrays_are_named(array, value, published, tmp_path):
    name = {"label": "labels", "writer": "writers"}.get(array, array)
    published("femnist", **{name: value})
    with pytest.raises(DataError, match=rf"femnist\.npz.*{array}"):
        load("femnist", tmp_path)
