"""What every partition promises, and that it is fast."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.exceptions import ConfigError
from fedcohort.partition import PARTITIONS, one_label

# Options of the partitions that use every sample exactly once.
LOSSLESS = [
    ("iid", {}),
    ("shards", {"per_client": 1}),
    ("shards", {"per_client": 3}),
    ("dirichlet-per-client", {"alpha": 0.05}),
    ("dirichlet-per-client", {"alpha": 10.0}),
    ("dirichlet-per-class", {"alpha": 0.05}),
    ("dirichlet-prior", {"alpha": 0.2}),
    ("dirichlet-prior", {"alpha": 100.0, "sizes": "released"}),
    ("skewness", {"xi": 1.0}),
    ("skewness", {"xi": 0.8}),
    ("skewness", {"xi": 0.3}),
    ("skewness", {"xi": "H"}),
    ("one-label", {}),
    ("uniform-plus-dirichlet", {"alpha": 0.3}),
    ("uniform-sizes", {}),
]
BALANCED = ("iid", "shards", "dirichlet-per-client", "dirichlet-prior")
# These promise a minimum whenever there are enough samples; the others may have to refuse.
ALWAYS_POSSIBLE = (*BALANCED[:1], *BALANCED[2:], "dirichlet-per-class", "uniform-plus-dirichlet")

label_rows = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(np.array)


@pytest.mark.parametrize(("name", "options"), LOSSLESS)
@settings(max_examples=60, deadline=None)
@given(label_rows, st.integers(1, 20), st.integers(0, 6), st.integers(0, 2**32))
def test_no_sample_is_lost_or_duplicated_and_the_minimum_holds(
    name, options, labels, clients, min_size, seed
):
    rng = np.random.default_rng(seed)
    try:
        parts = PARTITIONS[name](labels, clients, rng, min_size=min_size, **options)
    except ConfigError as error:
        refusal = str(error)
        assert name in refusal
        assert clients * min_size > labels.size or name not in ALWAYS_POSSIBLE or "sizes" in options
        return
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(labels.size))
    assert all(part.size >= min_size and (np.diff(part) > 0).all() for part in parts)
    if name in BALANCED and "sizes" not in options:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("name", "options"), [*LOSSLESS, ("dirichlet-environment", {"samples": 9})]
)
def test_the_generator_decides_everything(name, options, mnist_like):
    labels = mnist_like(100)
    first, again, other = (
        PARTITIONS[name](labels, 20, np.random.default_rng(seed), **options) for seed in (1, 1, 2)
    )
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


def test_labels_may_be_anything_that_sorts():
    parts = one_label(["cat", "dog", "cat", "dog"], 2, np.random.default_rng(0))
    assert sorted(part.tolist() for part in parts) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("labels", "clients", "min_size", "message"),
    [
        ([0, 1], 0, 1, "clients=0"),
        ([], 1, 1, "non-empty"),
        ([[0], [1]], 1, 1, "non-empty"),
        ([0, 1, 0, 1, 0], 3, 2, "3 clients of at least min_size=2 need 6 samples"),
        ([0, 1], 1, -1, "min_size=-1"),
    ],
)
def test_impossible_requests_say_what_is_impossible(labels, clients, min_size, message):
    with pytest.raises(ConfigError, match=message):
        PARTITIONS["iid"](labels, clients, np.random.default_rng(0), min_size=min_size)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(case for case in LOSSLESS if "sizes" not in case[1]),  # "released" solves a dense program
        ("dirichlet-environment", {"samples": 6}),
    ],
)
def test_ten_thousand_clients_are_quick(name, options, mnist_like):
    # 0.01 to 0.3 s of processor time as measured: a loop over samples or n^2 memory would fail.
    labels, start = mnist_like(1), time.process_time()
    parts = PARTITIONS[name](labels, 10_000, np.random.default_rng(0), **options)
    assert len(parts) == 10_000
    assert time.process_time() - start < 3.0
