"""A few seconds of what `make soak` does for longer."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fuzzing import TARGETS
from fuzzing.mutate import zip_archive

FUZZ = Path(__file__).with_name("fuzz.py")


def fuzz(*arguments):
    done = subprocess.run(
        [sys.executable, str(FUZZ), *arguments], capture_output=True, text=True, timeout=280
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_only_our_errors_come_out_of_damaged_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = fuzz("--seconds", "240", "--count", "150", "--seed", "0", "--only", ",".join(TARGETS))
    assert len(results) == len(TARGETS)
    assert {r["target"]: r["errors"] for r in results if r["errors"]} == {}
    for result in results:
        assert result["trials"] > 0, result


def test_a_crash_and_another_error_would_be_seen(tmp_path):
    """The driver itself: a parser that crashes, one that raises, one that eats memory."""
    code = f"""
import ctypes, json, sys
sys.path.insert(0, {str(FUZZ.parent)!r})
import fuzz
from fuzzing.target import Target
class Bad(Target):
    name = "bad"
    def examples(self):
        return [b"x"]
    def parse(self):
        first, self.started = not self.started, True
        if first:
            raise fuzz.FedcohortError()
        if self.act == "crash":
            ctypes.string_at(0)
        if self.act == "raise":
            raise KeyError("x")
        bytearray(8 << 30)
    started = False
fuzz.TARGETS["bad"] = Bad
for act in ("crash", "raise", "memory"):
    Bad.act = act
    print(json.dumps(list(fuzz.run("bad", seed=0, count=3)["errors"])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    crash, raised, memory = map(json.loads, done.stdout.splitlines())
    assert crash == ["exit status -11"]  # in each of the three trials
    assert raised == ["KeyError at ?"]
    assert memory == ["MemoryError at ?"]


def test_trials_go_on_where_a_result_ends(tmp_path):
    out = tmp_path / "result.json"
    for count in ("20", "50"):
        fuzz("--only", "trace", "--count", count, "--jobs", "2", "--out", str(out))
    found = json.loads(out.read_text())
    (row,) = found["result"]["parsers"]
    assert (row["trials"], row["next"]) == (50, 50)
    assert row["refused"] + row["accepted"] == 50
    assert len(found["provenance"]) == 2
    other = tmp_path / "other.json"
    fuzz("--only", "trace", "--count", "30", "--seed", "9", "--out", str(other))
    fuzz("--merge", str(other), "--seconds", "0", "--out", str(out))
    merged = json.loads(out.read_text())
    (row,) = merged["result"]["parsers"]
    assert (row["trials"], row["next"]) == (80, 50)
    assert len(merged["provenance"]) == 3


def test_the_parser_with_the_least_work_left_runs_until_all_are_done(tmp_path):
    out = tmp_path / "result.json"
    fuzz("--only", "budget", "--count", "10", "--out", str(out))
    wanted = "--only", "budget,trace-csv", "--count", "40", "--out", str(out)
    rows = fuzz(*wanted, "--shortest-first")
    assert rows[0]["target"] == "trace-csv"  # it never ran, so its speed is measured first
    assert {row["target"]: row["trials"] for row in rows} == {"budget": 40, "trace-csv": 40}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_for_damage_are_valid(method):
    members = {"a.npy": b"x" * 1000, "state.json": b"{}", "empty": b""}
    with zipfile.ZipFile(io.BytesIO(zip_archive(members, method))) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {method}
        assert {name: archive.read(name) for name in archive.namelist()} == members
