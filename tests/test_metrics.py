from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcohort.exceptions import UnknownClient
from fedcohort.metrics import gemd, participation, participation_entropy

NAN = float("nan")
COUNTS = hnp.arrays(
    np.int64, st.tuples(st.integers(1, 8), st.integers(1, 6)), elements=st.integers(1, 50)
)


def gemd_by_definition(counts, selected):
    """Eq. 15 term by term, with n_c and P_c(y=j) written out."""
    n = [sum(row) for row in counts]
    total = 0.0
    for j in range(len(counts[0])):
        pooled = sum(n[c] * (counts[c][j] / n[c]) for c in selected) / sum(n[c] for c in selected)
        total += abs(pooled - sum(row[j] for row in counts) / sum(n))
    return total


@given(COUNTS, st.data())
def test_gemd_equals_the_definition(counts, data):
    selected = data.draw(st.sets(st.integers(0, len(counts) - 1), min_size=1).map(sorted))
    expected = gemd_by_definition(counts.tolist(), selected)
    assert gemd(counts, selected) == pytest.approx(expected, abs=1e-12)
    assert 0.0 <= gemd(counts, selected) < 2.0


def test_gemd_of_clients_without_examples_is_refused():
    with pytest.raises(ValueError, match=r"\[1\] hold no examples"):
        gemd([[1, 2], [0, 0]], [1])


def test_participation_counts_in_the_order_of_clients():
    counts = participation([["b", "a"], ["b"], []], ["c", "b", "a"])
    assert counts.tolist() == [0, 2, 1]
    with pytest.raises(UnknownClient, match="'x'"):
        participation([["x"]], ["a"])


def test_participation_entropy_exact():
    assert participation_entropy([1, 1, 2]) == pytest.approx(1.5 / math.log2(3))
    assert participation_entropy([7]) == 1.0
    for bad in ([], [0, 0], [1, -1], [1, NAN]):
        with pytest.raises(ValueError, match="counts must be"):
            participation_entropy(bad)
