from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas import DataFrame
from scipy import sparse

from fedcohort.exceptions import ConfigError, IncompatibleSketches
from fedcohort.sketch import hashing
from fedcohort.sketch.distances import distance
from fedcohort.sketch.race import ColumnCounts, RaceSketch, empty_sketch
from fedcohort.sketch.transforms import Tokenizer, Transform


def data(n, dim=5, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim))


def filled(n, seed=0, **options):
    sketch = RaceSketch.srp(dim=5, rows=20, bits=3, **options)
    sketch.add(data(n, seed=seed))
    return sketch


def test_counts_are_the_hashes_counted():
    sketch = filled(300)
    codes = sketch.family.codes(data(300))
    np.testing.assert_array_equal(sketch.counts, [np.bincount(row, minlength=8) for row in codes])
    assert sketch.n == 300
    np.testing.assert_allclose(sketch.normalized().sum(axis=1), 1.0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(0, 100))
def test_streaming_merging_and_order_do_not_matter(sizes, seed):
    x = data(sum(sizes), seed=seed)
    whole = RaceSketch.srp(dim=5, rows=20, bits=3)
    whole.add(x)
    streamed, merged = whole.empty_like(), whole.empty_like()
    for part in np.split(x[::-1], np.cumsum(sizes)[:-1]):
        streamed.add(part)
        single = whole.empty_like()
        single.add(part)
        merged += single
    assert whole == streamed == merged


@pytest.mark.parametrize("threads", ["1", "3"])
def test_threads_and_blocks_change_nothing(threads, monkeypatch):
    expected = filled(2000)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(hashing, "block_length", lambda rows, dim: 64)
    assert filled(2000) == expected


def test_input_kinds_agree(tmp_path):
    x = np.random.default_rng(1).integers(0, 256, (200, 12)).astype(np.uint8)
    np.save(tmp_path / "x.npy", x)
    kinds = [
        x.astype(np.float32),
        x.astype(np.float64),
        x.astype(np.int64),
        x.reshape(200, 3, 4),
        x.tolist(),
        np.asfortranarray(x),
        sparse.csr_matrix(x),
        sparse.coo_array(x),
        np.load(tmp_path / "x.npy", mmap_mode="r"),
    ]
    expected = RaceSketch.srp(dim=12, rows=30, bits=4)
    expected.add(x)
    for kind in kinds:
        sketch = expected.empty_like()
        sketch.add(kind)
        assert sketch == expected


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (RaceSketch.srp(dim=5, rows=20, bits=3, seed=1), "seed: 0 is not 1"),
        (RaceSketch.minhash(rows=20, buckets=8), "bits: 3 is not None"),
        (filled(9, transform=Transform(center=0.5)), "transform center: None is not 0.5"),
    ],
)
def test_unlike_sketches_are_refused(other, message):
    sketch = filled(10)
    for act in (sketch.__add__, lambda o: distance(sketch, o)):
        with pytest.raises(IncompatibleSketches, match=message):
            act(other)


def test_labels_are_seen():
    # Same images, other labels: only a sketch that hashes labels can tell.
    x, y = data(400), np.zeros(400, int)
    step = Transform(unit=True, classes=3, label_weight=1.0)
    a = RaceSketch.srp(dim=5, rows=200, bits=4, transform=step)
    b = a.empty_like()
    a.add(x, y)
    b.add(x, y + 2)
    assert distance(a, b) > 0.3
    for labels in (y[:5], y + 3, y + 0.5, None):
        with pytest.raises(ValueError, match="labels"):
            a.add(x, labels)
    with pytest.raises(ValueError, match="classes"):
        filled(1).add(x, y)


