"""Who runs a suite repeats the settings behind the published numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedcohort.experiments import benchmark
from fedcohort.experiments.suite import read_suite

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from docs_tables import results


@pytest.mark.parametrize("suite", ["selection", "papers", "skip", "coldstart"])
def test_published_parts_have_the_settings_of_their_suite(suite):
    now = {(p.setting, p.variant): benchmark._plain(p.experiment) for p in read_suite(suite)}
    published = results.result(f"benchmark-{suite}.json")["parts"]
    assert len(published) > 4
    changed = [
        (part["setting"], part["variant"])
        for part in published
        if now.get((part["setting"], part["variant"])) != part["experiment"]
    ]
    assert changed == []


def made(commit, source, setting):
    parts = [{"setting": setting, "variant": "uniform", "made_by": 0}]
    return {"suite": "s", "commit": commit, "provenance": [{"source": source}], "parts": parts}


def test_parts_that_joined_later_know_who_made_them():
    both = results.joined(made("a", "1", "first"), made("a", "1", "second"))
    assert [part["made_by"] for part in both["parts"]] == [0, 1]
    assert len(both["provenance"]) == 2


@pytest.mark.parametrize("later", [made("b", "1", "second"), made("a", "2", "second")])
def test_parts_of_other_code_do_not_join(later):
    with pytest.raises(ValueError, match="different code"):
        results.joined(made("a", "1", "first"), later)
