from __future__ import annotations

from pathlib import Path

import pytest

from fedcohort.datasets import DATASETS, available, load
from fedcohort.datasets.published import MissingData, data_root
from fedcohort.exceptions import ConfigError


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
