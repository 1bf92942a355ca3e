from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.datasets import load
from fedcohort.exceptions import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def idx_bytes(array, magic):
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def write_mnist(root, name="mnist"):
    folder = root / name
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(idx_bytes(IMAGES, 2051))
        )
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(idx_bytes(LABELS, 2049))
        )
    return folder


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_round_trip(name, tmp_path):
    write_mnist(tmp_path, name)
    data = load(name, tmp_path)
    assert np.array_equal(data.x[:, 0], IMAGES.astype(np.float32) / np.float32(255))
    assert data.x.dtype == np.float32
    assert np.array_equal(data.y_test, LABELS)
    assert data.y.dtype == np.int64
    raw = load(name, tmp_path, dtype="uint8")
    assert np.array_equal(raw.x[:, 0], IMAGES)
    assert raw.x.flags.writeable  # so that torch can share it


def test_idx_files_may_be_uncompressed(tmp_path):
    folder = write_mnist(tmp_path)
    for path in list(folder.iterdir()):
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert len(load("mnist", tmp_path).y) == 12


GOOD = idx_bytes(IMAGES, 2051)
DAMAGED_IMAGES = {
    "not gzip": (b"hello", "cannot be read"),
    "cut gzip": (gzip.compress(GOOD)[:-20], "ended before"),
    "checksum": (gzip.compress(GOOD)[:-8] + b"\0\0\0\0" + gzip.compress(GOOD)[-4:], "CRC"),
    "empty file": (b"", "ends too early"),
    "short header": (gzip.compress(GOOD[:10]), "ends too early"),
    "wrong magic": (
        gzip.compress(idx_bytes(IMAGES, 2049)),
        "more data follow than its header promises",
    ),
    "wrong shape": (gzip.compress(idx_bytes(IMAGES[:, :, :20], 2051)), r"shape \(12, 28, 20\)"),
    "too few bytes": (gzip.compress(GOOD[:-1]), "ends too early"),
    "too many bytes": (gzip.compress(GOOD + b"x"), "more data follow"),
    "no images": (gzip.compress(idx_bytes(IMAGES[:0], 2051)), r"shape \(0, 28, 28\)"),
    "absurd count": (
        gzip.compress(struct.pack(">4I", 2051, 2**32 - 1, 28, 28)),
        r"claims uint8 of shape \(4294967295, 28, 28\)",
    ),
    "fewer images": (gzip.compress(idx_bytes(IMAGES[:5], 2051)), "12 labels for 5 images"),
}


@pytest.mark.parametrize("case", DAMAGED_IMAGES)
def test_damaged_idx_files(case, tmp_path):
    content, message = DAMAGED_IMAGES[case]
    path = write_mnist(tmp_path) / TRAIN_IMAGES
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(path.parent) in str(caught.value)
    assert "must contain IDX" in str(caught.value)


def test_idx_labels_out_of_range(tmp_path):
    path = write_mnist(tmp_path) / TRAIN_LABELS
    path.write_bytes(gzip.compress(idx_bytes(np.full(12, 10, dtype=np.uint8), 2049)))
    with pytest.raises(DataError, match="a label 10"):
        load("mnist", tmp_path)


@settings(max_examples=150)
@given(st.data())
def test_a_changed_byte_never_gives_wrong_data_or_a_stray_error(tmp_path, data):
    root = tmp_path / "idx"
    path = root / "mnist" / TRAIN_LABELS
    if not path.exists():
        write_mnist(root)
    whole = bytearray(gzip.compress(idx_bytes(LABELS, 2049), mtime=0))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        loaded = load("mnist", root)
    except DataError:
        return
    assert np.array_equal(loaded.y, LABELS)  # the byte was one of the gzip header's
