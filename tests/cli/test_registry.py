from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fedcohort.cli import invoke
from fedcohort.sketch.race import RaceSketch

EMPTY = RaceSketch.srp(dim=2, rows=30, bits=3)


def sketch(path, angle, seed=0, empty=EMPTY):
    made = empty.empty_like()
    made.add(np.random.default_rng(seed).normal([np.cos(angle), np.sin(angle)], 0.2, (200, 2)))
    made.save(path)
    return str(path)


@pytest.fixture
def warm(tmp_path):
    folder = str(tmp_path / "warm")
    for i, angle in enumerate((0.0, 0.0, 2.0, 2.0)):
        file = sketch(tmp_path / f"c{i}.sketch", angle, i)
        save_file({"w": np.array([angle])}, tmp_path / f"c{i}.safetensors")
        model = ["--model", str(tmp_path / f"c{i}.safetensors")]
        arguments = ["registry", "add", folder, f"c{i}", file, *model]
        assert invoke([*arguments, "--metadata", json.dumps({"i": i})]) == 0
    return folder


def test_add_list_remove(warm, tmp_path, capsys):
    capsys.readouterr()
    assert invoke(["registry", "list", warm]) == 0
    assert "4 clients" in capsys.readouterr().out
    assert invoke(["registry", "remove", warm, "c0"]) == 0
    capsys.readouterr()
    assert invoke(["registry", "list", warm, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["clients"] == 3
    assert [e["client"] for e in told["entries"]] == ["c1", "c2", "c3"]
    assert told["entries"][0]["metadata"] == {"i": 1}
    assert len(told["entries"][0]["model"]) == 64


def test_nearest_for_machines(warm, tmp_path, capsys):
    new = sketch(tmp_path / "new.sketch", 2.0, 9)
    capsys.readouterr()
    assert invoke(["nearest", new, "--registry", warm, "--k", "3", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["near"] is True
    assert {n["client"] for n in told["neighbors"][:2]} == {"c2", "c3"}
    assert list(told["weights"].values()) == [1.0]
    distances = [n["distance"] for n in told["neighbors"]]
    assert len(distances) == 3
    assert distances[0] <= told["max_distance"]
    assert told["neighbors"][0]["metadata"]["i"] in (2, 3)


def test_nearest_for_people_and_the_advised_model(warm, tmp_path, capsys):
    new = sketch(tmp_path / "new.sketch", 2.0, 9)
    out = tmp_path / "start.safetensors"
    capsys.readouterr()
    arguments = ["nearest", new, "--registry", warm, "--k", "2"]
    assert invoke([*arguments, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "c2" in shown
    assert "near: distance" in shown
    assert load_file(out)["w"].tolist() == pytest.approx([2.0])


def test_nobody_is_near(warm, tmp_path, capsys):
    new = sketch(tmp_path / "new.sketch", 4.0, 9)
    capsys.readouterr()
    assert invoke(["nearest", new, "--registry", warm]) == 0
    assert "no client is close enough" in capsys.readouterr().out
    out = str(tmp_path / "start.safetensors")
    assert invoke(["nearest", new, "--registry", warm, "--out", out]) == 2
    assert "no global model" in capsys.readouterr().err
    save_file({"w": np.array([-1.0])}, tmp_path / "global.safetensors")
    given = ["--model", str(tmp_path / "global.safetensors")]
    assert invoke(["registry", "global", warm, *given]) == 0
    assert invoke(["nearest", new, "--registry", warm, "--out", out]) == 0
    assert load_file(out)["w"].tolist() == [-1.0]
    capsys.readouterr()
    for limit in ("none", "1000"):
        assert invoke(["nearest", new, "--registry", warm, "--max-distance", limit]) == 0
        assert "near: distance" in capsys.readouterr().out


def test_check_finds_damage_and_removes_orphans(warm, tmp_path, capsys):
    assert invoke(["registry", "check", warm]) == 0
    stray = tmp_path / "warm" / "models" / "ab" / f"ab{'0' * 62}.safetensors"
    stray.parent.mkdir()
    stray.write_text("half")
    capsys.readouterr()
    assert invoke(["registry", "check", warm]) == 1
    assert "orphan" in capsys.readouterr().out
    assert invoke(["registry", "check", warm, "--remove-orphans"]) == 0
    assert not stray.exists()
    model = next((tmp_path / "warm" / "models").rglob("*.safetensors"))
    model.write_bytes(model.read_bytes() + b"x")
    capsys.readouterr()
    assert invoke(["registry", "check", warm, "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [p["kind"] for p in told["problems"]] == ["model"]


def test_mistakes_are_one_line(warm, tmp_path, capsys):
    new = sketch(tmp_path / "new.sketch", 2.0, 9)
    other = sketch(tmp_path / "o.sketch", 0.0, 0, RaceSketch.srp(dim=2, rows=30, bits=3, seed=4))
    odd = tmp_path / "odd.safetensors"
    save_file({"v": np.ones(3)}, odd)
    cases = {
        "not a registry": ["nearest", new, "--registry", str(tmp_path / "nowhere")],
        "seed: 0 is not 4": ["nearest", other, "--registry", warm],
        "'x' is not a number": ["nearest", new, "--registry", warm, "--max-distance", "x"],
        "is registered already": ["registry", "add", warm, "c1", new, "--reference", "r"],
        "another architecture": ["registry", "add", warm, "c9", new, "--model", str(odd)],
        "not a folder": ["registry", "add", warm, "c9"],
        "not JSON": ["registry", "add", warm, "c9", new, "--reference", "r", "--metadata", "{"],
        "no client 'c9'": ["registry", "remove", warm, "c9"],
    }
    for message, arguments in cases.items():
        capsys.readouterr()
        assert invoke(arguments) == 2
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1
    assert not (tmp_path / "nowhere").exists()


def test_export_and_add_a_folder(warm, tmp_path, capsys):
    hostile = "[red]evil\x1b[2J/../x"
    new = sketch(tmp_path / "new.sketch", 2.0, 9)
    assert invoke(["registry", "add", warm, hostile, new]) == 0
    capsys.readouterr()
    assert invoke(["registry", "list", warm]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "[red]evil" in shown
    out = tmp_path / "files"
    assert invoke(["registry", "export", warm, str(out)]) == 0
    assert "5 clients written" in capsys.readouterr().out
    assert len(list(out.glob("*.sketch"))) == 5
    (out / "c1.sketch").write_bytes(b"damaged")
    again = str(tmp_path / "again")
    assert invoke(["registry", "add", again, str(out)]) == 1
    told = capsys.readouterr()
    assert "4 clients added, 1 skipped" in told.out
    assert "skipped 'c1.sketch'" in told.err
    assert invoke(["registry", "list", again, "--format", "json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [e["client"] for e in entries] == ["c0", "c2", "c3", hostile]
    assert entries[1]["metadata"] == {"i": 2}


def test_a_registry_without_models_still_shows_the_nearest(tmp_path, capsys):
    folder = str(tmp_path / "warm")
    for i, angle in enumerate((0.0, 2.0)):
        assert invoke(["registry", "add", folder, f"c{i}", sketch(tmp_path / f"{i}", angle)]) == 0
    capsys.readouterr()
    new = sketch(tmp_path / "new", 2.0, 9)
    assert invoke(["nearest", new, "--registry", folder, "--k", "1"]) == 0
    shown = capsys.readouterr().out
    assert "c1" in shown
    assert "no registered client has a model" in shown
    assert invoke(["nearest", new, "--registry", folder, "--strategy", "plain"]) == 0
