"""Small data sets on disk, as they are published."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10
FEMNIST = {
    "images": IMAGES,
    "labels": (np.arange(12) * 5).astype(np.uint8),
    "writers": np.repeat([0, 1, 2], 4).astype(np.uint16),
    "writer_ids": np.array(["f0001_00", "f0002_11", "f0003_22"]),
    "is_test": np.tile([False, False, False, True], 3),
}
HEART_ROW = "63.0,1.0,4.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,"


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder):
    for part in ("train", "t10k"):
        for name, array in (("images-idx3", IMAGES), ("labels-idx1", LABELS)):
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(idx(array)))


def write_cifar(folder):
    for i, name in enumerate(["test_batch", *(f"data_batch_{k}" for k in range(1, 6))]):
        records = np.random.default_rng(i).integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def write_femnist(folder, **changes):
    arrays = {key: value for key, value in (FEMNIST | changes).items() if value is not None}
    np.savez_compressed(folder / "femnist.npz", **arrays)


def write_heart(folder):
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [HEART_ROW + str(i % 5) for i in range(12)]
        rows[3] = "50,0,1,?,0,?,0,140,1,1,?,?,?,0"
        (folder / f"processed.{hospital}.data").write_text("\n".join(rows) + "\n")


def write_plays(folder, text=""):
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "plays.tsv.gz").write_bytes(gzip.compress(data))


WRITERS = {
    "mnist": write_mnist,
    "fashion-mnist": write_mnist,
    "cifar10": write_cifar,
    "femnist": write_femnist,
    "heart-disease": write_heart,
    "shakespeare": write_plays,
}


@pytest.fixture
def published(tmp_path):
    """Return a function that writes a data set under `tmp_path` and returns its folder."""

    def write(name, *arguments, **options):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        WRITERS[name](folder, *arguments, **options)
        return folder

    write.images, write.labels, write.femnist = IMAGES, LABELS, FEMNIST
    return write
