"""Who is there, when a round ends and whose updates it uses: exact cases, and rounds by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.datasets import federate, load
from fedcohort.exceptions import ConfigError
from fedcohort.rounds import stream
from fedcohort.simulate import Durations, LocalTraining, Pace, Simulation, build
from fedcohort.simulate.clock import (
    HOURS,
    PHONE_KILOBYTES,
    PHONE_MILLISECONDS,
    PHONES,
    Bernoulli,
    Diurnal,
    Trace,
    UniformSubset,
)
from fedcohort.simulate.local import jobs

NAMES = tuple("abcdefgh")
SECONDS = {"a": 4.0, "b": 1.0, "c": 9.0, "d": 2.0}
SPEED_COLUMNS = "client,samples_per_second,bytes_per_second"


@pytest.mark.parametrize(
    ("pace", "given", "expected"),
    [
        (Pace(), {}, ("abcd", "", 9.0, "c")),
        # It waits for one that never answers, since nobody knows that.
        (Pace(), {"lost": "c"}, ("abd", "", 9.0, "c")),
        (Pace(), {"lost": "abcd"}, ("", "", 9.0, "c")),
        (Pace(over_select=1.3), {"wanted": 3}, ("abd", "c", 4.0, "a")),
        (Pace(over_select=1.3), {"wanted": 3, "lost": "b"}, ("acd", "", 9.0, "c")),
        (Pace(over_select=1.3), {"wanted": 3, "lost": "bd"}, ("ac", "", 9.0, "c")),
        (Pace(deadline=3), {}, ("bd", "ac", 3.0, "c")),
        (Pace(deadline=4.0), {}, ("abd", "c", 4.0, "a")),
        (Pace(deadline=20), {}, ("abcd", "", 9.0, "c")),
        (Pace(deadline=3), {"lost": "abcd"}, ("", "", 3.0, "c")),
        (Pace(deadline=0.5), {}, ("b", "acd", 1.0, "b")),  # not without an update
        # Both: the deadline comes first, or the number.
        (Pace(over_select=2, deadline=3), {"wanted": 3}, ("bd", "ac", 3.0, "c")),
        (Pace(over_select=2, deadline=3), {"wanted": 1}, ("b", "acd", 1.0, "b")),
    ],
)
def test_when_a_round_ends_and_whose_updates_it_uses(pace, given, expected):
    end = pace.close(given.get("wanted", 4), SECONDS, given.get("lost", ()), pace.limit([]))
    assert ("".join(end.used), "".join(end.cut), end.seconds, end.slowest) == expected
    assert end.extended == (pace.deadline == 0.5)


def test_a_quantile_is_of_the_durations_measured():
    assert [Pace(over_select=1.3).asked(k) for k in (1, 3, 10, 100)] == [2, 4, 13, 130]
    pace = Pace(deadline="50%")
    assert pace.limit([]) == float("inf")
    assert pace.limit([1.0, 2.0, 10.0]) == 2.0
    assert Pace(deadline="100%").limit([1.0, 2.0, 10.0]) == 10.0
    assert Pace(deadline=7).limit([1.0]) == 7


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=8),
    st.integers(1, 8),
    st.sets(st.integers(0, 7)),
    st.one_of(st.just(float("inf")), st.floats(0.05, 120)),
)
def test_every_round_keeps_the_rules(seconds, wanted, lost, limit):
    times = {str(i): s for i, s in enumerate(seconds)}
    gone = {str(i) for i in lost}
    end = Pace(over_select=1.5).close(wanted, times, gone, limit)
    answering = [c for c in times if c not in gone]
    assert [c for c in times if c in {*end.used, *end.cut}] == answering
    assert bool(end.used) == bool(answering)
    assert len(end.used) <= wanted
    assert all(times[u] <= times[c] for u in end.used for c in end.cut)
    assert all(times[u] <= end.seconds for u in end.used)
    assert end.seconds <= limit or end.extended
    assert end.waiting == pytest.approx(sum(end.seconds - times[u] for u in end.used))
    assert end.working <= sum(times.values()) + 1e-9


@pytest.mark.parametrize(
    ("field", "value"),
    [("over_select", 0.9), ("late", "soon"), ("staleness", -1), ("deadline", 0),
     ("deadline", "80"), ("deadline", "0%"), ("deadline", "soon")],
)  # fmt: skip
def test_a_wrong_pace_is_named(field, value):
    with pytest.raises(ConfigError, match=f"Pace: {field}="):
        Pace(**{field: value})


def test_durations_are_drawn_and_read(tmp_path):
    alike = Durations.draw("ab", 0, speed=100, bandwidth=1000, sigma=0)
    assert alike.seconds("a", samples=50, bytes_moved=2000) == pytest.approx(0.5 + 2.0)
    with pytest.raises(ConfigError, match="'c'"):
        alike.seconds("c", 1, 1)
    drawn = Durations.draw([str(i) for i in range(4001)], 0, speed=100, sigma=0.5)
    speeds = np.log(list(drawn.samples_per_second.values()))
    assert np.median(speeds) == pytest.approx(np.log(100), abs=0.05)  # 5 standard errors: 0.05
    assert speeds.std() == pytest.approx(0.5, abs=0.03)
    (tmp_path / "trace.csv").write_text(f"{SPEED_COLUMNS}\na,100,1000\nb,100,1000.0\n")
    assert Durations.read(tmp_path / "trace.csv") == alike
    (tmp_path / "durations.csv").write_text("client,seconds\na,2.5\n")  # as Flower runs leave it
    assert Durations.read(tmp_path / "durations.csv").seconds("a", 10**6, 10**9) == 2.5


def test_phones_are_those_that_were_measured():
    phones = Durations.phones([str(i) for i in range(3000)], 1, speed=100)
    speeds = np.array(list(phones.samples_per_second.values()))
    median = np.median(PHONE_MILLISECONDS)
    assert set(np.round(100 * median / speeds, 6)) == set(PHONE_MILLISECONDS)
    assert {v / 1024 for v in phones.bytes_per_second.values()} == set(PHONE_KILOBYTES)
    # 3,000 draws of ten values: each 300 times, standard deviation 16.4.
    assert abs((speeds == speeds.max()).sum() - 300) < 82


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (Durations.read, "client,samples_per_second\na,1\n", "bytes_per_second"),
        (Durations.read, f"{SPEED_COLUMNS}\na,0,1\n", "line 2: samples_per_second=0"),
        (Durations.read, f"{SPEED_COLUMNS}\na,1,1\na,1,1\n", "twice"),
        (Durations.read, f"{SPEED_COLUMNS}\n,1,1\n", "empty"),
        (Trace.read, "round,client\n2,a\n", "start with round 1"),
        (Trace.read, "round\n1\n", "must have the columns round,client"),
        (Trace.read, "round,client\n-1,a\n", "line 2: round=-1"),
        (Trace.read, "round,client\n1\n", "line 2: client"),
    ],
)
def test_mistakes_in_files_are_named(tmp_path, read, text, words):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "trace.csv")
    with pytest.raises(ConfigError, match="missing"):
        read(tmp_path / "missing")


LOCAL = LocalTraining(epochs=1, batch_size=16, lr=0.1)
DATA = load("digits")
CLIENTS = federate(DATA, "shards", clients=12, seed=0)
SPEEDS = Durations.draw(CLIENTS.clients, 4, sigma=1.0)


def simulation(policy="uniform", **options):
    options = {"cohort_size": 3, "local": LOCAL, "device": "cpu", "durations": SPEEDS} | options
    model = build("mlp-64-30", DATA.x.shape[1:], 10, seed=0)
    return Simulation(CLIENTS, model, policy, **options)


def test_a_client_that_is_asked_states_the_seconds_of_its_rounds():
    run = simulation("sketch-match:time=ask")
    (record,) = run.step()
    session = run.seeds[0].session
    stated = session.signals.values("expected_duration", CLIENTS.clients)
    seconds = dict(zip(CLIENTS.clients, stated, strict=True))
    measured = session.signals.values("duration", record.finished)
    assert measured.tolist() == [seconds[c] for c in record.finished]
    assert record.seconds == max(measured) < max(stated)
    assert session.ledger.by_kind("up")["expected_duration"] == 8 * 12


def test_over_selection_in_rounds():
    fast = simulation(pace=Pace(over_select=2.0))
    for _ in range(5):
        (record,) = fast.step()
        assert len(record.selected) == 6
        assert len(record.finished) == len(record.cut) == 3
        seconds = {c: fast.seeds[0].seconds_of(c) for c in record.selected}
        assert set(record.finished) == set(sorted(seconds, key=seconds.get)[:3])
        assert record.seconds == max(seconds[c] for c in record.finished)
        # All six download the model, three upload it.
        size = fast.seeds[0].model_bytes
        assert (record.bytes_down, record.bytes_up) == (6 * size, 3 * size)
    assert not fast.seeds[0].session.state_dict()["failures"]  # being cut is no failure


@pytest.mark.parametrize(
    ("aggregation", "beta"), [("mean", 0.0), ("size-weighted", 0.0), ("mean", 0.35)]
)
def test_a_late_update_enters_the_round_in_which_it_arrives(aggregation, beta):
    """Each round's model by hand: fresh models and late steps, weighted by their staleness.

    With beta, REFL's rule: (1 - beta) / (1 + tau) + beta (1 - exp(-D / D_max)).
    """
    pace = Pace(deadline="40%", late="next", staleness=1.0, deviation=beta)
    run = simulation(pace=pace, aggregation=aggregation)
    seed, trainer = run.seeds[0], run.trainer
    waiting, clock, seen = {}, 0.0, 0
    for number in range(12):
        before = seed.model.clone()
        (record,) = run.step()
        assert not set(record.selected) & (set(waiting) - set(record.selected))
        names = [c for c in record.selected if c in {*record.finished, *record.cut}]
        work = jobs(trainer, 0, number, names, [CLIENTS.parts[c] for c in names])
        trained = dict(zip(names, trainer.train(before, work, run.train_data).clone(), strict=True))
        for client in record.selected:
            waiting.pop(client, None)
        end = clock + record.seconds
        due = {c: w for c, w in waiting.items() if w[1] <= end}
        assert set(record.late) == set(due)
        weighted = aggregation == "size-weighted"
        share = {c: len(CLIENTS.parts[c]) if weighted else 1 for c in (*record.finished, *due)}
        middle = sum(trained[c] - before for c in record.finished) / max(len(record.finished), 1)
        far = {c: (due[c][2] - middle).square().sum().item() for c in due}
        weights = dict(share)
        for c in due:
            weights[c] *= (1 - beta) / (1 + number - due[c][0])
            weights[c] += share[c] * beta * (1 - np.exp(-far[c] / max(far.values())))
        total = sum(weights.values())
        expected = before.clone()
        for client in share:
            step = due[client][2] if client in due else trained[client] - before
            expected += weights[client] / total * step
        torch.testing.assert_close(seed.model, expected, rtol=1e-4, atol=1e-6)
        for client in due:
            del waiting[client]
        for client in record.cut:
            arrival = clock + seed.seconds_of(client)
            waiting[client] = (number, arrival, trained[client] - before)
        clock, seen = end, seen + len(due)
    assert seen >= 3


def test_what_a_gate_decides_waits_for_all():
    with pytest.raises(ConfigError, match="gate"):
        simulation(gate="sketch-to-skip", pace=Pace(deadline=1))
    with pytest.raises(ConfigError, match="18 are asked"):
        simulation(cohort_size=9, pace=Pace(over_select=2))


def test_subsets_have_their_size_and_clients_their_probability():
    there = UniformSubset(3).available(0, NAMES, stream(0))
    assert len(set(there)) == 3 and set(there) <= set(NAMES)
    assert len(UniformSubset(30).available(0, NAMES, stream(0))) == 8
    draws = [Bernoulli(0.25).available(i, NAMES, stream(0, i)) for i in range(2000)]
    # Standard deviation 19.4; a round without anybody, one in ten, is drawn again.
    assert abs(sum("b" in there for there in draws) - 2000 * 0.25 / (1 - 0.75**8)) < 100
    assert all(Bernoulli(0.05).available(i, NAMES, stream(0, i)) for i in range(50))
    with pytest.raises(ConfigError, match="no client was available"):
        Bernoulli(0.0).available(0, NAMES, stream(0))


def test_a_trace_holds_until_the_next_entry(tmp_path):
    (tmp_path / "trace.csv").write_text("round,client\n1,a\n1,b\n4,c\n4,stranger\n")
    trace = Trace.read(tmp_path / "trace.csv")
    rounds = [trace.available(i, NAMES, stream(0)) for i in (0, 2, 3, 9)]
    assert rounds == [["a", "b"], ["a", "b"], ["c"], ["c"]]


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
