"""The script that times policies runs, at a small size; the others find what they import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from fedcohort.policies import POLICIES

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import selection


@pytest.mark.parametrize("name", selection.POLICIES)
def test_selection_is_timed(name):
    found = selection.time_policy(name, clients=60, cohort=6, rounds=12)
    assert found["clients"] == 60
    assert 0 < found["median_round_s"] <= found["slowest_later_round_s"]


def test_every_policy_is_timed():
    assert {name.partition(" (")[0] for name in selection.POLICIES} == set(POLICIES)


@pytest.mark.parametrize("name", ["ray_scaling", "registry", "simulation", "sketching"])
def test_other_scripts_find_what_they_import(name):
    assert callable(importlib.import_module(name).main)
