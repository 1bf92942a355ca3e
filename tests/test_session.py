from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from fedcohort import storage
from fedcohort.exceptions import InvalidCheckpoint, NoClients, PolicyError
from fedcohort.policies import Policy, PowerOfChoice, Uniform
from fedcohort.rounds import Selection
from fedcohort.session import MAX_ASKS, Session
from fedcohort.signals.catalog import Needs


@dataclass
class Memory:
    seen: list[str] = field(default_factory=list)


class Nosy(Policy):
    """Asks for one signal of every kind and takes the first clients."""

    needs = Needs(
        profile=frozenset({"num_examples"}),
        query=frozenset({"loss"}),
        reply=frozenset({"duration", "loss_rms"}),
    )

    def __init__(self):
        self.state = Memory()

    def candidates(self, round, signals, rng):
        return round.available[:3]

    def select(self, round, signals, rng):
        return Selection(round.available[: round.size])

    def observe(self, round, outcome, signals):
        self.state.seen += outcome.finished


def answers(log, silent=()):
    def collect(name, clients):
        log.append((name, clients))
        return {c: np.float64(1.0) for c in clients if c not in silent}

    return collect


def test_only_declared_signals_are_collected_and_only_from_whom_it_takes():
    session, log = Session(Nosy(), cohort_size=2, seed=0), []
    session.begin(["d", "b", "a", "c"], answers(log))
    session.finish({}, ["a"])
    session.begin(["a", "b", "c", "d", "e"], answers(log))
    assert log == [
        ("num_examples", ("a", "b", "c", "d")),
        ("loss", ("a", "b", "c")),
        ("num_examples", ("e",)),
        ("loss", ("a", "b", "c")),
    ]


def test_every_byte_is_charged_by_kind_and_direction():
    session = Session(Nosy(), cohort_size=2, seed=0, model_bytes=1000)
    session.begin(["a", "b", "c", "d"], answers([]))
    replies = {"duration": {"a": 1.0}, "loss_rms": {"a": 2.0, "b": 9.0}}
    session.finish(replies, ["a"])
    # a, b, c got the model to answer the loss query; a and b, selected, hold it already.
    assert session.ledger.by_kind("down") == {"model": 3000}
    # Four sizes and three losses of 8 bytes; b did not finish, so its reply never came; the
    # duration is taken by the server.
    assert session.ledger.by_kind("up") == {
        "num_examples": 32,
        "loss": 24,
        "loss_rms": 8,
        "model": 1000,
    }


def test_a_silent_client_is_asked_a_few_times_and_then_left_alone():
    session, log = Session(Nosy(), cohort_size=1, seed=0), []
    for _ in range(MAX_ASKS + 3):
        session.begin(["a", "b"], answers(log, silent=("b",)))
        session.finish({}, [])
    asked = [clients for name, clients in log if name == "num_examples"]
    assert asked == [("a", "b")] + [("b",)] * (MAX_ASKS - 1)


def test_a_short_cohort_is_topped_up():
    class Shy(Policy):
        def select(self, round, signals, rng):
            return Selection(round.available[:1], weights=(3.0,))

    selection = Session(Shy(), cohort_size=3, seed=0).begin("abcdef", answers([]))
    assert selection.clients[0] == "a"
    assert len(set(selection.clients)) == 3
    assert selection.weights == (1.0, 1.0, 1.0)  # fillers get the mean; the sum is the policy's


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [(("a", "a"), "twice"), (("z",), "'z' is not available"), (tuple("abc"), "3 clients for")],
)
def test_a_policy_that_breaks_its_contract_is_named(chosen, complaint):
    class Rogue(Policy):
        def select(self, round, signals, rng):
            return Selection(chosen)

    with pytest.raises(PolicyError, match=rf"Rogue.select: .*{complaint}"):
        Session(Rogue(), cohort_size=2, seed=0).begin("abcd", answers([]))


def test_user_mistakes():
    session = Session(Uniform(), cohort_size=1, seed=0)
    with pytest.raises(NoClients, match="round 1"):
        session.begin([], answers([]))
    with pytest.raises(RuntimeError, match=r"before Session\.begin"):
        session.finish({}, [])
    session.begin(["a"], answers([]))
    with pytest.raises(ValueError, match="'b' was not selected"):
        session.finish({}, ["b"])
    with pytest.raises(RuntimeError, match="finish the round first"):
        session.state_dict()


def test_a_checkpoint_of_another_run_is_refused():
    state = Session(Uniform(), cohort_size=2, seed=0).state_dict()
    for other in (
        Session(Nosy(), cohort_size=2, seed=0),
        Session(Uniform(), cohort_size=3, seed=0),
        Session(Uniform(), cohort_size=2, seed=1),
    ):
        with pytest.raises(InvalidCheckpoint, match="this is"):
            other.load_state_dict(state)


class First(Policy):
    """Always the first clients, with weights."""

    def select(self, round, signals, rng):
        chosen = round.available[: round.size]
        return Selection(chosen, weights=(1 / len(chosen),) * len(chosen))


