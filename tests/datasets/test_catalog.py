from __future__ import annotations

import gzip
import struct

import pytest

from fedcohort.datasets import DATASETS, available, load
from fedcohort.datasets.folder import MissingData, places
from fedcohort.exceptions import ConfigError

HEART_ROW = "63,1,4,145,233,1,2,150,0,2.3,3,0,6,"


def write_mnist(root):
    (root / "mnist").mkdir(parents=True)
    for part, n in (("train", 12), ("t10k", 5)):
        images = struct.pack(">4I", 2051, n, 28, 28) + bytes(n * 784)
        labels = struct.pack(">2I", 2049, n) + bytes(n)
        for name, data in (("images-idx3", images), ("labels-idx1", labels)):
            (root / "mnist" / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(data))


def write_heart(root):
    (root / "heart-disease").mkdir()
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        path = root / "heart-disease" / f"processed.{hospital}.data"
        path.write_text("\n".join(HEART_ROW + str(i % 2) for i in range(6)))


def test_root_then_variable_then_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCOHORT_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert places(tmp_path) == (tmp_path,)
    assert places() == (tmp_path / "env", tmp_path / "cache" / "fedcohort")
    write_mnist(tmp_path / "cache" / "fedcohort")
    assert load("mnist").x.shape == (12, 1, 28, 28)
    monkeypatch.delenv("FEDCOHORT_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places() == (tmp_path / ".cache" / "fedcohort",)


@pytest.mark.parametrize("name", [n for n in DATASETS if n != "digits"])
def test_a_missing_file_is_named_with_the_places_and_the_contents(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCOHORT_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(MissingData) as caught:
        load(name)
    message = str(caught.value)
    assert str(tmp_path / "env" / name) in message
    assert str(tmp_path / "cache" / "fedcohort" / name) in message
    assert "it must contain" in message
    assert "not found" in message


def test_one_missing_file_of_several(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingData, match=r"train-labels-idx1-ubyte\.gz"):
        load("mnist", tmp_path)


def test_unknown_names_and_options_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"unknown data set 'minst'; did you mean 'mnist'.*digits, mnist"
    ):
        load("minst")
    with pytest.raises(ConfigError, match="unknown option 'dtype' of data set 'digits'"):
        load("digits", dtype="uint8")
    with pytest.raises(ConfigError, match="unknown option 'size' of data set 'mnist'"):
        load("mnist", tmp_path, size=3)
    write_mnist(tmp_path)
    with pytest.raises(ConfigError, match="dtype='float64'"):
        load("mnist", tmp_path, dtype="float64")


def test_available_tells_ok_missing_and_damaged_apart(tmp_path):
    write_mnist(tmp_path)
    write_heart(tmp_path)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "data_batch_1.bin").write_bytes(b"x")
    found = {record.name: record for record in available(tmp_path)}
    assert list(found) == list(DATASETS)
    assert {name: record.status for name, record in found.items()} == {
        "digits": "ok",
        "mnist": "ok",
        "fashion-mnist": "missing",
        "cifar10": "damaged",
        "femnist": "missing",
        "shakespeare": "missing",
        "heart-disease": "ok",
    }
    assert (found["mnist"].samples, found["mnist"].clients) == (17, None)
    assert (found["heart-disease"].samples, found["heart-disease"].clients) == (24, 4)
    assert found["mnist"].where == str(tmp_path / "mnist")
    assert "data_batch_1.bin" in found["cifar10"].detail
    assert found["cifar10"].samples is None
