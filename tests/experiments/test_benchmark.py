"""A suite can be interrupted, spread and joined, and its numbers are those of a plain run."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time

import pytest

import fedcohort
from fedcohort.cli import invoke
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments import benchmark, workers
from fedcohort.experiments.config import NamedConfig
from fedcohort.experiments.folder import check, simulation_of
from fedcohort.experiments.suite import Part, Script, read_suite, suites
from fedcohort.experiments.workers import parse_workers, run_parts

SUITE = """
[experiment]
rounds = 3
seeds = [1000, 1001]
device = "cpu"
data = {clients = 12, partition = "shards", options = {per_client = 2}}

[variants]
uniform = {policy = "uniform"}
match = {policy = {name = "sketch-match", options = {epsilon = 1.0}}}
"skip, always" = {policy = "uniform", gate = {name = "sketch-to-skip", options = {threshold = 9.0}}}

[quick]
variants = ["uniform"]
experiment = {rounds = 1, seeds = [0]}

[[settings]]
name = "cohorts of 3"
targets = [0.05, 0.99]
experiment = {cohort_size = 3}

[[settings]]
name = "cohorts of 4"
variants = ["uniform"]
experiment = {cohort_size = 4}
"""


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_text(SUITE)
    return str(path)


def test_the_parts_of_a_suite(suite):
    parts = read_suite(suite)
    assert [(p.setting, p.variant) for p in parts] == [
        ("cohorts of 3", "uniform"),
        ("cohorts of 3", "match"),
        ("cohorts of 3", "skip, always"),
        ("cohorts of 4", "uniform"),
    ]
    assert parts[1].experiment.policy.options == {"epsilon": 1.0}
    assert parts[2].experiment.gate.name == "sketch-to-skip"
    assert len({p.file_name for p in parts}) == 4
    quick = read_suite(suite, quick=True)
    assert [p.experiment.seeds for p in quick] == [(0,), (0,)]


def test_an_interrupted_suite_goes_on_and_equals_a_plain_run(suite, tmp_path):
    parts = read_suite(suite)[:2]
    left = benchmark.run_suite(parts, tmp_path / "out", seconds=0.0)
    assert left == parts  # no time: nothing was begun
    fresh = []
    for _ in range(2):
        benchmark.run_suite(
            parts,
            tmp_path / "out",
            resume=True,
            on_part=lambda part, now: fresh.append((part.variant, now)),
        )
    assert fresh == [("uniform", True), ("match", True), ("uniform", False), ("match", False)]
    with pytest.raises(ConfigError, match="--resume"):
        benchmark.run_suite(parts, tmp_path / "out")
    found = json.loads((tmp_path / "out" / parts[0].file_name).read_text())
    plain = simulation_of(parts[0].experiment, benchmark.Datasets().get(parts[0].experiment)[0])
    records = [plain.step() for _ in range(3)]
    for i, row in enumerate(found["seeds"]):
        assert row["curve"] == [round(records[-1][i].accuracy, 4)]  # three rounds: one point
        assert row["rounds_to"] == [1, None]
        assert row["bytes_to"] == [records[0][i].bytes_up + records[0][i].bytes_down, None]
    by_client = benchmark.client_accuracy(plain, 0)
    federation = plain.federations[0]
    first = federation.parts[federation.clients[0]]
    right = plain.trainer.hits(plain.seeds[0].model, first, plain.train_data)
    assert by_client[0] == right.mean()
    assert found["seeds"][0]["worst_tenth_accuracy"] == pytest.approx(by_client.min())


def test_a_part_whose_time_is_over_goes_on(suite, tmp_path, monkeypatch):
    part = read_suite(suite)[1].on("cpu")
    loaded = benchmark.Datasets()
    clock = iter(range(9))
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(clock))
    with pytest.raises(benchmark.Unfinished):
        benchmark.write_part(part, tmp_path, loaded, until=1)  # two of three rounds
    assert not (tmp_path / part.file_name).exists()
    benchmark.write_part(part, tmp_path, loaded)
    (found,) = tmp_path.glob("*.json*")
    whole = benchmark.run_part(part, loaded)["seeds"]
    rows = json.loads(found.read_text())["seeds"]
    for row in (*rows, *whole):
        row.pop("select_seconds")
    assert rows == json.loads(json.dumps(whole))


def test_parts_of_other_code_are_refused_at_the_join(suite, tmp_path, monkeypatch):
    parts = read_suite(suite, quick=True)[:1]
    with pytest.raises(DataError, match="is missing"):
        benchmark.join(parts, tmp_path, "trial")
    benchmark.run_suite(parts, tmp_path / "out")
    monkeypatch.setattr(benchmark, "commit", lambda: "abc")
    both = read_suite(suite, quick=True)
    some = benchmark.join(both, tmp_path / "out", "trial", partial=True)
    assert (len(some["parts"]), some["missing"]) == (1, ["cohorts of 4, uniform"])
    joined = benchmark.join(parts, tmp_path / "out", "trial", quick=True)
    assert joined["commit"] == "abc"
    assert joined["parts"][0]["made_by"] == 0
    assert joined["provenance"][0]["source"] == benchmark.source_digest()
    monkeypatch.setattr(benchmark, "source_digest", lambda scripts=None: "other code")
    with pytest.raises(DataError, match="other code"):
        benchmark.join(parts, tmp_path / "out", "trial")


def test_a_checkout_that_differs_from_its_commit_cannot_join(tmp_path, monkeypatch):
    code = tmp_path / "fedcohort"
    code.mkdir()
    (code / "__init__.py").write_text("")
    monkeypatch.setattr(fedcohort, "__file__", str(code / "__init__.py"))
    with pytest.raises(DataError, match="not in a git checkout"):
        benchmark.commit()
    run = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*run, *words], check=True)
    assert len(benchmark.commit()) == 40
    (code / "__init__.py").write_text("changed = True")
    with pytest.raises(DataError, match="differs from its commit"):
        benchmark.commit()


def test_published_suites_use_held_out_seeds(tmp_path):
    for name in suites():
        parts = read_suite(name)
        assert min(min(p.experiment.seeds, default=1000) for p in parts) >= 1000
        assert len({p.file_name for p in parts}) == len(parts)
        for part in parts:
            if isinstance(part.experiment, Script):
                assert (benchmark.checkout() / part.experiment.path).exists()
            else:
                check(part.experiment)
        assert read_suite(name, quick=True)
    tuned = tmp_path / "tuned.toml"
    tuned.write_text(SUITE.replace("[1000, 1001]", "[0, 1]"))
    with pytest.raises(ConfigError, match="1000"):
        read_suite(str(tuned))


def test_the_command(suite, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert invoke(["benchmark", "--suite", suite, "--quick", "--out", out]) == 0
    assert "done: trial: cohorts of 3, uniform" in capsys.readouterr().err
    assert invoke(["benchmark", "--suite", "selektion", "--out", out]) == 2
    assert "did you mean 'selection'" in capsys.readouterr().err
    assert invoke(["benchmark", "--suite", suite, "--quick", "--out", out]) == 2
    assert "--resume" in capsys.readouterr().err
    assert invoke(["benchmark", "--suite", suite, "--only", "nowhere", "--out", out]) == 2
    assert "matches none of 4 parts" in capsys.readouterr().err
    assert invoke(["benchmark", "--suite", suite, "--only", "of 4", "--list", "--out", out]) == 0
    assert capsys.readouterr().out == "trial: cohorts of 4, uniform\n"


def test_important_parts_come_first(suite, tmp_path):
    ranked = tmp_path / "ranked.toml"
    ranked.write_text(SUITE + '\n[rank]\n"cohorts of 3" = 1\nmatch = -1\n')
    names = [(p.variant, p.rank) for p in read_suite(str(ranked))]
    assert names == [("match", 0), ("uniform", 0), ("uniform", 1), ("skip, always", 1)]


def test_workers_find_what_one_process_finds(suite, tmp_path, monkeypatch):
    """Two processes share the list; a part that fails is reported and does not end the others.

    A worker whose GPU does not work leaves its parts to them, even one that asks for a GPU.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(workers.MOST_FAILURES, "cuda", 2)
    parts = read_suite(suite, quick=True)
    parts[0] = dataclasses.replace(parts[0], needs_gpu=True)
    wrong = dataclasses.replace(
        parts[0],
        variant="wrong",
        experiment=dataclasses.replace(parts[0].experiment, model=NamedConfig("char-lstm")),
    )
    done, stops = [], []
    outcome = run_parts(
        [*parts, wrong],
        tmp_path / "two",
        {"cuda": 1, "cpu": 2},
        on_part=lambda part, device, seconds: done.append((part.name, device)),
        on_stop=stops.append,
    )
    assert len(stops) == 1 and stops == outcome.stopped
    assert re.match("a cuda worker stopped after 2 failures in a row: .*CUDA", stops[0])
    assert sorted(done) == [(p.name, "cpu") for p in parts]
    assert not outcome.left
    assert list(outcome.failed) == [wrong.name]
    assert "char-lstm" in outcome.failed[wrong.name]
    benchmark.run_suite(parts, tmp_path / "one")
    for part in parts:
        one, two = (
            json.loads((tmp_path / where / part.file_name).read_text())["seeds"]
            for where in ("one", "two")
        )
        for row in (*one, *two):
            row.pop("select_seconds")
        assert one == two
    assert run_parts(parts, tmp_path / "none", {"cpu": 1}, seconds=0.0).left == parts


