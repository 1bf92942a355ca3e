from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fedcohort.exceptions import (
    ConfigError,
    DataError,
    FedcohortError,
    IncompatibleSketches,
    UnknownClient,
)
from fedcohort.personalize import Record, Registry, check
from fedcohort.sketch.race import RaceSketch

MODEL = {"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2)}


def models_of(registry):
    return {digest for (digest,) in registry.db.rows("SELECT digest FROM models")}


def test_what_goes_in_comes_out(registry, make):
    sketch, turned = make(0.0), np.asfortranarray(np.arange(6.0).reshape(2, 3))
    model = {**MODEL, "turned": turned, "scalar": np.float64(3.0)}
    registry.add("ann", sketch, model, metadata={"site": "north", "year": 2024})
    assert registry.sketch("ann") == sketch
    loaded = registry.model("ann")
    assert loaded.keys() == model.keys()
    for name, values in model.items():
        np.testing.assert_array_equal(loaded[name], values, strict=True)
    entry = registry.get("ann")
    assert entry.metadata == {"site": "north", "year": 2024}
    assert (entry.n, entry.privacy, entry.reference) == (200.0, None, None)
    noisy = make(0.0).privatize(2.0, rng=np.random.default_rng(0))
    registry.add("bob", noisy, model)  # beside an exact one
    assert registry.sketch("bob") == noisy
    assert registry.get("bob").privacy == "epsilon=2"


@settings(max_examples=30)
@given(client=st.text(min_size=1))
def test_any_text_is_an_id_and_none_becomes_a_path(registry, make, client):
    before = set(registry.path.parent.rglob("*"))
    registry.add(client, make(0.0), MODEL, replace=True)
    assert registry.get(client).client == client
    np.testing.assert_array_equal(registry.model(client)["bias"], np.ones(2))
    after = set(registry.path.parent.rglob("*"))
    assert {p.name for p in after - before} <= {"registry.sqlite-wal", "registry.sqlite-shm"}
    registry.remove(client)
    assert len(registry) == 0


def test_wrong_and_unknown_ids_are_refused(registry, make):
    for client in (7, None, b"ann", "", "lone \ud800"):
        for act in (lambda c: registry.add(c, make(0.0), MODEL), registry.get):
            with pytest.raises(ConfigError, match="client id"):
                act(client)
    for act in (registry.get, registry.sketch, registry.model, registry.remove):
        with pytest.raises(UnknownClient, match="no client 'nobody'"):
            act("nobody")
    assert len(registry) == 0


def test_unlike_sketches_are_refused_and_told_apart(registry, make):
    registry.add("ann", make(0.0), MODEL)
    other = RaceSketch.srp(dim=2, rows=30, bits=3, seed=1)
    other.add(np.tile(np.eye(2), (5, 1)))
    with pytest.raises(IncompatibleSketches, match=r"'bob'.*seed: 0 is not 1"):
        registry.add("bob", other, MODEL)
    assert [e.client for e in registry.entries()] == ["ann"]
    registry.remove("ann")
    registry.add("bob", other, MODEL)  # an emptied registry is free again
    assert registry.spec == other.spec


@pytest.mark.parametrize(
    ("n", "options", "message"),
    [
        (3, {}, "'ann': cannot tell who is near a sketch of n=3"),
        (200, {"model": MODEL, "reference": "x"}, "a model or a reference, not both"),
        (200, {"metadata": {"x": float("nan")}}, "metadata of client 'ann'"),
        (200, {"model": {}}, "a model needs at least one array"),
        (200, {"model": {"w": np.array(["a"])}}, "'w' must name an array of numbers"),
        (200, {"model": {3: np.zeros(1)}}, "3 must name an array of numbers"),
        (200, {"model": {"w": np.zeros(100)}}, "'ann': a model of .* keep it elsewhere"),
    ],
)
def test_mistakes_are_named_and_nothing_is_added(registry, make, monkeypatch, n, options, message):
    monkeypatch.setattr("fedcohort.personalize.registry.MAX_MODEL", 800)
    with pytest.raises((FedcohortError, ValueError), match=message):
        registry.add("ann", make(0.0, n=n), **options)
    assert len(registry) == 0


def test_references_are_kept_and_never_opened(registry, make, tmp_path):
    trap = tmp_path / "model.safetensors"
    registry.add("ann", make(0.0), reference=str(trap))  # nothing is there: nobody looks
    registry.add("bob", make(1.0), reference="https://models.example/bob")
    assert registry.get("bob").reference == "https://models.example/bob"
    with pytest.raises(ConfigError, match=r"never opened.*load it yourself"):
        registry.model("ann")
    assert check(registry) == []


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"bias": np.ones(2)}, "array 'layer.weight' is missing"),
        ({**MODEL, "more": np.ones(1)}, "array 'more' is new"),
        ({**MODEL, "bias": np.ones(3)}, r"array 'bias' has shape \[3\], not \[2\]"),
    ],
)
def test_another_architecture_is_refused(registry, make, tmp_path, model, problem):
    registry.add("ann", make(0.0), MODEL)
    before = models_of(registry)
    path = tmp_path / "other.safetensors"
    save_file(model, path)
    for form in (model, path):
        with pytest.raises(ConfigError, match=f"'new': another architecture.*{problem}"):
            registry.add("new", make(1.0), form)
        with pytest.raises(ConfigError, match="global model: another architecture"):
            registry.set_global(form)
    assert models_of(registry) == before
    registry.remove("ann")
    registry.add("new", make(1.0), {"w": np.zeros(1)})  # no model is stored: any will do


