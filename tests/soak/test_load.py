"""A small version of the soak of load; the driver finds what grows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import load
import provenance

SMALL = ["policy sketch-match", "policy oort", *(c for c in load.cases() if c.startswith("gate"))]


@pytest.mark.parametrize("case", SMALL)
def test_a_session_stays_right_under_load(case):
    """Every policy meets the same contract in tests/policies; here are many clients."""
    found = load.soak(case, clients=3000, rounds=16, until=time.monotonic() + 60)
    assert found["error"] is None
    assert found["rounds"] == 16


def test_growth_would_be_seen():
    flat = load.judged([0.1] * 40, [100.0] * 40)
    assert flat["flat"] is True
    assert load.judged([0.01 * i for i in range(40)], [100.0] * 40)["flat"] is False
    growing = [100.0 + 10 * i for i in range(40)]
    assert load.judged([0.1] * 40, growing)["flat"] is False
    assert load.judged([0.1] * 80, growing + [500.0] * 40, warm_up=40)["flat"] is True


def test_a_wrong_cohort_would_be_seen(monkeypatch):
    policy = load.POLICIES["uniform"]

    class Twice(policy):
        def select(self, round, signals, rng):
            return load.Session.begin  # not a selection at all

    monkeypatch.setitem(load.POLICIES, "uniform", Twice)
    assert load.soak("policy uniform", clients=50, rounds=2, until=time.monotonic() + 10)["error"]


def test_a_rerun_goes_on_only_with_the_same_code_and_settings(tmp_path):
    out, settings = tmp_path / "r.json", {"clients": 50, "rounds": 9}
    made_by = {"commit": "c", "source": "s"}
    rows = [{"case": "gate cmfl", "rounds": 9, "error": None}]
    assert load.earlier(out, settings, made_by) == {}
    out.write_text(json.dumps({"provenance": made_by, "result": {**settings, "cases": rows}}))
    assert load.earlier(out, settings, made_by) == {"gate cmfl": rows[0]}
    for other in ({"commit": "d"}, {"source": "t"}, {"commit": "c-dirty"}):
        assert load.earlier(out, settings, made_by | other) == {}
    assert load.earlier(out, settings | {"clients": 51}, made_by) == {}


def test_cases_that_are_cut_short_run_again():
    assert load.is_done({"rounds": 9, "error": None}, 9)
    assert load.is_done({"rounds": 3, "error": "round 3: ValueError: 1"}, 9)
    assert not load.is_done({"rounds": 3, "error": None}, 9)
    assert not load.is_done(None, 9)


def test_time_is_kept_for_the_cases_that_wait():
    assert load.deadline(end=200, seconds=100, waiting=8, cases=10) == 180
    assert load.deadline(end=200, seconds=100, waiting=0, cases=10) == 200


def test_all_cases_run():
    rows = load.run(["policy uniform", "gate cmfl"], {"clients": 20, "rounds": 3}, 1, 1e9)
    assert {row["case"]: row["rounds"] for row in rows} == {"policy uniform": 3, "gate cmfl": 3}


def commit_all(folder):
    run = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c")
    for step in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        subprocess.run([*run, *step], check=True)


def test_writing_results_does_not_make_the_code_look_changed(tmp_path):
    """Otherwise a run whose results are tracked could never go on."""
    result, code = tmp_path / "benchmarks" / "results" / "r.json", tmp_path / "code.py"
    result.parent.mkdir(parents=True)
    for path in (result, code):
        path.write_text("1")
    commit_all(tmp_path)
    clean = provenance._commit(tmp_path)
    result.write_text("2")
    assert provenance._commit(tmp_path) == clean
    code.write_text("2")
    assert provenance._commit(tmp_path) == f"{clean}-dirty"


def test_an_archive_knows_its_commit(tmp_path, monkeypatch):
    """Nothing else states one: no variable, and not the checkout in which an archive lies."""
    monkeypatch.setenv("FEDCOHORT_COMMIT", "another")
    plain, archive = tmp_path / "plain", tmp_path / "plain" / "archive"
    (plain / "benchmarks").mkdir(parents=True)
    for name in (".gitattributes", "benchmarks/commit.txt"):
        shutil.copy(provenance.ROOT / name, plain / name)
    assert provenance._commit(plain) == "unknown"
    commit_all(plain)
    made = subprocess.run(["git", "-C", plain, "archive", "HEAD"], capture_output=True, check=True)
    archive.mkdir()
    subprocess.run(["tar", "-x", "-C", archive], input=made.stdout, check=True)
    commit = provenance._commit(plain)
    (plain / "benchmarks" / "more.txt").write_text("a second commit")
    commit_all(plain)
    assert provenance._commit(archive) == commit != provenance._commit(plain)
