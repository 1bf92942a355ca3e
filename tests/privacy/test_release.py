from __future__ import annotations

import numpy as np
import pytest

from fedcohort.exceptions import IncompatibleSketches
from fedcohort.privacy.release import MAX_VARIANCE, Release, noise_for
from fedcohort.sketch import file
from fedcohort.sketch.race import RaceSketch, distance, pooled
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
    made = private.release
    assert made.mechanism == ("gaussian" if delta else "laplace")
    assert abs(noise.mean()) < 4 * np.sqrt(made.variance / noise.size)
    assert noise.var() == pytest.approx(made.variance, rel=0.04)
    assert noise.std() == pytest.approx(np.sqrt(made.variance), rel=0.02)
    factor = 2 if neighbors == "replace" else 1
    if not delta:
        assert made.variance == pytest.approx(2 * (factor * 1000) ** 2, rel=1e-3)
    else:
        assert made.variance == pytest.approx(factor * 1000 * 4.2247**2, rel=1e-2)


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
    assert merged.release.variance == pytest.approx(a.noise + b.noise)
    assert merged.release.epsilon == 1.0
    assert merged.release.parts == 2
    assert merged.n == 4000
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


def test_release_round_trip_and_hostile_values():
    made = noise_for(10, 1.0, 0.0, "add-remove")
    assert Release.from_spec(made.spec()) == made
    options = ({"epsilon": float("inf")}, {"delta": 1.0}, {"neighbors": "swap"}, {"n": "secret"})
    for wrong in options:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            filled(5).privatize(**{"epsilon": 1.0} | wrong)
    for key, value in (
        ("epsilon", -1.0),
        ("epsilon", "1"),
        ("variance", float("nan")),
        ("variance", 1e39),
        ("fourth", 1e77),
        ("rho", 10**400),
        ("parts", 0),
        ("parts", True),
        ("mechanism", "none"),
        ("neighbors", None),
        ("rho", True),
    ):
        with pytest.raises(ValueError, match=r"release|epsilon|neighbors"):
            Release.from_spec({**made.spec(), key: value})
    with pytest.raises(ValueError, match="state"):
        Release.from_spec({"epsilon": 1.0})


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
