from __future__ import annotations

import pytest

from fedcohort.datasets import DATASETS
from fedcohort.exceptions import ConfigError
from fedcohort.experiments.compare import read
from fedcohort.experiments.config import dump, papers, parse
from fedcohort.experiments.run import check
from fedcohort.partition import PARTITIONS
from fedcohort.simulate import MODELS
from fedcohort.simulate.local import Schedule

TOML = """
rounds = 7
cohort_size = 3
seeds = [4, 5]
target = 0.5
[data]
dataset = "digits"
partition = "dirichlet-per-client"
clients = 12
options = {alpha = 0.3}
[local]
lr = 1
schedule = {gamma = 0.5, milestones = [2, 4]}
[policy]
name = "power-of-choice"
options = {d = 6}
"""


def test_a_file_becomes_an_experiment(tmp_path):
    path = tmp_path / "exp.toml"
    path.write_text(TOML)
    experiment = read(path)
    assert (experiment.seeds, experiment.data.options) == ((4, 5), {"alpha": 0.3})
    assert (experiment.local.lr, experiment.local.schedule) == (1.0, Schedule(0.5, (2, 4)))
    assert experiment.policy.options == {"d": 6}
    assert parse(dump(experiment)) == experiment


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"round": 3}, "unknown key 'round'; did you mean 'rounds'"),
        ({"data": {"alpha": 1}}, r"unknown key 'alpha' in \[data\]"),
        ({"rounds": "many"}, "rounds='many' must be a whole number"),
        ({"seeds": [1, "x"]}, r"seeds\[1\]='x' must be a whole number"),
        ({"seeds": [1, 1]}, "different"),
        ({"local": 3}, "local=3 must be a table"),
        ({"data": {"options": 3}}, "data.options=3 must be a table"),
        ({"target": 70}, "target=70"),
        ({"cohort_size": 61}, "cohort_size=61"),
        ({"policy": "oort:alpha"}, "'alpha' must be written as key=value"),
        ({"local": {"schedule": {"gama": 1}}}, r"unknown key 'gama' in \[local.schedule\]"),
        ({"local": {"lr": float("nan")}}, "local.lr=nan must be a finite number"),
    ],
)
def test_errors_name_the_key(values, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(values)


@pytest.mark.parametrize("name", sorted(papers()))
def test_settings_of_papers_can_be_built(name):
    experiment = read(f"paper:{name}")
    check(experiment)
    assert experiment.data.dataset in DATASETS
    assert experiment.data.partition in PARTITIONS
    assert experiment.model.name in MODELS
    with pytest.raises(ConfigError, match=r"unknown paper setting 'bogus'\. Known: fedacs-high"):
        read("paper:bogus")
