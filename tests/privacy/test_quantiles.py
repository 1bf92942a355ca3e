"""Private quantiles: exact probabilities by enumeration, the epsilon audited, the sampler."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from fedcohort.privacy.quantiles import (
    CELLS,
    miss_sensitivity,
    private_constants,
    private_quantile,
    quantile_misses,
    quartile_error,
)

CELL_COUNT = 4
QUANTILES = [(1, 2), (1, 4), (3, 4)]


def tally(values):
    return np.bincount(values, minlength=CELL_COUNT)


def missed(values, a, b):
    return quantile_misses(tally(values), a, b)


def probabilities(values, a, b, epsilon, neighbors):
    """The mechanism written down again, from the definition: sort, and look which cells fit."""
    n, misses = len(values), []
    for cell in range(CELL_COUNT):
        before, upto = sum(v < cell for v in values), sum(v <= cell for v in values)
        position = a / b * n
        misses.append(max(0.0, before - position, position - upto))  # in ranks
    s = max(a, b - a) / b if neighbors == "add-remove" else 1.0
    weights = [math.exp(-epsilon * d / (2 * s)) for d in misses]
    return np.array(weights) / sum(weights)


def data_sets(most):
    for n in range(most + 1):
        yield from itertools.combinations_with_replacement(range(CELL_COUNT), n)


def neighbors_of(values, relation):
    for i in range(len(values)):
        left = values[:i] + values[i + 1 :]
        if relation == "add-remove":
            yield left
        else:
            yield from (tuple(sorted((*left, v))) for v in range(CELL_COUNT))
            yield left  # a value may become missing


@pytest.mark.parametrize("relation", ["add-remove", "replace"])
@pytest.mark.parametrize(("a", "b"), QUANTILES)
def test_epsilon_holds_for_all_small_data_sets_and_is_nearly_used(a, b, relation):
    """All data of up to five values in four cells, and all their neighbors.

    With half of the sensitivity the largest ratio would exceed the bound; the lower limit shows
    that the enumeration reaches data where the epsilon is spent.
    """
    epsilon, worst, most = 1.0, 0.0, 0
    for values in data_sets(5):
        mine, misses = probabilities(values, a, b, epsilon, relation), missed(values, a, b)
        for other in neighbors_of(values, relation):
            theirs = probabilities(other, a, b, epsilon, relation)
            worst = max(worst, float(np.abs(np.log(mine / theirs)).max()))
            most = max(most, int(np.abs(misses - missed(other, a, b)).max()))
    assert worst <= epsilon * (1 + 1e-12)
    assert worst > 0.55 * epsilon
    assert most == miss_sensitivity(a, b, relation)


@pytest.mark.parametrize("relation", ["add-remove", "replace"])
@pytest.mark.parametrize("values", [(0, 0, 1, 3), (2, 2, 2)])
def test_cells_are_drawn_with_these_probabilities(values, relation):
    """2,500 draws, seed 0: each frequency within 4.5 standard deviations of the enumeration."""
    rng, draws = np.random.default_rng(0), 2_500
    drawn = [private_quantile(tally(values), 3, 4, 1.5, relation, rng) for _ in range(draws)]
    found = np.bincount(drawn, minlength=CELL_COUNT) / draws
    wanted = probabilities(values, 3, 4, 1.5, relation)
    assert (np.abs(found - wanted) < 4.5 * np.sqrt(wanted * (1 - wanted) / draws)).all()


def test_constants_are_near_the_middle_and_the_spread_of_the_data():
    """Normal data, mean 54 and deviation 9, 5,000 records: 1% errors of quartiles are tiny."""
    rng = np.random.default_rng(1)
    values = rng.normal(54, 9, 5000)
    cells = np.floor(values / 120 * CELLS).astype(int)
    counts = np.stack([np.bincount(cells, minlength=CELLS)] * 2)
    for found in private_constants(counts, [(0, 120), (0, 240)], 1.0, rng=rng):
        factor = 1 if found.center < 80 else 2
        assert found.center == pytest.approx(54 * factor, rel=0.03)
        assert found.scale == pytest.approx(9 * factor, rel=0.1)
    counts = np.zeros((1, CELLS), np.int64)
    counts[0, 0], counts[0, 100:200] = 10_000, 1  # half of the values are one
    (found,) = private_constants(counts, [(0, CELLS)], 2.0, rng=np.random.default_rng(0))
    assert found == (0.5, None)


def test_the_stated_error_of_a_quartile_holds():
    """300 quartiles of 4,000 uniform values: at most 5% (and 3 standard deviations) are off."""
    rng = np.random.default_rng(3)
    counts = np.bincount(rng.integers(0, CELLS, 4000), minlength=CELLS)
    most = quartile_error(1, 0.2)
    misses = quantile_misses(counts, 1, 4) / 4
    off = [misses[private_quantile(counts, 1, 4, 0.1, rng=rng)] > most for _ in range(300)]
    assert np.mean(off) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
