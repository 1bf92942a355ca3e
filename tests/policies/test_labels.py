"""Policies by label histograms and by updates: exact small cases, laws and targets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from fedcohort.policies import DELTA, FLIPS, FedCBS, FedSAE, HiCSFL, LabelMatch, base
from fedcohort.policies.base import label_counts, label_distances
from fedcohort.policies.delta import proportional_inclusion, systematic
from fedcohort.policies.fed_cbs import imbalance
from fedcohort.policies.hics_fl import entropies
from fedcohort.rounds import Outcome, Round, stream
from fedcohort.signals.table import Signals

IDS = tuple(f"{i:02d}" for i in range(20))


def labeled(rows) -> Signals:
    signals = Signals()
    signals.record("label_histogram", dict(zip(IDS, np.asarray(rows, float), strict=False)), 0)
    return signals


def one_label(classes: int = 5) -> Signals:
    """Client i holds label i mod 5 only."""
    return labeled(10 * np.eye(classes)[np.arange(20) % classes])


@pytest.mark.parametrize("block", [1, 70, 1 << 15])
def test_distances_of_labels_are_the_definition_in_any_blocks(block, monkeypatch) -> None:
    """Bit for bit: cohorts must not depend on how many rows are handled at a time."""
    monkeypatch.setattr(base, "_BLOCK", block)
    rng = np.random.default_rng(0)
    counts, pooled = rng.integers(0, 50, (300, 12)) + 0.5, rng.integers(0, 9, 12) + 0.1
    goal = rng.dirichlet(np.ones(12))
    sums = pooled + counts
    expected = np.square(sums / sums.sum(axis=1, keepdims=True) - goal).sum(axis=1)
    np.testing.assert_array_equal(label_distances(counts, pooled, goal), expected)


def test_label_counts_drop_the_empty_and_clip_the_forged() -> None:
    rows = np.full((20, 2), 5.0)
    rows[3], rows[4], rows[5] = (0, 0), (-3, 6), (2.0**39, 2.0**39)
    positions, counts = label_counts(labeled(rows), IDS)
    assert 3 not in positions
    assert counts[3].tolist() == [0, 6]  # client 4: noise below zero is cut
    assert counts[4].tolist() == [50, 50]  # client 5: 10 times the median of 10


def test_imbalance_is_the_quadratic_form_of_the_paper() -> None:
    """QCID = sum_kl q_k q_l <a_k, a_l> / (sum q)^2 - 1 / B, by brute force."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (4, 6)).astype(float)
    q, shares = counts.sum(axis=1), counts / counts.sum(axis=1, keepdims=True)
    quadratic = (q @ (shares @ shares.T) @ q) / q.sum() ** 2 - 1 / 6
    assert imbalance(counts.sum(axis=0)[None])[0] == pytest.approx(quadratic)


class TestFedCBS:
    def test_the_law_by_enumeration(self) -> None:
        """P(first) by QCID^-1 plus the bonus, P(second | first) by QCID^-2; 4000 draws.

        Four standard errors are at most .032.
        """
        rows = np.array([[6.0, 2, 1], [1, 5, 2], [2, 2, 5]])
        signals, ids, number = labeled(rows), IDS[:3], 4
        policy = FedCBS(exploration=0.5)
        policy.state.selected = {"00": 3, "02": 1}
        times = np.array([3.0, 1.0, 1.0])
        first = 1 / imbalance(rows) + 0.5 * np.sqrt(3 * np.log(5) / (2 * times))
        first /= first.sum()
        expected = Counter()
        for i in range(3):
            others = [j for j in range(3) if j != i]
            second = np.array([imbalance((rows[i] + rows[j])[None])[0] ** -2 for j in others])
            for j, p in zip(others, second / second.sum(), strict=True):
                expected[ids[i], ids[j]] += first[i] * p
        draws = 4000
        found = Counter(
            policy.select(Round(number, ids, 2), signals, stream(0, n)).clients
            for n in range(draws)
        )
        for pair, p in expected.items():
            assert abs(found[pair] / draws - p) < 4 * np.sqrt(0.25 / draws)

    def test_cohorts_hold_every_label(self) -> None:
        signals, policy = one_label(), FedCBS()
        for number in range(20):
            round = Round(number, IDS, 5)
            chosen = policy.select(round, signals, stream(number)).clients
            assert {int(c) % 5 for c in chosen} == set(range(5))
            policy.observe(round, Outcome(chosen, chosen), signals)
        assert sum(policy.state.selected.values()) == 100