def test_a_worker_whose_process_ends_twice_in_a_row_stops(tmp_path):
    """Its parts are left for others; they have not failed."""
    script = tmp_path / "end.py"
    script.write_text("import os; os._exit(9)\n")
    parts = [Part("trial", name, "end", Script(str(script))) for name in "abc"]
    outcome = run_parts(parts, tmp_path / "out", {"cpu": 1})
    assert outcome.left == parts and not outcome.failed
    assert outcome.stopped == [
        "a cpu worker stopped after 2 failures in a row: its process ended with 9"
    ]


def test_a_busy_worker_stops_in_order(tmp_path):
    """A process that is killed inside a GPU kernel can harm others; this one runs its `finally`.

    A callback from C swallows the first request, as those of Numba do.
    """
    script = tmp_path / "slow.py"
    script.write_text(
        "import ctypes, pathlib, time\nhere = pathlib.Path(__file__).parent\n"
        "def busy():\n    (here / 'begun').touch()\n    time.sleep(60)\n"
        "ctypes.CFUNCTYPE(None)(busy)()\n"
        "try:\n    time.sleep(60)\nfinally:\n    (here / 'ended').touch()\n"
    )
    part = Part("trial", "slow", "script", Script(str(script)))
    campaign = workers._Campaign([part], str(tmp_path / "out"), float("inf"), None, None)
    campaign.start({"cpu": 1})
    campaign.collect()  # it has started, and gets its part
    (worker,) = campaign.pool
    while not (tmp_path / "begun").exists() and worker.process.is_alive():
        time.sleep(0.05)
    workers._end(worker)
    assert (tmp_path / "ended").exists()
    assert worker.process.exitcode == 0


