"""FedCor: the timetable, what is learned from losses, and selection as Algorithm 1."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.numerics import gp
from fedcohort.policies import FedCor
from fedcohort.policies.fedcor import FedCorState
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.session import Session
from fedcohort.signals.table import Signals

IDS = tuple(f"{i:02d}" for i in range(12))


class World:
    """Losses fall for clients of the kinds that trained: a session driven by hand."""

    def __init__(self, policy: FedCor, ids=IDS, size: int = 3, seed: int = 0) -> None:
        self.session = Session(policy, cohort_size=size, seed=seed)
        self.loss = dict.fromkeys(ids, 2.0)
        self.asked: list[int] = []
        self.losses: list[dict[str, float]] = []
        self.ids = list(ids)

    def step(self, silent=(), dropped=False) -> tuple[str, ...]:
        asked = []

        def collect(name, clients):
            if name == "num_examples":
                return dict.fromkeys(clients, 10)
            asked.extend(clients)
            return {c: self.loss[c] for c in clients if c not in silent}

        chosen = self.session.begin(self.ids, collect).clients
        self.asked.append(len(asked))
        self.losses.append(dict(self.loss))
        if not dropped:
            for c in self.ids:
                helped = sum(int(c) % 4 == int(k) % 4 for k in chosen)
                self.loss[c] -= 0.1 * helped - 0.02 * (3 - helped)
        self.session.finish({}, () if dropped else chosen)
        return chosen


def test_losses_are_asked_for_around_uniform_rounds_only() -> None:
    world = World(FedCor(warmup=3, interval=4))
    for _ in range(13):
        world.step()
    # warm-up rounds 0, 1, 2 and the one after; probes 7 and 11 and the ones after
    assert world.asked == [12, 12, 12, 12, 0, 0, 0, 12, 12, 0, 0, 12, 12]


def test_samples_are_the_changes_over_the_probed_rounds() -> None:
    world = World(FedCor(warmup=3, interval=4))
    for _ in range(9):
        world.step()
    state = world.session.policy.state
    expected = [
        [world.losses[after][c] - world.losses[after - 1][c] for c in IDS] for after in (1, 2, 3, 8)
    ]
    assert state.clients == list(IDS)
    np.testing.assert_allclose(state.changes, expected)


def test_the_fit_is_the_weighted_closed_form() -> None:
    policy = FedCor(warmup=4, interval=5, rank=3, noise_std=0.05, discount=0.8)
    world = World(policy)
    for _ in range(5):
        world.step()
    state = policy.state
    weights = 0.8 ** np.arange(3, -1, -1)
    expected = gp.fit_low_rank(state.changes, weights, 3, 0.05)
    np.testing.assert_allclose(state.embedding.T @ state.embedding, expected.T @ expected)


def test_history_is_limited() -> None:
    policy = FedCor(warmup=6, interval=2, history=4)
    world = World(policy)
    for _ in range(12):
        world.step()
    assert policy.state.changes.shape == (4, 12)


def test_selection_is_algorithm_1_with_annealing() -> None:
    x = np.random.default_rng(0).normal(size=(5, 12))
    policy = FedCor(warmup=1, interval=100, beta=0.5)
    policy.state = FedCorState(clients=list(IDS), embedding=x)
    signals = Signals()
    n = {c: int(c) + 1 for c in IDS}
    signals.record("num_examples", n, 0)
    p = np.array([n[c] for c in IDS]) / sum(n.values())
    alpha = np.ones(12)
    for number in range(2, 6):
        round = Round(number, IDS, 3)
        selection = policy.select(round, signals, stream(number))
        expected = gp.greedy(x.T @ x + 1e-4 * np.eye(12), p, alpha, 3, demote=True)
        assert selection.clients == tuple(IDS[i] for i in expected)
        policy.observe(round, Outcome(selection.clients, selection.clients), signals)
        alpha[expected] *= 0.5


def test_only_available_clients_but_everybodys_loss_counts() -> None:
    x = np.random.default_rng(1).normal(size=(5, 12))
    policy = FedCor(warmup=1)
    policy.state = FedCorState(clients=list(IDS), embedding=x)
    here = IDS[3:9]
    chosen = policy.select(Round(2, here, 3), Signals(), stream(0)).clients
    cov = x.T @ x + 1e-4 * np.eye(12)
    expected = gp.greedy(cov, np.ones(12) / 12, np.ones(12), 3, list(range(3, 9)), demote=True)
    assert chosen == tuple(IDS[i] for i in expected)


def test_annealing_is_reset_by_the_next_fit() -> None:
    policy = FedCor(warmup=3, interval=4, beta=0.5)
    world = World(policy)
    for _ in range(6):
        world.step()
    assert set(policy.state.alpha.values()) <= {0.5, 0.25, 0.125}
    assert len(policy.state.alpha) >= 3
    world.step()  # 6
    world.step()  # 7: a probe, nobody is annealed
    before = dict(policy.state.alpha)
    chosen = world.step()  # 8: refitted, then annealed by this round's picks alone
    assert policy.state.alpha == dict.fromkeys(chosen, 0.5) != before


def test_it_learns_to_cover_the_kinds() -> None:
    """Clients of four kinds help only their own; three different kinds are best every round."""
    world = World(FedCor(warmup=10, interval=10))
    cohorts = [world.step() for _ in range(30)]
    kinds = np.array([len({int(c) % 4 for c in cohort}) for cohort in cohorts])
    assert (np.delete(kinds, 20)[10:] == 3).all()  # round 20 is a probe
    assert kinds[:10].mean() < 3


def test_missing_losses_and_newcomers() -> None:
    world = World(FedCor(warmup=4, interval=5))
    for number in range(12):
        if number == 6:
            world.ids.append("12")
            world.loss["12"] = 2.0
        world.step(silent={IDS[number % 12], IDS[(5 * number + 1) % 12]})
    state = world.session.policy.state
    assert set(state.clients) == {*IDS, "12"}
    assert np.isfinite(state.embedding).all()
    assert np.isnan(state.changes).any()


def test_strangers_get_their_share_of_places() -> None:
    x = np.random.default_rng(0).normal(size=(5, 6))
    policy = FedCor(warmup=1)
    policy.state = FedCorState(clients=list(IDS[:6]), embedding=x)
    chosen = policy.select(Round(2, IDS, 4), Signals(), stream(0)).clients
    assert len(set(chosen) & set(IDS[:6])) == 2
    assert len(set(chosen) & set(IDS[6:])) == 2


def test_a_probe_nobody_finished_teaches_nothing() -> None:
    policy = FedCor(warmup=3, interval=4)
    world = World(policy)
    world.step(dropped=True)
    assert policy.state.probed == -2
    for _ in range(3):
        world.step()
    assert policy.state.changes.shape == (2, 12)


def test_more_picks_than_the_rank() -> None:
    world = World(FedCor(warmup=2, interval=50, rank=2), size=9)
    for _ in range(5):
        assert len(set(world.step())) == 9


def test_a_panel_is_asked_before_and_after() -> None:
    policy = FedCor(warmup=2, interval=3, panel=5)
    world = World(policy)
    panels = []
    for _ in range(9):
        world.step()
        panels.append(list(policy.state.panel))
    assert world.asked == [5, 5, 5, 0, 0, 5, 5, 0, 5]
    assert panels[0] == panels[1] == panels[2]
    assert panels[5] == panels[6] != panels[0]
    assert (~np.isnan(policy.state.changes)).sum(axis=1).tolist() == [5, 5, 5]


def test_gradient_fit_continues_from_the_last() -> None:
    policy = FedCor(warmup=4, interval=3, fit="gradient", steps=200, noise_std=0.05)
    world = World(policy)
    values = []
    for number in range(12):
        world.step()
        if number >= 4:
            state = policy.state
            weights = 0.95 ** np.arange(len(state.changes) - 1, -1, -1.0)
            values.append(gp.log_likelihood(state.embedding, state.changes, weights, 0.05))
    assert np.isfinite(values).all()
    best = gp.fit_low_rank(policy.state.changes, weights, 15, 0.05)
    assert values[-1] <= gp.log_likelihood(best, policy.state.changes, weights, 0.05) + 1e-6


@pytest.mark.parametrize("bad", [{"warmup": 0}, {"rank": 0}, {"history": 0}, {"steps": 0}])
def test_counts_must_be_positive(bad) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FedCor(**bad)
