"""Policies that read updates: HiCS-FL, DELTA, DivFL and clustered sampling on exact small cases."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import ward
from scipy.spatial.distance import pdist

from fedcohort import testing
from fedcohort.numerics.sampling import (
    always_selected,
    angle_tree,
    one_per_unit,
    similarity_groups,
)
from fedcohort.policies import DELTA, ClusteredSampling, DivFL, HiCSFL, hics_fl
from fedcohort.policies.hics_fl import entropies
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.signals.table import Signals

IDS = tuple(f"{i:02d}" for i in range(20))


def recorded(**rows) -> Signals:
    """Readings of the first clients, in their order."""
    named = {name: dict(zip(IDS, values, strict=False)) for name, values in rows.items()}
    return testing.recorded(**named)


class TestHiCSFL:
    def test_everybody_is_tried_once_also_without_a_report(self) -> None:
        policy, seen = HiCSFL(), []
        for number in range(4):
            round = Round(number, IDS, 5)
            chosen = policy.select(round, Signals(), stream(number)).clients
            policy.observe(round, Outcome(chosen, chosen), Signals())
            seen += chosen
        assert sorted(seen) == list(IDS)
        assert policy.select(Round(4, IDS, 5), Signals(), stream(4)).clients == ()

    def test_who_drops_out_is_tried_again_and_whom_a_gate_withholds_is_not(self) -> None:
        policy, round = HiCSFL(), Round(0, IDS[:3], 3)
        policy.observe(round, Outcome(IDS[:3], IDS[:1], IDS[1:2]), Signals())
        assert policy.select(round, Signals(), stream(0)).clients == (IDS[2],)

    def observed(self, policy, rows, number=0):
        signals = Signals()
        signals.record("bias_update", dict(zip(IDS, rows, strict=True)), number)
        policy.observe(Round(number, IDS, 20), Outcome(IDS, IDS), signals)
        return signals

    def test_balanced_clusters_come_first_and_all_are_equal_in_the_end(self, monkeypatch) -> None:
        """Entropies 1.386 and about 1: variance .04 is below .1, so clusters are drawn by entropy.

        4 clusters, one of them balanced: with gamma 20 it is drawn almost always, at the end 1/4.
        """
        rows = [np.zeros(4) if i < 10 else np.eye(4)[i % 3] for i in range(20)]
        monkeypatch.setattr(hics_fl, "_GAMMA", 20.0)
        policy, shares = HiCSFL(temperature=0.5, rounds=100), []
        signals = self.observed(policy, rows)
        assert entropies(np.array(rows), 0.5).var() < 0.1
        for number in (1, 100):
            drawn = [
                policy.select(Round(number, IDS, 4), signals, stream(number, n)).clients
                for n in range(200)
            ]
            shares.append(np.mean([int(c) < 10 for cohort in drawn for c in cohort]))
        assert shares[0] > 0.97
        assert abs(shares[1] - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 800)

    def test_where_entropies_differ_much_groups_are_drawn_by_their_data(self) -> None:
        """Half have entropy ln 4, half 0: variance .48. Each of 4 kinds of 5 gets one of 4 places.

        By entropy, the balanced half would have had nearly all places.
        """
        rows = [np.zeros(4) if i < 10 else np.eye(4)[i // 5] for i in range(20)]
        policy = HiCSFL(temperature=0.01)
        signals = self.observed(policy, rows)
        for n in range(50):
            chosen = policy.select(Round(1, IDS, 4), signals, stream(n)).clients
            assert sum(int(c) >= 10 for c in chosen) == 2

    def test_a_client_that_has_learned_its_labels_stays_what_it_is(self) -> None:
        """The first update counts. Tiny later updates would look balanced: log 4."""
        first = [np.eye(4)[i % 4] for i in range(20)]
        policy = HiCSFL(temperature=0.01)
        self.observed(policy, first)
        signals = self.observed(policy, [1e-6 * row for row in first], number=1)
        scores = policy.select(Round(2, IDS, 4), signals, stream(0)).scores
        assert list(scores.values()) == pytest.approx([0.0] * 4, abs=1e-3)


class TestDELTA:
    def test_the_cohort_divides_its_own_probability(self) -> None:
        """Two of four trained: sizes 10 and 30, distances 3 and 1, so both get half of their 2."""
        policy, ids = DELTA(), IDS[:4]
        signals = recorded(num_examples=[10, 30, 10, 10], update_distance=[3.0, 1.0])
        policy.observe(Round(0, ids, 2), Outcome(ids[:2], ids[:2]), signals)
        assert policy.state.probability == pytest.approx({"00": 1.0, "01": 1.0})
        signals = recorded(num_examples=[10, 30, 10, 10])
        signals.record("update_distance", {"01": 1.0, "02": 9.0}, 1)
        policy.observe(Round(1, ids, 2), Outcome(ids[1:3], ids[1:3]), signals)
        # importance 30 and 90 of a probability of 2; 00 and 03 keep theirs
        assert policy.state.probability == pytest.approx({"00": 1.0, "01": 0.5, "02": 1.5})
        scores = {}
        for n in range(40):
            scores |= policy.select(Round(2, ids, 1), signals, stream(n)).scores
        assert scores == pytest.approx({"00": 0.25, "01": 0.125, "02": 0.375, "03": 0.25})

    def test_the_aggregate_is_unbiased(self) -> None:
        """Over 6000 draws each client's mean weight is its share of the data."""
        ids, policy = IDS[:5], DELTA()
        signals = recorded(num_examples=(10, 20, 30, 5, 35))
        policy.state.probability = dict(zip(ids, (2.0, 0.5, 0.5, 1.0, 1.0), strict=True))
        weights = np.zeros((6000, 5))
        for n, row in enumerate(weights):
            selection = policy.select(Round(1, ids, 2), signals, stream(n))
            row[[ids.index(c) for c in selection.clients]] = selection.weights
        error = weights.std(axis=0) / np.sqrt(len(weights))
        gap = weights.mean(axis=0) - np.array([0.1, 0.2, 0.3, 0.05, 0.35])
        assert (np.abs(gap) < 4 * error + 1e-9).all()

    def test_local_variance_adds_the_spread_of_batches_and_lies_are_clipped(self) -> None:
        """Importance is sqrt(zeta^2 + ratio sigma^2); 1e15 counts as ten times the median."""
        ids, policy = IDS[:4], DELTA(local_variance=4.0)
        signals = recorded(update_distance=(3.0, 1.0, 0.0, 1.0), gradient_spread=(2.0, 0, 2.0, 1.0))
        policy.observe(Round(0, ids, 4), Outcome(ids, ids), signals)
        importance = np.sqrt([9 + 16, 1, 16, 1 + 4])
        found = [policy.state.probability[c] for c in ids]
        assert found == pytest.approx(4 * importance / importance.sum())
        policy, signals = DELTA(), recorded(update_distance=(1.0, 1.0, 1e15))
        policy.observe(Round(0, IDS[:3], 3), Outcome(IDS[:3], IDS[:3]), signals)
        assert policy.state.probability["02"] == pytest.approx(3 * 10 / 12)

    def test_the_spread_is_that_of_the_batches(self) -> None:
        """Against gradients by autograd in float64, one batch at a time."""
        torch = pytest.importorskip("torch")
        from fedcohort.datasets import federate, load
        from fedcohort.simulate import LocalTraining, Simulation, build

        clients = federate(load("digits"), "iid", clients=9, seed=0)
        model = build("mlp-64-30", clients.dataset.sample_shape, 10, seed=0)
        local = LocalTraining(epochs=1, batch_size=50, lr=0.1)
        policy = DELTA(local_variance=1.0)
        simulation = Simulation(clients, model, policy, cohort_size=2, local=local, device="cpu")
        simulation.step()
        (client, _) = simulation.seeds[0].session.selection.clients
        order = stream(0, "gradient spread", 0, client).permutation(clients.parts[client])
        double, rows = model.double(), []
        for first in range(0, len(order), 50):
            at = order[first : first + 50]
            double.zero_grad()
            outputs = double(torch.from_numpy(clients.dataset.x[at]).double())
            labels = torch.from_numpy(clients.dataset.y[at])
            torch.nn.functional.cross_entropy(outputs, labels).backward()
            rows.append(torch.cat([p.grad.ravel() for p in double.parameters()]).numpy().copy())
        expected = np.sqrt(np.square(rows - np.mean(rows, axis=0)).sum(axis=1).mean())
        found = simulation.seeds[0].session.signals.values("gradient_spread", (client,))[0]
        assert found == pytest.approx(expected, rel=1e-4)