def test_a_database_with_other_tables_is_refused(registry, make):
    """A view in the place of a table could run for ever."""
    registry.add("ann", make(0.0), MODEL)
    with registry.db.writing() as db:
        db.execute(
            "CREATE VIEW more AS WITH RECURSIVE t(x) AS (VALUES(1) UNION ALL SELECT 1 FROM t) "
            "SELECT x FROM t"
        )
    with pytest.raises(DataError, match="other tables"):
        Registry(registry.path)


def test_known_clients_are_replaced_only_when_asked(registry, make):
    registry.add("ann", make(0.0), MODEL)
    with pytest.raises(ConfigError, match="'ann' is registered already"):
        registry.add("ann", make(1.0), {"w": np.zeros(1)})
    assert registry.sketch("ann") == make(0.0)
    registry.add("ann", make(1.0), {"w": np.zeros(1)}, replace=True)
    assert registry.sketch("ann") == make(1.0)
    assert check(registry) == []  # nor are the old counts searched


def test_equal_models_are_kept_once_until_the_last_client_goes(registry, make):
    with pytest.raises(ConfigError, match="no global model"):
        registry.global_model()
    registry.add("ann", make(0.0), MODEL)
    registry.add("bob", make(1.0), {k: v.copy() for k, v in reversed(MODEL.items())})
    digest = registry.get("ann").model
    assert registry.get("bob").model == digest
    registry.set_global(MODEL)
    registry.remove("ann")
    registry.set_global({k: v + 1 for k, v in MODEL.items()})
    assert models_of(registry) == {digest, registry.global_digest()}
    registry.remove("bob")
    assert models_of(registry) == {registry.global_digest()}
    np.testing.assert_array_equal(registry.global_model()["bias"], MODEL["bias"] + 1)
    assert check(registry) == []


def test_safetensors_files_are_copied_and_others_refused(registry, make, tmp_path):
    path = tmp_path / "ann.safetensors"
    save_file(MODEL, path)
    registry.add("ann", make(0.0), path)
    path.unlink()
    np.testing.assert_array_equal(registry.model("ann")["bias"], np.ones(2))
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(DataError, match="not the content of a safetensors file"):
        registry.add("bob", make(1.0), path)
    with pytest.raises(DataError, match="cannot be read"):
        registry.add("bob", make(1.0), tmp_path / "missing")
    assert len(registry) == 1
    assert check(registry) == []


def test_many_clients_are_added_all_or_none(registry, make):
    good = [Record(f"c{i}", make(i / 10, i), {"w": np.array([float(i)])}) for i in range(20)]
    assert registry.add_many(good) == 20
    assert [e.client for e in registry.entries()] == [f"c{i}" for i in range(20)]
    bad = [Record("new", make(0.5), {"w": np.ones(1) / 2}), Record("c3", make(0.5))]
    with pytest.raises(ConfigError, match="'c3' is registered already"):
        registry.add_many(bad)
    assert len(registry) == 20
    assert len(models_of(registry)) == 20


def test_folders_that_are_no_registry(tmp_path, registry):
    with pytest.raises(DataError, match="not a registry"):
        Registry(tmp_path / "missing")
    with pytest.raises(ConfigError, match="not an empty folder"):
        Registry.create(registry.path)
    file = tmp_path / "registry.sqlite"
    file.write_bytes(b"not a database, but long enough" * 100)
    with pytest.raises(DataError, match=r"registry\.sqlite"):
        Registry(tmp_path)
    file.unlink()
    with closing(sqlite3.connect(file)) as other:
        other.execute("PRAGMA user_version = 9")
    with pytest.raises(DataError, match="version 9"):
        Registry(tmp_path)


def test_threads_may_share_a_registry(registry, make):
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda i: registry.add(f"c{i}", make(0.0), MODEL), range(30)))
    assert len(registry) == 30


@pytest.mark.parametrize("point", ["os.replace", "os.fsync"])
def test_a_registry_whose_making_was_killed_is_made_again(tmp_path, point):
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from fedcohort.personalize import Registry\n"
        f"{point} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Registry.create(sys.argv[1])"
    )
    folder = tmp_path / "warm"
    assert subprocess.run([sys.executable, "-c", code, folder]).returncode == -signal.SIGKILL
    with Registry.create(folder) as registry:
        assert len(registry) == 0