def test_workers_stop_when_their_parent_is_killed(tmp_path):
    """Otherwise they would hold a GPU until their part ends."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import pathlib, time\nhere = pathlib.Path(__file__).parent\n(here / 'begun').touch()\n"
        "try:\n    time.sleep(120)\nfinally:\n    (here / 'ended').touch()\n"
    )
    code = (
        "from fedcohort.experiments.suite import Part, Script\n"
        "from fedcohort.experiments.workers import run_parts\n"
        f"part = Part('trial', 'slow', 'script', Script({str(script)!r}))\n"
        f"run_parts([part], {str(tmp_path / 'out')!r}, {{'cpu': 1}})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    for name in ("begun", "ended"):
        late = time.monotonic() + 40
        while not (tmp_path / name).exists() and time.monotonic() < late:
            time.sleep(0.05)
        assert (tmp_path / name).exists(), name
        parent.kill()
    parent.wait()


def test_workers_are_counted_by_device():
    assert parse_workers("cpu=2") == {"cpu": 2}
    for wrong in ("gpu=2", "cpu", "cpu=-1", ""):
        with pytest.raises(ConfigError, match="cuda=5,cpu=9"):
            parse_workers(wrong)


def test_a_script_is_a_part(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "echo.py").write_text(
        "import json, sys\n"
        "words = sys.argv[1:]\n"
        "with open(words[-1], 'w') as file:\n"
        "    json.dump({'result': words[:-1]}, file)\n"
    )
    monkeypatch.setattr(benchmark, "checkout", lambda: tmp_path)
    suite = tmp_path / "scripts.toml"
    suite.write_text(
        "[[settings]]\nname = 's'\nscript = 'benchmarks/echo.py'\nseeds = [1000, 1001]\n"
        "variants = {a = ['--device', '{device}']}\nquick_arguments = ['--few']\n"
    )
    (part,) = read_suite(str(suite), quick=True)
    result = benchmark.run_part(part.on("cpu"), benchmark.Datasets())
    assert result["result"] == ["--device", "cpu", "--few", "--seeds", "1000", "1001", "--out"]
    before = result["provenance"]["source"]
    benchmark.source_digest.cache_clear()
    (folder / "echo.py").write_text("raise SystemExit('no data')\n")
    with pytest.raises(DataError, match="no data"):
        benchmark.run_part(part, benchmark.Datasets())
    assert benchmark.source_digest(folder) != before
