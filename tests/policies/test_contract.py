"""Every registered policy passes every check of the contract; broken policies fail it."""

from __future__ import annotations

import pytest

from fedcohort.policies import POLICIES, Policy
from fedcohort.rounds import Selection
from fedcohort.testing import CHECKS, check_policy


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_contract(name, check):
    check(POLICIES[name])


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_names_are_kebab_case_and_say_when(name):
    assert name == name.lower().replace("_", "-")
    assert POLICIES[name].name == name
    assert POLICIES[name].when


class Twice(Policy):
    def select(self, round, signals, rng):
        return Selection(round.available[:1] * min(2, round.size))


class Stranger(Policy):
    def select(self, round, signals, rng):
        return Selection(("nobody",))


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


@pytest.mark.parametrize("policy", [Twice, Stranger, Impure, Forgetful])
def test_a_broken_policy_fails_the_contract(policy):
    with pytest.raises((AssertionError, RuntimeError)):
        check_policy(policy)
