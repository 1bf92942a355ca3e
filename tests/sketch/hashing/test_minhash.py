from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcohort.sketch.hashing import MinHash, base, minhash
from fedcohort.sketch.hashing.minhash import as_index_sets, as_sets

ROWS = 1 << 15


def meeting_rate(a, b, buckets=64, seeds=4):
    sets = as_sets([a, b])
    rates = []
    for seed in range(seeds):
        codes = MinHash(ROWS, buckets, seed).codes(sets)
        rates.append(np.mean(codes[:, 0] == codes[:, 1]))
    return float(np.mean(rates))


# 2^17 rows in all: four standard errors are at most 0.0056. A given pair of sets also carries the
# error of one fixed pre-hash; neighboring integers would show a poor one.
@pytest.mark.parametrize("buckets", [2, 64, 512])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (range(10), range(10)),
        (range(10), range(10, 20)),
        (range(10), range(5, 15)),
        (range(1000), range(100, 1000)),
        ([0, 1], [1, 2]),
        ([-5, 7], [7]),
        (["the", "quick", "brown", "fox"], ["the", "lazy", "brown", "dog"]),
        ([b"a", "1", 1], [b"a", "b", 2]),
    ],
)
def test_law(a, b, buckets):
    similarity = len(set(a) & set(b)) / len(set(a) | set(b))
    expected = similarity + (1 - similarity) / buckets
    assert abs(meeting_rate(a, b, buckets) - expected) < 0.007


def test_average_over_many_sets_is_exact():
    # 300 pairs of random sets, J = 1/3 each: the mean over pairs has s.e. 0.471/sqrt(300*200).
    rng = np.random.default_rng(0)
    hashes = MinHash(200, 1 << 16, seed=5)
    met = []
    for _ in range(300):
        tokens = rng.integers(0, 2**40, 30)
        codes = hashes.codes(as_sets([tokens[:20], tokens[10:]]))
        met.append(np.mean(codes[:, 0] == codes[:, 1]))
    assert abs(np.mean(met) - 1 / 3) < 4 * 0.471 / np.sqrt(300 * 200)


def test_empty_sets_meet_each_other_always_and_others_by_folding():
    codes = MinHash(ROWS, 64, seed=0).codes(as_sets([[], set(), ["a"]]))
    assert (codes[:, 0] == codes[:, 1]).all()
    assert abs(np.mean(codes[:, 0] == codes[:, 2]) - 1 / 64) < 4 * np.sqrt(1 / 64 / ROWS)


@given(st.lists(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(), st.binary()))))
def test_compiled_and_plain_loops_agree(sets):
    hashes = MinHash(20, 16, seed=3)
    hashed = as_sets(sets)
    compiled = hashes.codes(hashed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minhash, "kernels", lambda: None)
        np.testing.assert_array_equal(compiled, hashes.codes(hashed))


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(2, 10**6))
def test_compiled_and_plain_folding_agree(values, buckets):
    numbers, key = np.array([values], np.uint64), np.array([12345], np.uint64)
    compiled = base.fold(numbers, key, buckets)
    assert compiled.min() >= 0
    assert compiled.max() < buckets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "kernels", lambda: None)
        np.testing.assert_array_equal(compiled, base.fold(numbers, key, buckets))


@given(st.lists(st.integers(0, 1000), max_size=20))
def test_order_repetition_and_container_do_not_matter(tokens):
    hashes = MinHash(16, 64, seed=1)
    alike = [tokens, tokens[::-1], tokens * 2, set(tokens), iter(tokens), np.array(tokens, int)]
    codes = hashes.codes(as_sets(alike))
    assert (codes == codes[:, :1]).all()


def test_sparse_rows_are_sets_of_columns():
    hashes = MinHash(16, 64, seed=1)
    rows = as_index_sets(np.array([4, 7, 9]), np.array([0, 2, 2, 3]))
    np.testing.assert_array_equal(hashes.codes(rows), hashes.codes(as_sets([[4, 7], [], [9]])))


def test_strings_and_numbers_differ():
    codes = MinHash(200, 1 << 16, seed=0).codes(as_sets([["1"], [1], [b"1"]]))
    assert np.mean(codes[:, 0] == codes[:, 1]) < 0.05
    assert (codes[:, 0] == codes[:, 2]).all()  # bytes are the string's UTF-8


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["one string"], "one string"),
        ([[2**70]], "64 bits"),
        ([[1.5]], "1.5"),
        ([["a", None]], "None"),
    ],
)
def test_what_is_no_token_is_named(sets, message):
    with pytest.raises(ValueError, match=message):
        as_sets(sets)