def test_a_client_that_never_finishes_sits_out_and_comes_back_when_it_does():
    session = Session(First(), cohort_size=2, seed=0)
    picked = []
    for number in range(60):
        selection = session.begin("abcdef", answers([]))
        picked.append("a" in selection.clients)
        healthy = number >= 40
        session.finish({}, [c for c in selection.clients if c != "a" or healthy])
    # Picked twice, then after rests of 4, 8, 16 and 32 rounds; forgiven once it finishes.
    assert [i for i, there in enumerate(picked[:40]) if there] == [0, 1, 6, 15, 32]
    assert not any(picked[40:59])
    session.round_number = 65
    assert "a" in session.begin("abcdef", answers([])).clients
    session.finish({}, ["a"])
    assert "a" in session.begin("abcdef", answers([])).clients


def test_a_client_that_never_finishes_gets_less_than_its_share_of_a_large_federation():
    """300 clients for 2 places: one in 150 rounds is fair; a policy that always takes it."""
    session = Session(First(), cohort_size=2, seed=0)
    ids, picked = tuple(f"{i:03d}" for i in range(300)), []
    for _ in range(1500):
        selection = session.begin(ids, answers([]))
        picked.append("000" in selection.clients)
        session.finish({}, [c for c in selection.clients if c != "000"])
    # Rests of 4, 8, ..., 256 and then 300 rounds, twice what is fair.
    assert [i for i, there in enumerate(picked) if there][-4:] == [516, 817, 1118, 1419]


def test_those_who_sit_out_are_called_back_when_too_few_are_left():
    session = Session(First(), cohort_size=2, seed=0)
    for _ in range(5):
        assert len(session.begin("ab", answers([])).clients) == 2
        session.finish({}, ["b"])


def test_a_resumed_session_remembers_who_sits_out(tmp_path):
    first, second = (Session(First(), cohort_size=2, seed=0) for _ in range(2))
    for _ in range(3):
        first.begin("abcd", answers([]))
        first.finish({}, [])
    storage.save(tmp_path / "x", first.state_dict())
    second.load_state_dict(storage.load(tmp_path / "x"))
    assert second.resting == first.resting == {"a": 6, "b": 6}
    assert not {"a", "b"} & set(second.begin("abcdef", answers([])).clients)


def test_what_fails_late_is_refused_at_once():
    for wrong in ({"cohort_size": 2.5}, {"cohort_size": 0}, {"seed": "0"}, {"model_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Session(First(), **{"cohort_size": 2, "seed": 0, **wrong})


@pytest.mark.parametrize("wrong", ["", 7, "\ud800"])
def test_an_id_that_is_not_a_name_is_refused(wrong):
    with pytest.raises(ValueError, match="client id"):
        Session(First(), cohort_size=1, seed=0).begin(["a", wrong], answers([]))


def test_likely_mistakes_of_an_engine_are_logged_once(caplog):
    session = Session(PowerOfChoice(d=2), cohort_size=1, seed=0)
    for _ in range(3):
        session.begin("ab", lambda name, clients: {"zoe": 1.0})
        session.finish({"lost": {"a": 1.0}}, [])
    messages = [record.getMessage() for record in caplog.records]
    assert sum("'zoe'" in m for m in messages) == 2  # for num_examples and for loss
    assert sum("none of the 2 clients" in m for m in messages) == 2
    assert sum("'lost'" in m for m in messages) == 1


@pytest.mark.parametrize("available", ["abc", "cab", "abcabc", iter("bca")])
def test_clients_are_sorted_and_counted_once(available):
    log = []
    session = Session(Nosy(), cohort_size=2, seed=0)
    assert session.begin(available, answers(log)).clients == ("a", "b")
    assert log[0] == ("num_examples", ("a", "b", "c"))


def test_everybody_can_be_profiled_before_the_first_round():
    """Algorithm 3 of paper 0: all clients send their sketch, also those that come later."""
    session, log = Session(Nosy(), cohort_size=2, seed=0), []
    session.profile("dcba", answers(log))
    session.begin("ab", answers(log))
    assert log == [("num_examples", ("a", "b", "c", "d")), ("loss", ("a", "b"))]


def test_a_newcomer_downloads_the_initial_model_for_its_profile_and_then_the_current_one():
    """k-DPP's profiles are taken under the initial model, so that a newcomer's is comparable."""

    class Profiled(Policy):
        needs = Needs(profile=frozenset({"feature_profile"}))

        def select(self, round, signals, rng):
            return Selection(round.available[-1:])

    session = Session(Profiled(), cohort_size=1, seed=0, model_bytes=1000)
    profile = lambda name, clients: {c: np.ones(3, np.float32) for c in clients}  # noqa: E731
    session.begin("ab", profile)
    session.finish({}, ["b"])
    assert session.ledger.by_kind("down", 0) == {"model": 2000}  # the initial model is the current
    session.begin("abc", profile)
    assert session.ledger.by_kind("down", 1) == {"model": 2000}  # both to the newcomer c
