from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedcohort.sketch.errors import bounds, gaussian_tvd, path_sum, plug_in, simulate_gaussians
from fedcohort.sketch.hashing.srp import collision
from fedcohort.sketch.race import RaceSketch, distance


@pytest.mark.parametrize("gap", [0.0, 0.3, 1.0, 4.0])
def test_gaussian_closed_form_equals_the_integral(gap):
    def half(x):
        return abs(norm.pdf(x) - norm.pdf(x - gap)) / 2

    exact, _ = quad(half, -12, 16, points=[gap / 2], limit=200)
    assert gaussian_tvd([0.0], [gap], [[1.0]]) == pytest.approx(exact, abs=1e-9)


def test_gaussian_closed_form_depends_on_the_mahalanobis_distance_only():
    rng = np.random.default_rng(0)
    root = rng.standard_normal((4, 4))
    mean = rng.standard_normal(4)
    exact = gaussian_tvd(np.zeros(4), mean, np.eye(4))
    assert gaussian_tvd(np.zeros(4), root @ mean, root @ root.T) == pytest.approx(exact)


def circle(n, rng, low, high):
    angle = rng.uniform(low, high, n)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def test_plug_in_is_the_formula_with_kernel_densities():
    # 4,000 rows: densities are within 0.01 of the exact kernel's.
    rng = np.random.default_rng(1)
    x, y = circle(30, rng, 0, 1), circle(40, rng, 0.5, 2)
    points = circle(25, rng, 0, 2)
    a = RaceSketch.srp(dim=2, rows=4000, bits=3, seed=2)
    b = a.empty_like()
    a.add(x)
    b.add(y)
    p, q = (collision(points @ d.T, bits=3).mean(axis=1) for d in (x, y))
    assert plug_in(a, b, points) == pytest.approx(np.mean(np.abs(p - q) / (p + q)), abs=0.015)
    proposal = rng.uniform(1, 2, 25)
    w = 1 / proposal
    exact = np.sum(w * np.abs(p / (w @ p) - q / (w @ q))) / 2
    assert plug_in(a, b, points, proposal) == pytest.approx(exact, abs=0.015)


def test_plug_in_converges_as_the_kernel_narrows():
    # Uniform on arcs [0, 2] and [1, 3]: total variation 1/2.
    rng = np.random.default_rng(2)
    x, y = circle(4000, rng, 0, 2), circle(4000, rng, 1, 3)
    mixed = np.concatenate([circle(500, rng, 0, 2), circle(500, rng, 1, 3)])
    uniform = circle(1000, rng, -1, 4)
    for points, proposal in ((mixed, None), (uniform, np.ones(1000))):
        seen = []
        for bits in (2, 6, 16):
            a = RaceSketch.srp(dim=2, rows=100, bits=bits)
            b = a.empty_like()
            a.add(x)
            b.add(y)
            seen.append(plug_in(a, b, points, proposal))
        assert seen[0] < seen[1] < seen[2] < 0.55
        assert seen[2] > 0.4


def two(n=200, rows=4, bits=2, shift=1.0):
    rng = np.random.default_rng(3)
    a = RaceSketch.srp(dim=3, rows=rows, bits=bits)
    b = a.empty_like()
    a.add(rng.standard_normal((n, 3)))
    b.add(rng.standard_normal((n, 3)) + shift)
    return a, b


def test_path_sum_enumerates_and_its_bounds_hold():
    a, b = two()
    gap = a.normalized() - b.normalized()
    exact = np.mean(
        [
            abs(gap[0, i] + gap[1, j] + gap[2, k] + gap[3, l])
            for i in range(4)
            for j in range(4)
            for k in range(4)
            for l in range(4)
        ]
    )
    made = path_sum(a, b)
    assert made.value == pytest.approx(exact)
    assert made.value <= made.upper_l1 <= made.upper_frobenius
    # the paper's claim, the plain norm as upper bound of the summed absolute differences, fails:
    assert np.abs(gap).sum() > distance(a, b)


def test_path_sum_is_the_frobenius_norm_for_many_rows():
    a, b = two(rows=200, bits=4)
    made = path_sum(a, b, 20_000, np.random.default_rng(0))
    assert made.value == pytest.approx(made.by_frobenius, rel=0.03)
    with pytest.raises(ValueError, match="rng"):
        path_sum(a, b)


def test_bounds():
    a, b = two(rows=50, bits=3)
    made = bounds(a, b)
    assert made.lower_mean == pytest.approx(distance(a, b, "tvd-lower"))
    assert made.lower_mean < made.lower <= made.upper == 1
    with pytest.raises(ValueError, match="noise"):
        bounds(a.privatize(1.0), b)


def test_simulation_of_the_paper():
    made = np.array(simulate_gaussians(12, np.random.default_rng(4), samples=500, bits=6))
    exact, others = made[:, 0], made[:, 1:]
    for column in others.T:
        assert np.corrcoef(exact, column)[0, 1] > 0.9
    assert (made[:, 1] < exact + 0.1).all()  # blurred densities read low
    assert math.isclose(made[:, 0].max(), exact.max())
