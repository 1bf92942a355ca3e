"""Who runs a suite repeats the settings behind the published numbers."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from docs_tables import results
from suite import Script, published_experiment, read_suite

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


def made(commit, source, setting, *variants, seeds=(1000,), **changes):
    """A result with one setting, whose rows are all alike."""
    row = {"gemd": 0.5, "participation_entropy": 1.0, "bytes_up": 1, "bytes_down": 1}
    row |= {"curve": [0.5], "accuracy": 0.5} | changes
    parts = [
        {
            "setting": setting,
            "variant": variant,
            "made_by": 0,
            "experiment": {"rounds": 5, "seeds": list(seeds)},
            "seeds": [{"seed": seed, **row} for seed in seeds],
        }
        for variant in variants or ("uniform",)
    ]
    return {"commit": commit, "provenance": [{"source": source}], "parts": parts}


def test_parts_that_joined_later_know_who_made_them():
    both = results.joined(made("a", "1", "first"), made("b", "2", "second"))
    assert [part["made_by"] for part in both["parts"]] == [0, 1]
    assert [origin["source"] for origin in both["provenance"]] == ["1", "2"]
    assert both["commits"] == ["a", "b"]


def test_a_setting_is_of_one_code_or_its_baseline_was_repeated():
    held = made("a", "1", "first", seeds=(1000, 1001))
    results.joined(held, made("b", "1", "first", "other"))
    with pytest.raises(ValueError, match="parts of 'first' were made by different code"):
        results.joined(held, made("b", "2", "first", "other"))
    again = made("b", "2", "first", "uniform", "other", seeds=(1000, 1001))
    both = results.joined(held, again)["parts"]
    assert [(part["variant"], part["made_by"]) for part in both] == [("uniform", 0), ("other", 1)]
    third = results.joined(results.joined(held, again), made("a", "1", "first", "more"))
    assert [part["variant"] for part in third["parts"]] == ["uniform", "other", "more"]
    unstable = made("b", "2", "first", "uniform", "other", seeds=(1000, 1001), curve=[0.9])
    assert len(results.joined(held, unstable)["parts"]) == 2  # it ends where the published one does
    two = {"seeds": (1000, 1001)}
    changes = (
        {"gemd": 0.6},
        {"bytes_up": 2},
        {"curve": [0.9], "accuracy": 0.9},
        {"seeds": (1000,)},
    )
    for wrong in (two | change for change in changes):
        with pytest.raises(ValueError, match="another baseline"):
            results.joined(held, made("b", "2", "first", "uniform", "other", **wrong))


def test_seeds_that_were_run_later_join_their_part():
    first = made("a", "1", "first", seeds=(1000, 1002))
    (part,) = results.joined(first, made("b", "1", "first", seeds=(1001,)))["parts"]
    assert [row["seed"] for row in part["seeds"]] == [1000, 1001, 1002]
    assert part["experiment"] == {"rounds": 5, "seeds": [1000, 1001, 1002]}
    with pytest.raises(ValueError, match="run twice"):
        results.joined(first, made("b", "1", "first", seeds=(1002,)))
    other = made("b", "1", "first", seeds=(1001,))
    other["parts"][0]["experiment"]["rounds"] = 6
    with pytest.raises(ValueError, match="run twice"):
        results.joined(first, other)


def test_what_was_not_run_is_listed(monkeypatch):
    parts = read_suite("coldstart")
    held = [
        {
            "setting": part.setting,
            "variant": part.variant,
            "experiment": {"seeds": list(part.experiment.seeds[:2])},
        }
        for part in parts[:1]
    ]
    monkeypatch.setattr(results, "result", lambda file: {"parts": held})
    text = results.left_out("coldstart", "any.json")
    first, *others = parts
    assert text.startswith(f"1 of the {len(parts)} parts of the suite have results. With seeds ")
    assert f"1000 and 1001 only: {first.setting}: {first.variant}. Not run:" in text
    assert all(part.variant in text.partition("Not run:")[2] for part in others)


def test_presets_are_settings_of_the_suites():
    """One source for both: each preset is a part, apart from rounds, seeds and target."""

    def shown(experiment):
        free = ("rounds", "seeds", "target", "device")
        return {k: v for k, v in plain(experiment).items() if k not in free}

    every = [p.experiment for s in ("papers", "skip") for p in read_suite(s)]
    parts = [shown(e) for e in every if not isinstance(e, Script)]
    for name in config.papers():
        preset = shown(config.read(f"paper:{name}"))
        if name == "race-mnist":
            assert preset["policy"]["options"].pop("everybody")  # came after the suite was run
        assert preset in parts, name
