"""FedCor: the timetable, what is learned from losses, and selection as Algorithm 1."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.gates import Gate
from fedcohort.numerics import gp
from fedcohort.policies import FedCor
from fedcohort.policies.fedcor import FedCorState
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.session import Session
from fedcohort.signals.table import Signals
from fedcohort.testing import recorded

IDS = tuple(f"{i:02d}" for i in range(12))


class OneOf(Gate):
    """Skips all rounds but each `every`-th."""

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0

    def announce(self, model):
        return None

    def probe(self, announced, start, models):
        raise NotImplementedError

    def decide(self, answers):
        self.calls += 1
        return () if self.calls % self.every else tuple(answers)


class World:
    """Losses fall for clients of the kinds that trained: a session driven by hand."""

    def __init__(self, policy: FedCor) -> None:
        self.session = Session(policy, cohort_size=3, seed=0)
        self.loss = dict.fromkeys(IDS, 2.0)
        self.asked: list[int] = []
        self.losses: list[dict[str, float]] = []
        self.ids = list(IDS)

    def step(self, dropped=False) -> tuple[str, ...]:
        asked = []

        def collect(name, clients):
            if name == "num_examples":
                return dict.fromkeys(clients, 10)
            asked.extend(clients)
            return {c: self.loss[c] for c in clients}

        chosen = self.session.begin(self.ids, collect).clients
        self.asked.append(len(asked))
        self.losses.append(dict(self.loss))
        if not dropped:
            for c in self.ids:
                helped = sum(int(c) % 4 == int(k) % 4 for k in chosen)
                self.loss[c] -= 0.1 * helped - 0.02 * (3 - helped)
        self.session.finish({}, () if dropped else chosen)
        return chosen


def test_losses_are_asked_for_around_uniform_rounds_and_their_changes_are_the_samples() -> None:
    world = World(FedCor(warmup=3, interval=4))
    for _ in range(13):
        world.step()
    # warm-up rounds 0, 1, 2 and the one after; probes 7 and 11 and the ones after
    assert world.asked == [12, 12, 12, 12, 0, 0, 0, 12, 12, 0, 0, 12, 12]
    state = world.session.policy.state
    expected = [
        [world.losses[after][c] - world.losses[after - 1][c] for c in IDS]
        for after in (1, 2, 3, 8, 12)
    ]
    assert state.clients == list(IDS)
    np.testing.assert_allclose(state.changes, expected)


def test_selection_is_algorithm_1_with_annealing() -> None:
    x = np.random.default_rng(0).normal(size=(5, 12))
    policy = FedCor(warmup=1, interval=100, beta=0.5)
    policy.state = FedCorState(clients=list(IDS), embedding=x, selections=2)
    n = {c: int(c) + 1 for c in IDS}
    signals = recorded(num_examples=n)
    p = np.array([n[c] for c in IDS]) / sum(n.values())
    alpha = np.ones(12)
    for number in range(2, 6):
        round = Round(number, IDS, 3)
        selection = policy.select(round, signals, stream(number))
        expected = gp.greedy(x, p, alpha, 3, noise_std=0.01, demote=True)
        assert selection.clients == tuple(IDS[i] for i in expected)
        policy.observe(round, Outcome(selection.clients, selection.clients), signals)
        alpha[expected] *= 0.5


@pytest.mark.parametrize("noisy", [True, False])
def test_only_available_clients_with_or_without_the_noise_of_the_fit(noisy: bool) -> None:
    """Everybody's loss counts; with much noise in the fit, the two selections differ."""
    x, here = np.random.default_rng(3).normal(size=(5, 12)), IDS[3:9]
    policy = FedCor(warmup=1, selection_noise=noisy)
    policy.state = FedCorState(clients=list(IDS), embedding=x, selections=2, noise_std=3.0)
    chosen = policy.select(Round(2, here, 3), Signals(), stream(0)).clients
    picks = [
        gp.greedy(x, np.ones(12) / 12, np.ones(12), 3, np.arange(3, 9), noise_std=noise)
        for noise in (0.0, 3.0)
    ]
    assert picks[0] != picks[1]
    assert chosen == tuple(IDS[i] for i in picks[noisy])


def test_it_learns_to_cover_the_kinds() -> None:
    """Clients of four kinds help only their own; three different kinds are best every round."""
    world = World(FedCor(warmup=10, interval=10))
    cohorts = [world.step() for _ in range(30)]
    kinds = np.array([len({int(c) % 4 for c in cohort}) for cohort in cohorts])
    assert (np.delete(kinds, 20)[10:] == 3).all()  # round 20 is a probe
    assert kinds[:10].mean() < 3


def test_a_probe_nobody_finished_teaches_nothing() -> None:
    policy = FedCor(warmup=3, interval=4)
    world = World(policy)
    world.step(dropped=True)
    assert not policy.state.pending
    for _ in range(3):
        world.step()
    assert policy.state.changes.shape == (2, 12)


def test_rounds_that_a_gate_skips_neither_lose_nor_falsify_samples() -> None:
    """With two of three rounds skipped, every selection of the warm-up still gives its sample."""
    policy = FedCor(warmup=4, interval=5)
    session = Session(policy, cohort_size=3, seed=0, gate=OneOf(3))
    loss, expected = dict.fromkeys(IDS, 2.0), []

    def collect(name, clients):
        return (
            dict.fromkeys(clients, 10) if name == "num_examples" else {c: loss[c] for c in clients}
        )

    for _ in range(15):
        chosen = session.begin(IDS, collect).clients
        admitted = session.admit({c: np.zeros(1) for c in chosen})
        if admitted:  # the global model moves, and the losses with it
            step = {c: -0.1 - 0.01 * len(expected) - 0.02 * (c in chosen) for c in IDS}
            loss = {c: loss[c] + step[c] for c in IDS}
            expected.append([step[c] for c in IDS])
        session.finish({}, admitted)
    session.begin(IDS, collect)
    assert len(expected) == 5
    np.testing.assert_allclose(policy.state.changes, expected[:4])


def test_the_warm_up_ends_although_a_gate_skips_most_rounds() -> None:
    """At 80 % skipped rounds, 15 selections take 75 rounds; after 45 it has samples enough."""
    session = Session(FedCor(warmup=15), cohort_size=3, seed=0, gate=OneOf(5))
    for _ in range(50):
        chosen = session.begin(IDS, lambda name, clients: dict.fromkeys(clients, 1.0))
        answers = {c: np.zeros(1) for c in chosen.clients}
        session.finish({}, session.admit(answers))
    assert session.policy.state.embedding is not None


def test_departed_clients_are_forgotten() -> None:
    """Four of twelve leave for good: after 30 selections they have no part in the model."""
    policy = FedCor(warmup=3, interval=500)  # no refit on the way
    world = World(policy)
    for _ in range(5):
        world.step()
    assert policy.state.clients == list(IDS)
    world.ids = list(IDS[:8])
    for _ in range(32):
        world.step()
    state = policy.state
    assert state.clients == list(IDS[:8])
    assert state.changes.shape[1] == state.embedding.shape[1] == len(state.last_seen) == 8
    world.ids = list(IDS)  # they come back as new clients, drawn uniformly until the next probe
    assert len(world.step()) == 3


def test_a_false_loss_is_clipped() -> None:
    policy = FedCor(warmup=3)
    world = World(policy)
    world.step()
    world.loss[IDS[5]] = 1e14
    world.step()
    row = np.abs(policy.state.changes[0])
    assert row[5] == row.max() == pytest.approx(10 * np.median(row))
