"""What the definition of each partition promises, and the tools that they share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedcohort.exceptions import ConfigError
from fedcohort.partition import PARTITIONS, apportion, deal, dirichlet, least_sizes, natural

label_rows = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(np.array)


def split(name, labels, clients, seed=0, **options):
    return PARTITIONS[name](labels, clients, np.random.default_rng(seed), **options)


def table(labels, parts):
    classes = int(labels.max()) + 1
    return np.array([np.bincount(labels[part], minlength=classes) for part in parts])


def top_shares(labels, parts):
    counts = table(labels, parts)
    return counts.max(axis=1) / counts.sum(axis=1)


def test_shards_of_equal_classes_hold_at_most_that_many_labels():
    labels = np.repeat(np.arange(10), 60)
    for per_client in (1, 2, 5):
        counts = table(labels, split("shards", labels, 20, per_client=per_client))
        assert (counts.sum(axis=1) == 30).all()
        assert (counts > 0).sum(axis=1).max() <= per_client
    assert set(counts[counts > 0] % 6) == {0}  # five shards of six


def test_the_three_conventions_differ_as_measured(mnist_like):
    # Mean top-class share of the draws themselves: Dir(0.2) over ten classes 0.54, FedCor's
    # Dir(0.2 * prior) 0.89. Dealing without replacement takes a little off. Five splits of 100
    # clients; a mean over 500 clients has a standard error of about 0.01.
    labels = mnist_like()
    for name, share in (("dirichlet-per-client", 0.53), ("dirichlet-prior", 0.88)):
        tops = [top_shares(labels, split(name, labels, 100, s, alpha=0.2)) for s in range(5)]
        assert np.mean(tops) == pytest.approx(share, abs=0.04)
    by_class = [len(p) for p in split("dirichlet-per-class", labels, 100, alpha=0.2)]
    assert max(by_class) > 2 * min(by_class)  # the only one with unequal sizes


def test_the_cap_stops_clients_at_the_average_size():
    # A capped client can pass the average only with the class that takes it there.
    labels = np.repeat(np.arange(10), 100)
    for seed in range(20):
        parts = split("dirichlet-per-class", labels, 10, seed, alpha=0.1, min_size=0)
        for row in table(labels, parts):
            last = np.flatnonzero(row)[-1] if row.any() else 0
            assert row[:last].sum() < 100 or row[last] == 0


def test_uniform_plus_dirichlet_has_a_skewed_and_a_uniform_half(mnist_like):
    labels = mnist_like(2)
    top = top_shares(labels, split("uniform-plus-dirichlet", labels, 31, alpha=0.5))
    assert top[:15].mean() > 0.3
    assert top[15:].max() < 0.17  # 968 samples: 0.112 + 5 standard deviations


@settings(max_examples=80, deadline=None)
@given(label_rows, st.integers(1, 30), st.integers(0, 2**32))
def test_one_label_means_one_label(labels, clients, seed):
    classes = np.unique(labels).size
    assume(labels.size >= clients)
    try:
        parts = split("one-label", labels, clients, seed)
    except ConfigError as error:
        refusal = str(error)
        assert "use fewer clients" in refusal
        return
    allowed = -(-classes // clients)
    assert all(np.unique(labels[part]).size <= allowed for part in parts)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(3, 60), min_size=2, max_size=6),
    st.integers(1, 25),
    st.floats(0.2, 1.0),
    st.integers(0, 2**32),
)
def test_skewness_gives_each_client_its_share_of_a_main_class(sizes, clients, xi, seed):
    assume(max(sizes) <= sum(sizes) / 2)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    try:
        parts = split("skewness", labels, clients, seed, xi=xi, min_size=2)
    except ConfigError:
        return
    for row in table(labels, parts):
        n = row.sum()
        # rounding, and one sample taken back where rounding overdrew a class
        assert (row >= np.floor(xi * n + 0.5) - 1).any()
        if xi > 0.999:
            assert row.max() == n


def test_skewness_puts_the_share_before_equal_sizes(mnist_like):
    labels = mnist_like(1)
    counts = table(labels, split("skewness", labels, 100, xi=0.8))
    assert set(counts.sum(axis=1)) == {600}
    assert counts.max(axis=1) / 600 == pytest.approx(0.8, abs=0.02)
    pure = table(labels, split("skewness", labels, 100, xi=1))
    assert ((pure > 0).sum(axis=1) == 1).all()
    assert (pure.sum(axis=1).min(), pure.sum(axis=1).max()) == (584, 627)  # docs/data.md


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(5, 40), min_size=2, max_size=6), st.integers(1, 20), st.integers(0, 2**32)
)
def test_two_halves_are_two_different_classes(sizes, clients, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    try:
        parts = split("skewness", labels, clients, seed, xi="H")
    except ConfigError:
        return
    assert ((table(labels, parts) > 0).sum(axis=1) == 2).all()


@pytest.mark.parametrize(
    ("name", "labels", "clients", "options", "message"),
    [
        ("shards", [0, 1, 0, 1, 0], 2, {"per_client": 3}, "per_client=3 x 2 clients"),
        ("skewness", [0, 1], 2, {"xi": "h"}, "xi='h'"),
        ("skewness", [0, 0, 0], 1, {"xi": "H"}, "cannot cover 1 classes"),
        ("skewness", [0, 1, 1], 2, {"xi": "H"}, "too small"),
        ("skewness", [0, 1, 2, 2], 2, {"xi": 1.0}, "xi of at most 0.750"),
        ("dirichlet-environment", [0, 1, 0, 1], 2, {"samples": 5}, "samples=5"),
        ("dirichlet-environment", [0, 1, 0, 1], 2, {"samples": 2, "min_size": 3}, "min_size=3"),
        ("dirichlet-environment", [0, 1, 0, 1], 2, {"samples": 2, "x_med": 3.0}, "x_max=3.0"),
        ("uniform-sizes", [0, 1, 0, 1], 2, {"low": 5, "high": 4}, "low=5"),
        ("dirichlet-per-client", [0, 1, 0, 1], 2, {"alpha": 0.0}, "alpha=0.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, labels, clients, options, message):
    with pytest.raises(ConfigError, match=message):
        split(name, labels, clients, **options)


@settings(max_examples=60, deadline=None)
@given(label_rows, st.integers(1, 20), st.data(), st.integers(0, 2**32))
def test_environment_clients_have_their_size_without_repeats(labels, clients, data, seed):
    samples = data.draw(st.integers(1, labels.size))
    parts = split("dirichlet-environment", labels, clients, seed, samples=samples)
    assert len(parts) == clients
    for part in parts:
        assert part.size == samples
        assert (np.diff(part) > 0).all() and part[0] >= 0 and part[-1] < labels.size


def test_environment_as_in_fedacs():
    labels = np.repeat(np.arange(10), 5000)
    parts = split("dirichlet-environment", labels, 200, x_med=0.1, x_max=5.0)
    holders = np.bincount(np.concatenate(parts), minlength=labels.size)
    assert holders.mean() == 8.0  # 200 x 2,000 / 50,000
    top = top_shares(labels, parts)
    assert top[:100].mean() > 0.7  # Dir(0.05) on average
    assert top[100:].mean() < 0.4  # Dir(2.5) on average


@given(st.lists(st.one_of(st.integers(0, 20), st.text(max_size=3)), min_size=1, max_size=50))
def test_natural_groups_by_the_text_of_the_id(ids):
    array = np.array(ids, dtype=object)
    parts = natural(array)
    assert list(parts) == sorted({str(name) for name in ids})
    for name, part in parts.items():
        assert part.tolist() == [i for i, other in enumerate(ids) if str(other) == name]


def test_natural_leaves_small_clients_out_and_takes_any_id():
    assert list(natural([3, 1, 3], min_size=2)) == ["3"]
    assert type(next(iter(natural(np.array(["a"]))))) is str
    assert list(natural(["a", "a\0"])) == ["a", "a\0"]
    with pytest.raises(ConfigError, match="min_size=3"):
        natural([3, 1, 3], min_size=3)
    with pytest.raises(ConfigError, match="non-empty"):
        natural([])


def test_released_sizes_solve_the_quadratic_program():
    """The least squares of all ways to use every class up: against SciPy's own solver."""
    rng = np.random.default_rng(0)
    mix, supply = dirichlet(np.full((12, 3), 0.3), rng), np.array([50, 30, 20])
    sizes = least_sizes(mix, supply)
    assert mix.T @ sizes == pytest.approx(supply, rel=1e-4)
    exact = minimize(
        lambda x: x @ x,
        np.full(12, 8.0),
        jac=lambda x: 2 * x,
        bounds=[(0, None)] * 12,
        constraints={"type": "eq", "fun": lambda x: mix.T @ x - supply, "jac": lambda x: mix.T},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    assert sizes == pytest.approx(exact.x, abs=0.02)
    with pytest.raises(ConfigError, match="use up all classes"):
        least_sizes(np.array([[1.0, 0.0]]), np.array([5, 5]))


def test_fedcors_released_split_is_unbalanced():
    """100 clients of Fashion-MNIST: up to 1,396 records in the authors' run, 600 on average."""
    labels = np.repeat(np.arange(10), 6000)
    parts = split("dirichlet-prior", labels, 100, alpha=0.2, sizes="released")
    sizes = [len(part) for part in parts]
    assert min(sizes) < 450 and max(sizes) > 900
    assert top_shares(labels, parts).mean() == pytest.approx(0.88, abs=0.04)


def test_dirichlet_draws_have_the_right_moments_even_where_gammas_underflow():
    # Mean 1/k; second moment (a+1)/(k(ka+1)). 20,000 rows: standard errors below 0.003.
    rng = np.random.default_rng(0)
    for a, k in [(0.001, 4), (0.2, 4), (5.0, 3)]:
        draw = dirichlet(np.full((20_000, k), a), rng)
        assert np.isfinite(draw).all()
        assert draw.sum(axis=1) == pytest.approx(1.0)
        assert draw.mean(axis=0) == pytest.approx(1 / k, abs=0.012)
        assert (draw**2).mean() == pytest.approx((a + 1) / (k * (k * a + 1)), abs=0.006)


def test_deal_favors_nobody_when_a_class_runs_short():
    mix = np.array([[1.0, 0.0], [1.0, 0.0]])
    size, supply = np.array([5, 5]), np.array([5, 5])
    first = [int(deal(mix, size, supply, np.random.default_rng(seed))[0, 0]) for seed in range(20)]
    assert set(first) == {0, 5}  # one order only with probability 2e-6


def test_apportion_makes_the_smallest_share_as_large_as_can_be():
    # Against all ways to give seven clients to three classes.
    counts = np.array([50, 31, 9])
    best = max(min(counts / (a, b, 7 - a - b)) for a in range(1, 6) for b in range(1, 7 - a))
    holders = apportion(counts, 7, 7)
    assert holders.sum() == 7
    assert (counts / holders).min() == best
    assert apportion(counts, 7, 3).max() == 3
    assert apportion(counts, 2, 2).tolist() == [1, 1, 0]
