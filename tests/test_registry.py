"""One lookup of names: one error message, and entry points of installed packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flwr.serverapp.strategy import FedAvg

import fedcohort
from fedcohort.datasets import federate, load
from fedcohort.exceptions import ConfigError
from fedcohort.flower import CohortStrategy
from fedcohort.gates import GATES
from fedcohort.options import parse_named, parse_options
from fedcohort.policies import POLICIES
from fedcohort.registry import GROUPS, load_installed, lookup, make
from fedcohort.session import Session
from fedcohort.signals.catalog import Needs
from fedcohort.simulate.models import build
from fedcohort.sketch.hashing import family_from


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: lookup("policy", "Power_of_choise", POLICIES), "did you mean 'power-of-choice'?"),
        (lambda: lookup("gate", "cmlf", GATES), "unknown gate 'cmlf'; did you mean 'cmfl'?"),
        (lambda: load("mnits"), "unknown data set 'mnits'; did you mean 'mnist'?"),
        (lambda: build("lenet", (1, 28, 28), 10), "unknown model 'lenet'; did you mean 'lenet5'?"),
        (lambda: federate(load(), "shard", 3), "unknown partition 'shard'; did you mean 'shards'?"),
        (lambda: Needs(reply=frozenset({"los"})), "unknown signal 'los'; did you mean 'loss'?"),
        (lambda: family_from({"name": "spr"}), "unknown hash family 'spr'; did you mean 'srp'?"),
        (lambda: lookup("policy", ["oort"], POLICIES), "unknown policy ['oort']"),  # type: ignore[arg-type]
    ],
)
def test_unknown_name_suggests_the_nearest_and_lists_all(ask, message):
    with pytest.raises(ConfigError) as error:
        ask()
    assert message in str(error.value)
    assert " Known: " in str(error.value)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package that offers one policy, and one that cannot be imported."""
    (tmp_path / "fc_plugin.py").write_text(
        "from fedcohort.policies import Uniform\nclass Mine(Uniform):\n    '''Mine.'''\n"
    )
    info = tmp_path / "fc_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fc-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUPS['policy']}]\nmine = fc_plugin:Mine\nbroken = fc_plugin:Absent\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return info


def test_entry_point_is_found_by_its_name(package: Path):
    known = dict(POLICIES)
    assert lookup("policy", "mine", known).__name__ == "Mine"
    assert known["mine"] is lookup("policy", "mine", known)
    with pytest.raises(ConfigError, match=r"did you mean 'mine'\?.*uniform.*mine, broken"):
        lookup("policy", "mime", POLICIES)


def test_entry_point_that_cannot_be_imported_is_named(package: Path):
    with pytest.raises(ConfigError, match=r"'broken' of fc-plugin cannot be imported.*Absent"):
        lookup("policy", "broken", POLICIES)
    with pytest.raises(ConfigError, match="broken"):
        load_installed("policy", dict(POLICIES))


def test_options_hold_nested_lists_and_keep_brackets_that_do_not_close():
    nested = parse_options('a=[[1,2],[3]],b={"x":{"y":1},"z":2},c=1')
    assert nested == {"a": [[1, 2], [3]], "b": {"x": {"y": 1}, "z": 2}, "c": 1}
    assert parse_options("a=[1,2") == {"a": "[1,2"}
    assert parse_options("a=1],b=2") == {"a": "1]", "b": 2}
    many = "[" * 100_000  # once took time with the square of their number
    assert parse_options(f"a={many}") == {"a": many}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [("race-softmax:rows=2.5", "rows=2.5"), ("oort:alpha=x", "alpha='x'"), ("oort:d=1", "'d'")],
)
def test_options_are_checked_alike_wherever_a_policy_is_named(spec, reason):
    """A session, a strategy and the registry once had three rules."""
    name, options = parse_named(spec)
    ways = [
        lambda: Session(spec, cohort_size=2, seed=0),
        lambda: make("policy", spec, POLICIES),
        lambda: CohortStrategy(FedAvg(), spec, cohort_size=2),
    ]
    for way in ways:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            way()
    with pytest.raises((TypeError, ConfigError)):
        POLICIES[name](**options)


def test_a_class_in_place_of_an_object_is_refused():
    with pytest.raises(ConfigError, match=r"policy Oort is a class; give an object: Oort\(\)"):
        Session(POLICIES["oort"], cohort_size=2, seed=0)


def test_a_whole_number_and_the_same_float_are_one_option():
    """A checkpoint of ``epsilon=1`` loads into ``epsilon=1.0``."""
    first = Session("sketch-match:epsilon=1", cohort_size=2, seed=0)
    second = Session(POLICIES["sketch-match"](epsilon=1.0), cohort_size=2, seed=0)
    second.load_state_dict(first.state_dict())
    assert repr(first.policy) == repr(second.policy) == "SketchMatch(epsilon=1.0)"


def test_every_public_name_can_be_loaded_and_simulate_is_package_and_function():
    assert all(getattr(fedcohort, name) is not None for name in fedcohort.__all__)
    assert callable(fedcohort.simulate)
    assert fedcohort.simulate.simulate is fedcohort.simulate.simulation.simulate
