"""The script that times policies runs, at a small size."""

from __future__ import annotations

import pytest
import selection

from fedcohort.policies import POLICIES


@pytest.mark.parametrize("name", selection.POLICIES)
def test_selection_is_timed(name):
    timed = selection.time_policy(name, clients=60, cohort=6, rounds=12)
    assert timed["clients"] == 60
    assert 0 < timed["median_round_s"] <= timed["slowest_later_round_s"]


def test_every_policy_is_timed():
    assert {name.partition(" (")[0] for name in selection.POLICIES} == set(POLICIES)