class TestLabelMatch:
    def test_each_pick_is_the_best_of_all(self) -> None:
        rows = np.random.default_rng(1).integers(0, 20, (20, 4)).astype(float)
        signals = labeled(rows)
        selection = LabelMatch().select(Round(0, IDS, 4), signals, stream(3))
        goal = rows.sum(axis=0) / rows.sum()
        chosen = [IDS.index(c) for c in selection.clients]

        def distance(members):
            pooled = rows[list(members)].sum(axis=0)
            return np.square(pooled / pooled.sum() - goal).sum()

        for k in range(1, 4):
            rest = [j for j in range(20) if j not in chosen[:k]]
            best = min(rest, key=lambda j: distance([*chosen[:k], j]))
            assert chosen[k] == best
        scores = list(selection.scores.values())
        assert scores[-1] == pytest.approx(distance(chosen))

    def test_targets_differ_on_a_long_tail(self) -> None:
        """19 clients hold label 0, one holds label 1: only "balanced" always takes that one."""
        signals = labeled([[10.0, 0.0]] * 19 + [[0.0, 10.0]])
        balanced = LabelMatch("balanced").select(Round(0, IDS, 2), signals, stream(1)).clients
        federation = LabelMatch("global").select(Round(0, IDS, 2), signals, stream(1)).clients
        assert "19" in balanced
        assert "19" not in federation

    def test_equal_averaging_counts_clients_not_examples(self) -> None:
        signals = labeled([[100.0, 0.0], [0.0, 1.0], [0.0, 100.0]])
        ids, policy = IDS[:3], LabelMatch("balanced")
        cohorts = {"equal": set(), "size": set()}
        for averaging in ("equal", "size"):
            for n in range(30):
                chosen = policy.select(Round(0, ids, 2, averaging), signals, stream(n)).clients
                cohorts[averaging].add(frozenset(chosen))
        assert frozenset({"00", "01"}) in cohorts["equal"]
        # by size, 100 against 1 is no balance: the first client decides, 00 and 02 find each other
        assert frozenset({"00", "02"}) in cohorts["size"]
        starts_at_0 = [
            policy.select(Round(0, ids, 2, "size"), signals, stream(n)).clients for n in range(30)
        ]
        assert all(c[1] == "02" for c in starts_at_0 if c[0] == "00")


class TestFLIPS:
    def test_clusters_get_equal_places_and_clients_their_turn(self) -> None:
        rows = [[10.0, 0, 0]] * 12 + [[0, 10.0, 0]] * 6 + [[0, 0, 10.0]] * 2
        signals, policy, picks = labeled(rows), FLIPS(), Counter()
        for number in range(24):
            round = Round(number, IDS, 3)
            chosen = policy.select(round, signals, stream(number)).clients
            policy.observe(round, Outcome(chosen, chosen), signals)
            picks.update(chosen)
        assert len(policy.state.centers) == 3  # found by the Davies-Bouldin index
        kinds = [sum(picks[c] for c in IDS[a:b]) for a, b in ((0, 12), (12, 18), (18, 20))]
        assert kinds == [24, 24, 24]
        assert {picks[c] for c in IDS[:12]} == {2}
        assert {picks[c] for c in IDS[18:]} == {12}

    def test_newcomers_join_the_nearest_center(self) -> None:
        policy = FLIPS(clusters=2)
        policy.select(Round(0, IDS[:6], 2), labeled([[9.0, 1], [1, 9.0]] * 3), stream(0))
        centers = policy.state.centers.copy()
        policy.select(Round(1, IDS[:7], 2), labeled([[9.0, 1], [1, 9.0]] * 3 + [[8, 2]]), stream(1))
        np.testing.assert_array_equal(policy.state.centers, centers)


class TestHiCSFL:
    def test_entropy_by_hand(self) -> None:
        updates = np.array([[0.02, -0.01, 0.0], [0.0, 0.0, 0.0]])
        shares = np.exp(updates / 0.01)
        shares /= shares.sum(axis=1, keepdims=True)
        expected = -(shares * np.log(shares)).sum(axis=1)
        np.testing.assert_allclose(entropies(updates, 0.01), expected)
        assert entropies(np.array([[1e15, -1e15]]), 1e-3) == pytest.approx(0.0)

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

    def test_balanced_clusters_come_first_and_all_are_equal_in_the_end(self) -> None:
        """Half of the clients have balanced labels; with gamma 4 they are drawn exp(4 ln 4) = 256
        times as often as clients of one label, and as often at the end (4 clusters: 1 balanced)."""
        updates = {}
        for i, c in enumerate(IDS):
            updates[c] = np.zeros(4) if i < 10 else 0.1 * np.eye(4)[i % 3] - 0.02
        signals = Signals()
        signals.record("bias_update", updates, 0)
        policy = HiCSFL(rounds=100)
        policy.state.tried = dict.fromkeys(IDS, True)
        shares = []
        for number in (1, 100):
            drawn = [
                policy.select(Round(number, IDS, 4), signals, stream(number, n)).clients
                for n in range(200)
            ]
            shares.append(np.mean([int(c) < 10 for cohort in drawn for c in cohort]))
        assert shares[0] > 0.97
        assert abs(shares[1] - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 800)


