from __future__ import annotations

import json
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from fedcohort.sketch.race import RaceSketch

HOSTILE = "[bold]eve\x1b[2J\x9b1m"


@pytest.fixture
def sites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    empty = RaceSketch.srp(4, rows=30, bits=4)
    for i in range(6):
        sketch = empty.empty_like()
        sketch.add(rng.normal(size=(150, 4)) + (3 if i % 2 else -3) * np.array([1, 0, 0, 1]))
        sketch.origin = {"spec": HOSTILE}
        sketch.save(f"site-{i}.sketch")
    return [f"site-{i}.sketch" for i in range(6)]


def test_a_page_and_its_numbers(sites, tmp_path, told):
    assert "Six [sites]" in told("profile", *sites, "-o", "h.html", "--title", "Six [sites]")
    command = ["profile", ".", "-o", "h.html", "--force", "--cohort-size", "2"]
    result = told(*command, "--format", "json")
    assert (result["page"], result["clients"]) == ("h.html", 6)
    numbers = json.loads((tmp_path / "h.json").read_text())
    assert numbers["clusters"] == 2
    assert [c["cluster"] for c in numbers["client"]] in ([0, 1] * 3, [1, 0] * 3)
    assert numbers["plan"]["uniform"].keys() == {"2"}
    page = unescape((tmp_path / "h.html").read_text("utf-8"))
    assert numbers["plan"]["verdict"] in page
    told("profile", *sites, "-o", "none.html", "--cohort-size", "0")
    without = unescape((tmp_path / "none.html").read_text("utf-8"))
    assert numbers["plan"]["verdict"] not in without


def test_names_from_data_cannot_command_the_terminal(sites, tmp_path, told, fails):
    index = {site: f"{HOSTILE}{i}" for i, site in enumerate(sites)}
    (tmp_path / "clients.json").write_text(json.dumps(index))
    assert "[bold]eve" in told("distance", ".")
    assert "[bold]eve" in told("profile", ".", "-o", "page.html")
    told("inspect", sites[0])
    told("plan", ".", "-k", "2")
    np.savez("x.npz", **{"a\x1b[2J": np.eye(4), "who": np.array([HOSTILE, "b"] * 2)})
    told("sketch", "x.npz", "--columns", "a\x1b[2J", "--by", "who", "-o", "out")
    assert "[bold]eve" in told("distance", "out")
    assert "\\x1b[2J" in fails("sketch", "x.npz", "--columns", "\x1b[2J", "-o", "out2")


SPEC = """
[privacy]
explain = 0.5
[columns.age]
center = 60
scale = 10
[columns.sex]
kind = "category"
levels = ["f", "m"]
"""


def test_histograms_of_columns_that_differ_and_changes_since_earlier(tmp_path, told, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    Path("s.toml").write_text(SPEC)
    for folder, moved in (("old", ()), ("new", (4,))):
        lines = ["site,age,sex"]
        for site in range(8):
            ages = rng.normal(80 if site in moved else 60, 10, 300)
            lines += [f"s{site},{age:.1f},{rng.choice(['f', 'm'])}" for age in ages]
        Path(f"{folder}.csv").write_text("\n".join(lines))
        told("sketch", f"{folder}.csv", "--by", "site", "--spec", "s.toml", "-o", folder)
    told("profile", "new", "--against", "old", "-o", "h.html")
    html = Path("h.html").read_text("utf-8")
    assert "age of s4" in html and "higher by at least 20" in html
    assert ": 0% here," in html  # bins of young people
    numbers = json.loads(Path("h.json").read_text("utf-8"))
    (changed,) = [c for c in numbers["changes"] if c["changed"]]
    assert changed["client"] == "s4"
    assert [gap["column"] for gap in changed["columns"]] == ["age"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["site-0.sketch"], "a profile needs at least two sketches, not 1"),
        (["site-0.sketch", "none.sketch"], "none.sketch: cannot be read"),
        (["site-0.sketch", "empty.sketch"], "two sketches of two records or more"),
        (["site-0.sketch", "site-1.sketch", "-o", "h.json"], "h.json: name the page"),
    ],
)
def test_mistakes(sites, arguments, message, fails):
    RaceSketch.load("site-0.sketch").empty_like().save("empty.sketch")
    assert message in fails("profile", *arguments)
