"""Client ids in files follow the rule of sessions, registries and budgets."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.cli import invoke


@pytest.mark.parametrize("client", ["", "a\ud800"])
def test_ids_that_are_not_names_are_refused_before_anything_is_written(tmp_path, capsys, client):
    np.savez(tmp_path / "x.npz", x=np.eye(4), who=np.array(["b", client, "b", client]))
    out = tmp_path / "out"
    command = ["sketch", str(tmp_path / "x.npz"), "--columns", "x", "--by", "who", "-o", str(out)]
    assert invoke(command) == 2
    assert "client id" in capsys.readouterr().err
    assert list(out.glob("*.sketch")) == []


def test_an_empty_client_is_not_an_account_named_by_the_output(tmp_path, capsys):
    """Otherwise every other output file would have a budget of its own."""
    np.save(tmp_path / "x.npy", np.eye(4))
    budget = ["--epsilon", "1", "--budget", str(tmp_path / "b.json"), "--budget-epsilon", "1"]
    command = ["sketch", str(tmp_path / "x.npy"), "--client", "", *budget]
    assert invoke([*command, "-o", str(tmp_path / "a.sketch")]) == 2
    assert "--client" in capsys.readouterr().err
    assert not (tmp_path / "a.sketch").exists()