class TestDELTA:
    def test_inclusion_is_proportional_and_the_aggregate_unbiased(self) -> None:
        """Over 6000 draws each client's mean weight is its share of the data."""
        ids, signals = IDS[:5], Signals()
        signals.record("num_examples", dict(zip(ids, (10, 20, 30, 5, 35), strict=True)), 0)
        signals.record("update_distance", dict(zip(ids, (4.0, 1.0, 0.5, 2.0, 1.0), strict=True)), 0)
        policy, total, squares = DELTA(exploration=0.2), np.zeros(5), np.zeros(5)
        draws = 6000
        for n in range(draws):
            selection = policy.select(Round(1, ids, 2), signals, stream(n))
            weights = np.zeros(5)
            for client, weight in zip(selection.clients, selection.weights, strict=True):
                weights[ids.index(client)] = weight
            total, squares = total + weights, squares + weights**2
        mean = total / draws
        error = np.sqrt(np.maximum(squares / draws - mean**2, 1e-12) / draws)
        assert (np.abs(mean - np.array([0.1, 0.2, 0.3, 0.05, 0.35])) < 4 * error + 1e-9).all()

    def test_systematic_draws_keep_size_and_inclusion(self) -> None:
        inclusion = proportional_inclusion(np.array([0.7, 0.1, 0.1, 0.05, 0.05]), 3)
        assert inclusion.sum() == pytest.approx(3)
        assert inclusion[0] == 1
        hits = np.zeros(5)
        for n in range(4000):
            chosen = systematic(inclusion, stream(n))
            assert len(set(chosen.tolist())) == 3
            hits[chosen] += 1
        assert (np.abs(hits / 4000 - inclusion) < 4 * np.sqrt(0.25 / 4000)).all()

    def test_local_variance_adds_the_spread_of_batches(self) -> None:
        """Inclusion probabilities are proportional to sqrt(zeta^2 + ratio sigma^2), exactly."""
        ids, signals = IDS[:4], Signals()
        signals.record("update_distance", dict(zip(ids, (3.0, 1.0, 0.0, 1.0), strict=True)), 0)
        signals.record("gradient_spread", dict(zip(ids, (2.0, 0.0, 2.0, 1.0), strict=True)), 0)
        policy = DELTA(exploration=0.0, local_variance=4.0)
        importance = np.sqrt([9 + 16, 1, 16, 1 + 4])
        found = {}
        for n in range(40):
            found |= policy.select(Round(1, ids, 1), signals, stream(n)).scores
        assert [found[c] for c in ids] == pytest.approx(importance / importance.sum())
        assert policy.needs.reply == {"update_distance", "gradient_spread"}
        assert DELTA().needs.reply == {"update_distance"}

    def test_the_spread_is_that_of_the_batches(self) -> None:
        """Against gradients by autograd in float64, one batch at a time."""
        torch = pytest.importorskip("torch")
        from fedcohort.datasets import federate, load
        from fedcohort.rounds import stream as generator
        from fedcohort.simulate import LocalTraining, Simulation, build

        clients = federate(load("digits"), "iid", clients=9, seed=0)
        model = build("mlp-64-30", clients.dataset.sample_shape, 10, seed=0)
        local = LocalTraining(epochs=1, batch_size=50, lr=0.1)
        policy = DELTA(local_variance=1.0)
        simulation = Simulation(clients, model, policy, cohort_size=2, local=local, device="cpu")
        simulation.step()
        signals, (session,) = simulation.sessions[0].signals, simulation.sessions
        (client, _) = simulation.seeds[0].selection.clients
        order = generator(0, "gradient spread", 0, client).permutation(clients.parts[client])
        double, rows = model.double(), []
        for first in range(0, len(order), 50):
            at = order[first : first + 50]
            double.zero_grad()
            outputs = double(torch.from_numpy(clients.dataset.x[at]).double())
            labels = torch.from_numpy(clients.dataset.y[at])
            torch.nn.functional.cross_entropy(outputs, labels).backward()
            rows.append(torch.cat([p.grad.ravel() for p in double.parameters()]).numpy().copy())
        assert len(rows) > 2
        expected = np.sqrt(np.square(rows - np.mean(rows, axis=0)).sum(axis=1).mean())
        found = signals.values("gradient_spread", (client,))[0]
        assert found == pytest.approx(expected, rel=1e-4)
        assert session.policy.signal_options["update_distance"]["insight_step"]

    def test_a_forged_distance_is_clipped(self) -> None:
        signals = Signals()
        signals.record("update_distance", dict.fromkeys(IDS, 1.0) | {"07": 1e15}, 0)
        signals.record("num_examples", dict.fromkeys(IDS, 10), 0)
        drawn = [DELTA().select(Round(1, IDS, 2), signals, stream(n)).clients for n in range(400)]
        share = 2 * (0.9 * 10 / 29 + 0.1 / 20)
        assert abs(np.mean(["07" in c for c in drawn]) - share) < 4 * np.sqrt(0.25 / 400)


