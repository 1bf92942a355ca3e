from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedcohort.sketch.race import RaceSketch
from fedcohort.sketch.transforms import Tokenizer, Transform, unit_length


def test_order_of_the_steps():
    step = Transform(center=[1, 2], scale=[1, 4], unit=True, classes=3, label_weight=2.0)
    made = step.apply(np.array([[4.0, 18.0]]), np.array([2]))
    np.testing.assert_allclose(made, [[0.6, 0.8, 0, 0, 2]])


@given(
    arrays(
        float,
        st.tuples(st.integers(1, 4), st.integers(1, 9)),
        elements=st.floats(-1e300, 1e300, allow_subnormal=False),
    )
)
def test_unit_length_at_any_scale(x):
    made = unit_length(x)
    scaled = x / np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-320)
    length = np.linalg.norm(scaled, axis=1)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), (length > 0).astype(float))
    assert ((made == 0) | (np.sign(made) == np.sign(x))).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Transform(center=float("nan")), "center"),
        (lambda: Transform(center=[[1.0]]), "center"),
        (lambda: Transform(center="1"), "center"),
        (lambda: Transform(scale=[1.0, 0.0]), "scale"),
        (lambda: Transform(classes=3), "label_weight"),
        (lambda: RaceSketch.srp(3, transform=Transform(center=(1.0, 2.0))), "2 numbers for dim=3"),
        (lambda: RaceSketch.srp(3, transform=Tokenizer()), "Tokenizer"),
        (lambda: RaceSketch.minhash(transform=Transform(unit=True)), "Transform"),
    ],
)
def test_wrong_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_tokenizers():
    assert Tokenizer("char", (2, 2)).sets(["Abc"]) == [["ab", "bc"]]
    assert Tokenizer("char", lowercase=False).sets(["Ab"]) == [["A", "b"]]
    assert Tokenizer("word", (1, 2)).sets(["not to be"]) == [["not", "to", "be", "not to", "to be"]]
    assert Tokenizer().sets([""]) == [[]]
    for wrong in ({"analyzer": "bytes"}, {"ngrams": (2, 1)}, {"ngrams": (0, 1)}, {"lowercase": 1}):
        with pytest.raises(ValueError, match="tokenizer"):
            Tokenizer(**wrong)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("constants", [{"center": -1.7e308}, {"scale": 1e-10}])
def test_rows_that_overflow_are_refused(constants, unit):
    """They were hashed as infinities."""
    sketch = RaceSketch.srp(dim=2, rows=3, bits=2, transform=Transform(unit=unit, **constants))
    with pytest.raises(ValueError, match="row 1 of the data is too large for the transform"):
        sketch.add(np.array([[1.0, 2.0], [1e308, 1.0]]))
    assert sketch.n == 0
