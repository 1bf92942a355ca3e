"""Images: scikit-learn's digits, MNIST and Fashion-MNIST, CIFAR-10 and FEMNIST.

The digits (1,797 of 8x8 pixels) need no file. MNIST and Fashion-MNIST come as the four IDX files
they are published in, CIFAR-10 as the six files of its binary version, FEMNIST (handwritten
characters by writer; the writers are the clients, as in LEAF) as one .npz file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.datasets.base import Dataset, Pixels, holdout, pixels
from fedcohort.datasets.folder import Folder, damaged, read_all, read_arrays
from fedcohort.rounds import stream


def read_digits(folder: Folder) -> Dataset:
    """Return the digits, scaled from 0..16 to [0, 1]; a fifth of each class is for testing.

    The test set of 359 is drawn once and for all, with a fixed seed.
    """
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = (raw.images[:, None] / 16.0).astype(np.float32)
    y = raw.target.astype(np.int64)
    test = holdout(y, 0.2, stream(0, "digits", "test"))
    return Dataset(folder.name, x[~test], y[~test], x[test], y[test], classes=10)


SIDE = 28
LIMIT = 1_000_000
IMAGES = (
    "IDX images: magic 2051, count, 28, 28 as big-endian 32-bit numbers, then count x 784 bytes"
)
LABELS = "IDX labels: magic 2049 and count as big-endian 32-bit numbers, then count bytes of 0 to 9"


def read_idx(folder: Folder, *, dtype: Pixels = "float32") -> Dataset:
    """Read images (samples, 1, 28, 28) and labels; files may be compressed (.gz) or not."""
    x, y = _part(folder, "train", dtype)
    x_test, y_test = _part(folder, "t10k", dtype)
    return Dataset(folder.name, x, y, x_test, y_test, classes=10)


def _part(
    folder: Folder, part: str, dtype: Pixels
) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    name = f"{part}-images-idx3-ubyte"
    path = folder.file(f"{name}.gz", name, holds=IMAGES)
    images = _bytes(path, (SIDE, SIDE), IMAGES)
    name = f"{part}-labels-idx1-ubyte"
    path = folder.file(f"{name}.gz", name, holds=LABELS)
    labels = _bytes(path, (), LABELS)
    if len(labels) != len(images):
        raise damaged(path, f"it has {len(labels)} labels for {len(images)} images", LABELS)
    if labels.size and labels.max() > 9:
        raise damaged(path, f"it has a label {labels.max()}", LABELS)
    return pixels(images[:, None], dtype), labels.astype(np.int64)


def _bytes(path: Path, shape: tuple[int, ...], holds: str) -> NDArray[np.uint8]:
    """Read an IDX file of bytes whose items have the given shape."""
    items = read_arrays(path, [""], holds)[""]
    if items.dtype != np.uint8 or items.shape[1:] != shape or not 0 < len(items) <= LIMIT:
        raise damaged(path, f"it holds {items.dtype} of shape {items.shape}", holds)
    return items


SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
MAX_RECORDS = 10_000
CIFAR_HOLDS = f"at most {MAX_RECORDS} records of {RECORD} bytes: label 0 to 9, then color planes"


def read_cifar(folder: Folder, *, dtype: Pixels = "float32") -> Dataset:
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
    path = folder.file(name, holds=CIFAR_HOLDS)
    data = read_all(path, MAX_RECORDS * RECORD, CIFAR_HOLDS)
    if not data or len(data) % RECORD:
        raise damaged(path, f"its {len(data)} bytes are not a number of whole records", CIFAR_HOLDS)
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, RECORD)
    if records[:, 0].max() > 9:
        row = int(records[:, 0].argmax())
        raise damaged(path, f"record {row} has label {records[row, 0]}", CIFAR_HOLDS)
    return records


CLASSES = 62
FEMNIST_HOLDS = (
    "arrays images uint8 (n, 28, 28), labels uint8 (n,) of 0 to 61, writers uint16 (n,) into "
    "writer_ids (text), and is_test bool (n,)"
)
KINDS = {"images": "u1", "labels": "u1", "writers": "u2", "is_test": "b1"}


def read_femnist(folder: Folder, *, dtype: Pixels = "float32") -> Dataset:
    """Read images (samples, 1, 28, 28), labels and writers.

    Digits come first (0-9), then A-Z (10-35) and a-z (36-61). As in LEAF, and unlike MNIST, the
    background is 1 (255) and ink is 0; the floats are LEAF's. The split into train and test is
    LEAF's own, within each writer.
    """
    path = folder.file("femnist.npz", holds=FEMNIST_HOLDS)
    raw = read_arrays(path, (*KINDS, "writer_ids"), FEMNIST_HOLDS)
    _check(path, raw)
    images, labels = raw["images"][:, None], raw["labels"].astype(np.int64)
    clients = raw["writer_ids"][raw["writers"]]
    test = raw["is_test"]
    return Dataset(
        folder.name,
        pixels(images[~test], dtype),
        labels[~test],
        pixels(images[test], dtype),
        labels[test],
        classes=CLASSES,
        client_ids=clients[~test],
        test_client_ids=clients[test],
    )


def _check(path: Path, raw: dict[str, NDArray[Any]]) -> None:
    n = len(raw["labels"]) if raw["labels"].ndim else 0
    for key, kind in KINDS.items():
        shape = (n, 28, 28) if key == "images" else (n,)
        if raw[key].dtype != np.dtype(kind) or raw[key].shape != shape or n == 0:
            form = f"{raw[key].dtype} of shape {raw[key].shape}"
            raise damaged(path, f"{key} is {form}", FEMNIST_HOLDS)
    names = raw["writer_ids"]
    if names.dtype.kind != "U" or names.ndim != 1:
        raise damaged(path, f"writer_ids is {names.dtype} of shape {names.shape}", FEMNIST_HOLDS)
    if raw["labels"].max() >= CLASSES:
        raise damaged(path, f"it has a label {raw['labels'].max()}", FEMNIST_HOLDS)
    if raw["writers"].max() >= names.size:
        raise damaged(path, f"writer {raw['writers'].max()} is not in writer_ids", FEMNIST_HOLDS)
