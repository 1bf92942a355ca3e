"""The published data sets, each read from the files that it comes in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fedcohort.datasets.base import Array, Dataset, holdout
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.files.arrays import arrays_in
from fedcohort.files.source import decompressed, reading
from fedcohort.rounds import stream

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]
VARIABLE = "FEDCOHORT_DATA"
MAX_ARRAY_BYTES = 1 << 30


class MissingData(DataError):
    """A data file is not where it was looked for."""


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all data sets: `root`, else $FEDCOHORT_DATA, else the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fedcohort")
    return Path(root or os.environ.get(VARIABLE) or cache).expanduser()


@contextmanager
def data_file(folder: Path, *names: str, holds: str) -> Iterator[Path]:
    """Give the first file of these names; errors about it say what it must contain."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise MissingData(
            f"{folder.name}: file {names[0]} not found in {folder}; it must contain {holds}. "
            f"Put it there, or set {VARIABLE} (or root) to the folder that holds {folder.name}/"
        )
    try:
        with reading(path, KeyError):
            yield path
    except DataError as error:
        raise DataError(f"damaged file: {error}; it must contain {holds}") from error


def _content(path: Path, limit: int) -> bytes:
    """Read at most `limit` bytes (after decompression); a longer file is damaged."""
    with decompressed(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it is longer than {limit} bytes")
    return data


def read_digits(folder: Path) -> Dataset:
    """Return 1,797 images (1, 8, 8) in [0, 1]; a fixed fifth of each class is for testing."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x, y = (raw.images[:, None] / 16.0).astype(np.float32), raw.target.astype(np.int64)
    test = holdout(y, 0.2, stream(0, "digits", "test"))
    return Dataset(folder.name, x, y, x[:0], y[:0], classes=10).split_off(test)


IDX_IMAGES = "IDX images: magic 2051, count, 28, 28 as big-endian 32-bit numbers, then the bytes"
IDX_LABELS = "IDX labels: magic 2049 and count as big-endian 32-bit numbers, then bytes of 0 to 9"
MAX_IMAGES = 1_000_000


def read_idx(folder: Path) -> Dataset:
    """Read images (samples, 1, 28, 28) and labels; files may be compressed (.gz) or not."""
    (x, y), (x_test, y_test) = (_idx_part(folder, part) for part in ("train", "t10k"))
    return Dataset(folder.name, x, y, x_test, y_test, classes=10)


def _idx_part(folder: Path, part: str) -> tuple[Array, Ints]:
    images = _idx_bytes(folder, f"{part}-images-idx3-ubyte", (28, 28), IDX_IMAGES)
    labels = _idx_bytes(folder, f"{part}-labels-idx1-ubyte", (), IDX_LABELS, len(images))
    return images[:, None] / np.float32(255), labels.astype(np.int64)


def _idx_bytes(
    folder: Path, name: str, shape: tuple[int, ...], holds: str, labels_for: int = 0
) -> Bytes:
    """Read an IDX file of bytes whose items have the given shape, or of labels."""
    with data_file(folder, f"{name}.gz", name, holds=holds) as path:
        items = arrays_in(path)[""].read(MAX_ARRAY_BYTES)
        if items.dtype != np.uint8 or items.shape[1:] != shape or not 0 < len(items) <= MAX_IMAGES:
            raise ValueError(f"it holds {items.dtype} of shape {items.shape}")
        if labels_for and len(items) != labels_for:
            raise ValueError(f"it has {len(items)} labels for {labels_for} images")
        if labels_for and items.max() > 9:
            raise ValueError(f"it has a label {items.max()}")
    return items


CIFAR_RECORD = 1 + 3 * 32 * 32
MAX_RECORDS = 10_000
CIFAR_HOLDS = (
    f"at most {MAX_RECORDS} records of {CIFAR_RECORD} bytes: label 0 to 9, then color planes"
)


def read_cifar(folder: Path) -> Dataset:
    """Read images (samples, 3, 32, 32) and labels."""
    train = np.concatenate([_cifar_batch(folder, f"data_batch_{i}.bin") for i in range(1, 6)])
    test = _cifar_batch(folder, "test_batch.bin")
    x, x_test = (a[:, 1:].reshape(-1, 3, 32, 32) / np.float32(255) for a in (train, test))
    y, y_test = (a[:, 0].astype(np.int64) for a in (train, test))
    return Dataset(folder.name, x, y, x_test, y_test, classes=10)


def _cifar_batch(folder: Path, name: str) -> Bytes:
    with data_file(folder, name, holds=CIFAR_HOLDS) as path:
        data = _content(path, MAX_RECORDS * CIFAR_RECORD)
        if not data or len(data) % CIFAR_RECORD:
            raise ValueError(f"its {len(data)} bytes are not a number of whole records")
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, CIFAR_RECORD)
        for row in np.flatnonzero(records[:, 0] > 9):
            raise ValueError(f"record {row} has label {records[row, 0]}")
    return records


FEMNIST_CLASSES = 62
FEMNIST_HOLDS = (
    "arrays images uint8 (n, 28, 28), labels uint8 (n,) of 0 to 61, writers uint16 (n,) into "
    "writer_ids (text), and is_test bool (n,)"
)
FEMNIST_KINDS = {"images": "u1", "labels": "u1", "writers": "u2", "is_test": "b1"}


def read_femnist(folder: Path) -> Dataset:
    """Read images (samples, 1, 28, 28), labels and writers, who are the clients, as in LEAF.

    Digits come first (0-9), then A-Z (10-35) and a-z (36-61). As in LEAF, and unlike MNIST, the
    background is 1 (255) and ink is 0. The split into train and test is LEAF's own.
    """
    with data_file(folder, "femnist.npz", holds=FEMNIST_HOLDS) as path:
        arrays = arrays_in(path)
        raw = {name: arrays[name].read(MAX_ARRAY_BYTES) for name in (*FEMNIST_KINDS, "writer_ids")}
        _check_femnist(raw)
    x, y = raw["images"][:, None] / np.float32(255), raw["labels"].astype(np.int64)
    clients = raw["writer_ids"][raw["writers"]]
    whole = Dataset(folder.name, x, y, x[:0], y[:0], FEMNIST_CLASSES, clients)
    return whole.split_off(raw["is_test"])


def _check_femnist(raw: dict[str, NDArray[Any]]) -> None:
    n = len(raw["labels"]) if raw["labels"].ndim else 0
    for key, kind in FEMNIST_KINDS.items():
        shape = (n, 28, 28) if key == "images" else (n,)
        if raw[key].dtype != np.dtype(kind) or raw[key].shape != shape or n == 0:
            raise ValueError(f"{key} is {raw[key].dtype} of shape {raw[key].shape}")
    names = raw["writer_ids"]
    if names.dtype.kind != "U" or names.ndim != 1:
        raise ValueError(f"writer_ids is {names.dtype} of shape {names.shape}")
    if raw["labels"].max() >= FEMNIST_CLASSES:
        raise ValueError(f"it has a label {raw['labels'].max()}")
    if raw["writers"].max() >= names.size:
        raise ValueError(f"writer {raw['writers'].max()} is not in writer_ids")


HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HEART_HOLDS = (
    "comma-separated rows of age, sex, cp, trestbps, chol, fbs, restecg, thalach, exang, oldpeak, "
    "slope, ca, thal, num, without a header; ? is missing"
)
# Column, name, center and scale. The constants are round clinical values, not statistics of the
# data: standardizing needs no round of communication and gives nothing away.
HEART_NUMBERS = (
    (0, "age", 50.0, 10.0),
    (1, "sex", 0.0, 1.0),
    (3, "trestbps", 130.0, 20.0),
    (4, "chol", 200.0, 100.0),
    (5, "fbs", 0.0, 1.0),
    (7, "thalach", 140.0, 25.0),
    (8, "exang", 0.0, 1.0),
    (9, "oldpeak", 1.0, 1.0),
)
# Column, name, values; the first value is the one with all zeros.
HEART_CATEGORIES = ((2, "cp", (1, 2, 3, 4)), (6, "restecg", (0, 1, 2)))
HEART_FEATURES = (
    *(name for _, name, _, _ in HEART_NUMBERS),
    *(f"{name}={v}" for _, name, values in HEART_CATEGORIES for v in values[1:]),
)
# The values that a column may have; column 13 is the diagnosis and never missing.
HEART_VALUES: dict[int, tuple[int, ...]] = {
    **{column: values for column, _, values in HEART_CATEGORIES},
    **dict.fromkeys((1, 5, 8), (0, 1)),
    13: (0, 1, 2, 3, 4),
}


def read_heart(folder: Path) -> Dataset:
    """Read 13 features and whether there is a heart disease; the hospitals are the clients.

    As FLamby's Fed-Heart-Disease: slope, ca and thal, mostly missing outside Cleveland, and rows
    with another missing value are left out, so that 740 stay; a cholesterol of 0, as in all rows of
    Switzerland, stands. A third of each hospital's rows of each class, always the same, is for
    testing.
    """
    tables = []
    for hospital in HOSPITALS:
        with data_file(folder, f"processed.{hospital}.data", holds=HEART_HOLDS) as path:
            tables.append(_heart_table(_content(path, 1 << 20).decode("ascii", "replace")))
    rows = np.concatenate(tables)
    clients = np.repeat(HOSPITALS, [len(table) for table in tables])
    whole = ~np.isnan(rows[:, :10]).any(axis=1)
    rows, clients = rows[whole], clients[whole]
    columns, _, centers, scales = zip(*HEART_NUMBERS, strict=True)
    numbers = (rows[:, columns] - np.array(centers)) / np.array(scales)
    flags = [rows[:, c] == v for c, _, values in HEART_CATEGORIES for v in values[1:]]
    x = np.column_stack([numbers, *flags]).astype(np.float32)
    y = (rows[:, 13] > 0).astype(np.int64)
    groups = np.char.add(clients, y.astype(str))
    test = holdout(groups, 1 / 3, stream(0, "heart-disease", "test"))
    return Dataset(folder.name, x, y, x[:0], y[:0], 2, clients).split_off(test)


def _heart_table(text: str) -> NDArray[np.float64]:
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    if not rows:
        raise ValueError("it is empty")
    for number, row in enumerate(rows, start=1):
        if len(row) != 14:
            raise ValueError(f"row {number} has {len(row)} columns")
    table = np.array([["nan" if v.strip() == "?" else v for v in row] for row in rows], float)
    wrong = np.isinf(table)
    for column, values in HEART_VALUES.items():
        wrong[:, column] |= ~np.isin(table[:, column], values) & ~np.isnan(table[:, column])
    wrong[:, 13] |= np.isnan(table[:, 13])
    for row, column in np.argwhere(wrong):
        raise ValueError(f"column {column + 1} of row {row + 1} is {table[row, column]:g}")
    return table


WINDOW = 80
MIN_LINES = 10
CHARACTERS = "\n !\"$&'(),-." + digits + ":;?" + ascii_uppercase + "[]" + ascii_lowercase
TOKENS = 1 + len(CHARACTERS)  # 80; token 0 stands for any other character
PLAYS_HEADER = "play\tspeaker\tline_id\ttext"
PLAYS_HOLDS = (
    "UTF-8 lines of tab-separated play, speaker, line_id, text, with these names in line 1"
)


def read_shakespeare(folder: Path, *, max_samples: int | None = 500) -> Dataset:
    """Read windows (samples, 80) of tokens and the token that follows each; roles are clients.

    A client is a role with at least ten lines, named "play/SPEAKER". The last tenth of a role's
    samples is for testing: no character to be guessed there is part of a training sample. A role
    gives at most `max_samples`, evenly spaced over its text; None for all (4.2 million, 2.7 GB).
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"shakespeare: max_samples={max_samples} must be at least 1, or None")
    with data_file(folder, "plays.tsv.gz", holds=PLAYS_HOLDS) as path:
        roles = {
            role: encode("\n".join(lines))
            for role, lines in sorted(_lines_by_role(_content(path, 64 << 20).decode()).items())
            if len(lines) >= MIN_LINES and sum(map(len, lines)) + len(lines) - 1 > WINDOW
        }
        if not roles:
            raise ValueError(f"no role has {MIN_LINES} lines and over {WINDOW} characters")
    train, test = {}, {}
    for role, text in roles.items():
        windows = text.size - WINDOW
        count = windows if max_samples is None else min(windows, max_samples)
        starts = np.arange(count) * windows // count
        train[role], test[role] = np.split(starts, [count - count // 10])
    x, y, clients = _windows(roles, train)
    x_test, y_test, test_clients = _windows(roles, test)
    return Dataset(folder.name, x, y, x_test, y_test, TOKENS, clients, test_clients, tokens=True)


def encode(text: str) -> Bytes:
    """Turn characters into tokens; 0 stands for those that are not in `CHARACTERS`."""
    table = np.zeros(128, dtype=np.uint8)
    table[[ord(c) for c in CHARACTERS]] = np.arange(1, TOKENS)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.where(codes < 128, table[np.minimum(codes, 127)], 0).astype(np.uint8)


def _lines_by_role(text: str) -> dict[str, list[str]]:
    lines = text.split("\n")
    if lines[0] != PLAYS_HEADER:
        raise ValueError(f"its first line is {lines[0][:60]!r}")
    roles: dict[str, list[str]] = {}
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) == 4:
            roles.setdefault(f"{fields[0]}/{fields[1]}", []).append(fields[3])
        elif line:
            raise ValueError(f"line {number} has {len(fields)} fields")
    return roles


def _windows(roles: dict[str, Bytes], starts: dict[str, Ints]) -> tuple[Ints, Ints, Array]:
    """Cut the windows out, role by role into one array."""
    sizes = [s.size for s in starts.values()]
    x = np.empty((sum(sizes), WINDOW), dtype=np.int64)
    for role, rows in zip(starts, np.split(x, np.cumsum(sizes)[:-1]), strict=True):
        rows[:] = sliding_window_view(roles[role], WINDOW)[starts[role]]
    y = np.concatenate([roles[role][begin + WINDOW] for role, begin in starts.items()])
    names = np.array(list(starts), dtype=object)  # fixed width would outweigh the windows
    return x, y.astype(np.int64), np.repeat(names, sizes)
