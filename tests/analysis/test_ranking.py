"""Ranks by skew from a run of FedACS, in the terminal and on the page."""

from __future__ import annotations

import dataclasses

import pytest

from fedcohort import storage
from fedcohort.experiments.compare import DEFAULT_SETTING, compare
from fedcohort.experiments.config import NamedConfig
from fedcohort.experiments.results import read
from fedcohort.report.content import Content, skew_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = dataclasses.replace(DEFAULT_SETTING.data, clients=8)
    setting = dataclasses.replace(
        DEFAULT_SETTING, rounds=12, seeds=(0, 1), device="cpu", cohort_size=4, data=data
    )
    out = tmp_path_factory.mktemp("ranks")
    fedcor = NamedConfig("fedcor", {"warmup": 4})
    compare(setting, [NamedConfig("fedacs"), fedcor, NamedConfig("uniform")], out)
    return out


def test_ranks_follow_the_duels_of_the_chosen_seed(folder, told):
    for seed in (0, 1):
        saved = storage.load(folder / "fedacs" / "checkpoint")["seeds"][seed]
        state = saved["session"]["policy_state"]
        ranks = skew_ranks(folder / "fedacs", seed)
        assert [r.rank for r in ranks] == sorted(r.rank for r in ranks)
        for r in ranks:  # the prior would give all clients the middle, as if no duel were decided
            assert r.low - 0.5 <= r.rank <= r.high + 0.5
            assert r.duels == state["wins"].get(r.client, 0) + state["losses"].get(r.client, 0)
        surest = max(ranks, key=lambda r: state["wins"].get(r.client, 0) / max(r.duels, 1))
        assert surest.rank < len(ranks) / 2
    shown = told("rank", folder / "fedacs", "--seed", "2", "--format", "json")["clients"]
    assert [row["client"] for row in shown] == [r.client for r in ranks]  # of the second seed


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [(["uniform"], "not Uniform"), (["fedacs", "--seed", "3"], "seed 3"), (["none"], "none")],
)
def test_runs_without_ranks_are_named(folder, arguments, culprit, fails):
    assert culprit in fails("rank", folder / arguments[0], *arguments[1:])


def test_the_report_has_ranks_and_says_who_made_rounds_wait(folder):
    shown = Content(read(folder))
    assert list(shown.ranks) == ["fedacs"]
    last = skew_ranks(folder / "fedacs")[-1]
    assert shown.ranks["fedacs"].rows[0][0].text == last.client
    for run in read(folder):
        waited = [row for row in shown.waiting if row["run"] == run.policy]
        records = run.histories[0].rounds
        assert sum(row["rounds"] for row in waited) == len(records)
        total = sum(row["seconds"] for row in waited)
        assert total == pytest.approx(sum(record.seconds for record in records))
