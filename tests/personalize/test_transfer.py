from __future__ import annotations

import json

import numpy as np
import pytest

from fedcohort.cli import invoke
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.personalize import Registry, check
from fedcohort.personalize.maintenance import add_folder, export


def test_a_registry_survives_export_and_import(registry, make, tmp_path):
    registry.add("ann", make(0.0), {"w": np.ones(2)}, metadata={"site": "north"})
    registry.add("_1", make(1.0), reference="s3://x")
    registry.add("../../x", make(2.0))
    assert export(registry, tmp_path / "files") == 3
    assert {p.parent for p in tmp_path.rglob("*.sketch")} == {tmp_path / "files"}
    with Registry.create(tmp_path / "again") as again:
        assert add_folder(again, tmp_path / "files") == (3, {})
        for old, new in zip(registry.entries(), again.entries(), strict=True):
            assert (old.client, old.model, old.reference, old.metadata, old.n) == (
                (new.client, new.model, new.reference, new.metadata, new.n)
            )
            assert registry.sketch(old.client) == again.sketch(new.client)
        assert check(again) == []
        count, skipped = add_folder(again, tmp_path / "files")
        assert count == 0
        assert all("registered already" in reason for reason in skipped.values())
        assert add_folder(again, tmp_path / "files", replace=True) == (3, {})


def test_what_sketch_by_writes_is_registered_under_the_clients_names(tmp_path, capsys):
    rows = [f"{site},{i}.5,{i}" for i in range(6) for site in ("north", "south/2")]
    (tmp_path / "t.csv").write_text("\n".join(["site,u,v", *rows]))
    out, warm = str(tmp_path / "sites"), str(tmp_path / "warm")
    assert invoke(["sketch", str(tmp_path / "t.csv"), "--by", "site", "-o", out]) == 0
    assert invoke(["registry", "add", warm, out]) == 0
    with Registry(warm) as registry:
        assert [entry.client for entry in registry.entries()] == ["north", "south/2"]
        assert registry.get("south/2").n == 6


def test_an_index_cannot_name_files_elsewhere(registry, make, tmp_path):
    make(0.0).save(tmp_path / "secret.sketch")
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "link.sketch").symlink_to(tmp_path / "secret.sketch")
    clients = {"../secret.sketch": "a", "missing.sketch": "b", "link.sketch": "c", "x": "d"}
    (folder / "clients.json").write_text(json.dumps(clients))
    count, skipped = add_folder(registry, folder)
    assert count == 0
    assert skipped.keys() == clients.keys()
    make(0.0).save(folder / "mine.sketch")
    for listed in ({"mine.sketch": 7}, {"mine.sketch": ""}):
        (folder / "clients.json").write_text(json.dumps(listed))
        assert "mine.sketch" in add_folder(registry, folder)[1]
    (folder / "clients.json").unlink()
    for details in ([], {"metadata": []}, {"reference": 7}):
        (folder / "details.json").write_text(json.dumps({"mine.sketch": details}))
        assert "mine.sketch" in add_folder(registry, folder)[1]
    for content in ("{", "[]", "[" * 100_000, "\ud800"):
        (folder / "clients.json").write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(DataError, match=r"clients\.json"):
            add_folder(registry, folder)


def test_folders_that_cannot_be_used(registry, make, tmp_path):
    registry.add("ann", make(0.0))
    with pytest.raises(ConfigError, match="not an empty folder"):
        export(registry, registry.path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \.sketch files"):
        add_folder(registry, tmp_path / "empty")
    with pytest.raises(ConfigError, match="not a folder"):
        add_folder(registry, tmp_path / "nowhere")
