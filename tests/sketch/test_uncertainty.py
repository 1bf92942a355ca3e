from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from fedcohort.exceptions import IncompatibleSketches
from fedcohort.sketch.distances import distance
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.uncertainty import (
    distance_with_error,
    squared_error,
    too_few,
    total_variation,
    total_variations,
    variances,
)


def filled(n, mean, rng, rows=10, bits=4):
    sketch = RaceSketch.srp(dim=4, rows=rows, bits=bits, seed=1)
    sketch.add(rng.standard_normal((n, 4)) + np.array([mean, 0, 0, 0]))
    return sketch


@pytest.mark.parametrize(
    ("epsilon", "delta", "shift", "n", "rows"),
    [
        (1.0, 0.0, 0.0, "public", 10),
        (0.3, 0.0, 1.0, "public", 10),
        (1.0, 1e-5, 1.0, "public", 10),
        (1.0, 0.0, 2.0, "private", 2),  # an estimated n adds its part
    ],
)
def test_noise_variance_is_that_of_repeated_releases(epsilon, delta, shift, n, rows):
    # Same data, 400 releases: the standard deviation of the squares is known to about 5%.
    rng = np.random.default_rng(5)
    sizes = (400, 400) if n == "private" else (1500, 2500)
    a, b = (filled(size, mean, rng, rows) for size, mean in zip(sizes, (0.0, shift), strict=True))
    squares, predicted = [], []
    for _ in range(400):
        p, q = (s.privatize(epsilon, delta, n=n, rng=rng) for s in (a, b))
        squares.append(distance(p, q, "mmd") * rows)
        predicted.append(variances(p, q)[0])
    assert np.std(squares) == pytest.approx(math.sqrt(np.mean(predicted)), rel=0.2)


@pytest.mark.parametrize(
    ("rows", "shift", "epsilon", "share"),
    [(10, 0.0, None, 0.25), (10, 0.5, None, 0.25), (10, 0.5, 2.0, 0.25), (1, 1.0, None, 0.87)],
)
def test_sampling_variance_bounds_that_of_repeated_data(rows, shift, epsilon, share):
    """Fresh data 300 times, same hash functions: never above the bound, nor far below it.

    With one row there is nothing to bound: 4 u'Cu + 2 tr C^2 is the variance but for 1/n^3.
    """
    rng = np.random.default_rng(7)
    squares, bounds = [], []
    for _ in range(300):
        a, b = filled(300, 0.0, rng, rows), filled(500, shift, rng, rows)
        if epsilon is not None:
            a, b = (s.privatize(epsilon, rng=rng) for s in (a, b))
        squares.append(distance(a, b, "mmd") * rows)
        bounds.append(sum(variances(a, b)))
    assert share < np.std(squares) / math.sqrt(np.mean(bounds)) < 1.15


def test_kinds_and_zero():
    rng = np.random.default_rng(9)
    a, b = filled(2000, 0.0, rng).privatize(1.0, rng=rng), filled(2000, 1.5, rng)
    square, error = distance_with_error(a, b, "mmd")
    value, near = distance_with_error(a, b)
    assert value == pytest.approx(math.sqrt(10 * square))
    assert near == pytest.approx(10 * error / (2 * value), rel=0.05)
    value, near = distance_with_error(a, a)
    assert value == 0 < near < 1


def one_by_one(a, b):
    """Var D of one pair: both variances as the module defines them, row by row."""
    spread = a.noise / a.n**2 + b.noise / b.n**2
    fourth = sum(s.release.fourth / s.n**4 for s in (a, b) if s.release is not None)
    q, r = a.counts / a.n, b.counts / b.n
    u = q - r
    total = 4 * spread * max((u**2).sum() - u.size * spread, 0)
    total += u.size * (2 * spread**2 + fourth)
    for sketch, own in ((a, q), (b, r)):
        if sketch.release is not None and sketch.release.n == "private":
            relative = sketch.noise * a.buckets / a.rows / sketch.n**2
            total += 4 * relative * (own * u).sum() ** 2
    along = squared = 0.0
    for x, y, g in zip(q, r, u, strict=True):
        c = np.diag(x) / a.n - np.outer(x, x) / a.n + np.diag(y) / b.n - np.outer(y, y) / b.n
        held = np.maximum(np.diag(c), 0) + spread  # noise and sampling error inside g
        along += g @ c @ g - (np.diag(x) / a.n + np.diag(y) / b.n).diagonal() @ held
        along += spread * (x @ x / a.n + y @ y / b.n)
        squared += np.trace(c @ c)
    return math.sqrt(total + a.rows * (4 * max(along, 0) + 2 * max(squared, 0)))


@pytest.mark.parametrize("n", [None, "public", "private"])
def test_errors_are_those_of_each_row(n):
    rng = np.random.default_rng(8)
    made = [filled(40 * i + 20, i / 5, rng) for i in range(6)]
    if n is not None:
        made = [s.privatize(3.0, n=n, rng=rng) if i % 3 else s for i, s in enumerate(made)]
    for a, b in product(made[:2], made):
        assert squared_error(a, b) == pytest.approx(one_by_one(a, b), rel=1e-9)


