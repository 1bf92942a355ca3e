"""A suite can be interrupted, spread and joined, and its numbers are those of a plain run."""

from __future__ import annotations

import json
import subprocess

import pytest

import fedcohort
from fedcohort.cli import invoke
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments import benchmark
from fedcohort.experiments.folder import simulation_of

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
    parts = benchmark.read_suite(suite)
    assert [(p.setting, p.variant) for p in parts] == [
        ("cohorts of 3", "uniform"),
        ("cohorts of 3", "match"),
        ("cohorts of 3", "skip, always"),
        ("cohorts of 4", "uniform"),
    ]
    assert parts[1].experiment.policy.options == {"epsilon": 1.0}
    assert parts[2].experiment.gate.name == "sketch-to-skip"
    assert len({p.file_name for p in parts}) == 4
    quick = benchmark.read_suite(suite, quick=True)
    assert [p.experiment.seeds for p in quick] == [(0,), (0,)]


def test_an_interrupted_suite_goes_on_and_equals_a_plain_run(suite, tmp_path):
    parts = benchmark.read_suite(suite)[:2]
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
    plain = simulation_of(parts[0].experiment, benchmark._Datasets().get(parts[0].experiment)[0])
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


def test_parts_of_other_code_are_refused_at_the_join(suite, tmp_path, monkeypatch):
    parts = benchmark.read_suite(suite, quick=True)[:1]
    with pytest.raises(DataError, match="is missing"):
        benchmark.join(parts, tmp_path, "trial")
    benchmark.run_suite(parts, tmp_path / "out")
    monkeypatch.setattr(benchmark, "commit", lambda: "abc")
    joined = benchmark.join(parts, tmp_path / "out", "trial", quick=True)
    assert joined["commit"] == "abc"
    assert joined["parts"][0]["made_by"] == 0
    assert joined["provenance"][0]["source"] == benchmark.source_digest()
    monkeypatch.setattr(benchmark, "source_digest", lambda: "other code")
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
    for name in benchmark.suites():
        parts = benchmark.read_suite(name)
        assert min(min(p.experiment.seeds) for p in parts) >= 1000
        assert benchmark.read_suite(name, quick=True)
    tuned = tmp_path / "tuned.toml"
    tuned.write_text(SUITE.replace("[1000, 1001]", "[0, 1]"))
    with pytest.raises(ConfigError, match="1000"):
        benchmark.read_suite(str(tuned))


def test_the_command(suite, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert invoke(["benchmark", "--suite", suite, "--quick", "--out", out]) == 0
    assert "done: cohorts of 3, uniform" in capsys.readouterr().err
    assert invoke(["benchmark", "--suite", "selektion", "--out", out]) == 2
    assert "did you mean 'selection'" in capsys.readouterr().err
    assert invoke(["benchmark", "--suite", suite, "--quick", "--out", out]) == 2
    assert "--resume" in capsys.readouterr().err