def test_texts_and_token_sets():
    texts = ["To be or not to be", "that is the question", ""]
    a = RaceSketch.minhash(rows=50, buckets=16, transform=Tokenizer("word"))
    a.add(texts)
    b = RaceSketch.minhash(rows=50, buckets=16)
    b.add([{"to", "be", "or", "not"}, ["that", "is", "the", "question"], []])
    np.testing.assert_array_equal(a.counts, b.counts)
    c = RaceSketch.minhash(rows=50, buckets=16)
    c.add(sparse.csr_matrix([[0, 3, 0, 1], [0, 0, 0, 0]]))
    d = c.empty_like()
    d.add([[1, 3], []])
    assert c == d
    with pytest.raises(ValueError, match="not one string"):
        b.add("To be")
    with pytest.raises(ValueError, match="labels"):
        b.add([["a"]], [1])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones(5), "table of vectors"),
        (np.ones((2, 4)), "4 columns"),
        (np.array([["a"] * 5]), "dtype"),
        (np.ones((2, 5)) * 1j, "dtype"),
        (np.where(np.arange(25_000).reshape(5000, 5) == 21_607, np.nan, 1), "row 4321"),
    ],
)
def test_wrong_data_is_named_and_nothing_is_added(x, message):
    sketch = filled(0)
    with pytest.raises(ValueError, match=message):
        sketch.add(x)
    assert sketch == filled(0)


def test_zeros_and_ones_are_sets_of_columns():
    """Two clients with disjoint vocabularies looked equal: each row was the token set {0, 1}."""
    ones = np.zeros((2, 40, 30), int)
    for i, row in enumerate(np.random.default_rng(0).integers(0, 15, (40, 6))):
        ones[0, i, row], ones[1, i, row + 15] = 1, 1
    sketches = []
    images, tables = ones.reshape(2, 40, 5, 6), map(DataFrame, ones)
    for kind in (ones, ones > 0, ones.astype(float), map(sparse.csr_matrix, ones), images, tables):
        a, b = RaceSketch.minhash(rows=50), RaceSketch.minhash(rows=50)
        for sketch, x in zip((a, b), kind, strict=True):
            sketch.add(x)
        sketches.append((a, b))
        assert distance(a, b) > 0.5 * np.sqrt(50)
    assert all(pair == sketches[0] for pair in sketches)
    with pytest.raises(ValueError, match="0/1"):
        RaceSketch.minhash(rows=5).add(3 * ones[0])  # tokens or weights?
    tokens = RaceSketch.minhash(rows=5)
    tokens.add(list(3 * ones[0]))
    assert tokens.n == 40
    for marks in (list(ones[0] > 0), (ones[0] > 0).tolist()):
        with pytest.raises(ValueError, match="True is neither"):
            tokens.add(marks)
    with pytest.raises(ValueError, match="7 is one token"):
        tokens.add([7, 8])


def test_rows_of_whole_numbers_are_tokens_only_where_that_is_known():
    """Otherwise a table of whole numbers lost the order of its columns."""
    x, options = np.arange(40).reshape(4, 10), {"rows": 5, "bits": 3}
    with pytest.raises(ConfigError, match="whole numbers"):
        empty_sketch(options, x)
    assert empty_sketch(options, x, tokens=True).family.name == "minhash"
    assert empty_sketch(options | {"hash": "srp"}, x).family.name == "srp"
    assert empty_sketch(options, x.astype(np.float32)).family.name == "srp"


@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_the_claim_is_the_total_and_names_both_mechanisms(delta):
    sketch = filled(300)
    sketch.columns = tuple({"name": name} for name in "abcde")
    sketch.marginals = ColumnCounts.empty(5)
    sketch.marginals.add(np.zeros((300, 5), int))
    private = sketch.privatize(1.0, delta, explain=0.25)
    joint, single = private.release, private.marginals.release
    assert private.total_release.epsilon == pytest.approx(1.0)
    total = private.total_release.delta
    assert total == joint.delta + single.delta <= delta
    claim, budget = private.claim(), "epsilon=1" + (f", delta={total:g}" if delta else "")
    assert claim.startswith(budget + " for")
    assert f"n=300, {budget})" in repr(private)
    for release, share in ((joint, 0.75), (single, 0.25)):
        assert f"{release.mechanism} noise" in claim
        assert f"epsilon={share}" in claim
    assert sketch.claim().startswith("exact")
