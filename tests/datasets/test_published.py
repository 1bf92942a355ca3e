"""The published data sets: where their files are looked for, read and refused."""

from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path

import numpy as np
import pytest

from fedcohort.datasets import DATASETS, available, load
from fedcohort.datasets.published import (
    CHARACTERS,
    HEART_FEATURES,
    TOKENS,
    MissingData,
    data_root,
    encode,
)
from fedcohort.exceptions import ConfigError, DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10
FEMNIST = {
    "images": IMAGES,
    "labels": (np.arange(12) * 5).astype(np.uint8),
    "writers": np.repeat([0, 1, 2], 4).astype(np.uint16),
    "writer_ids": np.array(["f0001_00", "f0002_11", "f0003_22"]),
    "is_test": np.tile([False, False, False, True], 3),
}
HEART = "63.0,1.0,4.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,"


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


def femnist(**changes):
    content = io.BytesIO()
    arrays = {key: value for key, value in (FEMNIST | changes).items() if value is not None}
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def write_femnist(folder):
    (folder / "femnist.npz").write_bytes(femnist())


def write_heart(folder):
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [HEART + str(i % 5) for i in range(12)]
        rows[3] = "50,0,1,?,0,?,0,140,1,1,?,?,?,0"
        (folder / f"processed.{hospital}.data").write_text("\n".join(rows) + "\n")


def write_plays(folder, text=""):
    (folder / "plays.tsv.gz").write_bytes(gzip.compress(text.encode()))


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
    """Return a function that writes a data set, as it is published, and returns its folder."""

    def write(name, *arguments, **options):
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        WRITERS[name](folder, *arguments, **options)
        return folder

    return write


def test_root_then_variable_then_cache(published, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDCOHORT_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_root() == tmp_path / ".cache" / "fedcohort"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root() == tmp_path / "cache" / "fedcohort"
    monkeypatch.setenv("FEDCOHORT_DATA", str(published("mnist").parent))
    assert load("mnist").x.shape == (12, 1, 28, 28)
    assert data_root("elsewhere") == Path("elsewhere")


@pytest.mark.parametrize("name", [n for n in DATASETS if n != "digits"])
def test_a_missing_file_is_named_with_the_place_and_the_contents(name, tmp_path):
    with pytest.raises(MissingData, match=f"{tmp_path / name}; it must contain"):
        load(name, tmp_path)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ConfigError, match=r"'minst'.*'mnist'"):
        load("minst")
    with pytest.raises(ConfigError, match=r"'max_samples'.*'heart-disease'"):
        load("heart-disease", max_samples=3)


