"""FEMNIST: handwritten characters by writer, the writers being the clients (LEAF)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcohort.datasets.base import Dataset, Pixels, pixels
from fedcohort.datasets.files import Folder, damaged, read_npz

CLASSES = 62
HOLDS = (
    "arrays images uint8 (n, 28, 28), labels uint8 (n,) of 0 to 61, writers uint16 (n,) into "
    "writer_ids (text), and is_test bool (n,)"
)
KINDS = {"images": "u1", "labels": "u1", "writers": "u2", "is_test": "b1"}


def read(folder: Folder, *, dtype: Pixels = "float32") -> Dataset:
    """Read images (samples, 1, 28, 28), labels and writers.

    Digits come first (0-9), then A-Z (10-35) and a-z (36-61). As in LEAF, and unlike MNIST, the
    background is 1 (255) and ink is 0; the floats are LEAF's. The split into train and test is
    LEAF's own, within each writer.
    """
    path = folder.file("femnist.npz", holds=HOLDS)
    raw = read_npz(path, (*KINDS, "writer_ids"), HOLDS)
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
            found = f"{raw[key].dtype} of shape {raw[key].shape}"
            raise damaged(path, f"{key} is {found}", HOLDS)
    names = raw["writer_ids"]
    if names.dtype.kind != "U" or names.ndim != 1:
        raise damaged(path, f"writer_ids is {names.dtype} of shape {names.shape}", HOLDS)
    if raw["labels"].max() >= CLASSES:
        raise damaged(path, f"it has a label {raw['labels'].max()}", HOLDS)
    if raw["writers"].max() >= names.size:
        raise damaged(path, f"writer {raw['writers'].max()} is not in writer_ids", HOLDS)
