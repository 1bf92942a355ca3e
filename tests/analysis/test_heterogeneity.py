"""The profile of federations whose structure is known."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fedcohort.analysis.heterogeneity import measure, suggest_clusters
from fedcohort.analysis.plan import plan
from fedcohort.exceptions import DataError
from fedcohort.files.marginals import ColumnGap
from fedcohort.personalize import nearest
from fedcohort.personalize.registry import Record, Registry
from fedcohort.sketch.distances import distance_matrix, squares_to_global
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.uncertainty import cap_by_observed, errors_to_global, pair_errors

EMPTY = RaceSketch.srp(8, rows=50, bits=5)
MEANS = np.random.default_rng(0).normal(size=(4, 8)) * 2


def sketches(kinds, n, seed=0):
    """One sketch a client: Gaussians around the mean of its kind."""
    rng = np.random.default_rng(seed)
    made = []
    for kind, size in zip(kinds, np.broadcast_to(n, len(kinds)), strict=True):
        sketch = EMPTY.empty_like()
        sketch.add(rng.normal(size=(int(size), 8)) + MEANS[kind])
        made.append(sketch)
    return made


def names(items):
    return [f"site-{i}" for i in range(len(items))]


def profile(items):
    return measure(items, names(items))


def test_planted_clusters_are_found():
    kinds = [0, 1, 2, 0, 1, 2, 0, 1, 0]
    items = sketches(kinds, 200)
    found = profile(items)
    frobenius = distance_matrix(items, "frobenius") / np.sqrt(EMPTY.rows)
    assert np.allclose(found.matrix, frobenius, atol=1e-12)
    assert found.clusters.number == 3
    assert [c.cluster for c in found.clients] == kinds  # the largest cluster is number 0
    ordered = [kinds[i] for i in found.clusters.order]
    assert sum(a != b for a, b in pairwise(ordered)) == 2
    assert found.told_apart == pytest.approx(26 / 36)  # pairs of unlike kinds among nine clients
    for i, client in enumerate(found.clients):
        assert kinds[int(client.nearest.removeprefix("site-"))] == kinds[i]


@pytest.mark.parametrize("n", [10, 300, (5, 400, 30, 80, 12, 9, 700, 33, 60, 25, 41, 18)])
def test_clients_that_are_alike_form_one_cluster_without_outliers(n):
    # Seeds 0 to 9. A false alarm needs three standard errors between groups or a robust score of
    # 3.5 with errors that are upper bounds. Pairs are told apart at the 5 % level, so that their
    # mean share over seeds stays below that; the pairs of one seed are not independent.
    shares = []
    for seed in range(10):
        found = profile(sketches([0] * 12, n, seed))
        assert found.clusters.number == 1
        assert not found.outliers
        shares.append(found.told_apart)
    assert np.mean(shares) <= 0.05


def test_an_odd_client_is_an_outlier_and_a_small_one_is_not():
    found = profile(sketches([0] * 14 + [3], [200] * 13 + [5, 200]))
    assert [c.name for c in found.outliers] == ["site-14"]
    assert found.clients[13].high - found.clients[13].low > 0.1


def test_too_few_records_are_left_out_and_named():
    items = [*sketches([0, 1], 20), EMPTY.empty_like(), *sketches([0], 1)]
    found = profile(items)
    assert found.left_out == ["site-2", "site-3"]
    assert len(found.clients) == 2
    assert found.clusters.number == 1
    with pytest.raises(DataError, match="at least two sketches of two records"):
        profile(items[1:])


def test_private_sketches():
    rng = np.random.default_rng(5)
    empty = RaceSketch.srp(8, rows=10, bits=4)
    items = []
    for kind in (0, 0, 1, 1, 2, 2):
        sketch = empty.empty_like()
        sketch.add(rng.normal(size=(2000, 8)) + MEANS[kind])
        items.append(sketch.privatize(1.0, rng=rng))
    found = profile(items)
    assert found.private == 6
    (claim,) = found.privacy
    assert claim.startswith("epsilon=1 for adding or removing one record, in the counts alone")
    assert "public: the exact number of records" in claim
    assert found.clusters.number == 3  # squared distances of 0.1 and more, noise of 0.002
    assert profile([*items[:5], sketch]).private == 5


def test_errors_cover_the_scatter_of_equal_clients():
    # 100 draws: the scatter's own relative error is about 7%. Errors are upper bounds, so only
    # being too small is wrong.
    for epsilon in (None, 4.0):
        squares, to_all = [], []
        for seed in range(100):
            items = sketches([0, 0, 0], [30, 60, 90], seed)
            if epsilon is not None:
                rng = np.random.default_rng(seed)
                items = [s.privatize(epsilon, rng=rng) for s in items]
            squares.append(distance_matrix(items, "mmd"))
            to_all.append(squares_to_global(items))
        pairs = np.triu_indices(3, 1)
        seen = np.std(squares, axis=0)[pairs]
        assert (pair_errors(items)[pairs] > 0.9 * seen).all()
        assert (errors_to_global(items) > 0.9 * np.std(to_all, axis=0)).all()
        if epsilon is not None:  # noise prevails here, and its part is no bound but exact
            assert (pair_errors(items)[pairs] < 1.15 * seen).all()


def test_tightened_errors_still_cover_chance_and_never_grow():
    items = sketches([0] * 30, 40)
    squares, errors = distance_matrix(items, "mmd"), pair_errors(items)
    tight = cap_by_observed(squares, errors)
    pairs = np.triu_indices(30, 1)
    assert (tight <= errors).all()
    assert 1 <= np.mean(tight[pairs]) / np.std(squares[pairs]) < 3
    assert np.array_equal(cap_by_observed(np.abs(squares), errors), errors)


def test_one_cluster_is_suggested_when_chance_explains_the_division():
    squares = np.full((6, 6), 1.0)
    squares[:3, :3] = squares[3:, 3:] = 0.01
    np.fill_diagonal(squares, 0)
    small = suggest_clusters(squares, np.full((6, 6), 0.3))
    assert small.number == 2 and "3.3 standard errors" in small.reason  # 0.99 / 0.3
    large = suggest_clusters(squares, np.full((6, 6), 0.4))
    assert large.number == 1 and "2.5 standard errors" in large.reason


def test_verdicts_follow_the_rules():
    odd = profile(sketches([0] * 14 + [3], 200))
    assert odd.verdict().kind == "kind"
    assert "one client stands apart" in odd.verdict().headline
    assert odd.verdict().next_steps[0].startswith("Look at site-14: sketch with --set expl")
    groups = profile(sketches([0, 1] * 6, 200)).verdict()
    assert (groups.kind, "form 2 groups" in groups.headline) == ("kind", True)
    assert any("group 1: 6 clients, group 2: 6 clients" in step for step in groups.next_steps)
    rng = np.random.default_rng(0)
    graded = []
    for share in rng.uniform(0.2, 0.8, 12):
        sketch = EMPTY.empty_like()
        kind = (rng.random(400) < share).astype(int)
        sketch.add(rng.normal(size=(400, 8)) + MEANS[kind] / 3)
        graded.append(sketch)
    expected = plan(graded, [3])
    degree = profile(graded).verdict(expected)
    assert (degree.kind, expected.worthwhile) == ("degree", True)
    assert degree.next_steps[-1] == expected.lines()[-1]
    noisy = [s.privatize(0.01, rng=rng) for s in sketches([0] * 6, 50)]
    blind = profile(noisy)
    assert blind.verdict().kind == "unknown"
    assert "noise exceeds the signal in 6 of 6" in blind.warnings[0]


def gap(column, chance, marked=True):
    return ColumnGap(column, chance, marked, "more of the level x: +5%")


def test_marked_columns_come_first_in_every_verdict():
    alike = profile(sketches([0] * 12, 300))
    assert alike.verdict().kind == "alike"
    columns = {c.name: [gap("age", 0.5, False)] for c in alike.clients}
    columns["site-3"] = [gap("age", 1e-9), gap("sex", 1e-4)]
    columns["site-5"] = [gap("dose", 1e-12)._replace(hint="times 88.4?")]
    for changes, kind in (
        ({}, "columns"),
        ({"blind": True}, "unknown"),
        ({"told_apart": 0.9}, "degree"),
        ({"clusters": alike.clusters._replace(number=2)}, "kind"),
    ):
        found = alike._replace(columns=columns, **changes).verdict()
        assert found.kind == kind
        assert [step[:15] for step in found.next_steps[:2]] == [
            "Look at site-5:",
            "Look at site-3:",
        ]
        assert "+5% (times 88.4?)" in found.next_steps[0]
        assert "Federate as it is" not in " ".join(found.next_steps)


def test_a_verdict_never_says_that_clients_differ_and_that_random_cohorts_look_like_all():
    made = sketches([0] * 11 + [3], 300)
    found, expected = profile(made), plan(made[:11], [3])
    assert found.verdict().kind == "kind" and not expected.worthwhile
    verdict = found.verdict(expected)
    assert "Nothing to gain" not in " ".join([*verdict.reasons, *verdict.next_steps])


def test_nearest_clients_are_those_of_the_registry_with_200_private_sites(tmp_path):
    """Epsilon 2, 200 sites of 100 to 1,000 records and one of three, seed 11.

    Ranking by debiased squares alone agrees with the registry for few of them.
    """
    rng = np.random.default_rng(11)
    sizes = [*np.exp(rng.uniform(np.log(100), np.log(1000), 199)).astype(int).tolist(), 3]
    exact = []
    for i, n in enumerate(sizes):
        exact.append(RaceSketch.srp(4, rows=10, bits=3))
        exact[-1].add(rng.normal(size=(n, 4)) + 0.8 * np.eye(4)[i % 4])
    noisy = [s.privatize(2.0, rng=rng) for s in exact]
    names = [f"site-{i:03}" for i in range(200)]
    found = measure(noisy, names)
    with Registry.create(tmp_path / "registry") as registry:
        registry.add_many(Record(c, s) for c, s in zip(names[:-1], noisy[:-1], strict=True))
        with pytest.raises(DataError, match="'site-199': cannot tell who is near a sketch of n=3"):
            registry.add("site-199", noisy[-1])
        for client, sketch in zip(found.clients, noisy[:-1], strict=True):
            (first,) = nearest(registry, sketch, without=client.name)
            assert client.nearest == first.client
    assert found.left_out == ["site-199"]
    squares = distance_matrix(noisy, "mmd")
    np.fill_diagonal(squares, np.inf)
    assert (squares.argmin(axis=1) == 199).sum() > 50  # what the plain ranking did


def test_outliers_do_not_make_the_others_look_far():
    """Two far clients of 17 are a part of all data; the others look like samples of one law."""
    found = profile(sketches([0] * 15 + [2, 3], 300))
    assert {c.name for c in found.outliers} == {"site-15", "site-16"}
    near = [c.distance for c in found.clients if not c.outlier]
    assert np.quantile(near, 0.9) <= found.random_distance
    total = sum(sketches([0] * 15, 300)[1:], sketches([0] * 15, 300)[0])
    far = distance_matrix([sketches([0] * 15 + [2], 300)[-1], total], "mmd")[0, 1]
    assert found.clients[15].distance == pytest.approx(np.sqrt(far), rel=0.02)


def test_changes_since_earlier_sketches():
    """Fresh samples of the same law have not changed, in 10 federations; a moved client has."""
    for seed in range(10):
        new, old = sketches([0] * 8, 200, seed), sketches([0] * 8, 200, seed + 100)
        found = measure(new, names(new), dict(zip(names(old), old, strict=True)))
        assert [c.client for c in found.changes if c.changed] == []
    new[3] = sketches([2], 200)[0]
    earlier = {**dict(zip(names(old), old, strict=True)), "gone": old[0]}
    del earlier["site-7"]  # a newcomer
    earlier["site-6"] = sketches([0], 3)[0]
    found = measure(new, names(new), earlier)
    assert len(found.changes) == 6 and found.changes[0].client == "site-3"
    assert [c.changed for c in found.changes] == [True] + [False] * 5
    assert "site-6" in found.warnings[-1]


def test_columns_that_cannot_be_judged_are_never_alike():
    alike = profile(sketches([0] * 12, 300))
    unclear = ColumnGap("radius", 1.0, False, "", "state its center and scale")
    found = alike._replace(columns={c.name: [unclear] for c in alike.clients}).verdict()
    assert found.kind == "unknown"
    assert "radius" in found.headline and "state its center and scale" in found.reasons[0]
