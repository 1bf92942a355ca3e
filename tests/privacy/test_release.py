from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import spearmanr

from fedcohort.exceptions import IncompatibleSketches
from fedcohort.privacy.release import MAX_VARIANCE, noise_for, signal_to_noise, sketch_size
from fedcohort.sketch import file
from fedcohort.sketch.distances import distance, distance_matrix
from fedcohort.sketch.race import RaceSketch, pooled
from fedcohort.sketch.uncertainty import distance_with_error


def filled(n=2000, seed=0, rows=10, bits=5, mean=0.0):
    sketch = RaceSketch.srp(dim=4, rows=rows, bits=bits)
    sketch.add(np.random.default_rng(seed).standard_normal((n, 4)) + mean)
    return sketch


@pytest.mark.parametrize("delta", [0.0, 1e-6])
@pytest.mark.parametrize("neighbors", ["add-remove", "replace"])
def test_noise_is_what_the_release_says(delta, neighbors):
    # 64,000 cells: the variance is off by 1.3% (Laplace) at four standard errors of 0.9%.
    sketch = filled(rows=1000, bits=6)
    private = sketch.privatize(1.0, delta, neighbors, rng=np.random.default_rng(1))
    noise = (private.counts - sketch.counts).astype(float)
    made, moved = private.release, 2000 if neighbors == "replace" else 1000
    assert made.mechanism == ("gaussian" if delta else "laplace")
    assert abs(noise.mean()) < 4 * np.sqrt(made.variance / noise.size)
    assert noise.var() == pytest.approx(made.variance, rel=0.04)
    expected = moved * 4.2247**2 if delta else 2 * moved**2
    assert made.variance == pytest.approx(expected, rel=1e-2)


def test_the_exact_sketch_is_left_alone_and_n_is_handled():
    sketch = filled()
    before = sketch.counts.copy()
    public = sketch.privatize(1.0, rng=np.random.default_rng(0))
    hidden = sketch.privatize(1.0, n="private", rng=np.random.default_rng(0))
    np.testing.assert_array_equal(sketch.counts, before)
    assert not sketch.private
    assert public.n == 2000
    assert hidden.n == pytest.approx(hidden.counts.sum(axis=1).mean())
    assert hidden.n != 2000
    assert abs(hidden.n - 2000) < 4 * np.sqrt(hidden.noise * 32 / 10)


def test_merging_adds_noise_and_says_so():
    rng = np.random.default_rng(0)
    a, b = filled(seed=1).privatize(1.0, rng=rng), filled(seed=2).privatize(0.5, rng=rng)
    merged = a + b
    assert merged.noise == pytest.approx(a.noise + b.noise)
    assert (merged.release.epsilon, merged.release.parts, merged.n) == (1.0, 2, 4000)
    np.testing.assert_array_equal(merged.counts, a.counts + b.counts)
    gaussian = filled(seed=3).privatize(1.0, 1e-5, rng=rng)
    assert (a + gaussian).release.mechanism in ("mixed", "laplace")
    assert pooled([filled(0), a]).noise == a.noise


def test_what_would_break_the_promise_is_refused():
    rng = np.random.default_rng(0)
    exact = filled(50)
    private = exact.privatize(1.0, rng=rng)
    with pytest.raises(ValueError, match="once"):
        private.privatize(1.0)
    with pytest.raises(ValueError, match="no more data"):
        private.add(np.ones((1, 4)))
    with pytest.raises(IncompatibleSketches, match="protect nobody"):
        exact + private
    other = exact.privatize(1.0, neighbors="replace", rng=rng)
    with pytest.raises(IncompatibleSketches, match="replace"):
        private + other


def test_hostile_values_of_a_release_are_named():
    made = noise_for(10, 1.0, 0.0, "add-remove")
    options = ({"epsilon": float("inf")}, {"delta": 1.0}, {"neighbors": "swap"}, {"n": "secret"})
    for wrong in options:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            filled(5).privatize(**{"epsilon": 1.0} | wrong)
    hostile = {"epsilon": -1.0, "variance": 1e39, "fourth": 1e77, "rho": 10**400, "parts": 0}
    for key, value in hostile.items():
        with pytest.raises(ValueError, match=key):
            replace(made, **{key: value})


@pytest.mark.filterwarnings("error")
def test_the_most_noise_that_counts_can_hold_overflows_nothing():
    exact = RaceSketch.srp(dim=2, rows=6, bits=3)
    exact.add(np.random.default_rng(0).standard_normal((50, 2)))
    header, _ = file.unpack(exact.privatize(1.0).to_bytes())
    header["release"] |= {"variance": MAX_VARIANCE, "fourth": MAX_VARIANCE**2}
    counts = np.full((6, 8), -(2**62))
    counts[:, ::2] = 2**62
    for n in (2, 50, 2**61):
        sketch = RaceSketch.from_bytes(file.pack({**header, "n": n}, counts))
        for kind in ("mmd", "frobenius"):
            assert np.isfinite(distance_with_error(sketch, exact, kind)).all()
    tiny = RaceSketch.from_bytes(file.pack({**header, "n": 1e-300}, counts))
    with pytest.raises(ValueError, match="no frobenius distance between sketches of n=1e-300"):
        distance(tiny, exact, debias=False)


def federation(rows, bits, delta=None, n=2000):
    """Distances of 12 clients of Gaussian clusters mixed by Dirichlet(0.5), and one sketch."""
    rng, sketches = np.random.default_rng(0), []
    centers = rng.standard_normal((10, 20))
    for _ in range(12):
        labels = rng.choice(10, n, p=rng.dirichlet(np.full(10, 0.5)))
        sketches.append(RaceSketch.srp(dim=20, rows=rows, bits=bits))
        sketches[-1].add(centers[labels] + rng.standard_normal((n, 20)))
    if delta is not None:
        sketches = [s.privatize(1.0, delta, rng=rng) for s in sketches]
    return distance_matrix(sketches, "mmd")[np.triu_indices(12, 1)], sketches[0]


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_plan_ranks_clients_where_a_thousand_rows_drown(delta):
    truth, _ = federation(1000, 6)
    size = sketch_size(2000, 1.0, delta, dim=20)
    planned, sketch = federation(size.rows, size.bits, delta)
    assert spearmanr(truth, planned).statistic > 0.85
    assert signal_to_noise(sketch) == pytest.approx(size.signal_to_noise)
    if delta == 0:
        drowned, sketch = federation(1000, 6, delta)
        assert spearmanr(truth, drowned).statistic < 0.5
        assert signal_to_noise(sketch) < 1
