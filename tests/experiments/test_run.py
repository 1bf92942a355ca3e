from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.experiments.config import NamedConfig, dump, parse
from fedcohort.experiments.folder import run, tracker
from fedcohort.experiments.results import read_histories
from fedcohort.experiments.several import DEFAULT_SETTING, compare

SMALL = dataclasses.replace(
    DEFAULT_SETTING, rounds=6, seeds=(0, 1), checkpoint_every=4, device="cpu"
)


def test_a_folder_tells_the_whole_story(tmp_path):
    summaries = run(SMALL, tmp_path / "run")
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert len(lines) == 12
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert parse(config) == SMALL
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [s["seed"] for s in summary["seeds"]] == [0, 1]
    assert summaries[0].rounds == 6
    assert summaries[0].bytes_up == sum(
        r.bytes_up for r in read_histories(tmp_path / "run")[0].rounds
    )
    assert summaries[0].overhead.up == pytest.approx(100.0)
    assert 0 < summaries[0].participation_entropy <= 1


def test_a_folder_in_use_is_refused(tmp_path):
    run(SMALL, tmp_path / "run")
    with pytest.raises(ConfigError, match="--resume"):
        run(SMALL, tmp_path / "run")
    other = dataclasses.replace(SMALL, rounds=7)
    with pytest.raises(ConfigError, match="another experiment: rounds differ"):
        run(other, tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="no run here"):
        read_histories(tmp_path)


def test_killed_at_any_moment_and_resumed(tmp_path):
    """kill -9 again and again until the run gets through: the lines are those of a calm run."""
    experiment = dataclasses.replace(
        SMALL, rounds=40, checkpoint_every=3, policy=NamedConfig("oort")
    )
    run(experiment, tmp_path / "calm")
    config = tmp_path / "exp.json"
    config.write_text(json.dumps(dump(experiment)))
    code = (
        "import json, sys, time; from fedcohort.experiments import config, folder\n"
        "e = config.parse(json.load(open(sys.argv[1])))\n"
        "folder.run(e, sys.argv[2], resume=True, on_round=lambda r: time.sleep(0.05))"
    )
    place, kills = tmp_path / "stormy", 0
    lines = place / "rounds.jsonl"
    while not (place / "summary.json").exists():
        process = subprocess.Popen([sys.executable, "-c", code, str(config), str(place)])
        seen = lines.stat().st_size if lines.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            grown = lines.exists() and lines.stat().st_size > seen
            if grown and kills < 3:
                time.sleep(0.31)  # some rounds later, between two checkpoints or in one
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        assert process.wait(timeout=60) in (0, -signal.SIGKILL)
    assert kills == 3
    assert lines.read_bytes() == (tmp_path / "calm" / "rounds.jsonl").read_bytes()


def test_a_torn_last_line_is_mended(tmp_path):
    run(dataclasses.replace(SMALL, rounds=4), tmp_path / "a")
    lines = tmp_path / "a" / "rounds.jsonl"
    whole = lines.read_bytes()
    with lines.open("ab") as file:
        file.write(b'{"seed": 0, "rou')
    run(dataclasses.replace(SMALL, rounds=4), tmp_path / "a", resume=True)
    assert lines.read_bytes() == whole
    lines.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="its checkpoint knows"):
        run(dataclasses.replace(SMALL, rounds=4), tmp_path / "a", resume=True)


def test_compare_runs_each_policy_on_the_same_split(tmp_path):
    policies = [NamedConfig("uniform"), NamedConfig("power-of-choice", {"d": 8})]
    results = compare(SMALL, policies, tmp_path)
    assert [r.policy for r in results] == ["uniform", "power-of-choice"]
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert set(written) == {"uniform", "power-of-choice"}
    # Power-of-choice downloads the model to its 8 candidates, uniform to its 5.
    down = [r.summaries[0].bytes_down for r in results]
    assert down[1] == down[0] * 8 // 5


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        (NamedConfig("bogus"), "unknown policy 'bogus'"),
        (NamedConfig("oort", {"speed": 1}), "unknown option 'speed' of policy 'oort'"),
        (NamedConfig("oort", {"alpha": -1}), "alpha=-1"),
    ],
)
def test_wrong_policies_are_found_before_the_first_run(tmp_path, policy, complaint):
    with pytest.raises(ConfigError, match=complaint):
        compare(SMALL, [NamedConfig("uniform"), policy], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_tracking(tmp_path, kind, monkeypatch):
    pytest.importorskip(kind)
    # MLflow's database takes ten seconds to set up; its files take none and log the same.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    with tracker(kind, tmp_path, {"rounds": 6}) as log:
        run(SMALL, tmp_path / "run", on_round=log)
    written = [p for p in (tmp_path / kind).rglob("*") if p.is_file() and p.stat().st_size]
    assert written


def test_unknown_trackers(tmp_path):
    with (
        pytest.raises(ConfigError, match="unknown tracker 'bogus'"),
        tracker("bogus", tmp_path, {}),
    ):
        pass
