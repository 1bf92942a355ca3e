from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedcohort.sketch.race import RaceSketch

EMPTY = RaceSketch.srp(dim=2, rows=30, bits=3)


def sketch(path, angle, seed=0, empty=EMPTY):
    made = empty.empty_like()
    made.add(np.random.default_rng(seed).normal([np.cos(angle), np.sin(angle)], 0.2, (200, 2)))
    made.save(path)
    return path


@pytest.fixture
def warm(tmp_path, told):
    folder = tmp_path / "warm"
    for i, angle in enumerate((0.0, 0.0, 2.0, 2.0)):
        file = sketch(tmp_path / f"c{i}.sketch", angle, i)
        save_file({"w": np.array([angle])}, tmp_path / f"c{i}.safetensors")
        model = ["--model", tmp_path / f"c{i}.safetensors"]
        told("registry", "add", folder, f"c{i}", file, *model, "--metadata", json.dumps({"i": i}))
    return folder


@pytest.fixture
def newcomer(tmp_path):
    return sketch(tmp_path / "new.sketch", 2.0, 9)


def clients(told, folder):
    entries = told("registry", "list", folder, "--format", "json")["entries"]
    return {entry["client"]: entry["metadata"] for entry in entries}


def test_a_registry_is_listed_checked_exported_and_made_again(warm, newcomer, tmp_path, told):
    hostile = "[red]evil\x1b[2J/../x"
    assert "3 clients left" in told("registry", "remove", warm, "c0")
    told("registry", "add", warm, hostile, newcomer)
    shown = told("registry", "list", warm)
    assert "4 clients" in shown and "[red]evil" in shown
    assert clients(told, warm) == {f"c{i}": {"i": i} for i in (1, 2, 3)} | {hostile: {}}
    out, again = tmp_path / "files", tmp_path / "again"
    assert "4 clients written" in told("registry", "export", warm, out)
    (out / "c1.sketch").write_bytes(b"damaged")
    shown = told("registry", "add", again, out, code=1)
    assert "3 clients added, 1 skipped" in shown and "skipped 'c1.sketch'" in shown
    assert list(clients(told, again)) == ["c2", "c3", hostile]
    assert "0 problems" in told("registry", "check", warm)
    with closing(sqlite3.connect(warm / "registry.sqlite")) as db:
        db.execute("UPDATE models SET content = x'00' WHERE rowid = 1")
        db.commit()
    damage = told("registry", "check", warm, "--format", "json", code=1)
    assert [p["kind"] for p in damage["problems"]] == ["model"]


def test_the_nearest_client_and_its_model(warm, newcomer, tmp_path, told):
    out = tmp_path / "start.safetensors"
    command = ["nearest", newcomer, "--registry", warm, "--k", "3"]
    advice = told(*command, "--format", "json")
    assert advice["near"] is True
    assert {n["client"] for n in advice["neighbors"][:2]} == {"c2", "c3"}
    assert advice["neighbors"][0]["metadata"]["i"] in (2, 3)
    assert advice["distance"] <= advice["max_distance"]
    shown = told(*command, "--out", out)
    assert "c2" in shown and "near: distance" in shown
    assert load_file(out)["w"].tolist() == pytest.approx([2.0])


def test_nobody_is_near(warm, tmp_path, told, fails):
    new, out = sketch(tmp_path / "far.sketch", 4.0, 9), tmp_path / "start.safetensors"
    command = ["nearest", new, "--registry", warm]
    assert "no client is close enough" in told(*command)
    assert "no global model" in fails(*command, "--out", out)
    save_file({"w": np.array([-1.0])}, tmp_path / "global.safetensors")
    told("registry", "global", warm, "--model", tmp_path / "global.safetensors")
    told(*command, "--out", out)
    assert load_file(out)["w"].tolist() == [-1.0]
    for limit in ("none", "1000"):
        assert "near: distance" in told(*command, "--max-distance", limit)


def test_mistakes_are_one_line(warm, newcomer, tmp_path, fails):
    other = sketch(tmp_path / "o.sketch", 0.0, 0, RaceSketch.srp(dim=2, rows=30, bits=3, seed=4))
    cases = {
        "not a registry": ["nearest", newcomer, "--registry", tmp_path / "nowhere"],
        "seed: 0 is not 4": ["nearest", other, "--registry", warm],
        "max-distance='x'": ["nearest", newcomer, "--registry", warm, "--max-distance", "x"],
        "not a folder": ["registry", "add", warm, "c9"],
        "not a JSON object": ["registry", "add", warm, "c9", newcomer, "--metadata", "{"],
        "no client 'c9'": ["registry", "remove", warm, "c9"],
    }
    for message, arguments in cases.items():
        assert message in fails(*arguments)
    assert not (tmp_path / "nowhere").exists()


def test_a_registry_without_models_still_shows_the_nearest(newcomer, tmp_path, told):
    for i, angle in enumerate((0.0, 2.0)):
        told("registry", "add", tmp_path / "warm", f"c{i}", sketch(tmp_path / f"{i}", angle))
    shown = told("nearest", newcomer, "--registry", tmp_path / "warm", "--k", "1")
    assert "c1" in shown and "no registered client has a model" in shown