def cost(rows, chosen, weights):
    far = np.linalg.norm(rows[:, None] - rows[list(chosen)], axis=2)
    return float(weights @ far.min(axis=1))


class TestDivFL:
    @pytest.mark.parametrize("weights", [None, "coverage"])
    @pytest.mark.parametrize("seed", range(5))
    def test_greedy_steps_and_guarantee_by_brute_force(self, seed: int, weights) -> None:
        """By default all clients count alike, as in the authors' code, however large they are."""
        rng, ids = np.random.default_rng(seed), IDS[:9]
        rows, n = rng.normal(size=(9, 4)), rng.integers(1, 30, size=9)
        signals = recorded(gradient_sketch=rows, num_examples=n)
        share = n / n.sum() if weights else np.full(9, 1 / 9)
        chosen = DivFL(weights=weights).select(Round(0, ids, 3), signals, stream(0)).clients
        at = [ids.index(c) for c in chosen]
        for step in range(3):
            best = min(cost(rows, [*at[:step], j], share) for j in range(9))
            assert cost(rows, at[: step + 1], share) == pytest.approx(best)
        start = share @ np.linalg.norm(rows[:, None] - rows, axis=2).max(axis=1)
        optimum = min(cost(rows, s, share) for s in combinations(range(9), 3))
        assert start - cost(rows, at, share) >= (1 - 1 / np.e) * (start - optimum)

    def test_coverage_weights_are_the_shares_of_the_nearest(self) -> None:
        rows = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [9.0], [9.1], [9.2], [9.3]])
        policy = DivFL(weights="coverage")
        selection = policy.select(Round(0, IDS[:9], 3), recorded(gradient_sketch=rows), stream(0))
        for client, weight in zip(selection.clients, selection.weights, strict=True):
            at = int(client)
            assert weight == pytest.approx((3 if at < 3 else 2 if at < 5 else 4) / 9)

    def test_only_this_rounds_gradients_count(self) -> None:
        signals, round = recorded(gradient_sketch=np.eye(9)), Round(1, IDS[:9], 3)
        assert DivFL().select(round, signals, stream(0)).clients == ()
        assert DivFL().candidates(round, signals, stream(0)) == IDS[:9]

    def test_updates_of_earlier_rounds_are_used_and_strangers_get_places(self) -> None:
        policy, round = DivFL("update_sketch"), Round(5, IDS[:9], 3)
        signals = recorded(update_sketch=np.eye(6))
        assert not policy.needs.query
        chosen = policy.select(round, signals, stream(0)).clients
        assert len(set(chosen) & set(IDS[:6])) == 2
        assert len(set(chosen) & set(IDS[6:9])) == 1


