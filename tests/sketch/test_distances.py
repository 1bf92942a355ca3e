from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.signals.forms import sketch_dtype
from fedcohort.sketch.distances import (
    distance,
    distance_matrix,
    gram,
    squares_to_global,
)
from fedcohort.sketch.race import RaceSketch

# A tiny world: 3 items, 2 rows of 3 buckets; CODES[r][item] is the bucket.
CODES = np.array([[0, 1, 1], [2, 0, 1]])
ONE_HOT = np.eye(3)[CODES].transpose(1, 0, 2)  # (item, row, bucket)


def readings(*clients, noise=None):
    out = np.zeros(len(clients), sketch_dtype(2, 3, "i8"))
    for i, items in enumerate(clients):
        out["n"][i] = len(items)
        out["counts"][i] = ONE_HOT[list(items)].sum(axis=0)
    return out


def all_samples(p, n):
    """Every sample of n items with its probability."""
    for items in product(range(3), repeat=n):
        yield items, float(np.prod([p[i] for i in items]))


def true_square(p, q):
    gap = np.tensordot(np.asarray(p) - np.asarray(q), ONE_HOT, axes=1)
    return float((gap**2).sum())


P, Q, S = (0.5, 0.3, 0.2), (0.1, 0.2, 0.7), (0.3, 0.4, 0.3)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 4), (3, 2)])
def test_debiased_square_has_the_exact_expectation(n, m):
    mmd = raw = 0.0
    for a, pa in all_samples(P, n):
        for b, pb in all_samples(Q, m):
            two = readings(a, b)
            mmd += pa * pb * distance_matrix(two, "mmd")[0, 1]
            raw += pa * pb * distance_matrix(two, debias=False)[0, 1] ** 2
    assert mmd == pytest.approx(true_square(P, Q) / 2)
    assert raw > true_square(P, Q) + 0.1  # what debiasing removes is not small


def test_noise_variance_has_the_exact_expectation():
    # Noise of -1 or +1 on each of 6 counts of one side, all 64 patterns.
    total = 0.0
    for a, pa in all_samples(P, 2):
        for b, pb in all_samples(Q, 2):
            two = readings(a, b)
            two["noise"][0] = 1.0
            counts = two["counts"][0].copy()
            for pattern in product((-1, 1), repeat=6):
                two["counts"][0] = counts + np.reshape(pattern, (2, 3))
                total += pa * pb / 64 * distance_matrix(two, "mmd")[0, 1]
    assert total == pytest.approx(true_square(P, Q) / 2)


def test_squares_to_the_global_sketch_have_the_exact_expectation():
    weights = np.array([2, 3, 2]) / 7
    total = np.zeros(3)
    for (a, pa), (b, pb), (c, pc) in product(
        all_samples(P, 2), all_samples(Q, 3), all_samples(S, 2)
    ):
        total += pa * pb * pc * squares_to_global(readings(a, b, c))
    mixture = weights @ np.array([P, Q, S])
    expected = [true_square(mixture, p) / 2 for p in (P, Q, S)]
    np.testing.assert_allclose(total, expected)


def test_debiased_gram_has_the_exact_expectation():
    total = np.zeros((2, 2))
    for (a, pa), (b, pb) in product(all_samples(P, 2), all_samples(Q, 3)):
        total += pa * pb * gram(readings(a, b))
    means = [np.tensordot(p, ONE_HOT, axes=1).ravel() for p in (P, Q)]
    np.testing.assert_allclose(total, np.array(means) @ np.transpose(means) / 2)


def test_expected_square_is_rows_times_mmd_of_the_kernel():
    # Two finite populations; 40 seeds x 500 rows make the tolerance about 4 standard errors.
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 4)), rng.standard_normal((6, 4)) + 1
    unit = np.concatenate([x, y]) / np.linalg.norm(np.concatenate([x, y]), axis=1, keepdims=True)
    kernel = (1 - np.arccos(np.clip(unit @ unit.T, -1, 1)) / np.pi) ** 3
    weights = np.r_[np.full(8, 1 / 8), np.full(6, -1 / 6)]
    exact = weights @ kernel @ weights
    squares = []
    for seed in range(40):
        a = RaceSketch.srp(dim=4, rows=500, bits=3, seed=seed)
        b = a.empty_like()
        a.add(x)
        b.add(y)
        squares.append(distance(a, b, debias=False) ** 2 / 500)
    assert np.mean(squares) == pytest.approx(exact, rel=0.04)


