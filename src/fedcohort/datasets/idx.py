"""MNIST and Fashion-MNIST, in the four IDX files they are published in."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fedcohort.datasets.base import Dataset, Pixels, pixels
from fedcohort.datasets.files import Folder, damaged, opened

SIDE = 28
LIMIT = 1_000_000
IMAGES = (
    "IDX images: magic 2051, count, 28, 28 as big-endian 32-bit numbers, then count x 784 bytes"
)
LABELS = "IDX labels: magic 2049 and count as big-endian 32-bit numbers, then count bytes of 0 to 9"


def read(folder: Folder, *, dtype: Pixels = "float32") -> Dataset:
    """Read images (samples, 1, 28, 28) and labels; files may be compressed (.gz) or not."""
    x, y = _part(folder, "train", dtype)
    x_test, y_test = _part(folder, "t10k", dtype)
    return Dataset(folder.name, x, y, x_test, y_test, classes=10)


def _part(
    folder: Folder, part: str, dtype: Pixels
) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    name = f"{part}-images-idx3-ubyte"
    path = folder.file(f"{name}.gz", name, holds=IMAGES)
    images = read_idx(path, 2051, (SIDE, SIDE), IMAGES)
    name = f"{part}-labels-idx1-ubyte"
    path = folder.file(f"{name}.gz", name, holds=LABELS)
    labels = read_idx(path, 2049, (), LABELS)
    if len(labels) != len(images):
        raise damaged(path, f"it has {len(labels)} labels for {len(images)} images", LABELS)
    if labels.size and labels.max() > 9:
        raise damaged(path, f"it has a label {labels.max()}", LABELS)
    return pixels(images[:, None], dtype), labels.astype(np.int64)


def read_idx(path: Path, magic: int, shape: tuple[int, ...], holds: str) -> NDArray[np.uint8]:
    """Read an IDX file of bytes whose items have the given shape."""
    with opened(path, holds) as file:
        count = _header(file, path, magic, shape, holds)
        wanted = count * math.prod(shape)
        data = file.read(wanted + 1)  # one more, to see that the file ends there
    if len(data) != wanted:
        found = f"{len(data)}" if len(data) < wanted else "more"
        raise damaged(path, f"its header promises {wanted} bytes of data and {found} follow", holds)
    return np.frombuffer(data, dtype=np.uint8).reshape(count, *shape)


def _header(file: IO[bytes], path: Path, magic: int, shape: tuple[int, ...], holds: str) -> int:
    words = 2 + len(shape)
    head = file.read(4 * words)
    if len(head) < 4 * words:
        raise damaged(path, f"its header has {len(head)} bytes, not {4 * words}", holds)
    found, count, *sides = struct.unpack(f">{words}I", head)
    if found != magic:
        raise damaged(path, f"its magic number is {found}, not {magic}", holds)
    if tuple(sides) != shape or not 0 < count <= LIMIT:
        raise damaged(path, f"its header says {count} items of shape {tuple(sides)}", holds)
    return int(count)
