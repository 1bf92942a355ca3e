from __future__ import annotations

import json

import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.experiments.compare import expand, run_several
from fedcohort.experiments.run import run


def test_every_combination_once_and_the_last_key_fastest():
    table = {"local.lr": [0.1, 0.2], "seeds": [[0], [1, 2]], "data": {"options.per_client": [1, 2]}}
    settings = expand({"rounds": 3, "sweep": table})
    seen = [(e.local.lr, e.seeds, e.data.options["per_client"]) for _, e in settings]
    assert seen == [(lr, s, p) for lr in (0.1, 0.2) for s in ((0,), (1, 2)) for p in (1, 2)]
    assert all(e.rounds == 3 for _, e in settings)
    assert len({name for name, _ in settings}) == 8
    assert all(len(name) < 120 and "/" not in name and "[" not in name for name, _ in settings)


def test_names_stay_apart_and_stay_the_same_when_values_are_added():
    policies = [{"name": "power-of-choice", "options": {"d": d}} for d in (5, 6, 7)]
    few = expand({"sweep": {"policy": policies[:2]}})
    more = expand({"sweep": {"policy": policies}})
    assert [s.name for s in few] == [s.name for s in more][:2]
    assert len({s.name for s in more}) == 3
    assert [s.experiment.policy.options["d"] for s in more] == [5, 6, 7]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sweep": {}}, "must be a table of lists"),
        ({"sweep": {"local.lr": 0.1}}, r"local.lr = 0.1 must be a list"),
        ({"sweep": {"local.lr": []}}, r"local.lr = \[\] must be a list"),
        ({"sweep": {"local.lr": [0.1, 0.1]}}, "local.lr .* give each value once"),
        ({"sweep": {"local.rate": [0.1]}}, r"local.rate=0.1: unknown key 'rate' in \[local\]"),
        ({"sweep": {"rounds.x": [1]}, "rounds": 3}, "rounds.x: rounds = 3 is not a table"),
        ({"sweep": {"policy.name": ["nobody"]}}, "policy.name=nobody: unknown policy 'nobody'"),
        (
            {"policy": "uniform", "sweep": {"policy.options.d": [3]}},
            "policy.options.d=3: unknown option 'd' of policy 'uniform'",
        ),
    ],
)
def test_errors_name_the_key(values, message):
    with pytest.raises(ConfigError, match=message):
        expand(values)


def test_a_sweep_equals_its_runs(tmp_path):
    settings = expand({"rounds": 2, "device": "cpu", "sweep": {"policy": ["uniform", "oort"]}})
    seen = []
    results = run_several(settings, tmp_path, on_round=lambda name, _: seen.append(name))
    assert seen == ["policy=uniform"] * 2 + ["policy=oort"] * 2
    for result, (name, experiment) in zip(results, settings, strict=True):
        assert result.policy == name
        assert run(experiment, tmp_path / "alone" / name).histories == result.histories
    assert json.loads((tmp_path / "runs.json").read_text()) == [s.name for s in settings]
    with pytest.raises(ConfigError, match="--resume"):
        run_several(settings, tmp_path)
