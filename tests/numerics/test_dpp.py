"""k-DPP draws, probabilities and inclusion against enumeration of all subsets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chi2

from fedcohort.numerics import _loops, dpp


def _kernel(n: int, rank: int, seed: int) -> np.ndarray:
    features = np.random.default_rng(seed).normal(size=(n, rank))
    return features @ features.T


def _enumerate(kernel: np.ndarray, k: int) -> dict[tuple[int, ...], float]:
    """All probabilities, by determinants; for k above the rank by the documented extension."""
    n = len(kernel)
    rank = int(np.linalg.matrix_rank(kernel))
    core = min(k, rank)
    law = {
        subset: max(float(np.linalg.det(kernel[np.ix_(subset, subset)])), 0.0)
        for subset in combinations(range(n), core)
    }
    total = sum(law.values())
    law = {subset: value / total for subset, value in law.items()}
    extended: dict[tuple[int, ...], float] = {}
    for subset, value in law.items():
        rest = [i for i in range(n) if i not in subset]
        fills = list(combinations(rest, k - core))
        for fill in fills:
            key = tuple(sorted(subset + fill))
            extended[key] = extended.get(key, 0.0) + value / len(fills)
    return extended


CASES = [
    *((n, n, k) for n in (6, 7, 8) for k in (1, 2, 3, 4, 5)),
    (6, 3, 2),  # singular
    (7, 4, 4),  # as many as the rank
    (7, 2, 4),  # above the rank
    (6, 1, 5),
]


@pytest.mark.parametrize(("n", "rank", "k"), CASES)
def test_probabilities_and_inclusion_match_enumeration(n: int, rank: int, k: int) -> None:
    kernel = _kernel(n, rank, seed=n * 10 + k)
    law = _enumerate(kernel, k)
    for subset, probability in law.items():
        assert np.exp(dpp.log_probability(kernel, subset)) == pytest.approx(probability, abs=1e-9)
    expected = np.zeros(n)
    for subset, probability in law.items():
        expected[list(subset)] += probability
    np.testing.assert_allclose(dpp.inclusion(kernel, k), expected, atol=1e-9)


@pytest.mark.parametrize(("n", "rank", "k"), CASES)
def test_draws_follow_the_law(n: int, rank: int, k: int) -> None:
    """Chi-square over all subsets at the 1e-4 level: 19 cases, fixed seeds.

    A sampler that ignored one conditional (say, proposals without rejection) would be off by
    tens of percent in many cells; 6,000 draws then exceed the threshold many times over.
    """
    kernel = _kernel(n, rank, seed=n * 10 + k)
    law = _enumerate(kernel, k)
    process = dpp.FixedSizeDPP.from_kernel(kernel)
    rng = np.random.default_rng(1000 + n * 10 + k)
    counts = dict.fromkeys(law, 0)
    draws = 6000
    for _ in range(draws):
        counts[tuple(process.sample(k, rng))] += 1
    expected = np.array([law[subset] * draws for subset in law])
    seen = np.array([counts[subset] for subset in law])
    rare = expected < 5  # pooled, as the chi-square approximation asks
    cells = [(seen[~rare], expected[~rare]), (seen[rare].sum(), max(expected[rare].sum(), 1e-9))]
    statistic = sum(float(np.sum((o - e) ** 2 / e)) for o, e in cells)
    freedom = int((~rare).sum()) - 1 + int(rare.any())
    assert statistic < chi2.isf(1e-4, max(freedom, 1))


def test_compiled_loops_equal_plain_python() -> None:
    process = dpp.FixedSizeDPP.from_kernel(_kernel(12, 9, seed=3))
    chances = process._chance_table(5)
    for seed in range(20):
        fast, plain = np.random.default_rng(seed), np.random.default_rng(seed)
        chosen = _loops.draw_eigenvectors(chances, 5, fast)
        assert chosen.tolist() == _loops.draw_eigenvectors.py_func(chances, 5, plain).tolist()
        items = _loops.draw_projection(process.eigenvectors, chosen, fast)
        again = _loops.draw_projection.py_func(process.eigenvectors, chosen, plain)
        assert items.tolist() == again.tolist()


def test_dual_form_equals_the_kernel_it_stands_for() -> None:
    features = np.random.default_rng(5).normal(size=(9, 3))
    dual, full = (
        dpp.FixedSizeDPP.from_features(features),
        dpp.FixedSizeDPP.from_kernel(features @ features.T),
    )
    assert dual.rank == full.rank == 3
    for k in (1, 2, 3, 5):
        np.testing.assert_allclose(dual.inclusion(k), full.inclusion(k), atol=1e-9)
        for subset in combinations(range(9), k):
            assert dual.log_probability(subset) == pytest.approx(full.log_probability(subset))


def test_large_sets_do_not_overflow() -> None:
    """e_50 of 1,000 eigenvalues around 1e6 is about 1e385; log space must carry it."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(1000, 60)) * 1e3
    process = dpp.FixedSizeDPP.from_features(features)
    chances = process.inclusion(50)
    assert np.isfinite(chances).all()
    assert chances.sum() == pytest.approx(50)
    subset = process.sample(50, rng)
    assert len(set(subset)) == 50
    assert np.isfinite(process.log_probability(subset))