def test_available_tells_ok_missing_and_damaged_apart(published, tmp_path):
    published("mnist")
    published("heart-disease")
    (published("cifar10") / "data_batch_1.bin").write_bytes(b"x")
    records = {record.name: record for record in available(tmp_path)}
    expected = {"mnist": "ok", "heart-disease": "ok", "digits": "ok", "cifar10": "damaged"}
    status = {name: record.status for name, record in records.items()}
    assert status == dict.fromkeys(DATASETS, "missing") | expected
    assert (records["mnist"].samples, records["mnist"].where) == (24, str(tmp_path / "mnist"))
    assert (records["heart-disease"].samples, records["heart-disease"].clients) == (44, 4)
    assert "data_batch_1.bin" in records["cifar10"].detail


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
    assert np.array_equal(data.x[:, 0], IMAGES.astype(np.float32) / np.float32(255))
    assert np.array_equal(data.y_test, LABELS)
    for path in list(folder.iterdir()):  # uncompressed files do as well
        (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert np.array_equal(load(name, tmp_path).x, data.x)


def test_cifar_round_trip(published, tmp_path):
    folder = published("cifar10")
    data = load("cifar10", tmp_path)
    files = [folder / f"data_batch_{i}.bin" for i in range(1, 6)]
    raw = np.concatenate([np.fromfile(f, np.uint8) for f in files]).reshape(-1, 3073)
    assert np.array_equal(data.y, raw[:, 0])
    planes = raw[:, 1:].reshape(-1, 3, 32, 32)
    assert np.array_equal(data.x, planes.astype(np.float32) / np.float32(255))
    assert len(data.y_test) == 4


def test_femnist_round_trip(published, tmp_path):
    published("femnist")
    data, test = load("femnist", tmp_path), FEMNIST["is_test"]
    expected = IMAGES[~test].astype(np.float32) / np.float32(255)  # not inverted
    assert np.array_equal(data.x[:, 0], expected)
    assert data.classes == 62
    assert data.client_ids.tolist() == ["f0001_00"] * 3 + ["f0002_11"] * 3 + ["f0003_22"] * 3
    assert data.test_client_ids.tolist() == ["f0001_00", "f0002_11", "f0003_22"]
    assert data.y_test.tolist() == [15, 35, 55]


def decode(tokens):
    return "".join(("\ufffd" + CHARACTERS)[int(token)] for token in tokens)


def test_heart_features_clients_and_split(published, tmp_path):
    published("heart-disease")
    data = load("heart-disease", tmp_path)
    assert len(data.y) + len(data.y_test) == 44  # one of twelve rows is incomplete
    assert len(HEART_FEATURES) == data.x.shape[1] == 13
    assert dict(zip(HEART_FEATURES, data.x[0].tolist(), strict=True)) == pytest.approx(
        {
            "age": 1.3, "sex": 1.0, "trestbps": 0.75, "chol": 0.33, "fbs": 1.0, "thalach": 0.4,
            "exang": 0.0, "oldpeak": 1.3, "cp=2": 0.0, "cp=3": 0.0, "cp=4": 1.0,
            "restecg=1": 0.0, "restecg=2": 1.0,
        }
    )  # fmt: skip
    names = ["cleveland", "hungarian", "switzerland", "va"]
    assert np.unique(data.client_ids, return_counts=True)[1].tolist() == [7, 7, 7, 7]
    assert np.unique(data.test_client_ids).tolist() == names
    # num of 1 to 4 is a disease: rows 0, 5 and 10 of each twelve are healthy
    assert int((np.concatenate([data.y, data.y_test]) == 0).sum()) == 12


HEADER = "play\tspeaker\tline_id\ttext"


def plays(*roles):
    """Lines of (play, speaker, number of lines, length of a line), one role after the other."""
    letters = "".join(c for c in CHARACTERS if c != "\n")
    rows = [HEADER]
    for play, speaker, lines, length in roles:
        for i in range(lines):
            text = "".join(letters[(i + k) % len(letters)] for k in range(length))
            rows.append(f"{play}\t{speaker}\t1.1.{i}\t{text}")
    return "\n".join(rows) + "\n"


def test_the_vocabulary_has_80_tokens():
    assert TOKENS == 80
    assert encode(CHARACTERS).tolist() == list(range(1, 80))
    assert decode(encode("naïve \U0001f600")) == "na\ufffdve \ufffd"


def test_windows_and_the_character_that_follows(published, tmp_path):
    text = plays(
        ("hamlet", "HAMLET", 12, 30), ("hamlet", "OPHELIA", 10, 9), ("lear", "FOOL", 9, 40)
    )
    published("shakespeare", text)
    data = load("shakespeare", tmp_path, max_samples=None)
    # HAMLET speaks 12 x 30 + 11 = 371 characters: 291 samples, 29 for testing.
    # OPHELIA speaks 10 x 9 + 9 = 99: 19 and 1. FOOL has nine lines.
    assert data.client_ids.tolist() == ["hamlet/HAMLET"] * 262 + ["hamlet/OPHELIA"] * 18
    assert data.test_client_ids.tolist() == ["hamlet/HAMLET"] * 29 + ["hamlet/OPHELIA"]
    speech = "\n".join(row.split("\t")[3] for row in text.splitlines()[1:13])
    for start in (0, 1, 100, 261):
        assert decode(data.x[start]) == speech[start : start + 80]
        assert decode(data.y[start : start + 1]) == speech[start + 80]
    assert decode(data.x_test[28]) == speech[-81:-1]
    assert decode(data.y_test[28:29]) == speech[-1]


def test_max_samples_are_spread_over_the_text(published, tmp_path):
    published("shakespeare", plays(("hamlet", "HAMLET", 50, 40)))
    whole = load("shakespeare", tmp_path, max_samples=None)
    some = load("shakespeare", tmp_path, max_samples=20)
    assert (len(some.y), len(some.y_test)) == (18, 2)
    windows = 50 * 41 - 1 - 80
    everything = np.concatenate([whole.x, whole.x_test])
    assert np.array_equal(some.x, everything[[i * windows // 20 for i in range(18)]])
    with pytest.raises(ConfigError, match="max_samples=0"):
        load("shakespeare", max_samples=0)


IMAGES_GZ, LABELS_GZ = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
DAMAGED = [
    ("mnist", IMAGES_GZ, gzip.compress(b"\0\0\x08\x03")[:-8] + bytes(8), "IDX images"),  # checksum
    ("mnist", IMAGES_GZ, gzip.compress(struct.pack(">4I", 2051, 2**32 - 1, 28, 28)), "IDX images"),
    ("mnist", IMAGES_GZ, gzip.compress(struct.pack(">4I", 2051, 0, 28, 28)), "IDX images"),
    ("mnist", LABELS_GZ, gzip.compress(struct.pack(">2I", 2049, 5) + bytes(5)), "5 labels for 12"),
    ("mnist", LABELS_GZ, gzip.compress(struct.pack(">2I", 2049, 12) + b"\n" * 12), "label 10"),
    ("cifar10", "data_batch_3.bin", bytes(3072), "records of 3073 bytes"),
    ("cifar10", "data_batch_3.bin", b"\x0a" + bytes(3072), "record 0 has label 10"),
    ("femnist", "femnist.npz", femnist(is_test=None), "is_test"),
    ("femnist", "femnist.npz", femnist(images=np.zeros((12, 28, 28))), "images"),
    ("femnist", "femnist.npz", femnist(labels=np.full(12, 62, np.uint8)), "label 62"),
    ("femnist", "femnist.npz", femnist(writers=np.full(12, 3, np.uint16)), "writer 3"),
    ("femnist", "femnist.npz", femnist(writer_ids=np.array(["a"], object)), "writer_ids"),
    ("heart-disease", "processed.va.data", b"", "empty"),
    ("heart-disease", "processed.va.data", b"1,2,3", "row 1"),
    ("heart-disease", "processed.va.data", f"{HEART}?".encode(), "column 14 of row 1 is nan"),
    ("heart-disease", "processed.va.data", f"{HEART}inf".encode(), "column 14 of row 1 is inf"),
    ("heart-disease", "processed.va.data", f"old{HEART[4:]}0".encode(), "'old'"),
    ("shakespeare", "plays.tsv.gz", gzip.compress(b"play,speaker,line_id,text"), "first line"),
    ("shakespeare", "plays.tsv.gz", gzip.compress(f"{HEADER}\na\tb\tc".encode()), "line 2"),
    ("shakespeare", "plays.tsv.gz", gzip.compress(f"{HEADER}\n\xff".encode("latin-1")), "UTF-8"),
    ("shakespeare", "plays.tsv.gz", gzip.compress(plays(("a", "B", 3, 50)).encode()), "10 lines"),
]


# Compressed files hold the time of day, and ids of tests must be the same in every process.
@pytest.mark.parametrize(
    ("name", "file", "content", "culprit"), DAMAGED, ids=[culprit for *_, culprit in DAMAGED]
)
def test_damaged_files_are_named(name, file, content, culprit, published, tmp_path):
    (published(name) / file).write_bytes(content)
    with pytest.raises(DataError, match=f"{file}.*{culprit}"):
        load(name, tmp_path)
