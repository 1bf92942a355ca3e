"""A suite can be interrupted, spread and joined, and its numbers are those of a plain run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import shutil
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
    clock = itertools.count()  # read before and after each round, which takes 1
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(clock))
    with pytest.raises(benchmark.Unfinished):
        benchmark.write_part(part, tmp_path, loaded, until=4.5)  # the third would end at 5
    kept = benchmark.storage.load(tmp_path / f"{part.file_name}.checkpoint")
    assert [len(records) for records in kept["records"]] == [2, 2]
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


def test_the_list_of_parts_as_json(suite, capsys):
    assert invoke(["benchmark", "--suite", suite, "--only", "uniform", "--list"]) == 0
    names = capsys.readouterr().out.splitlines()
    command = ["benchmark", "--suite", suite, "--only", "uniform", "--list", "--format", "json"]
    assert invoke(command) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == names
    assert rows[0] == {
        "name": "trial: cohorts of 3, uniform",
        "suite": "trial",
        "setting": "cohorts of 3",
        "variant": "uniform",
        "runs_on": "any",
        "rank": 0,
        "targets": [0.05, 0.99],
        "file_name": read_suite(suite)[0].file_name,
        "seeds": [1000, 1001],
    }


def test_important_parts_come_first(suite, tmp_path):
    ranked = tmp_path / "ranked.toml"
    ranked.write_text(SUITE + '\n[rank]\n"cohorts of 3" = 1\nmatch = -1\n')
    names = [(p.variant, p.rank) for p in read_suite(str(ranked))]
    assert names == [("match", 0), ("uniform", 0), ("uniform", 1), ("skip, always", 1)]


def test_workers_find_what_one_process_finds(suite, tmp_path):
    """Two processes share the list; a part that fails is reported and does not end the others."""
    parts = read_suite(suite, quick=True)
    parts[0] = dataclasses.replace(parts[0], runs_on="gpu")  # there is none: a CPU worker runs it
    wrong = dataclasses.replace(
        parts[0],
        variant="wrong",
        experiment=dataclasses.replace(parts[0].experiment, model=NamedConfig("char-lstm")),
    )
    done = []
    outcome = run_parts(
        [*parts, wrong],
        tmp_path / "two",
        {"cpu": 2},
        on_part=lambda part, device, seconds: done.append((part.name, device)),
    )
    assert sorted(done) == [(p.name, "cpu") for p in parts]
    assert not outcome.left and not outcome.stopped
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


def test_a_device_that_does_not_work_ends_the_run_with_one_error(suite, tmp_path, monkeypatch):
    """Nothing is run on it, and no part has failed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(workers.MOST_FAILURES, "cuda", 1)
    parts = [dataclasses.replace(p, runs_on="gpu") for p in read_suite(suite, quick=True)]
    with pytest.raises(ConfigError, match=r"no cuda worker can start: .*CUDA.*--resume"):
        run_parts(parts, tmp_path, {"cuda": 1})
    assert not list(tmp_path.glob("*.json"))
    assert workers._untrained("cpu") == ""
    monkeypatch.setattr("modelstack.trainer.Trainer", lambda *a, **k: 1 / 0)
    assert workers._untrained("cpu") == "ZeroDivisionError: division by zero"


class Schedule:
    """Workers without processes; what they are given is read from their pipes."""

    def __init__(self, parts, folder, seconds=1000.0, **counts):
        deadline = time.monotonic() + seconds
        self.campaign = workers._Campaign(parts, str(folder), deadline, None, None)
        for device in (d for d, n in counts.items() for _ in range(n)):
            pipe, _ = multiprocessing.Pipe()
            worker = workers._Worker(device, None, pipe, idle=True, started=True)
            self.campaign.pool.append(worker)

    def give(self):
        """Give all idle workers their next parts, and return the settings that run by device."""
        for worker in self.campaign.pool:
            if worker.idle:
                self.campaign._give(worker)
        return self.running()

    def running(self):
        busy = [w for w in self.campaign.pool if w.part is not None]
        return sorted((w.device, self.campaign.parts[w.part].setting) for w in busy)

    def finish(self, setting):
        campaign = self.campaign
        busy = [w for w in campaign.pool if w.part is not None]
        worker = next(w for w in busy if campaign.parts[w.part].setting == setting)
        campaign._finish(worker, campaign.parts[worker.part], "")
        worker.idle = True


