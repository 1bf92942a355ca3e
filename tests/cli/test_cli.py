from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from fedcohort import __version__
from fedcohort.cli import app, invoke

SMALL = ["--rounds", "4", "--seeds", "2", "--clients", "20", "--device", "cpu"]


def commands():
    import typer

    group = typer.main.get_command(app)

    def walk(command, path):
        inner = getattr(command, "commands", None)
        if inner is None:
            yield path, command
        else:
            for name, child in inner.items():
                yield from walk(child, [*path, name])

    return list(walk(group, []))


@pytest.mark.parametrize(("path", "command"), commands(), ids=lambda v: str(v)[:40])
def test_every_command_has_help_an_example_and_formats(path, command, capsys):
    assert invoke([*path, "--help"]) == 0
    assert f"fedcohort {' '.join(path)}" in " ".join(capsys.readouterr().out.split())
    assert "Example" in command.help
    assert any("--format" in p.opts for p in command.params)
    assert all(p.help for p in command.params)


def test_version(capsys):
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out == f"fedcohort {__version__}\n"


def test_compare_prints_a_table_and_writes_a_folder(tmp_path, capsys):
    out = tmp_path / "result"
    arguments = ["compare", "--policies", "uniform,power-of-choice:d=8", "--out", str(out)]
    assert invoke([*arguments, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "uniform" in shown
    assert "rounds to 80%" in shown
    for name in ("curves.png", "bytes.png", "comparison.json", "uniform/rounds.jsonl"):
        assert (out / name).stat().st_size > 0
    assert invoke([*arguments, *SMALL]) == 2
    assert "--resume" in capsys.readouterr().err
    assert invoke([*arguments, *SMALL, "--resume"]) == 0


def test_compare_json(tmp_path, capsys):
    arguments = ["compare", "--policies", "uniform", "--out", str(tmp_path), "--format", "json"]
    assert invoke([*arguments, *SMALL, "--target", "0.999"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["policies"]
    assert row["policy"] == "uniform"
    assert row["rounds_to_target"] == {"mean": None, "std": None, "missing": 2}
    assert result["setting"]["target"] == 0.999


def test_compare_with_a_gate(tmp_path, capsys):
    arguments = ["compare", "--policies", "uniform", "--out", str(tmp_path), "--gate"]
    arguments += ["sketch-to-skip:k=20", "--threshold", "0.5", "--local", "steps=1;batch_size=8"]
    assert invoke([*arguments, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("fedavg", "change %", "skipped %", "up %", "down %"))
    assert invoke([*arguments, *SMALL, "--resume", "--format", "json"]) == 0
    plain, gated = json.loads(capsys.readouterr().out)["policies"]
    assert (plain["policy"], plain["accuracy_change"]["mean"]) == ("fedavg", 0.0)
    assert plain["overhead_up"]["mean"] == 100.0
    assert gated["overhead_up"]["mean"] < 100.0


def test_run_and_resume(tmp_path, capsys):
    config = tmp_path / "exp.toml"
    config.write_text('rounds = 3\ndevice = "cpu"\n[policy]\nname = "active-fl"\n')
    out = ["--out", str(tmp_path / "run")]
    assert invoke(["run", str(config), *out, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"][0]["rounds"] == 3
    assert invoke(["run", str(config), *out]) == 2
    assert invoke(["run", str(config), *out, "--resume"]) == 0


def test_policies_and_data(capsys):
    assert invoke(["policies", "--clients", "30", "--format", "json"]) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["uniform"]["once"] == 0
    assert rows["uniform"]["models_each_round"] == 20
    assert rows["power-of-choice"]["each_round"] == 80
    assert invoke(["policies"]) == 0
    capsys.readouterr()
    assert invoke(["data", "list", "--format", "json"]) == 0
    digits = next(r for r in json.loads(capsys.readouterr().out) if r["name"] == "digits")
    assert digits["status"] == "ok"
    assert invoke(["data", "list"]) == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["compare", "--bogus"], "No such option"),
        (["compare", "--rounds", "x"], "--rounds"),
        (["compare", "--rounds", "0"], "rounds = 0"),
        (["compare", "--policies", "bogus"], "unknown policy 'bogus'. Known: active-fl"),
        (["compare", "--policies", "oort:alpha"], "name:key=value"),
        (["compare", "--policies", "oort,oort"], "once"),
        (["compare", "--dataset", "bogus"], "bogus"),
        (["compare", "--partition", "bogus"], "bogus"),
        (["compare", "--partition", "shards:alpha=1"], "alpha"),
        (["compare", "--model", "bogus"], "bogus"),
        (["compare", "--cohort-size", "99"], "cohort_size = 99 exceeds data.clients = 60"),
        (["compare", "--gate", "bogus"], r"unknown gate 'bogus'"),
        (["compare", "--config", "missing.toml"], "missing.toml: no such file"),
        (["run", "missing.toml"], "missing.toml: no such file"),
        (["policies", "--clients", "0"], "--clients"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, complaint, capsys, tmp_path):
    out = ["--out", str(tmp_path / "out")] if arguments[0] == "compare" else []
    assert invoke([*arguments, *out]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert complaint in line
    assert "Traceback" not in captured.err


def test_the_entry_point_is_quick_and_leaves_torch_alone():
    code = (
        "import sys, fedcohort; assert not {'torch', 'sklearn', 'numba', 'matplotlib'} "
        "& set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-m", "fedcohort.cli", "--help"], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The promise is 0.5 s; processor time, doubled, so that a busy machine does not matter.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert result.returncode == 0
    assert "compare" in result.stdout
