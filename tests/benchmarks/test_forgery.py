"""Lies are what they are meant to be: none is dropped before it is tried."""

from __future__ import annotations

import pytest
from forgery import LIES, needed, share

from fedcohort.policies import POLICIES

TOLD_TO = {signal: name for name in sorted(POLICIES) for signal in needed(POLICIES[name]())}


@pytest.mark.parametrize("signal", sorted(LIES.keys() & TOLD_TO.keys()))
def test_no_lie_is_dropped_before_it_is_tried(signal):
    """`share` fails where the session drops a lie, as it drops a number in place of a vector."""
    for lie in LIES[signal].values():
        assert 0 <= share(POLICIES[TOLD_TO[signal]], 2, {signal: lie}, rounds=2, seed=0) <= 1
    with pytest.raises(AssertionError, match="dropped"):
        share(POLICIES[TOLD_TO[signal]], 99, {signal: lambda *_: "nonsense"}, rounds=2, seed=0)
