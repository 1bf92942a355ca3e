"""A published number can be repeated with a few of its seeds, and what differs is found."""

from __future__ import annotations

import copy
import json

import against
import pytest
from parts import write_part
from run import main
from suite import read_suite

from fedcohort.exceptions import DataError


@pytest.fixture(scope="module")
def published(suite_text, tmp_path_factory):
    """A suite of two parts, and the file of its results."""
    folder = tmp_path_factory.mktemp("published")
    suite, file = folder / "trial.toml", folder / "trial.json"
    suite.write_text(suite_text.partition('[[settings]]\nname = "cohorts of 4')[0])
    parts = read_suite(str(suite))[:2]
    for part in parts:
        write_part(part, folder / "parts")
    results = [json.loads((folder / "parts" / part.file_name).read_text()) for part in parts]
    file.write_text(json.dumps({"suite": "trial", "parts": results}))
    return suite, file


def test_the_first_seeds_repeat_the_published_ones(published, tmp_path, capsys):
    words = ["--suite", published[0], "--out", tmp_path, "--seeds", 2, "--against", published[1]]
    assert main([*map(str, words)]) == 0
    assert [line.partition(" seeds")[0] for line in capsys.readouterr().out.splitlines()] == [
        "same: cohorts of 3, uniform: 2",
        "same: cohorts of 3, match: 2",
    ]


def test_verdicts_by_rule(published):
    """Each change of a published result gets the verdict that the rule gives it."""
    theirs = json.loads(published[1].read_text())["parts"][0]

    def verdict(change):
        ours = copy.deepcopy(theirs)
        for row in ours["seeds"]:
            change(row)
        return against.compare(ours, theirs).verdict

    deviation = against.standard_error([row["accuracy"] for row in theirs["seeds"]], 3)
    assert deviation > 0

    def shifted(row, errors):
        row["gemd"] += 0.1
        row["accuracy"] += errors * deviation

    def raised(row, by):
        row["curve"][0] += by

    assert verdict(lambda row: row) == "same"
    assert verdict(lambda row: row.update(bytes_up=row["bytes_up"] + 1)) == "other bytes"
    assert verdict(lambda row: raised(row, 0.009)) == "same"
    assert verdict(lambda row: raised(row, 0.011)) == "agrees"
    assert verdict(lambda row: shifted(row, 2.9)) == "agrees"
    assert verdict(lambda row: shifted(row, -3.1)) == "differs"


def test_what_cannot_be_compared_is_named(published, suite_text, tmp_path, capsys):
    suite, file = published
    part = read_suite(str(suite))[0].first(1)
    write_part(part, tmp_path / "parts")
    text = file.read_text()

    def compared():
        pairs = against.twins([part], against.read_published([tmp_path / "other.json"]))
        against.repetitions(pairs, tmp_path / "parts")

    for content, match in (
        ("[]", "is not a result file"),
        ('{"parts": []}', "not published training runs"),
        (text.replace('"cohort_size": 3', '"cohort_size": 4'), "other settings"),
        (text.replace('"seed": 1000', '"seed": 1009'), "none of its seeds"),
    ):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(DataError, match=match):
            compared()
    words = ["--suite", str(suite), "--out", str(tmp_path / "new"), "--against"]
    suite.write_text(suite_text.replace("rounds = 3", "rounds = 1"))
    for path, complaint in ((file, "published with other settings"), ("none", "no such file")):
        assert main([*words, str(path)]) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()  # nothing was run in vain
