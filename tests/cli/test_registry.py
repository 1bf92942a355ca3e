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
    return str(path)


@pytest.fixture
def warm(tmp_path, told):
    folder = str(tmp_path / "warm")
    for i, angle in enumerate((0.0, 0.0, 2.0, 2.0)):
        file = sketch(tmp_path / f"c{i}.sketch", angle, i)
        save_file({"w": np.array([angle])}, tmp_path / f"c{i}.safetensors")
        model = ["--model", tmp_path / f"c{i}.safetensors"]
        told("registry", "add", folder, f"c{i}", file, *model, "--metadata", json.dumps({"i": i}))
    return folder


def test_add_list_remove(warm, told):
    assert "4 clients" in told("registry", "list", warm)
    assert "3 clients left" in told("registry", "remove", warm, "c0")
    listed = told("registry", "list", warm, "--format", "json")
    assert listed["clients"] == 3
    assert [e["client"] for e in listed["entries"]] == ["c1", "c2", "c3"]
    assert listed["entries"][0]["metadata"] == {"i": 1}


def test_the_nearest_client_and_its_model(warm, tmp_path, told):
    new, out = sketch(tmp_path / "new.sketch", 2.0, 9), tmp_path / "start.safetensors"
    command = ["nearest", new, "--registry", warm, "--k", "3"]
    for_machines = told(*command, "--format", "json")
    assert for_machines["near"] is True
    assert {n["client"] for n in for_machines["neighbors"][:2]} == {"c2", "c3"}
    assert for_machines["neighbors"][0]["metadata"]["i"] in (2, 3)
    assert for_machines["distance"] <= for_machines["max_distance"]
    shown = told(*command, "--out", str(out))
    assert "c2" in shown and "near: distance" in shown
    assert load_file(out)["w"].tolist() == pytest.approx([2.0])


def test_nobody_is_near(warm, tmp_path, told):
    new, out = sketch(tmp_path / "new.sketch", 4.0, 9), str(tmp_path / "start.safetensors")
    assert "no client is close enough" in told("nearest", new, "--registry", warm)
    assert "no global model" in told("nearest", new, "--registry", warm, "--out", out, code=2)
    save_file({"w": np.array([-1.0])}, tmp_path / "global.safetensors")
    told("registry", "global", warm, "--model", str(tmp_path / "global.safetensors"))
    told("nearest", new, "--registry", warm, "--out", out)
    assert load_file(out)["w"].tolist() == [-1.0]
    for limit in ("none", "1000"):
        assert "near: distance" in told("nearest", new, "--registry", warm, "--max-distance", limit)


def test_check_finds_damage(warm, told):
    assert "0 problems" in told("registry", "check", warm)
    with closing(sqlite3.connect(f"{warm}/registry.sqlite")) as db:
        db.execute("UPDATE models SET content = x'00' WHERE rowid = 1")
        db.commit()
    found = told("registry", "check", warm, "--format", "json", code=1)
    assert [p["kind"] for p in found["problems"]] == ["model"]


def test_mistakes_are_one_line(warm, tmp_path, told):
    new = sketch(tmp_path / "new.sketch", 2.0, 9)
    other = sketch(tmp_path / "o.sketch", 0.0, 0, RaceSketch.srp(dim=2, rows=30, bits=3, seed=4))
    cases = {
        "not a registry": ["nearest", new, "--registry", str(tmp_path / "nowhere")],
        "seed: 0 is not 4": ["nearest", other, "--registry", warm],
        "max-distance='x'": ["nearest", new, "--registry", warm, "--max-distance", "x"],
        "not a folder": ["registry", "add", warm, "c9"],
        "not a JSON object": [
            "registry",
            "add",
            warm,
            "c9",
            new,
            "--reference",
            "r",
            "--metadata",
            "{",
        ],
        "no client 'c9'": ["registry", "remove", warm, "c9"],
    }
    for message, arguments in cases.items():
        shown = told(*arguments, code=2)
        assert message in shown and shown.count("\n") == 1
    assert not (tmp_path / "nowhere").exists()


def test_export_and_add_a_folder(warm, tmp_path, told):
    hostile = "[red]evil\x1b[2J/../x"
    told("registry", "add", warm, hostile, sketch(tmp_path / "new.sketch", 2.0, 9))
    shown = told("registry", "list", warm)
    assert "\x1b" not in shown and "[red]evil" in shown
    out, again = tmp_path / "files", str(tmp_path / "again")
    assert "5 clients written" in told("registry", "export", warm, str(out))
    (out / "c1.sketch").write_bytes(b"damaged")
    shown = told("registry", "add", again, str(out), code=1)
    assert "4 clients added, 1 skipped" in shown and "skipped 'c1.sketch'" in shown
    entries = told("registry", "list", again, "--format", "json")["entries"]
    assert [e["client"] for e in entries] == ["c0", "c2", "c3", hostile]


def test_a_registry_without_models_still_shows_the_nearest(tmp_path, told):
    folder, new = str(tmp_path / "warm"), sketch(tmp_path / "new", 2.0, 9)
    for i, angle in enumerate((0.0, 2.0)):
        told("registry", "add", folder, f"c{i}", sketch(tmp_path / f"{i}", angle))
    shown = told("nearest", new, "--registry", folder, "--k", "1")
    assert "c1" in shown and "no registered client has a model" in shown
