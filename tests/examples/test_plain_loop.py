"""The example that needs no framework."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_loop.py"


def test_a_loop_of_ones_own_learns_and_counts(capsys):
    session, accuracy = runpy.run_path(str(EXAMPLE))["main"](rounds=30)
    assert accuracy > 0.85  # seeded throughout; chance is 0.1
    assert session.round_number == 30
    up = session.ledger.by_kind("up")
    assert up == {"num_examples": 20 * 8, "loss": 30 * 10 * 8, "model": 30 * 5 * 65 * 10 * 8}
    assert f"accuracy {accuracy:.3f}" in capsys.readouterr().out
