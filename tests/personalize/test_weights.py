from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.personalize.cold_start import RIDGE, by_distance, matching, mixture_square


def problem(seed, k=6, dim=4):
    rng = np.random.default_rng(seed)
    clients, newcomer = rng.normal(size=(k, dim)), rng.normal(size=dim) / 2
    return clients @ clients.T, ((clients - newcomer) ** 2).sum(axis=1), clients, newcomer


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_matching_is_the_minimum_over_the_simplex(seed):
    """No other weights do better: first-order conditions, and 200 random alternatives."""
    gram, squares, _, _ = problem(seed)
    energy = np.random.default_rng(seed + 1).uniform(0, 0.5, 6)

    def cost(w):
        return mixture_square(gram, squares, w) + RIDGE * (w**2 * energy).sum()

    weights = matching(gram, squares, energy)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    rng = np.random.default_rng(seed + 2)
    for other in [*np.eye(6), *rng.dirichlet(np.full(6, 0.5), 200)]:
        assert cost(weights) <= cost(other) + 1e-7
    slope = 2 * gram @ weights + 2 * RIDGE * energy * weights + squares - np.diag(gram)
    used = weights > 1e-6
    assert np.ptp(slope[used]) < 1e-4
    assert slope.min() > slope[used].mean() - 1e-4


def test_a_mixture_of_clients_is_recognized():
    _, _, clients, _ = problem(0, k=5, dim=8)
    true = np.array([0.0, 0.5, 0.2, 0.0, 0.3])
    newcomer = true @ clients
    squares = ((clients - newcomer) ** 2).sum(axis=1)
    found = matching(clients @ clients.T, squares, np.zeros(5))
    np.testing.assert_allclose(found, true, atol=1e-5)


def test_matching_survives_what_debiasing_does():
    """A diagonal made too small leaves negative curvature; the answer is still a mixture."""
    gram, squares, _, _ = problem(3)
    weights = matching(gram - 5 * np.eye(6), squares - 5, np.zeros(6))
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    assert matching(np.zeros((1, 1)), [0.0], [0.0]).tolist() == [1.0]


@given(seed=st.integers(0, 10_000))
def test_mixture_square_is_the_distance(seed):
    gram, squares, clients, newcomer = problem(seed)
    weights = np.random.default_rng(seed).dirichlet(np.ones(6))
    expected = ((weights @ clients - newcomer) ** 2).sum()
    assert mixture_square(gram, squares, weights) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-1, 100), st.floats(0, 10)), min_size=1, max_size=10))
def test_weights_by_distance(pairs):
    squares, errors = np.array(pairs).T
    weights = by_distance(squares, errors)
    assert np.isfinite(weights).all()
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    far = np.maximum(squares, 0) + errors
    order = np.argsort(far)
    assert (np.diff(weights[order]) <= 1e-12).all()


def test_weights_by_distance_by_hand():
    assert by_distance([3.0, 1.0], [1.0, 1.0]).tolist() == pytest.approx([0.2, 0.8])
    assert by_distance([-5.0, -1.0], [1.0, 1.0]).tolist() == [0.5, 0.5]
    assert by_distance([0.0, 1.0], [0.0, 0.0]).tolist() == pytest.approx([1.0, 0.0])
