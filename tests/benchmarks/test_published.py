"""Who runs a suite repeats the settings behind the published numbers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from docs_tables import results
from suite import Script, published_experiment, read_suite

from fedcohort.analysis.comparison import Interval
from fedcohort.experiments import config


@pytest.mark.parametrize("suite", ["selection", "papers", "skip", "coldstart"])
def test_published_parts_have_the_settings_of_their_suite(suite):
    """A field that came later has its default, which is what the older code did.

    Parts that the suite no longer has stay in their file. Some were run with the first seeds only.
    """
    parts = {(part.setting, part.variant): part for part in read_suite(suite)}
    published = results.by_name(results.result(f"benchmark-{suite}.json")["parts"])
    published = {name: part["experiment"] for name, part in published.items() if name in parts}
    assert len(published) > len(parts) / 2
    for name, experiment in published.items():
        now = plain(parts[name].first(len(experiment["seeds"])).experiment)
        if now != experiment | {"device": "cpu"}:
            assert now == plain(published_experiment(experiment)), name


def plain(run):
    values = asdict(run) if isinstance(run, Script) else config.dump(run)
    return json.loads(json.dumps(values)) | {"device": "cpu"}


def test_presets_are_settings_of_the_suites():
    """One source for both: each preset is a part, apart from rounds, seeds and target."""

    def shown(experiment):
        free = dict.fromkeys(("rounds", "seeds", "target"))
        return plain(experiment) | free

    parts = [shown(p.experiment) for s in ("papers", "skip") for p in read_suite(s)]
    for name in config.papers():
        preset = shown(config.parse(config.read_values(f"paper:{name}")))
        if name == "race-mnist":
            assert preset["policy"]["options"].pop("everybody")  # came after the suite was run
        assert preset in parts, name


@pytest.mark.parametrize(
    ("interval", "smallest", "verdict"),
    [
        ((1.0, 0.5, 1.5), 0.5, "better"),
        ((-1.0, -1.5, -0.5), 0.5, "worse"),
        ((0.2, 0.1, 0.3), 0.5, "level"),  # not zero, and too small to matter
        ((0.4, 0.1, 0.7), 0.5, "cannot tell"),
        ((1.0, -0.5, 2.5), 0.5, "cannot tell"),
        ((0.2, 0.1, 0.3), 0.0, "better"),
    ],
)
def test_an_effect_must_matter_and_be_beyond_chance(interval, smallest, verdict):
    assert results.judge(Interval(*interval), smallest) == verdict


def test_what_was_not_run_is_grouped(suite, monkeypatch):
    def part(variant, seeds):
        return {"setting": "cohorts of 3", "variant": variant, "experiment": {"seeds": seeds}}

    held = {"parts": [part("uniform", [1000, 1001, 1002]), part("match", [1000, 1002])]}
    monkeypatch.setattr(results, "result", lambda name: held)
    lines = results.left_out(suite, "trial.json").splitlines()
    assert [line for line in lines if line] == [
        "2 of the 4 parts of the suite have results.",
        "With seeds 1000 and 1002 only:",
        "- cohorts of 3: match",
        "Not run:",
        "- cohorts of 3: skip, always",
        "- cohorts of 4: all variants",
    ]


def test_later_results_add_seeds_or_take_the_place_of_earlier_ones(monkeypatch):
    def part(variant, *seeds):
        rows = [{"seed": seed} for seed in seeds]
        about = {"setting": "s", "variant": variant, "made_by": 0}
        return about | {"experiment": {"seeds": list(seeds)}, "seeds": rows}

    def file(source, *parts):
        return {"commit": source, "provenance": [{"source": source}], "parts": list(parts)}

    monkeypatch.setattr(results, "check_baseline", lambda *a: None)
    held = file("old", part("uniform", 1, 2), part("more", 1), part("again", 1, 2))
    later = file("new", part("uniform", 2, 3), part("more", 2, 3), part("again", 1))
    whole = results.by_name(results.joined(held, later)["parts"])
    found = {variant: p["experiment"]["seeds"] for (_, variant), p in whole.items()}
    assert found == {"uniform": [1, 2, 3], "more": [1, 2, 3], "again": [1]}
    monkeypatch.undo()
    with pytest.raises(ValueError, match="different code"):
        results.joined(held, file("new", part("more", 4)))
