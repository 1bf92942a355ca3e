from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.exceptions import ConfigError
from fedcohort.personalize import Record, Search
from fedcohort.personalize.limits import (
    NO_LIMIT,
    Limit,
    calibrated,
    distance_limit,
    gains_limit,
    leave_one_out,
    spread_limit,
    store_limit,
    stored_limit,
)


def test_the_spread_limit_is_the_quantile_or_a_standard_error():
    limit = spread_limit(np.arange(101.0))
    assert limit.squared == 95.0
    assert limit.squared_for(10.0) == 95.0
    assert limit.squared_for(300.0) == 300.0


def test_limits_that_a_person_sets_know_no_tolerance():
    assert distance_limit(3.0).squared_for(1e6) == 9.0
    assert NO_LIMIT.squared_for(1.0) == inf
    for bad in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="max_distance"):
            distance_limit(bad)


@given(st.lists(st.tuples(st.floats(-1, 10), st.integers(-5, 5)), min_size=1, max_size=8))
def test_the_gains_limit_serves_the_warm_clients_best(pairs):
    """No other limit, tried one by one, would have gained more."""
    squares = np.array([p[0] for p in pairs])
    gains = np.array([p[1] for p in pairs], float)
    if len(set(squares.tolist())) < len(squares):
        return  # ties cannot be parted by any limit
    limit = gains_limit(squares, gains)
    best = max(gains[squares <= t].sum() for t in [-inf, *squares])
    assert gains[squares <= limit.squared].sum() == pytest.approx(best)
    assert limit.squared <= squares.max()  # nothing is known beyond


def test_gains_must_fit():
    for gains in ([1.0], [1.0, float("nan")]):
        with pytest.raises(ConfigError, match="one finite gain"):
            gains_limit([1.0, 2.0], gains)


def test_leave_one_out_finds_each_clients_nearest_other(registry, make):
    angles = {"a": 0.0, "b": 0.05, "c": 2.0, "d": 2.05}
    registry.add_many(
        Record(c, make(angle, i, 2000), reference=c) for i, (c, angle) in enumerate(angles.items())
    )
    found = leave_one_out(Search(registry))
    assert {c: near.client for c, near in found.items()} == {
        "a": "b", "b": "a", "c": "d", "d": "c",
    }  # fmt: skip
    assert len(leave_one_out(Search(registry), most=2)) == 2


def test_calibration_by_gains_separates_near_from_far(registry, make):
    """Pairs near and far; only near neighbors helped, so the limit lies between."""
    angles = {"a": 0.0, "b": 0.1, "c": 2.0, "d": 3.2}
    registry.add_many(
        Record(c, make(angle, i, 2000), reference=c) for i, (c, angle) in enumerate(angles.items())
    )
    search = Search(registry)
    nearest = leave_one_out(search)
    limit = calibrated(search, {"a": 0.2, "b": 0.1, "c": -0.3, "d": -0.2})
    assert nearest["b"].squared < limit.squared < nearest["c"].squared
    assert limit.errors == 0
    with pytest.raises(ConfigError, match="no gain belongs"):
        calibrated(search, {"nobody": 1.0})


def test_limits_are_stored(registry, make):
    assert stored_limit(registry) is None
    for limit in (Limit(2.5, 0.5), Limit(-inf), NO_LIMIT):
        store_limit(registry, limit)
        assert stored_limit(registry) == limit


def test_one_client_gives_no_limit(registry, make):
    registry.add("ann", make(0.0), reference="x")
    assert calibrated(Search(registry)) == NO_LIMIT
