from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fedcohort.rounds import Outcome, stream


def test_dropped_keeps_the_order_of_selection():
    assert Outcome(("c", "a", "b"), ("a",)).dropped == ("c", "b")


def test_a_stream_is_the_same_in_another_process():
    code = "from fedcohort.rounds import stream; print(stream(7, 'x', 3).integers(1 << 60))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(there.stdout) == int(stream(7, "x", 3).integers(1 << 60))


def test_a_stream_is_fixed_for_ever():
    # Results on disk depend on it: a change here breaks everybody's resumed runs.
    assert stream(0, "select", 3).integers(0, 1000, 4).tolist() == [39, 65, 926, 509]
    assert stream(7, "session", 12, "naïve ☃").integers(0, 1000, 4).tolist() == [900, 929, 657, 729]


@given(
    st.lists(st.one_of(st.integers(0, 5), st.text(max_size=3)), max_size=4),
    st.lists(st.one_of(st.integers(0, 5), st.text(max_size=3)), max_size=4),
)
@example(["", ""], ["\x1fs"])
@example(["1"], [1])
@example([1, 1], [11])
@example([""], ["0:"])
def test_different_paths_have_different_streams(one, other):
    first, second = stream(0, *one).integers(1 << 62), stream(0, *other).integers(1 << 62)
    assert (first == second) == (one == other)


def test_streams_of_neighboring_rounds_are_uncorrelated():
    draws = np.array([stream(0, "r", i).random() for i in range(4000)])
    # Mean 1/2 with standard error 1/sqrt(12 * 4000) = 0.0046; lag-1 correlation within 4/sqrt(n).
    assert abs(draws.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / np.sqrt(len(draws))
