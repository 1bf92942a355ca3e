from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.sketch.hashing import SRP, srp
from fedcohort.sketch.hashing.base import hadamard, project, rotations
from fedcohort.sketch.hashing.srp import collision

ROWS = 1 << 15


def meeting_rate(x, y, bits, seeds=4, family="fast", rows=ROWS):
    x, y = np.asarray(x, float), np.asarray(y, float)
    rates = []
    for seed in range(seeds):
        codes = SRP(len(x), rows, bits, seed, family).codes(np.stack([x, y]))
        rates.append(np.mean(codes[:, 0] == codes[:, 1]))
    return float(np.mean(rates))


def cosine(x, y):
    x, y = np.asarray(x, float), np.asarray(y, float)
    return x @ y / np.linalg.norm(x) / np.linalg.norm(y)


def pair_at(angle, dim, seed):
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((dim, 2)))
    return basis[:, 0], np.cos(angle) * basis[:, 0] + np.sin(angle) * basis[:, 1]


# 4 seeds x 2^15 rows: four standard errors are at most 0.0055; 0.0025 more for the structure.
@pytest.mark.parametrize("bits", [1, 3, 6])
@pytest.mark.parametrize("dim", [2, 3, 7, 16, 100, 784, 2000])
def test_law_at_many_angles(dim, bits):
    for angle in (0.1, 0.7, 1.5, 2.5):
        x, y = pair_at(angle, dim, seed=dim)
        expected = (1 - angle / np.pi) ** bits
        assert abs(meeting_rate(x, y, bits) - expected) < 0.008


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1, 0], [0, 1]),
        ([1, 0], [1, 1]),
        ([1, 1], [1, -0.9]),
        ([1, 0], [np.cos(0.3), np.sin(0.3)]),
        ([1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]),
        ([1, 2, 3], [3, 2, 1]),
    ],
)
@pytest.mark.parametrize("pad", [0, 300, 1100])
def test_law_for_sparse_and_few_valued_vectors(x, y, pad):
    x, y = np.r_[x, np.zeros(pad)], np.r_[y, np.zeros(pad)]
    for bits in (1, 6):
        assert abs(meeting_rate(x, y, bits) - collision(cosine(x, y), bits)) < 0.008


def test_dense_family_keeps_the_law():
    x, y = pair_at(0.8, 20, seed=1)
    expected = (1 - 0.8 / np.pi) ** 4
    assert abs(meeting_rate(x, y, 4, family="dense") - expected) < 0.0055


def test_few_rows_of_a_small_rotation_stay_independent():
    # 6 bits from orthogonal directions of one 256-wide rotation would meet less often; so that
    # single rows are right too, average 10-row sketches over 3,000 seeds (4 s.e. = 0.009).
    x, y = pair_at(0.6, 4, seed=3)
    rate = meeting_rate(x, y, bits=6, seeds=3000, rows=10)
    assert abs(rate - (1 - 0.6 / np.pi) ** 6) < 0.011


def test_one_wide_rotation_serves_all_bits():
    # 6,000 directions of one rotation of 16,384: 60 seeds x 1,000 rows, four s.e. = 0.008.
    x, y = pair_at(0.5, 9000, seed=5)
    assert len(rotations(0, "srp", 9000, 1000, 6, "f4").second) == 1
    rate = meeting_rate(x, y, bits=6, seeds=60, rows=1000)
    assert abs(rate - (1 - 0.5 / np.pi) ** 6) < 0.008


@pytest.mark.parametrize("dim", [3, 300, 784, 3000])
def test_compiled_and_plain_loops_agree_bit_for_bit(dim, monkeypatch):
    x = np.random.default_rng(dim).standard_normal((37, dim))
    hashes = SRP(dim, rows=70, bits=5, seed=9)
    compiled = hashes.codes(x)
    monkeypatch.setattr(srp, "kernels", lambda: None)
    np.testing.assert_array_equal(compiled, hashes.codes(x))


def test_hadamard_is_the_sylvester_matrix():
    from scipy.linalg import hadamard as sylvester

    x = np.random.default_rng(0).standard_normal((3, 16))
    np.testing.assert_allclose(hadamard(x), x @ sylvester(16), atol=1e-12)


def test_a_rotation_keeps_lengths_and_gives_orthogonal_directions():
    turns = rotations(5, "srp", 300, 512, 1, "f8")
    eye = np.eye(turns.size)
    directions = project(eye, turns, turns.size) / turns.size
    assert turns.size == 512
    np.testing.assert_allclose(directions @ directions.T, 512 * eye, atol=1e-9)


def test_zero_vector_falls_into_bucket_zero_and_scale_does_not_matter():
    hashes = SRP(dim=9, rows=50, bits=6, seed=1)
    x = np.random.default_rng(2).standard_normal((1, 9))
    scaled = np.concatenate([x, 4 * x, x * 2.0**900, x * 2.0**-900, 0 * x])
    codes = hashes.codes(scaled)
    assert (codes[:, :4] == codes[:, :1]).all()
    assert (codes[:, 4] == 0).all()
    assert (hashes.codes(-x) == 63 - codes[:, :1]).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32), st.sampled_from(["u1", "i2", "i8", "f4", "f8"]))
def test_a_vector_is_hashed_alike_alone_and_in_company(n, seed, kind):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 100, (n, 12)).astype(kind)
    hashes = SRP(dim=12, rows=20, bits=4, seed=0)
    together = hashes.codes(x)
    alone = np.concatenate([hashes.codes(row[None]) for row in x], axis=1)
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together, hashes.codes(x.astype("f8")))


SCRIPT = """
import hashlib, numpy as np
from fedcohort.sketch.hashing import SRP, MinHash, PStable
from fedcohort.sketch.hashing.minhash import as_sets
x = (np.arange(5 * 100).reshape(5, 100) * 2654435761 % 1000) / 8 - 60
h = hashlib.sha256()
h.update(SRP(100, 40, 6, seed=7).codes(x).tobytes())
h.update(PStable(100, 40, 2.0, 64, seed=7).codes(x).tobytes())
h.update(MinHash(40, 64, seed=7).codes(as_sets([["a", "b"], [1, 2, 3], [], [b"x"]])).tobytes())
print(h.hexdigest())
"""
GOLDEN = "5d302224193858747559bbaf07e8b6b53ec8ed43f1f608f603bf92b2cb6db023"


@pytest.mark.parametrize("salt", ["1", "2"])
@pytest.mark.parametrize("start", ["", "import sys; sys.modules['numba'] = None"])
def test_hashes_are_the_same_in_every_process_and_never_change(salt, start):
    done = subprocess.run(
        [sys.executable, "-c", start + SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": salt},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == GOLDEN


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim=0"),
        ({"dim": 3, "bits": 21}, "bits=21"),
        ({"dim": 3, "rows": 2.5}, "rows=2.5"),
        ({"dim": 3, "rows": 1 << 20, "bits": 6}, "fewer rows"),
        ({"dim": 3, "seed": -1}, "seed=-1"),
        ({"dim": 3, "family": "slow"}, "slow"),
        ({"dim": 1 << 20, "family": "dense"}, "family='fast'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SRP(**options)
