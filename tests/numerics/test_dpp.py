"""k-DPP draws, probabilities and inclusion against enumeration of all subsets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from scipy.spatial.distance import pdist
from scipy.stats import chisquare

from fedcohort.numerics import dpp


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
    *((7, 7, k) for k in (1, 2, 3, 5)),
    (6, 3, 2),  # singular
    (7, 4, 4),  # as many as the rank
    (7, 2, 4),  # above the rank
    (6, 1, 5),
]


@pytest.mark.parametrize(("n", "rank", "k"), CASES)
def test_inclusion_and_draws_follow_the_law(n: int, rank: int, k: int) -> None:
    """Chi-square over all subsets at the 1e-4 level: 8 cases, fixed seeds.

    A sampler that ignored one conditional (say, proposals without rejection) would be off by
    tens of percent in many cells; 6,000 draws then exceed the threshold many times over.
    """
    kernel = _kernel(n, rank, seed=n * 10 + k)
    law, process = _enumerate(kernel, k), dpp.FixedSizeDPP.from_kernel(kernel)
    inclusion = np.zeros(n)
    for subset, probability in law.items():
        inclusion[list(subset)] += probability
    np.testing.assert_allclose(process.inclusion(k), inclusion, atol=1e-9)
    rng = np.random.default_rng(1000 + n * 10 + k)
    counts = Counter(tuple(process.sample(k, rng).tolist()) for _ in range(6000))
    expected = np.array(list(law.values())) * 6000
    seen = np.array([counts[subset] for subset in law])
    rare = expected < 5  # pooled, as the chi-square approximation asks
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    assert counts.keys() <= law.keys()
    assert chisquare(seen, expected, sum_check=False).pvalue > 1e-4


def test_dual_form_equals_the_kernel_it_stands_for() -> None:
    features = np.random.default_rng(5).normal(size=(9, 3))
    dual, full = (
        dpp.FixedSizeDPP.from_features(features),
        dpp.FixedSizeDPP.from_kernel(features @ features.T),
    )
    assert dual.rank == full.rank == 3
    for k in (1, 2, 3, 5):
        np.testing.assert_allclose(dual.inclusion(k), full.inclusion(k), atol=1e-9)


def test_large_sets_do_not_overflow() -> None:
    """e_50 of 1,000 eigenvalues around 1e6 is about 1e385; log space must carry it."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(1000, 60)) * 1e3
    process = dpp.FixedSizeDPP.from_features(features)
    chances = process.inclusion(50)
    assert np.isfinite(chances).all()
    assert chances.sum() == pytest.approx(50)
    assert len(set(process.sample(50, rng).tolist())) == 50


def test_equal_profiles_fall_back_to_uniform() -> None:
    kernel = dpp.similarity_kernel(pdist(np.ones((6, 4))))
    np.testing.assert_allclose(kernel, 6.0)
    np.testing.assert_allclose(dpp.FixedSizeDPP.from_kernel(kernel).inclusion(3), 0.5)


def test_empty_kernel_and_empty_draw() -> None:
    process = dpp.FixedSizeDPP.from_kernel(np.zeros((3, 3)))
    assert process.sample(0, np.random.default_rng(0)).size == 0
    assert len(process.sample(2, np.random.default_rng(0))) == 2
    assert process.inclusion(2) == pytest.approx([2 / 3] * 3)