def parts_on(*places):
    script = Script("s.py")
    return [Part("s", name, "v", script, runs_on=runs_on) for name, runs_on in places]


def test_heavy_parts_run_after_the_light_ones_and_three_at_a_time(tmp_path):
    heavy = [(f"heavy {i}", "gpu-heavy") for i in range(5)]
    light = [("a", "any"), ("b", "gpu"), ("c", "gpu"), ("d", "any"), ("figure", "cpu")]
    plan = Schedule(parts_on(*heavy, *light), tmp_path, cuda=3, cpu=1)
    assert plan.give() == [("cpu", "figure"), ("cuda", "a"), ("cuda", "b"), ("cuda", "c")]
    plan.finish("b")
    assert ("cuda", "d") in plan.give()  # the last light one
    plan.finish("a")
    assert ("cuda", "heavy 0") in plan.give()
    plan.finish("figure")
    assert [where for where, _ in plan.give()] == ["cuda"] * 3  # the CPU takes no heavy part
    more = Schedule(parts_on(*heavy), tmp_path, cuda=5)
    assert more.give() == [("cuda", f"heavy {i}") for i in range(3)]
    more.finish("heavy 1")
    assert more.give() == [("cuda", f"heavy {i}") for i in (0, 2, 3)]
    alone = Schedule(parts_on(("figure", "cpu")), tmp_path, cuda=1)
    assert alone.give() == [("cuda", "figure")]  # where there is no CPU worker
    slow = Schedule(parts_on(heavy[0], ("b", "gpu"), ("a", "any")), tmp_path, cpu=2)
    assert slow.give() == [("cpu", "a"), ("cpu", "b")]


def test_only_a_script_that_cannot_end_in_time_is_not_begun(suite, tmp_path):
    """The fastest part of its setting counts: the first ones load data, or share the device."""
    plan = Schedule(parts_on(("short", "any"), ("long", "any")), tmp_path, cpu=2)
    one, other = plan.campaign.parts
    for seconds in (5000.0, 10.0):
        plan.campaign._note("cpu", one, seconds)
        plan.campaign._note("cpu", other, 5 * seconds + 1000)
    plan.campaign._note("cuda", one, 9000.0)
    assert plan.give() == [("cpu", "short")]
    part = read_suite(suite)[0]
    plan = Schedule([part], tmp_path, cpu=1)
    plan.campaign._note("cpu", part, 5000.0)
    assert plan.give() == [("cpu", part.setting)]  # the next call continues it


def test_a_new_folder_with_the_finished_parts_goes_on(tmp_path):
    """As on a machine that was lent again; how long its scripts took is known."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "with open(sys.argv[-1], 'w') as file:\n    json.dump({'result': 1}, file)\n"
    )
    parts = [Part("trial", name, "v", Script(str(script))) for name in "ab"]
    benchmark.write_part(parts[0].on("cpu"), tmp_path, benchmark.Datasets())
    shutil.copytree(tmp_path, tmp_path / "second", ignore=shutil.ignore_patterns("*.py"))
    assert benchmark.split_done(parts, tmp_path / "second", resume=True) == (parts[:1], parts[1:])
    campaign = workers._Campaign(parts, str(tmp_path / "second"), 0.0, None, None)
    campaign.learn_durations(parts[:1])
    held = json.loads((tmp_path / "second" / parts[0].file_name).read_text())
    assert campaign.shortest == {("cpu", "a"): held["seconds"]}


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
        "def busy():\n    (here / 'begun').touch()\n    time.sleep(900)\n"
        "ctypes.CFUNCTYPE(None)(busy)()\n"
        "try:\n    time.sleep(900)\nfinally:\n    (here / 'ended').touch()\n"
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
        "try:\n    time.sleep(900)\nfinally:\n    (here / 'ended').touch()\n"
    )
    code = (
        "from fedcohort.experiments.suite import Part, Script\n"
        "from fedcohort.experiments.workers import run_parts\n"
        f"part = Part('trial', 'slow', 'script', Script({str(script)!r}))\n"
        f"run_parts([part], {str(tmp_path / 'out')!r}, {{'cpu': 1}})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    for name in ("begun", "ended"):
        late = time.monotonic() + 140  # less than it takes the part, and pytest, to end by itself
        while not (tmp_path / name).exists() and time.monotonic() < late:
            time.sleep(0.05)
        parent.kill()
        parent.wait()
        assert (tmp_path / name).exists(), name


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
