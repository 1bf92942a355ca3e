"""The example of docs/personalize.md runs, and finds clients of the newcomer's two classes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "personalize.md"


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S))
    world = {}
    exec(compile(source, str(PAGE), "exec"), world)
    nearest = world["start"].registry.path
    assert (nearest / "registry.sqlite").exists()
    advice, data, parts = world["advice"], world["data"], world["clients"].parts
    assert advice.near
    wanted = sum(w * np.isin(data.y[parts[c]], (3, 8)).mean() for c, w in advice.weights.items())
    assert wanted > 0.7  # 0.2 if clients were taken at random
    assert world["arrays"].keys() == dict(world["model"].named_parameters()).keys()
    assert "Neighbor(client=" in capsys.readouterr().out
