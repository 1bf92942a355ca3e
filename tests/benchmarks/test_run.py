"""A suite can be interrupted, spread and joined, and its numbers are those of a plain run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import parts as running
import provenance
import pytest
from parts import join, split_done, write_part
from run import main
from suite import SUITES, Part, Script, read_suite

from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments.run import check, simulation_of


def rows_of(folder, part):
    """The rows of a result file, without the times that a clock measured."""
    rows = json.loads((Path(folder) / part.file_name).read_text())["seeds"]
    return [{k: v for k, v in row.items() if k != "select_seconds"} for row in rows]


def test_published_suites_use_held_out_seeds(suite):
    for name in SUITES:
        parts = read_suite(name)
        first = min(min(p.experiment.seeds, default=1000) for p in parts)
        assert first >= 1000 or name == "grid"  # which tunes, on development seeds
        assert len({p.file_name for p in parts}) == len(parts)
        for part in parts:
            if isinstance(part.experiment, Script):
                assert (provenance.ROOT / part.experiment.path).exists()
            else:
                check(part.experiment)["policy"].check_cohort(part.experiment.cohort_size)
    tuned = Path(suite)
    tuned.write_text(tuned.read_text().replace("[1000, 1001, 1002]", "[0, 1]"))
    with pytest.raises(ConfigError, match="1000"):
        read_suite(suite)


def test_a_part_is_a_plain_run(suite, tmp_path):
    part = read_suite(suite)[1]
    assert part.experiment.policy.options == {"epsilon": 1.0}
    write_part(part, tmp_path)
    plain = simulation_of(part.experiment, running.loaded(part.experiment)[0])
    records = [plain.step() for _ in range(3)]
    for i, row in enumerate(rows_of(tmp_path, part)):
        assert row["curve"] == [round(records[-1][i].accuracy, 4)]  # three rounds: one point
        assert row["rounds_to"] == [1, None]
        assert row["seconds_to"] == [records[0][i].elapsed, None]
        assert row["bytes_to"] == [records[0][i].bytes_up + records[0][i].bytes_down, None]
        by_client = running.client_accuracy(plain, i)
        assert row["worst_tenth_accuracy"] == pytest.approx(by_client.min())  # one of 12
    federation = plain.seeds[0].federation
    first = federation.parts[federation.clients[0]]
    x, y = (values[first] for values in plain.train_data)
    right = (plain.model(0)(x).argmax(1) == y).double().mean()
    assert running.client_accuracy(plain, 0)[0] == float(right)
    assert list(tmp_path.glob("trial*")) == [Path(suite), tmp_path / part.file_name]  # no leftovers


def test_a_part_that_is_stopped_in_time_goes_on(suite, tmp_path, monkeypatch):
    part, clock = read_suite(suite)[1], itertools.count()

    def lines():
        return (tmp_path / "two" / part.stem / "rounds.jsonl").read_text().splitlines()

    monkeypatch.setattr(running.time, "time", lambda: next(clock))
    assert not write_part(part, tmp_path / "two", until=2)  # it looks before, then in each round
    assert len(lines()) == 2 * 3
    assert not (tmp_path / "two" / part.file_name).exists()
    monkeypatch.undo()
    for folder in ("two", "one"):
        assert write_part(part, tmp_path / folder)
    assert rows_of(tmp_path / "two", part) == rows_of(tmp_path / "one", part)


def test_processes_share_the_parts_and_stop_in_time(suite, tmp_path, capsys):
    words = ["--suite", suite, "--only", "uniform", "--seeds", "1", "--device", "cpu", "--out"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*words, str(two), "--seconds", "0"]) == 3
    assert capsys.readouterr().err.count("no time left: trial") == 2
    assert main([*words, str(two), "--resume", "--workers", "2", "--seconds", "600"]) == 0
    assert main([*words, str(one)]) == 0
    assert "done: trial: cohorts of 3, uniform" in capsys.readouterr().err
    assert main([*words, str(one), "--resume"]) == 0
    assert "kept: trial: cohorts of 3, uniform" in capsys.readouterr().err
    assert main([*words, str(one)]) == 2
    assert "--resume" in capsys.readouterr().err
    for part in (part.first(1) for part in read_suite(suite) if part.variant == "uniform"):
        assert rows_of(two, part) == rows_of(one, part)


def test_other_code_begins_anew_and_does_not_join(suite, tmp_path, monkeypatch):
    first, second = (part.first(1) for part in read_suite(suite)[:2])
    with pytest.raises(DataError, match="is missing"):
        join([first], tmp_path)
    write_part(first, tmp_path)
    monkeypatch.setattr(running, "clean_commit", lambda: "abc")
    some = join([first, second], tmp_path, partial=True)
    assert (len(some["parts"]), some["missing"]) == (1, ["cohorts of 3, match"])
    joined = join([first], tmp_path)
    assert joined["commit"] == "abc" and joined["parts"][0]["made_by"] == 0
    assert joined["provenance"][0]["source"] == provenance.source_digest(False)
    monkeypatch.setattr(running, "source_digest", lambda scripts: "other code")
    with pytest.raises(DataError, match="other code"):
        join([first], tmp_path)
    assert split_done([first], tmp_path, resume=True) == ([], [first])


def test_mistakes_and_the_list_of_parts(suite, capsys):
    for wrong, complaint in (
        (["--suite", "selektion"], "did you mean 'selection'"),
        (["--suite", suite, "--only", "nowhere"], "matches none of 4 parts"),
        (["--suite", suite, "--only", "("], "regular expression"),
    ):
        assert main(wrong) == 2
        assert complaint in capsys.readouterr().err
    assert main(["--suite", suite, "--list"]) == 0
    listed = ["of 3, uniform", "of 3, match", "of 3, skip, always", "of 4, uniform"]
    assert capsys.readouterr().out.splitlines() == [f"trial: cohorts {name}" for name in listed]


def test_a_script_is_a_part(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "pathlib.Path(sys.argv[-1]).write_text(json.dumps({'result': sys.argv[1:-1]}))\n"
    )
    run = Script(str(script), ("--device", "{device}"), (1000, 1001))
    part = Part("scripts", "s", "a", run)
    write_part(part.on("cpu"), tmp_path)
    result = json.loads((tmp_path / part.file_name).read_text())["result"]
    assert result == ["--device", "cpu", "--seeds", "1000", "1001", "--out"]
    script.write_text("raise SystemExit('no data')\n")
    with pytest.raises(DataError, match="no data"):
        write_part(part, tmp_path)


def test_the_code_behind_a_result_is_known(tmp_path):
    digests = set()
    for name in ("one", "other"):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "src" / "code.py").write_text(f"{name} = True")
        digests.add(provenance.source_digest(True, tmp_path / name))
    assert len(digests) == 2
