"""The script that times policies runs, at a small size."""

from __future__ import annotations

import pytest
import selection


@pytest.mark.parametrize("name", selection.NAMES)
def test_selection_is_timed(name):
    timed = selection.time_policy(name, clients=60, cohort=6, rounds=12)
    assert timed["clients"] == 60
    assert 0 < timed["median_round_s"] <= timed["slowest_later_round_s"]
