from __future__ import annotations

import contextlib
import sqlite3
from itertools import islice

import numpy as np
import pytest

from fedcohort.exceptions import DataError
from fedcohort.personalize import Registry, check, remove_orphans


@pytest.fixture
def two(registry, make):
    registry.add("ann", make(0.0), {"w": np.zeros(100)})
    registry.add("bob", make(1.0), {"w": np.ones(100)})
    assert check(registry) == []
    return registry


def set_sketch(registry, client, content):
    with registry.db.writing() as db:
        number = db.execute("SELECT number FROM clients WHERE id = ?", (client,)).fetchone()
        db.execute("UPDATE sketches SET content = ? WHERE number = ?", (content, *number))


def test_a_changed_bit_in_a_model_is_found_and_never_loaded(two):
    path = two.models.path(two.get("ann").model)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    problems = check(two)
    assert [(p.kind, p.subject) for p in problems] == [("model", "ann")]
    with pytest.raises(DataError, match="damaged"):
        two.model("ann")
    assert two.model("bob")["w"].sum() == 100


def test_rows_that_repeat_do_not_keep_a_reader_forever(two):
    """A damaged table can return the same rows for any `number > ?`."""
    with pytest.raises(DataError, match="do not rise"):
        list(islice(two.db.pages("SELECT 7 WHERE ?1 < 99 LIMIT ?2"), 1000))


def test_a_table_whose_definition_is_not_utf8_is_our_error(two):
    with contextlib.closing(sqlite3.connect(two.db.path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        sql = "UPDATE sqlite_master SET sql = CAST(x'437265617465807461' AS TEXT) WHERE name = ?"
        db.execute(sql, ("sketches",))
        db.commit()
    with pytest.raises(DataError, match=r"registry\.sqlite"):
        Registry(two.path)


def test_a_missing_model_is_found(two):
    two.models.path(two.get("ann").model).unlink()
    assert [(p.kind, p.subject) for p in check(two)] == [("model", "ann")]
    with pytest.raises(DataError, match="missing"):
        two.model("ann")


def test_a_damaged_and_an_unlike_sketch_are_found(two, make):
    content = bytearray(two.sketch("ann").to_bytes())
    content[40] ^= 1
    set_sketch(two, "ann", bytes(content))
    from fedcohort.sketch.race import RaceSketch

    other = RaceSketch.srp(dim=2, rows=30, bits=3, seed=5)
    other.add(np.eye(2))
    set_sketch(two, "bob", other.to_bytes())
    found = {p.subject: p for p in check(two)}
    assert found["ann"].kind == "sketch"
    assert "checksum" in found["ann"].detail
    assert found["bob"].kind == "unlike"
    assert "seed" in found["bob"].detail


def test_a_missing_sketch_is_found(two):
    with two.db.writing() as db:
        db.execute("DELETE FROM sketches")
    assert [p.kind for p in check(two)] == ["sketch", "sketch"]
    with pytest.raises(DataError, match="missing"):
        two.sketch("ann")


def test_orphans_are_found_and_removed(two):
    stray = two.models.folder / "incoming.abc"
    stray.write_bytes(b"half a model")
    forgotten = two.models.put({"w": np.full(3, 7.0)})
    kinds = [(p.kind, p.subject) for p in check(two)]
    paths = sorted([str(stray), str(two.models.path(forgotten))])
    assert sorted(kinds) == [("orphan", path) for path in paths]
    assert sorted(map(str, remove_orphans(two))) == paths
    assert check(two) == []
    assert two.model("ann")["w"].sum() == 0


def test_a_hostile_hash_in_the_database_leads_nowhere(two, tmp_path):
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"secret")
    with two.db.writing() as db:
        db.execute("UPDATE clients SET model = '../../secret' WHERE id = 'ann'")
    with pytest.raises(DataError, match="not the SHA-256"):
        two.model("ann")
    kinds = {(p.kind, p.subject) for p in check(two) if p.kind == "model"}
    assert kinds == {("model", "ann")}
    assert secret.exists()


def test_a_damaged_database_is_reported(two):
    two.db.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    size = int(two.db.rows("PRAGMA page_size")[0][0])
    path = two.db.path
    two.close()
    content = bytearray(path.read_bytes())
    for page in range(2, len(content) // size):
        content[page * size : page * size + 100] = b"\xff" * 100
    path.write_bytes(content)
    from fedcohort.personalize import Registry

    with Registry(path.parent) as again:
        assert {p.kind for p in check(again)} == {"database"}
