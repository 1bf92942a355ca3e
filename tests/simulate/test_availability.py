from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import ConfigError
from fedcohort.rounds import stream
from fedcohort.simulate.clock import HOURS, PHONES, Bernoulli, Diurnal, Trace, UniformSubset

CLIENTS = tuple("abcdefgh")


def test_a_subset_has_its_size():
    there = UniformSubset(3).available(0, CLIENTS, stream(0))
    assert len(set(there)) == 3
    assert set(there) <= set(CLIENTS)
    assert len(UniformSubset(30).available(0, CLIENTS, stream(0))) == 8


def test_clients_are_there_with_their_probability():
    draws = [Bernoulli(0.25).available(i, CLIENTS, stream(0, i)) for i in range(2000)]
    # Standard deviation 19.4; a round without anybody, one in ten, is drawn again.
    assert abs(sum("b" in there for there in draws) - 2000 * 0.25 / (1 - 0.75**8)) < 100


def test_somebody_is_always_there():
    assert all(Bernoulli(0.05).available(i, CLIENTS, stream(0, i)) for i in range(50))
    with pytest.raises(ConfigError, match="no client was available"):
        Bernoulli(0.0).available(0, CLIENTS, stream(0))


def test_a_trace_holds_until_the_next_entry(tmp_path):
    (tmp_path / "trace.csv").write_text("round,client\n1,a\n1,b\n4,c\n4,stranger\n")
    trace = Trace.read(tmp_path / "trace.csv")
    rounds = [trace.available(i, CLIENTS, stream(0)) for i in (0, 2, 3, 9)]
    assert rounds == [["a", "b"], ["a", "b"], ["c"], ["c"]]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("round,client\n", "start with round 1"),
        ("round,client\n2,a\n", "start with round 1"),
        ("round\n1\n", "must have the columns round,client"),
        ("round,client\n-1,a\n", "line 2: round='-1'"),
        ("round,client\n1\n", "line 2: client"),
    ],
)
def test_bad_traces_are_refused(tmp_path, content, complaint):
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        Trace.read(path)
    with pytest.raises(ConfigError, match="missing"):
        Trace.read(tmp_path / "missing")


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
