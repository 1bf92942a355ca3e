"""The laws of collision, against closed forms. `test_pins.py` shows that bits never change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.linalg import hadamard
from scipy.stats import norm

from fedcohort.exceptions import ConfigError
from fedcohort.sketch.hashing import SRP, MinHash, PStable, as_sets, family_from, rotations

ROWS = 1 << 15
# 4 seeds x 2^15 rows: four standard errors of a rate are at most 0.0055; 0.0025 more are for the
# structure of the directions.
NEAR = 0.008


def meeting_rate(family, pair, seeds=4):
    codes = [family(seed).codes(pair) for seed in range(seeds)]
    return float(np.mean([np.mean(c[:, 0] == c[:, 1]) for c in codes]))


def angle_law(x, y, bits):
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    return (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** bits


def step_law(distance, width):
    """Datar et al.: the integral over projected gaps t of their density times 1 - t / width."""

    def integrand(t):
        return 2 / distance * norm.pdf(t / distance) * (1 - t / width)

    return quad(integrand, 0, width, points=[min(5 * distance, width)], limit=200)[0]


def pair_at(angle, dim, seed):
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, 2)))
    return np.stack([basis[:, 0], np.cos(angle) * basis[:, 0] + np.sin(angle) * basis[:, 1]])


DENSE = [pair_at(angle, d, d) for d in (2, 7, 100, 784, 2000) for angle in (0.1, 0.7, 1.5, 2.5)]
SPARSE = [
    [[1, 0], [0, 1]],
    [[1, 1], [1, -0.9]],
    [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]],
    [[1, 2, 3], [3, 2, 1]],
]


@pytest.mark.parametrize("bits", [1, 6])
def test_vectors_meet_by_angle(bits):
    """Few-valued and sparse vectors, such as one-hot ones, too."""
    padded = [np.pad(np.array(x, float), ((0, 0), (0, pad))) for x in SPARSE for pad in (0, 1100)]
    for pair in DENSE + padded:
        rate = meeting_rate(lambda s, dim=pair.shape[1]: SRP(dim, ROWS, bits, s), pair)
        assert abs(rate - angle_law(*pair, bits)) < NEAR, pair.shape


@pytest.mark.parametrize(("dim", "rows", "seeds"), [(4, 10, 3000), (9000, 1000, 60)])
def test_rows_stay_independent(dim, rows, seeds):
    """6 bits from orthogonal directions of one 256-wide rotation would meet less often.

    So that single rows are right too, the first average 10 rows over 3,000 seeds (4 s.e. = .009).
    The others use 6,000 directions of one rotation of 16,384 (4 s.e. = .008).
    """
    rate = meeting_rate(lambda s: SRP(dim, rows, 6, s), pair_at(0.6, dim, 3), seeds)
    assert abs(rate - (1 - 0.6 / np.pi) ** 6) < 0.011


@pytest.mark.parametrize("dim", [1, 13, 1500])
@pytest.mark.parametrize("buckets", [4, 512])
def test_points_meet_by_distance(dim, buckets):
    rng = np.random.default_rng(dim)
    start, step = rng.normal(scale=5, size=dim), rng.standard_normal(dim)
    for distance in (0.2, 1.0, 3.0, 20.0):
        pair = np.stack([start, start + distance * step / np.linalg.norm(step)])
        rate = meeting_rate(lambda s: PStable(dim, ROWS, 2.0, buckets, s), pair)
        alike = step_law(distance, 2.0)
        assert abs(rate - alike - (1 - alike) / buckets) < NEAR


# A given pair of sets also carries the error of one fixed pre-hash; neighboring integers would
# show a poor one.
@pytest.mark.parametrize("buckets", [2, 512])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (range(10), range(10)),
        (range(10), range(10, 20)),
        (range(1000), range(100, 1000)),
        ([0, 1], [1, 2]),
        ([-5, 7], [7]),
        (["the", "quick", "brown", "fox"], ["the", "lazy", "brown", "dog"]),
        ([b"a", "1", 1], [b"a", "b", 2]),
        ([], []),
        ([], ["a"]),
    ],
)
def test_sets_meet_by_overlap(a, b, buckets):
    union = len(set(a) | set(b))
    similarity = len(set(a) & set(b)) / union if union else 1.0
    rate = meeting_rate(lambda s: MinHash(ROWS, buckets, s), as_sets([a, b]))
    assert abs(rate - similarity - (1 - similarity) / buckets) < NEAR


def test_directions_are_rotations_by_sylvester_matrices():
    """The compiled loops against H D3 H D2 H D1 written as matrices: the same bits in f8."""
    dim, rows = 300, 70
    first, second, third, used = rotations(9, "srp", dim, rows, 5, "f4")
    h = hadamard(len(first)).astype("f8")
    x = np.random.default_rng(dim).integers(-9, 9, (37, dim)).astype("f8")
    wide = np.pad(x, ((0, 0), (0, len(first) - dim))).T
    spread = h @ (first[:, None] * wide)
    planes = np.concatenate(
        [
            (h @ (t[:, None] * (h @ (s[:, None] * spread))))[:used]
            for s, t in zip(second, third, strict=True)
        ]
    )[: rows * 5]
    bits = (planes.reshape(5, rows, -1) > 0) << np.arange(5)[:, None, None]
    np.testing.assert_array_equal(SRP(dim, rows, 5, 9).codes(x), bits.sum(axis=0))


def test_zero_vector_falls_into_bucket_zero_and_scale_does_not_matter():
    hashes = SRP(dim=9, rows=50, bits=6, seed=1)
    x = np.random.default_rng(2).standard_normal((1, 9))
    codes = hashes.codes(np.concatenate([x, 4 * x, x * 2.0**900, x * 2.0**-900, 0 * x]))
    assert (codes[:, :4] == codes[:, :1]).all()
    assert (codes[:, 4] == 0).all()
    assert (hashes.codes(-x) == 63 - codes[:, :1]).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32), st.sampled_from(["u1", "i2", "i8", "f4", "f8"]))
def test_a_vector_is_hashed_alike_alone_and_in_company(n, seed, kind):
    x = np.random.default_rng(seed).integers(0, 100, (n, 12)).astype(kind)
    for hashes in (SRP(dim=12, rows=20, bits=4), PStable(dim=12, rows=20)):
        together = hashes.codes(x)
        alone = np.concatenate([hashes.codes(row[None]) for row in x], axis=1)
        np.testing.assert_array_equal(together, alone)
        np.testing.assert_array_equal(together, hashes.codes(x.astype("f8")))


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_order_repetition_and_container_of_tokens_do_not_matter(tokens):
    alike = [tokens, tokens[::-1], tokens * 2, set(tokens), iter(tokens), np.array(tokens, int)]
    codes = MinHash(16, 64, seed=1).codes(as_sets(alike))
    assert (codes == codes[:, :1]).all()


def test_strings_are_not_numbers():
    hashes = MinHash(200, 1 << 16, seed=0)
    codes = hashes.codes(as_sets([["1"], [1], [b"1"]]))
    assert np.mean(codes[:, 0] == codes[:, 1]) < 0.05
    assert (codes[:, 0] == codes[:, 2]).all()  # bytes are the string's UTF-8


def test_large_numbers_keep_their_digits():
    # Time stamps: float32 would merge everything within two minutes.
    codes = PStable(1, rows=500).codes(np.array([[1.7e9], [1.7e9 + 40.0]]))
    assert np.mean(codes[:, 0] == codes[:, 1]) < 0.15


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SRP(3, bits=21), "bits=21"),
        (lambda: SRP(3, rows=1 << 20), "16777216"),
        (lambda: PStable(2, width=float("nan")), "width=nan"),
        (lambda: PStable(2, rows=4, width=1.0).codes(np.array([[0.0, 1e17]])), "1e[+]17"),
        (lambda: as_sets(["one string"]), "one string"),
        (lambda: as_sets([[2**70]]), "64 bits"),
        (lambda: as_sets([[1.5]]), "1.5"),
        (lambda: as_sets([["a", ["b"]]]), "b"),
        (lambda: family_from({**SRP(3).spec(), "family": "dense"}), "dense"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        make()
