from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.experiments.compare import DEFAULT_SETTING, compare
from fedcohort.experiments.config import NamedConfig, parse
from fedcohort.experiments.results import (
    Results,
    Run,
    gemd_by_round,
    new_rounds,
    read,
    read_histories,
    summarize,
)
from fedcohort.report.tables import setting_columns

SMALL = dataclasses.replace(
    DEFAULT_SETTING, rounds=5, seeds=(0, 1), checkpoint_every=2, device="cpu"
)
POLICIES = [NamedConfig("uniform"), NamedConfig("power-of-choice", {"d": 8})]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    return compare(SMALL, POLICIES, folder), folder


def test_a_folder_gives_back_what_the_comparison_returned(compared):
    returned, folder = compared
    found = read(folder)
    assert [r.policy for r in found] == ["uniform", "power-of-choice"]
    assert [r.summaries for r in found] == [r.summaries for r in returned]
    assert [r.histories for r in found] == [r.histories for r in returned]
    assert [r.experiment for r in found] == [r.experiment for r in returned]
    assert found.baseline(found[1]) is found[0]


def test_an_unfinished_run_is_read_as_far_as_it_got(compared, tmp_path):
    _, folder = compared
    lines = (folder / "uniform" / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    for name in ("config.json", "federation.json"):
        (tmp_path / name).write_bytes((folder / "uniform" / name).read_bytes())
    (tmp_path / "rounds.jsonl").write_bytes(b"".join(lines[:6]) + lines[6][:20])
    (result,) = read(tmp_path)
    assert not result.finished
    assert [s.rounds for s in result.summaries] == [3, 3]
    assert math.isfinite(result.summaries[0].gemd)


def test_rounds_that_were_reported_are_not_read_again(compared, tmp_path):
    """A cluster's runs were read from the first round every second."""
    lines = (compared[1] / "uniform" / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "rounds.jsonl"
    assert not list(new_rounds(path, 0, 2))
    path.write_bytes(b"".join(lines[:4]) + lines[4][:9])
    (_, first), (end, second) = new_rounds(path, 0, 2)
    assert [(r.seed, r.round) for r in (*first, *second)] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    path.write_bytes(b"#" * end + b"".join(lines[4:]))
    assert [records[0].round for _, records in new_rounds(path, end, 2)] == [3, 4, 5]
    path.write_bytes(b"".join(lines[::2]))  # of one seed, while the other is added
    assert not list(new_rounds(path, 0, 2))


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("config.json", "{", "config.json: .*cannot be read"),
        ("config.json", '{"rounds": "x"}', "config.json: rounds='x'"),
        ("federation.json", '{"seeds": [{"seed": 0}]}', "federation.json: not a federation"),
        ("rounds.jsonl", "{}\n", "line 1: not a round record"),
    ],
)
def test_damaged_files_are_named(compared, tmp_path, file, content, complaint):
    _, folder = compared
    for name in ("config.json", "rounds.jsonl", "federation.json"):
        (tmp_path / name).write_bytes((folder / "uniform" / name).read_bytes())
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        read(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no run found"):
        read(tmp_path / "empty")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 10**400),
        ("round", 7),
        ("accuracy", "high"),
        ("selected", "abc"),
        ("selected", [""]),
        ("skipped", 2),
    ],
)
def test_a_line_that_is_not_a_round_is_named(compared, tmp_path, key, value):
    lines = (compared[1] / "uniform" / "rounds.jsonl").read_text().splitlines(keepends=True)
    lines[1] = json.dumps({**json.loads(lines[1]), key: value}) + "\n"
    (tmp_path / "rounds.jsonl").write_text("".join(lines))
    with pytest.raises(ConfigError, match=r"rounds\.jsonl, line 2: not a round record"):
        read_histories(tmp_path)


def test_an_arrow_table_holds_every_round(compared):
    table = compared[0].to_arrow()
    assert table.num_rows == 2 * 2 * 5
    assert table.column("policy.options.d").to_pylist() == [None] * 10 + [8] * 10
    assert Results().to_arrow().num_rows == 0


def csv_rows(text):
    rows = csv.DictReader(io.StringIO(text))
    return [{**row, "selected": json.loads(row["selected"])} for row in rows]


READERS = {
    "csv": lambda path: csv_rows(path.read_text()),
    "json": lambda path: json.loads(path.read_text()),
    "parquet": lambda path: pq.read_table(path).to_pylist(),
}


@pytest.mark.parametrize("to", READERS)
def test_exports_agree(compared, tmp_path, told, to):
    returned, folder = compared
    out = tmp_path / f"rounds.{to}"
    told("export", folder, "-o", out)
    for row, wanted in zip(READERS[to](out), returned.records(), strict=True):
        assert float(row["accuracy"]) == wanted["accuracy"]
        assert (row["run"], int(row["round"])) == (wanted["run"], wanted["round"])
        assert row["selected"] == wanted["selected"]


def test_swept_settings_are_columns():
    runs = Results(Run(f"lr={lr}", [], [], parse({"local": {"lr": lr}})) for lr in (0.0125, 0.05))
    assert setting_columns(runs) == {"lr": ["0.0125", "0.05"]}
    assert setting_columns(Results(runs[1:])) == {"policy": ["lr=0.05"]}


def test_a_round_with_an_unknown_client_is_named():
    """A damaged rounds.jsonl or federation.json gave a KeyError."""
    history = SimpleNamespace(rounds=[SimpleNamespace(finished=("a", "eve"))])
    with pytest.raises(ConfigError, match="lists client 'eve'"):
        gemd_by_round(history, ["a", "b"], np.ones((2, 3), np.int64))


def test_time_to_target_is_the_time_of_the_rounds_until_then(compared):
    returned, _ = compared
    for history, members in zip(returned[0].histories, returned[0].members, strict=True):
        seconds = [r.seconds for r in history.rounds]
        best = int(history.accuracy.argmax())
        summary = summarize(history, *members, history.accuracy[best], 1)
        assert summary.rounds_to_target == best + 1
        assert summary.seconds_to_target == pytest.approx(sum(seconds[: best + 1]))
        assert summary.seconds_to_target == pytest.approx(history.rounds[best].elapsed)