class TestClusteredSampling:
    IDS = IDS[:12]
    SIZES = np.array([40, 3, 17, 8, 9, 25, 60, 5, 12, 30, 7, 14])

    @pytest.mark.parametrize("by", ["size", "similarity"])
    @pytest.mark.parametrize("size", [1, 3, 5, 11])
    def test_expected_weights_are_the_shares(self, by: str, size: int) -> None:
        """Mean weight over 3,000 draws; a weight lies in [0, max(1/size, p)]: 5 standard errors."""
        rows = np.random.default_rng(0).normal(size=(12, 4))
        signals = recorded(num_examples=self.SIZES, update_sketch=rows)
        policy = ClusteredSampling(by)
        total, draws = np.zeros(12), 3000
        for i in range(draws):
            selection = policy.select(Round(0, self.IDS, size), signals, stream(size, i))
            assert len(selection.clients) == size
            assert sum(selection.weights) == pytest.approx(1)
            total[[int(c) for c in selection.clients]] += selection.weights
        share = self.SIZES / self.SIZES.sum()
        error = 5 * np.sqrt(share * np.maximum(1 / size, share) / draws) + 1e-12
        assert (np.abs(total / draws - share) < error).all()

    @pytest.mark.parametrize("seed", range(20))
    def test_groups_are_those_of_the_authors_code(self, seed: int) -> None:
        """Ward on the rows of the matrix of angles; the largest subtrees of at most 1 / m of all.

        Unlike here, a cut that only splits the farthest groups first can break up a light one.
        """
        rng = np.random.default_rng(seed)
        rows, mass = rng.normal(size=(15, 3)), rng.dirichlet(np.ones(15)) * 4
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        angles = np.arccos(np.clip(unit @ unit.T, -1, 1))
        np.fill_diagonal(angles, 0)
        clusters = {i: [i] for i in range(15)}
        whole = dict(clusters)
        for node, (left, right, *_) in enumerate(ward(pdist(angles)), 15):
            clusters[node] = clusters[int(left)] + clusters[int(right)]
            if mass[clusters[node]].sum() <= 1:
                del whole[int(left)], whole[int(right)]
                whole[node] = clusters[node]
        labels = similarity_groups(angle_tree(rows), mass)
        found = {tuple(np.flatnonzero(labels == label)) for label in set(labels.tolist())}
        assert found == {tuple(sorted(group)) for group in whole.values()}

    @settings(max_examples=80, deadline=None)
    @given(
        n=st.lists(st.integers(0, 1000), min_size=1, max_size=25).filter(any),
        size=st.integers(1, 12),
        seed=st.integers(0, 2**32),
    )
    def test_cohorts_are_complete_and_different(self, n: list[int], size: int, seed: int) -> None:
        share = np.array(n) / sum(n)
        size = min(size, int(np.count_nonzero(share)))
        sure, mass = always_selected(share, size)
        assert mass.sum() == pytest.approx(size - sure.size)
        assert (mass <= 1).all()
        left, places = np.flatnonzero(mass > 0), size - sure.size
        rng = np.random.default_rng(seed)
        drawn = left[one_per_unit(mass[left], places, rng)] if places else left[:0]
        assert len({*sure.tolist(), *drawn.tolist()}) == size

    def test_giants_the_empty_and_the_unknown(self) -> None:
        signals = recorded(num_examples=[900, *np.full(11, 10)])
        for i in range(20):
            selection = ClusteredSampling().select(Round(0, self.IDS, 3), signals, stream(i))
            weights = dict(zip(selection.clients, selection.weights, strict=True))
            # Sizes are clipped at ten times the median, here 100: still more than one place.
            assert weights["00"] == pytest.approx(100 / 210)
        signals = recorded(num_examples=[10, 10, *np.full(10, 0)])
        selection = ClusteredSampling().select(Round(0, self.IDS, 4), signals, stream(0))
        assert set(selection.clients) == {"00", "01"}  # the session fills the rest
        unknown = ClusteredSampling().select(Round(0, self.IDS, 4), Signals(), stream(0))
        assert unknown.weights == pytest.approx((0.25,) * 4)
