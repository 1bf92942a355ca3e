"""Who runs a suite repeats the settings behind the published numbers."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from fedcohort.experiments import config
from fedcohort.experiments.suite import Script, read_suite

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from docs_tables import results


@pytest.mark.parametrize("suite", ["selection", "papers", "skip", "coldstart"])
def test_published_parts_have_the_settings_of_their_suite(suite):
    """A field that came later has its default, which is what the older code did.

    Parts that the suite no longer has stay in their file.
    """
    now = {(part.setting, part.variant): plain(part.experiment) for part in read_suite(suite)}
    published = results.result(f"benchmark-{suite}.json")["parts"]
    published = [part for part in published if (part["setting"], part["variant"]) in now]
    assert len(published) > len(now) / 2
    changed = [
        (part["setting"], part["variant"])
        for part in published
        if now[part["setting"], part["variant"]] != (part["experiment"] | {"device": "cpu"})
        and now[part["setting"], part["variant"]] != plain(config.parse(part["experiment"]))
    ]
    assert changed == []


def plain(run):
    values = asdict(run) if isinstance(run, Script) else config.dump(run)
    return json.loads(json.dumps(values)) | {"device": "cpu"}


def made(commit, source, setting):
    parts = [{"setting": setting, "variant": "uniform", "made_by": 0}]
    return {"commit": commit, "provenance": [{"source": source}], "parts": parts}


def test_parts_that_joined_later_know_who_made_them():
    both = results.joined(made("a", "1", "first"), made("b", "2", "second"))
    assert [part["made_by"] for part in both["parts"]] == [0, 1]
    assert [origin["source"] for origin in both["provenance"]] == ["1", "2"]
    assert both["commits"] == ["a", "b"]


def test_a_setting_is_of_one_code():
    results.joined(made("a", "1", "first"), made("b", "1", "first"))
    with pytest.raises(ValueError, match="parts of 'first' were made by different code"):
        results.joined(made("a", "1", "first"), made("b", "2", "first"))
