from __future__ import annotations

import pytest

from fedcohort.datasets import DATASETS, available, load
from fedcohort.datasets.base import MissingData, places
from fedcohort.exceptions import ConfigError


def test_root_then_variable_then_cache(published, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCOHORT_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert places(tmp_path) == (tmp_path,)
    assert places() == (tmp_path / "env", tmp_path / "cache" / "fedcohort")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fedcohort").symlink_to(published("mnist").parent)
    assert load("mnist").x.shape == (12, 1, 28, 28)
    monkeypatch.delenv("FEDCOHORT_DATA")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert places() == (tmp_path / ".cache" / "fedcohort",)


@pytest.mark.parametrize("name", [n for n in DATASETS if n != "digits"])
def test_a_missing_file_is_named_with_the_places_and_the_contents(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCOHORT_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(MissingData, match="it must contain") as caught:
        load(name)
    for place in (tmp_path / "env", tmp_path / "cache" / "fedcohort"):
        assert str(place / name) in str(caught.value)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(ConfigError, match=r"'minst'.*'mnist'"):
        load("minst")
    with pytest.raises(ConfigError, match=r"'max_samples'.*'heart-disease'"):
        load("heart-disease", max_samples=3)


def test_available_tells_ok_missing_and_damaged_apart(published, tmp_path):
    published("mnist")
    published("heart-disease")
    (published("cifar10") / "data_batch_1.bin").write_bytes(b"x")
    status = {record.name: record for record in available(tmp_path)}
    assert {name: record.status for name, record in status.items()} == {
        "digits": "ok",
        "mnist": "ok",
        "fashion-mnist": "missing",
        "cifar10": "damaged",
        "femnist": "missing",
        "shakespeare": "missing",
        "heart-disease": "ok",
    }
    assert (status["mnist"].samples, status["mnist"].clients) == (24, None)
    assert (status["heart-disease"].samples, status["heart-disease"].clients) == (44, 4)
    assert status["mnist"].where == str(tmp_path / "mnist")
    assert "data_batch_1.bin" in status["cifar10"].detail
