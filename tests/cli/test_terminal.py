"""Names that come from data cannot command the terminal, in any command that prints them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedcohort.cli import invoke
from fedcohort.sketch.race import RaceSketch

HOSTILE = "[bold]eve\x1b[2J\x9b1m"


@pytest.fixture
def sites(tmp_path):
    """Sketches whose clients have hostile names, by an index."""
    index = {}
    for i in range(4):
        made = RaceSketch.srp(dim=3, rows=20, bits=3)
        made.add(np.random.default_rng(i).normal(size=(50, 3)) + i)
        made.origin = {"spec": HOSTILE}
        made.save(tmp_path / f"{i}.sketch")
        index[f"{i}.sketch"] = f"{HOSTILE}{i}"
    (tmp_path / "clients.json").write_text(json.dumps(index))
    return tmp_path


def harmless(capsys, arguments, code=0):
    assert invoke(arguments) == code
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert not [c for c in text if not c.isprintable() and c != "\n"]
    return shown.out + shown.err


def test_tables_of_sketches(sites, capsys):
    assert "eve" in harmless(capsys, ["distance", str(sites)])
    assert "eve" in harmless(capsys, ["profile", str(sites), "-o", str(sites / "page.html")])
    harmless(capsys, ["inspect", str(sites / "0.sketch")])
    harmless(capsys, ["plan", str(sites), "-k", "2"])


def test_columns_and_clients_of_a_table(tmp_path, capsys):
    np.savez(tmp_path / "x.npz", **{"a\x1b[2J": np.eye(4), "who": np.array([HOSTILE, "b"] * 2)})
    data, out = str(tmp_path / "x.npz"), str(tmp_path / "out")
    harmless(capsys, ["sketch", data, "--columns", "a\x1b[2J", "--by", "who", "-o", out])
    assert "eve" in harmless(capsys, ["distance", out])
    harmless(capsys, ["sketch", data, "--columns", "\x1b[2J", "-o", out + "2"], code=2)
