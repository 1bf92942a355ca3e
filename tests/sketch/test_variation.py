"""Total variation: the truth is known for a finite population, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import IncompatibleSketches
from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.uncertainty import total_variation, total_variations

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


def test_the_interval_narrows_around_a_difference():
    a, b = RaceSketch.srp(6, rows=ROWS, bits=4), RaceSketch.srp(6, rows=ROWS, bits=4)
    x = np.random.default_rng(2).standard_normal((2, 20_000, 6))
    a.add(x[0])
    b.add(x[1] + [1.5, 0, 0, 0, 0, 0])
    value, low, high = total_variation(a, b)
    assert 0 < low < value < high < low + 0.1
    assert of_the_data(a, b) == pytest.approx(value, abs=0.01)


def test_matrix_is_symmetric_and_unlike_sketches_are_refused():
    a = RaceSketch.srp(6, rows=ROWS, bits=4)
    b = a.empty_like()
    a.add(ITEMS)
    b.add(ITEMS[:50])
    matrix = total_variations([a, b])
    assert matrix[0][1] == matrix[1][0] == total_variation(a, b)
    assert matrix[0][0].high == 0
    with pytest.raises(IncompatibleSketches):
        total_variation(a, RaceSketch.srp(6, rows=ROWS, bits=3))