def clients(sizes=(5, 30, 200), shift=1.0):
    out = []
    for i, n in enumerate(sizes):
        sketch = RaceSketch.srp(dim=6, rows=25, bits=3, seed=2)
        sketch.add(np.random.default_rng(i).standard_normal((n, 6)) + i * shift)
        out.append(sketch)
    return out


def brute(a, b, kind):
    gap = a.normalized() - b.normalized()
    return {
        "frobenius": np.sqrt((gap**2).sum()),
        "row-l2": np.linalg.norm(gap, axis=1).mean(),
        "tvd-lower": np.abs(gap).sum() / 2 / a.rows,
    }[kind]


@pytest.mark.parametrize("kind", ["frobenius", "row-l2", "tvd-lower"])
def test_all_ways_to_a_distance_agree(kind, monkeypatch):
    made = clients()
    stacked = np.stack([s.reading() for s in made])
    expected = [[brute(a, b, kind) for b in made] for a in made]
    monkeypatch.setattr("fedcohort.sketch.distances.CHUNK", 100)  # many chunks
    plain = {"kind": kind, "debias": False}
    for clients_given in (made, stacked):
        np.testing.assert_allclose(distance_matrix(clients_given, **plain), expected, atol=1e-12)
    assert distance(made[0], made[1], **plain) == pytest.approx(expected[0][1])


def test_small_alike_clients_are_near_and_small_unlike_ones_far():
    # Finding: raw distance puts an alike client of 20 samples beyond an unlike one of 2,000.
    def make(n, mean, seed):
        sketch = RaceSketch.srp(dim=10, rows=300, bits=5)
        sketch.add(np.random.default_rng(seed).standard_normal((n, 10)) + mean)
        return sketch

    big, small = make(5000, 1.0, 0), make(20, 1.0, 1)
    unlike = make(2000, np.r_[2.0, np.ones(9)], 2)
    assert distance(big, small, debias=False) > distance(big, unlike, debias=False)
    assert distance(big, small) < distance(big, unlike) / 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1), st.lists(st.integers(0, 5), min_size=1))
def test_lower_bound_never_exceeds_total_variation(a, b):
    points = np.random.default_rng(0).standard_normal((6, 3))
    one = RaceSketch.srp(dim=3, rows=30, bits=4)
    two = one.empty_like()
    one.add(points[a])
    two.add(points[b])
    shares = [np.bincount(s, minlength=6) / len(s) for s in (a, b)]
    exact = np.abs(shares[0] - shares[1]).sum() / 2
    assert distance(one, two, "tvd-lower") <= exact + 1e-12


def test_odd_clients_get_nan_and_spoil_nobody():
    made = clients((0, 1, 30, 40))
    raw = distance_matrix(made, debias=False)
    assert np.isnan(raw[0]).all()
    assert np.isfinite(raw[1:, 1:]).all()
    debiased = distance_matrix(made, debias=True)
    assert np.isnan(debiased[:2]).all()
    assert np.isfinite(debiased[2:, 2:]).all()
    to_global = squares_to_global(made)
    assert np.isnan(to_global[:2]).all()
    assert np.isfinite(to_global[2:]).all()
    with pytest.raises(ValueError, match="n=1"):
        distance(made[1], made[2], debias=True)


def test_what_is_not_supported_is_refused():
    made = clients((5, 6))
    with pytest.raises(ValueError, match="unknown kind"):
        distance_matrix(made, "euclid")
    with pytest.raises(ValueError, match="mmd"):
        distance_matrix(made, "mmd", debias=False)
    with pytest.raises(ValueError, match="no sketches"):
        distance_matrix([])
    with pytest.raises(ValueError, match="empty"):
        squares_to_global(clients((0, 0)))


def test_noise_is_removed_too():
    made = clients((50, 60))
    stacked = np.stack([s.reading() for s in made])
    exact, raw = distance_matrix(stacked)[0, 1], distance_matrix(stacked, debias=False)[0, 1]
    stacked["noise"] = 0.01
    assert distance_matrix(stacked)[0, 1] < exact < raw
    assert distance_matrix(stacked, debias=False)[0, 1] == raw
    with pytest.raises(ValueError, match="noise"):
        distance_matrix(stacked, "tvd-lower")
