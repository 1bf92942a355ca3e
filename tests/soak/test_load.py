"""A small version of the soak of load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import load

SMALL = ["policy sketch-match", "policy oort", *(c for c in load.CASES if c.startswith("gate"))]


@pytest.mark.parametrize("case", SMALL)
def test_a_session_stays_right_under_load(case):
    """Every policy meets the same contract in tests/policies; here are many clients."""
    done = load.soak(case, clients=3000, rounds=16, seconds=60)
    assert (done["error"], done["rounds"]) == (None, 16)
