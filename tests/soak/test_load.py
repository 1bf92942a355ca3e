"""A small version of the soak of load; the driver finds what grows."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import load

SMALL = ["policy sketch-match", "policy oort", *(c for c in load.cases() if c.startswith("gate"))]


@pytest.mark.parametrize("case", SMALL)
def test_a_session_stays_right_under_load(case):
    """Every policy meets the same contract in tests/policies; here are many clients."""
    found = load.soak(case, clients=3000, rounds=16, until=time.monotonic() + 60)
    assert found["error"] is None
    assert found["rounds"] == 16


def test_growth_would_be_seen():
    flat = load.judged([0.1] * 40, [100.0] * 40)
    assert flat["flat"] is True
    assert load.judged([0.01 * i for i in range(40)], [100.0] * 40)["flat"] is False
    growing = [100.0 + 10 * i for i in range(40)]
    assert load.judged([0.1] * 40, growing)["flat"] is False
    assert load.judged([0.1] * 80, growing + [500.0] * 40, warm_up=40)["flat"] is True


def test_a_wrong_cohort_would_be_seen(monkeypatch):
    policy = load.POLICIES["uniform"]

    class Twice(policy):
        def select(self, round, signals, rng):
            return load.Session.begin  # not a selection at all

    monkeypatch.setitem(load.POLICIES, "uniform", Twice)
    assert load.soak("policy uniform", clients=50, rounds=2, until=time.monotonic() + 10)["error"]
