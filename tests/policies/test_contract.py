"""Every registered policy passes every check of the contract; broken policies fail it."""

from __future__ import annotations

from typing import get_type_hints

import numpy as np
import pytest

from fedcohort.gates import GATES
from fedcohort.options import LARGEST, SMALLEST
from fedcohort.policies import POLICIES, Policy, SketchMatch
from fedcohort.registry import make
from fedcohort.rounds import Selection
from fedcohort.session import Session
from fedcohort.signals.catalog import Needs
from fedcohort.testing import CHECKS, check_policy, drive


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_contract(name, check):
    check(POLICIES[name])


VARIANTS = [
    "active-fl:everybody=true",
    "race-softmax:center=pooled",
    "sketch-match:pool=less-used,time=true",
    "sketch-match:time=ask,turns=2",
    "sketch-match:pool=all,turns=1,time=true",
    "sketch-match:refresh=2,turns=2",
    "sketch-match:refresh=3,embed=model",
    "fedacs:reward=insight,pool_share=0.05",
    "fedacs:reward=gradient-sketch,memory=0.9",
    "sketch-to-select:interval=1,compare=models",
    "sketch-to-select:interval=3,fresh=false",
    "fedcor:warmup=2,interval=3,fit=gradient",
    *(f"kdpp:{how}" for how in ("signal=race_sketch", "signal=insight", "signal=model_sketch")),
    "kdpp:kernel=features",
    "divfl:signal=update_sketch,weights=coverage",
    "clustered-sampling:by=similarity",
    "clustered-sampling:by=similarity,signal=race_sketch",
    "dc-fedavg:target=balanced,added=3",
    "delta:local_variance=0.5",
]


@pytest.mark.parametrize("spec", VARIANTS)
def test_variants_keep_the_contract(spec):
    check_policy(lambda: make("policy", spec, POLICIES))


def test_cohorts_near_a_target_keep_the_contract():
    check_policy(lambda: SketchMatch(target=np.full((10, 64), 1 / 64), time=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clustered-sampling", {"signal": "loss"}),
        ("fedacs", {"pool_share": 0}),
        ("fed-cbs", {"epsilon": 0.0005}),
        ("fedcor", {"interval": 1}),
        ("kdpp", {"signal": "loss"}),
        ("power-of-choice", {"d": 2.5}),
        ("sketch-match", {"pool": "half"}),
    ],
)
def test_wrong_options_are_named(name, options):
    (value,), kind = options.values(), POLICIES[name]
    culprit = kind.__name__
    with pytest.raises(ValueError, match=rf"{culprit}: .*{value!r}|{value!r} of {culprit}"):
        kind(**options)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_names_are_kebab_case_and_say_when(name):
    assert name == name.lower().replace("_", "-")
    assert POLICIES[name].name == name
    assert POLICIES[name].when
    lines = [line.strip() for line in POLICIES[name].__doc__.splitlines()]
    for key in ("Source:", "Checked:"):  # the page of all policies shows them
        assert any(line.startswith(key) for line in lines)


CONFIGURABLE = {**POLICIES, **GATES}
FLOATS = [
    (name, option)
    for name in sorted(CONFIGURABLE)
    for option, hint in get_type_hints(CONFIGURABLE[name].__init__).items()
    if "float" in str(hint)
]


@pytest.mark.parametrize(("name", "option"), [(n, o) for n, o in FLOATS if n in POLICIES])
def test_float_options_of_any_allowed_size_are_refused_or_work_without_a_warning(name, option):
    options = {"warmup": 2, "interval": 2} if name == "fedcor" else {}
    with pytest.raises(ValueError, match=f"{option}="):
        POLICIES[name](**options, **{option: -SMALLEST})
    for value in (SMALLEST, LARGEST):
        refusal, policy = "", None
        try:
            policy = POLICIES[name](**options, **{option: value})
        except ValueError as error:
            refusal = str(error)
        if policy is None:
            assert f"{option}=" in refusal
            continue
        session = Session(policy, cohort_size=5, seed=0)
        for _ in range(8):
            drive(session, [f"client-{i:03d}" for i in range(12)])  # pytest makes warnings errors


@pytest.mark.parametrize("name", ["active-fl", "oort"])
def test_a_client_that_finishes_and_never_reports_stays_below_its_share(name):
    """The fair share is .25; a client that was never heard of would be in every cohort."""
    session = Session(name, cohort_size=5, seed=1)
    ids = [f"client-{i:03d}" for i in range(20)]
    liar = ids[4]
    found = [drive(session, ids, spoil=lambda c, v: None if c == liar else v) for _ in range(90)]
    assert np.mean([liar in selection.clients for selection in found]) < 0.25


class Impure(Policy):
    calls = 0

    def select(self, round, signals, rng):
        Impure.calls += 1
        return Selection((round.available[Impure.calls % len(round.available)],))


class Forgetful(Policy):
    """Keeps what it learns outside of its state, so a restored one differs."""

    def __init__(self):
        self.seen = 0

    def select(self, round, signals, rng):
        self.seen += 1
        return Selection((round.available[self.seen % len(round.available)],))


class Gullible(Policy):
    """Trusts sizes as they come; a size of 2^40 squared and summed is still finite, its exp not."""

    needs = Needs(profile=frozenset({"num_examples"}))

    def select(self, round, signals, rng):
        positions, sizes = signals.read("num_examples", round.available)
        if not len(positions):
            return Selection(())
        with np.errstate(over="ignore"):
            scores = np.exp(sizes.astype(float))
        chosen = [round.available[positions[i]] for i in np.argsort(-scores)[: round.size]]
        return Selection(tuple(chosen), scores=dict(zip(chosen, -np.sort(-scores), strict=False)))


def test_a_policy_that_passes_raises_no_alarm(caplog):
    check_policy(POLICIES["power-of-choice"])
    assert caplog.records == []


@pytest.mark.parametrize("policy", [Impure, Forgetful, Gullible])
def test_a_broken_policy_fails_the_contract(policy):
    with pytest.raises((AssertionError, RuntimeError)):
        check_policy(policy)