def test_similarity_kernel_is_equation_14() -> None:
    profiles = np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    distance = np.array([[0, 5, 1], [5, 0, np.sqrt(18)], [1, np.sqrt(18), 0]])
    similarity = 1 - distance / 5
    np.testing.assert_allclose(dpp.similarity_kernel(profiles), similarity.T @ similarity)


def test_equal_profiles_fall_back_to_uniform() -> None:
    kernel = dpp.similarity_kernel(np.ones((6, 4)))
    np.testing.assert_allclose(kernel, 6.0)
    np.testing.assert_allclose(dpp.inclusion(kernel, 3), 0.5)
    assert len(set(dpp.sample(kernel, 3, np.random.default_rng(0)))) == 3


def test_frozen_scale_keeps_old_entries_when_a_client_joins() -> None:
    profiles = np.array([[0.0], [1.0], [2.0]])
    before = 1 - np.abs(profiles - profiles.T) / 2
    joined = dpp.similarity_kernel(np.vstack([profiles, [[50.0]]]), scale=2.0)
    np.testing.assert_allclose(joined[:3, :3], before.T @ before)  # the far newcomer adds 0
    assert np.linalg.eigvalsh(joined).min() > -1e-9


def test_duplicates_are_never_drawn_together() -> None:
    kernel = dpp.similarity_kernel([[0.0], [0.0], [1.0], [3.0]])
    assert dpp.log_probability(kernel, [0, 1]) == -np.inf
    process = dpp.FixedSizeDPP.from_kernel(kernel)
    rng = np.random.default_rng(0)
    assert all(process.sample(2, rng) != [0, 1] for _ in range(500))


@pytest.mark.parametrize(
    ("kernel", "k", "match"),
    [
        (np.ones((2, 3)), 1, "square"),
        (np.array([[1.0, np.nan], [np.nan, 1.0]]), 1, "finite"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), 1, "symmetric"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), 1, "negative eigenvalue"),
        (np.eye(3), 4, "cannot draw 4 of 3"),
    ],
)
def test_mistakes_are_named(kernel: np.ndarray, k: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dpp.sample(kernel, k, np.random.default_rng(0))


def test_empty_kernel_and_empty_draw() -> None:
    assert dpp.sample(np.zeros((3, 3)), 0, np.random.default_rng(0)) == []
    assert len(dpp.sample(np.zeros((3, 3)), 2, np.random.default_rng(0))) == 2
    assert dpp.log_probability(np.zeros((3, 3)), [0, 1]) == pytest.approx(np.log(1 / 3))
