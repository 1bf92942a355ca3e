"""Projections against their own matrix, their law, and their promises on memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from fedcohort.signals.projection import Projection


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 70),
    k=st.integers(1, 13),
    kind=st.sampled_from(["uniform", "sparse"]),
    seed=st.integers(0, 2**40),
    dtype=st.sampled_from([np.float32, np.float64, np.int64]),
)
def test_apply_is_the_matrix_product_exactly(dim, k, kind, seed, dtype) -> None:
    """Entries have 24 bits and the values are small integers, so every sum is exact."""
    projection = Projection(dim, k, kind, seed)
    values = np.random.default_rng(dim).integers(-50, 50, size=(3, dim)).astype(dtype)
    expected = values.astype(np.float64) @ projection.matrix().T
    np.testing.assert_array_equal(projection.apply(values), expected)
    np.testing.assert_array_equal(projection.apply(values[1]), expected[1])


def test_uniform_entries_are_uniform_and_independent_looking() -> None:
    entries = Projection(4000, 50, seed=1).matrix()
    assert kstest(entries.ravel(), "uniform", (-1, 2)).pvalue > 1e-3
    rows = np.corrcoef(entries)
    # off-diagonal correlations have deviation 1/sqrt(4000) = 0.016; 2,450 of them within 5
    assert np.abs(rows - np.eye(50)).max() < 5 / np.sqrt(4000)
    neighbors = np.corrcoef(entries[:, :-1].ravel(), entries[:, 1:].ravel())[0, 1]
    assert abs(neighbors) < 5 / np.sqrt(entries.size)


def test_sparse_has_one_signed_entry_a_column_spread_over_rows() -> None:
    entries = Projection(20_000, 7, "sparse", seed=1).matrix()
    np.testing.assert_array_equal(np.abs(entries).sum(axis=0), 1)
    counts = np.abs(entries).sum(axis=1)
    assert np.abs(counts - 20_000 / 7).max() < 5 * np.sqrt(20_000 / 7)
    assert abs(entries.sum()) < 5 * np.sqrt(20_000)


def test_seed_and_kind_decide_the_matrix_for_ever() -> None:
    """Pinned entries: sketches of a running federation must not change under it."""
    assert Projection(3, 2, seed=0).matrix()[0, 0] == -0.6316481232643127
    assert Projection(6, 2, "sparse").matrix()[0].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, -1.0]
    assert not np.array_equal(Projection(3, 2, seed=0).matrix(), Projection(3, 2, seed=1).matrix())


def test_dense_projection_of_a_real_model_stores_no_matrix() -> None:
    """100 x 555,178 float32 entries would take 212 MB."""
    projection = Projection(555_178, 100)
    model = np.random.default_rng(0).normal(size=555_178).astype(np.float32)
    projection.apply(model[None, :])  # compile outside the measurement
    tracemalloc.start()
    projection.apply(model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Projection(0, 1), "dim=0"),
        (lambda: Projection(1, 0), "k=0"),
        (lambda: Projection(1, 1, "gaussian"), "kind='gaussian'"),
        (lambda: Projection(4, 2).apply(np.ones((1, 1, 4))), "dim=4"),
    ],
)
def test_mistakes_are_named(call, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()
