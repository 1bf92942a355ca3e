"""Set matching against naive recomputation and against the best set by brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.numerics import herding


def objective(readings, weights, target, chosen, variance=None) -> float:
    """Squared distance of the merged reading from the target, plus the variance of the merge."""
    part = list(chosen)
    mix = weights[part] / weights[part].sum()
    gap = mix @ readings[part] - target
    return float(gap @ gap + (0 if variance is None else mix**2 @ variance[part]))


def _problem(seed: int, n: int = 10, d: int = 12):
    rng = np.random.default_rng(seed)
    readings = rng.dirichlet(np.full(d, 0.2), size=n)
    weights = rng.integers(5, 60, size=n).astype(float)
    share = weights / weights.sum()
    return readings, weights, share @ readings, {"variance": rng.random(n) * 0.05}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("private", [False, True])
def test_greedy_steps_equal_naive_recomputation(seed: int, private: bool) -> None:
    readings, weights, target, extra = _problem(seed)
    extra = extra if private else {}
    pool = np.random.default_rng(seed).permutation(10)[:7]
    expected: list[int] = []
    for _ in range(4):
        rest = [i for i in pool if i not in expected]
        values = [objective(readings, weights, target, [*expected, i], **extra) for i in rest]
        expected.append(rest[int(np.argmin(values))])
    gram = readings @ readings.T
    for known in (None, gram):
        chosen, value = herding.match(
            readings, weights, target, 4, pool=pool, sweeps=0, gram=known, **extra
        )
        assert chosen == expected
        assert value == pytest.approx(objective(readings, weights, target, chosen, **extra))


@pytest.mark.parametrize("fixed", [0, 2])
def test_exchanges_never_hurt_and_end_in_a_local_optimum(fixed: int) -> None:
    for seed in range(10):
        *problem, private = _problem(seed)
        pool = np.random.default_rng(seed).permutation(10)
        options = {"pool": pool, "fixed": fixed, **private}
        values = [herding.match(*problem, 5, sweeps=s, **options)[1] for s in (0, 1, 2, 20)]
        assert (np.diff(values) <= 1e-12).all()
        final, value = herding.match(*problem, 5, sweeps=50, **options)
        assert final[:fixed] == pool[:fixed].tolist()
        for at in range(fixed, 5):
            for other in set(range(10)) - set(final):
                swapped = [*final[:at], other, *final[at + 1 :]]
                assert objective(*problem, swapped, **private) >= value - 1e-12


def _total(readings, weights, target, sets, **known) -> float:
    return sum(objective(readings, weights, target, s, **known) for s in sets)


@pytest.mark.parametrize("seed", range(10))
def test_a_cut_cannot_be_improved_by_any_exchange(seed: int) -> None:
    """All exchanges between sets and with those left over, by naive recomputation."""
    readings, weights, target, known = _problem(seed, n=11)
    order = np.random.default_rng(seed).permutation(11).tolist()
    sets = herding.cut(readings, weights, target, 3, order=order, fixed=1, sweeps=50, **known)
    assert [len(s) for s in sets] == [3, 3, 3]
    assert order[0] in sets[0]
    groups = [*sets, sorted(set(range(11)) - {i for s in sets for i in s})]
    best = _total(readings, weights, target, sets, **known)
    assert (
        best
        <= _total(readings, weights, target, [order[:3], order[3:6], order[6:9]], **known) + 1e-12
    )
    for a, b in combinations(range(4), 2):
        for i in groups[a]:
            for j in groups[b]:
                if order[0] in (i, j):
                    continue
                changed = [list(g) for g in groups]
                changed[a][changed[a].index(i)], changed[b][changed[b].index(j)] = j, i
                assert _total(readings, weights, target, changed[:3], **known) >= best - 1e-9


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 9), sweeps=st.integers(0, 3), same=st.booleans()
)
def test_sets_are_complete_and_different(seed: int, n: int, sweeps: int, same: bool) -> None:
    readings, weights, target, private = _problem(seed, n=n)
    if same:
        readings = np.repeat(readings[:1], n, axis=0)
    for size in range(1, n + 1):
        chosen, _ = herding.match(readings, weights, target, size, sweeps=sweeps, **private)
        assert len(set(chosen)) == size
