from __future__ import annotations

import json

import numpy as np
import pytest

from fedcohort.cli import invoke
from fedcohort.sketch.race import RaceSketch


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    empty = RaceSketch.srp(4, rows=30, bits=4)
    for i in range(6):
        sketch = empty.empty_like()
        sketch.add(rng.normal(size=(150, 4)) + (3 if i % 2 else -3) * np.array([1, 0, 0, 1]))
        sketch.save(f"site-{i}.sketch")
    return [f"site-{i}.sketch" for i in range(6)]


def test_a_page_and_its_numbers(sites, tmp_path, capsys):
    assert invoke(["profile", *sites, "-o", "h.html", "--title", "Six [sites]"]) == 0
    shown = capsys.readouterr().out
    assert "Six [sites]" in shown
    numbers = json.loads((tmp_path / "h.json").read_text())
    assert numbers["clusters"] == 2
    assert [c["cluster"] for c in numbers["client"]] in ([0, 1] * 3, [1, 0] * 3)
    html = (tmp_path / "h.html").read_text("utf-8")
    assert html.startswith("<!doctype html>")
    assert "Six [sites]" in html


def test_a_folder_in_json(sites, tmp_path, capsys):
    assert invoke(["profile", ".", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["page"] == "heterogeneity.html"
    assert result["clients"] == 6
    assert (tmp_path / "heterogeneity.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["site-0.sketch"], "a profile needs at least two sketches, not 1"),
        (["site-0.sketch", "none.sketch"], "none.sketch: cannot be read"),
        (["site-0.sketch", "site-1.sketch", "-o", "no/h.html"], "no/h.html: cannot be written"),
        (["site-0.sketch", "empty.sketch"], "two sketches of two records or more"),
        (["site-0.sketch", "site-1.sketch", "-o", "h.json"], "h.json: name the page"),
    ],
)
def test_mistakes(sites, arguments, message, capsys):
    RaceSketch.load("site-0.sketch").empty_like().save("empty.sketch")
    assert invoke(["profile", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_the_page_says_what_choosing_cohorts_is_worth(sites, tmp_path):
    from html import unescape

    from fedcohort.analysis.plan import plan

    sketches = [RaceSketch.load(path) for path in sites]
    expected = plan(sketches, [2], names=[f"site-{i}" for i in range(6)]).lines()
    assert invoke(["profile", *sites, "-o", "h.html", "--cohort-size", "2"]) == 0
    assert expected[0] in unescape((tmp_path / "h.html").read_text("utf-8"))
    told = json.loads((tmp_path / "h.json").read_text("utf-8"))["plan"]
    assert told["uniform"].keys() == {"2"} and told["verdict"] == expected[0]
    assert invoke(["profile", *sites, "-o", "none.html", "--cohort-size", "0"]) == 0
    assert expected[0] not in unescape((tmp_path / "none.html").read_text("utf-8"))
