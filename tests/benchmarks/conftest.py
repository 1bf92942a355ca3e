"""The scripts in `benchmarks` import each other by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

SUITE = """
[experiment]
rounds = 3
seeds = [1000, 1001, 1002]
device = "cpu"
data = {clients = 12, partition = "shards", options = {per_client = 2}}

[variants]
uniform = {policy = "uniform"}
match = {policy = {name = "sketch-match", options = {epsilon = 1.0}}}
"skip, always" = {policy = "uniform", gate = {name = "sketch-to-skip", options = {threshold = 9.0}}}

[[settings]]
name = "cohorts of 3"
targets = [0.05, 0.99]
experiment = {cohort_size = 3}

[[settings]]
name = "cohorts of 4"
variants = ["uniform"]
experiment = {cohort_size = 4}
"""


@pytest.fixture(scope="session")
def suite_text():
    return SUITE


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_text(SUITE)
    return str(path)