def test_who_has_too_few_records():
    """Three records, or ten at epsilon 1, lie anywhere; the rule asks for sizes and noise alone."""
    rng = np.random.default_rng(3)
    exact = [filled(n, 0.0, rng) for n in (0, 1, 2, 3, 4, 400)]
    assert too_few(exact).tolist() == [True] * 4 + [False] * 2
    equal = filled(3, 0.0, rng)
    equal.counts[:] = 0
    equal.counts[:, 0] = 3  # three equal records show no scatter, and are three all the same
    assert too_few([equal]).all()
    for n, few in ((10, True), (2000, False)):
        private = filled(n, 0.0, rng).privatize(1.0, rng=rng)
        assert too_few(np.stack([private.reading()])).tolist() == [few]


# Total variation: the truth is known for a finite population, row by row.
RNG = np.random.default_rng(0)
ITEMS = RNG.standard_normal((400, 6))
UNIFORM = np.full(400, 1 / 400)
LAWS = {"one law": UNIFORM, "near": 0.9 * UNIFORM, "far": RNG.dirichlet(np.full(400, 0.3))}
LAWS["near"] = LAWS["near"] + 0.1 * LAWS["far"]
ROWS = 20


def drawn(empty, codes, law, n, rng):
    sketch, counts = empty.empty_like(), rng.multinomial(n, law)
    for row in range(empty.rows):
        sketch.counts[row] = np.bincount(codes[row], counts, empty.buckets)
    sketch.n = n
    return sketch


def truth(codes, law, buckets):
    gaps = [np.bincount(row, UNIFORM - law, buckets) for row in codes]
    return np.abs(gaps).sum() / 2 / len(codes)


def of_the_data(a, b):
    """Total variation of two data sets as the buckets see them."""
    return np.abs(a.normalized() - b.normalized()).sum() / 2 / a.rows


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(
    ("sizes", "bits", "epsilon"),
    [((50, 50), 3, None), ((500, 300), 6, None), ((5000, 5000), 6, None), ((2000, 2000), 3, 1.0)],
)
def test_intervals_cover_what_the_buckets_see(name, sizes, bits, epsilon):
    """100 pairs of samples: 95 % intervals may miss 11 at most (chance below .003 if exact).

    The plain distance of two data sets lies above the truth in nearly all of these trials. The
    mean estimate is also within a fifth of the truth and .06.
    """
    rng = np.random.default_rng(1)
    empty = RaceSketch.srp(6, rows=4 if epsilon else ROWS, bits=bits)
    codes = empty.family.codes(ITEMS)
    exact = truth(codes, LAWS[name], empty.buckets)
    covered, values, plain = 0, [], []
    for _ in range(100):
        laws = (UNIFORM, LAWS[name])
        a, b = (drawn(empty, codes, p, n, rng) for p, n in zip(laws, sizes, strict=True))
        plain.append(of_the_data(a, b))
        if epsilon:
            a, b = (s.privatize(epsilon, rng=rng) for s in (a, b))
        value, low, high = total_variation(a, b)
        covered += low <= exact <= high
        values.append(value)
    assert covered >= 89
    assert np.mean(np.array(plain) > exact) > 0.8 or name == "far"
    assert abs(np.mean(values) - exact) < 0.2 * exact + 0.06


@pytest.mark.parametrize(("buckets", "n", "epsilon"), [(256, 100, 1.0), (4096, 1000, None)])
@pytest.mark.parametrize("exact", [0.0, 0.5, 1.0])
def test_intervals_cover_where_most_buckets_hold_noise_or_nothing(buckets, n, epsilon, exact):
    """20 pairs, seed 1: two may miss. Of private ones, .5 or 1 apart, more than half missed."""
    rng, covered = np.random.default_rng(1), 0
    laws = np.full((2, buckets), (1 - exact) / buckets)
    laws[0, : buckets // 2] = laws[1, buckets // 2 :] = (1 + exact) / buckets
    for _ in range(20):
        pair = [RaceSketch.minhash(rows=4, buckets=buckets) for _ in laws]
        for sketch, law in zip(pair, laws, strict=True):
            sketch.counts, sketch.n = rng.multinomial(n, law, size=4), n
        a, b = (s.privatize(epsilon, rng=rng) if epsilon else s for s in pair)
        _, low, high = total_variation(a, b)
        covered += low <= exact <= high
    assert covered >= 18


def test_the_interval_narrows_around_a_difference():
    a, b = RaceSketch.srp(6, rows=ROWS, bits=4), RaceSketch.srp(6, rows=ROWS, bits=4)
    x = np.random.default_rng(2).standard_normal((2, 20_000, 6))
    a.add(x[0])
    b.add(x[1] + [1.5, 0, 0, 0, 0, 0])
    value, low, high = between = total_variation(a, b)
    assert 0 < low < value < high < low + 0.1
    assert of_the_data(a, b) == pytest.approx(value, abs=0.01)
    assert total_variations([a, b]) == [[(0, 0, 0), between], [between, (0, 0, 0)]]
    with pytest.raises(IncompatibleSketches):
        total_variation(a, RaceSketch.srp(6, rows=ROWS, bits=3))
