from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import stream
from fedcohort.simulate.availability import (
    Always,
    Bernoulli,
    Durations,
    Trace,
    UniformSubset,
    dropouts,
)

CLIENTS = tuple("abcdefgh")


def test_always_returns_the_very_same_tuple():
    assert Always().available(3, CLIENTS, stream(0)) is CLIENTS


def test_a_subset_has_its_size():
    there = UniformSubset(3).available(0, CLIENTS, stream(0))
    assert len(set(there)) == 3
    assert set(there) <= set(CLIENTS)
    assert len(UniformSubset(30).available(0, CLIENTS, stream(0))) == 8


def test_each_client_has_its_own_probability():
    chances = dict.fromkeys(CLIENTS, 0.0) | {"a": 1.0, "b": 0.25}
    draws = [Bernoulli(chances).available(i, CLIENTS, stream(0, i)) for i in range(2000)]
    assert all("a" in there for there in draws)
    # Binomial(2000, 1/4): standard deviation 19.4.
    assert abs(sum("b" in there for there in draws) - 500) < 100
    assert not any(set(there) - {"a", "b"} for there in draws)


def test_somebody_is_always_there():
    assert all(Bernoulli(0.05).available(i, CLIENTS, stream(0, i)) for i in range(50))
    with pytest.raises(ConfigError, match="no client was available"):
        Bernoulli(0.0).available(0, CLIENTS, stream(0))


def test_a_trace_holds_until_the_next_entry(tmp_path):
    lines = '{"round": 0, "clients": ["a", "b"]}\n{"round": 3, "clients": ["c", "stranger"]}\n'
    (tmp_path / "trace.jsonl").write_text(lines)
    (tmp_path / "trace.csv").write_text("round,client\n0,a\n0,b\n3,c\n3,stranger\n")
    for name in ("trace.jsonl", "trace.csv"):
        trace = Trace.read(tmp_path / name)
        rounds = [trace.available(i, CLIENTS, stream(0)) for i in (0, 2, 3, 9)]
        assert rounds == [["a", "b"], ["a", "b"], ["c"], ["c"]]
    cycle = Trace.read(tmp_path / "trace.csv", cycle=True)
    assert cycle.available(4, CLIENTS, stream(0)) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "start with round 0"),
        ('{"round": 1, "clients": ["a"]}', "start with round 0"),
        ("{", "not a trace"),
        ('{"round": 0, "clients": []}', "no client is available in round 0"),
    ],
)
def test_bad_traces_are_refused(tmp_path, content, complaint):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        Trace.read(path)
    with pytest.raises(ConfigError, match="no such trace"):
        Trace.read(tmp_path / "missing")


def test_dropouts_split_the_cohort_in_order():
    finished, gone = dropouts(CLIENTS, 0.5, stream(0))
    assert sorted(finished + gone) == list(CLIENTS)
    assert finished == sorted(finished)
    assert dropouts(CLIENTS, {c: float(c == "c") for c in CLIENTS}, stream(0))[1] == ["c"]
    with pytest.raises(ConfigError, match="'b'"):
        dropouts(("a", "b"), {"a": 0.5}, stream(0))


def test_durations():
    alike = Durations.draw(CLIENTS, 0, speed=100, bandwidth=1000, sigma=0)
    assert alike.seconds("a", samples=50, bytes_moved=2000) == pytest.approx(0.5 + 2.0)
    drawn = Durations.draw([str(i) for i in range(4001)], 0, speed=100, sigma=0.5)
    speeds = np.log(list(drawn.samples_per_second.values()))
    assert np.median(speeds) == pytest.approx(np.log(100), abs=0.05)  # 5 standard errors: 0.05
    assert speeds.std() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("make", [lambda: UniformSubset(0), lambda: Bernoulli(1.5)])
def test_options_are_checked(make):
    with pytest.raises(ConfigError, match="must"):
        make()
