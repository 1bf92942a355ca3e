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
