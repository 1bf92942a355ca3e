from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fedcohort.signals.forms import sketch_dtype
from fedcohort.sketch.distances import distance, distance_matrix, gram, squares_to_global
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


def clients(sizes=(5, 30, 200), shift=1.0):
    out = []
    for i, n in enumerate(sizes):
        sketch = RaceSketch.srp(dim=6, rows=25, bits=3, seed=2)
        sketch.add(np.random.default_rng(i).standard_normal((n, 6)) + i * shift)
        out.append(sketch)
    return out


def test_plain_distances_of_sketches_and_readings(monkeypatch):
    made = clients()
    gaps = [[np.linalg.norm(a.normalized() - b.normalized()) for b in made] for a in made]
    monkeypatch.setattr("fedcohort.sketch.distances.CHUNK", 100)  # many chunks
    for given in (made, np.stack([s.reading() for s in made])):
        np.testing.assert_allclose(distance_matrix(given, debias=False), gaps, atol=1e-12)


def test_odd_clients_get_nan_and_spoil_nobody():
    made = clients((0, 1, 30, 40))
    raw, debiased = (distance_matrix(made, debias=debias) for debias in (False, True))
    for values, odd in ((raw, 1), (debiased, 2), (squares_to_global(made), 2)):
        assert np.isnan(values[:odd]).all()
        assert np.isfinite(values[(slice(odd, None),) * values.ndim]).all()
    for few in (0, 1):
        with pytest.raises(ValueError, match=f"n={few}"):
            distance(made[few], made[2])
    with pytest.raises(ValueError, match="no distribution"):
        made[0].normalized()
    with pytest.raises(ValueError, match="no sketches"):
        distance_matrix([])
    with pytest.raises(ValueError, match="empty"):
        squares_to_global(clients((0, 0)))
