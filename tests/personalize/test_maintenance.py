from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from fedcohort.cli import invoke
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.personalize import Registry, check
from fedcohort.personalize.maintenance import add_folder, export
from fedcohort.sketch.file import narrow
from fedcohort.sketch.race import RaceSketch


@pytest.fixture
def two(registry, make):
    registry.add("ann", make(0.0), {"w": np.zeros(100)})
    registry.add("bob", make(1.0), {"w": np.ones(100)})
    assert check(registry) == []
    return registry


def set_column(registry, column, value, client):
    with registry.db.writing() as db:
        db.execute(f"UPDATE clients SET {column} = ? WHERE id = ?", (value, client))


@pytest.mark.parametrize(
    ("problem", "sql"),
    [
        ("damaged", "UPDATE models SET content = CAST('{}' AS BLOB) WHERE digest = ?"),
        ("damaged", "UPDATE models SET content = 7 WHERE digest = ?"),
        ("missing", "DELETE FROM models WHERE digest = ?"),
    ],
)
def test_a_changed_or_missing_model_is_found_and_never_loaded(two, problem, sql):
    with two.db.writing() as db:
        db.execute(sql, (two.get("ann").model,))
    assert [(p.kind, p.subject) for p in check(two)] == [("model", "ann")]
    with pytest.raises(DataError, match=problem):
        two.model("ann")
    assert two.model("bob")["w"].sum() == 100


def test_a_name_of_a_model_that_is_no_text_is_damage(two):
    """It left as a UnicodeEncodeError."""
    with two.db.writing() as db:
        db.execute("UPDATE clients SET model = CAST(X'FF' AS TEXT) WHERE id = 'ann'")
    with pytest.raises(DataError, match="warm"):
        two.model("ann")


def test_rows_that_repeat_do_not_keep_a_reader_forever(two):
    """A damaged table can return the same rows for any `number > ?`."""
    with pytest.raises(DataError, match="do not rise"):
        list(islice(two.db.pages("SELECT 7 WHERE ?1 < 99 LIMIT ?2"), 3))


def test_a_damaged_and_an_unlike_sketch_are_found(two, make):
    content = bytearray(two.sketch("ann").to_bytes())
    content[40] ^= 1
    set_column(two, "sketch", bytes(content), "ann")
    other = RaceSketch.srp(dim=2, rows=30, bits=3, seed=5)
    other.add(np.eye(2))
    set_column(two, "sketch", other.to_bytes(), "bob")
    with two.db.writing() as db:
        db.execute("UPDATE counts SET n = 2, counts = ?", (narrow(other.counts).tobytes(),))
    ann, bob = check(two)
    assert ann[:2] == ("sketch", "ann") and "checksum" in ann.detail
    assert bob[:2] == ("unlike", "bob") and "seed" in bob.detail


@pytest.mark.parametrize("change", ["DELETE FROM counts", "UPDATE counts SET n = n + 1"])
def test_counts_that_are_not_the_sketchs_are_found(two, change):
    with two.db.writing() as db:
        db.execute(change)
    assert [p.kind for p in check(two)] == ["sketch", "sketch"]


def test_a_database_that_is_a_link_is_refused(two, tmp_path):
    """A registry that somebody sent must not reach outside of its folder."""
    two.close()
    two.db.path.rename(tmp_path / "outside")
    two.db.path.symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match="link"):
        Registry(two.path)


def test_a_damaged_database_is_reported(two):
    two.db.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    size = int(two.db.rows("PRAGMA page_size")[0][0])
    path = two.db.path
    two.close()
    content = bytearray(path.read_bytes())
    for page in range(2, len(content) // size):
        content[page * size : page * size + 100] = b"\xff" * 100
    path.write_bytes(content)
    with Registry(path.parent) as again:
        assert {p.kind for p in check(again)} == {"database"}


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
    with pytest.raises(ConfigError, match=r"no \.sketch files"):
        add_folder(registry, folder)
    (folder / "link.sketch").symlink_to(tmp_path / "secret.sketch")
    clients = {"../secret.sketch": "a", "missing.sketch": "b", "link.sketch": "c", "x": "d"}
    (folder / "clients.json").write_text(json.dumps(clients))
    assert add_folder(registry, folder)[1].keys() == clients.keys()
    assert len(registry) == 0


def test_damaged_lists_of_clients_are_named(registry, make, tmp_path):
    make(0.0).save(tmp_path / "mine.sketch")
    wrong = [("clients", entry) for entry in (7, "")]
    wrong += [("details", entry) for entry in ([], {"metadata": []}, {"reference": 7})]
    for name, entry in wrong:
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"mine.sketch": entry}))
        count, skipped = add_folder(registry, tmp_path)
        assert count == 0 and "mine.sketch" in skipped
        file.unlink()
    for content in ("{", "[]", "[" * 100_000, "\ud800"):
        (tmp_path / "clients.json").write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(DataError, match=r"clients\.json"):
            add_folder(registry, tmp_path)
