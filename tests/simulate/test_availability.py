from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import stream
from fedcohort.simulate.availability import (
    HOURS,
    PHONES,
    Always,
    Bernoulli,
    Diurnal,
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


def test_phones_are_there_at_night_and_some_hardly_ever():
    names = [f"phone {i}" for i in range(2000)]
    diurnal = Diurnal(rounds_per_day=12, share=0.1)
    chances = np.array([diurnal.chances(i, names) for i in range(24)])
    assert (chances[:12] == chances[12:]).all()  # the next day
    night, noon = chances[2].mean(), chances[6].mean()
    assert night / noon == pytest.approx(HOURS[4] / HOURS[12], rel=0.05)  # few are cut at 1
    # The mean of 2,000 draws from PHONES: standard error 0.1 x (deviation / mean) / sqrt(2000).
    error = 0.1 * np.std(PHONES) / np.mean(PHONES) / 2000**0.5
    even_hours = np.mean(HOURS[::2]) / np.mean(HOURS)
    assert abs(chances.mean() - 0.1 * even_hours) < 5 * error
    low, high = np.percentile(chances[2], (10, 90))
    assert high / low > 20
    there = diurnal.available(2, tuple(names), stream(0))
    assert abs(len(there) - 2000 * night) < 5 * (2000 * night * (1 - night)) ** 0.5


@pytest.mark.parametrize(
    "make", [lambda: UniformSubset(0), lambda: Bernoulli(1.5), lambda: Diurnal(share=0)]
)
def test_options_are_checked(make):
    with pytest.raises(ConfigError, match="must"):
        make()