class TestFedSAE:
    def test_the_law_and_the_value(self) -> None:
        policy, signals, ids = FedSAE(beta=0.5), Signals(), IDS[:3]
        signals.record("num_examples", dict(zip(ids, (4, 9, 16), strict=True)), 0)
        signals.record("loss", {"00": 1.0, "01": 0.5}, 0)
        policy.observe(Round(0, ids, 3), Outcome(ids, ids), signals)
        # 2 x 1, 3 x .5, and half of the median for the one who reported nothing
        assert policy.state.value == {"00": 2.0, "01": 1.5, "02": 0.875}
        p = np.exp(0.5 * np.array([2.0, 1.5, 0.875]))
        p /= p.sum()
        found = Counter(
            policy.select(Round(1, ids, 1), signals, stream(n)).clients[0] for n in range(3000)
        )
        for client, q in zip(ids, p, strict=True):
            assert abs(found[client] / 3000 - q) < 4 * np.sqrt(0.25 / 3000)

    def test_active_rounds_end(self) -> None:
        policy = FedSAE(beta=100.0, active_rounds=3)
        policy.state.value = dict.fromkeys(IDS, 0.0) | {"05": 9.0}
        before = [policy.select(Round(2, IDS, 1), Signals(), stream(n)).clients for n in range(50)]
        after = [policy.select(Round(3, IDS, 1), Signals(), stream(n)).clients for n in range(50)]
        assert set(before) == {("05",)}
        assert len(set(after)) > 10


@pytest.mark.parametrize(
    ("factory", "match"),
    [
        (lambda: FedCBS(exploration=-1), "exploration=-1"),
        (lambda: LabelMatch("uniform"), "target='uniform'"),
        (lambda: LabelMatch(epsilon=0.0005), "LabelMatch: epsilon=0.0005"),
        (lambda: FedCBS(epsilon=0.0005), "FedCBS: epsilon=0.0005"),
        (lambda: FLIPS(epsilon=-1.0), "FLIPS: epsilon=-1.0"),
        (lambda: FLIPS(clusters=0), "clusters=0"),
        (lambda: FLIPS(most_clusters=1), "most_clusters=1"),
        (lambda: HiCSFL(temperature=0), "temperature=0"),
        (lambda: HiCSFL(gamma=-1), "gamma=-1"),
        (lambda: DELTA(exploration=2), "exploration=2"),
        (lambda: DELTA(local_variance=-1), "local_variance=-1"),
        (lambda: FedSAE(beta=-1), "beta=-1"),
    ],
)
def test_wrong_options_are_named(factory, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        factory()


def test_pairs_are_possible() -> None:
    """The clusters of FLIPS allow every pair of two kinds: no pair is favored."""
    rows = [[10.0, 0]] * 3 + [[0, 10.0]] * 3
    found = Counter()
    for n in range(900):
        chosen = FLIPS(clusters=2).select(Round(0, IDS[:6], 2), labeled(rows), stream(n)).clients
        found[frozenset(chosen)] += 1
    pairs = {frozenset({a, b}) for a, b in combinations(IDS[:6], 2) if (a < "03") != (b < "03")}
    assert set(found) == pairs
    assert all(abs(v / 900 - 1 / 9) < 4 * np.sqrt(8 / 81 / 900) for v in found.values())
