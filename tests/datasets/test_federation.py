from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedcohort.datasets import Dataset, Federation, federate, from_arrays, load
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments.config import DataConfig
from fedcohort.experiments.run import federation_of
from fedcohort.partition import iid

X = np.arange(40, dtype=float).reshape(20, 2)
Y = np.arange(20) % 3


def toy(**options):
    return from_arrays(X, Y, test_fraction=0, **options)


def test_counts_are_in_the_order_of_sorted_ids():
    federation = Federation(toy(), {"b": [0, 3, 6], "a": [1, 2]})
    assert federation.clients == ("a", "b")
    assert federation.sizes().tolist() == [2, 3]
    assert federation.label_counts().tolist() == [[0, 1, 1], [3, 0, 0]]
    assert federation.parts["b"].dtype == np.int64
    assert federation.test_parts() == {}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "at least one client"),
        ({"a": [0], "b": []}, "'b' has no samples"),
        ({"a": [0, 20]}, "beyond 0 to 19"),
        ({"a": [-1]}, "beyond 0 to 19"),
        ({"a": [1, 1]}, "holds a sample twice"),
        ({"a": [0.0]}, "not an index"),
        ({"a": [[0]]}, "not an index"),
    ],
)
def test_bad_parts_are_refused(parts, message):
    with pytest.raises(DataError, match=message):
        Federation(toy(), parts)


def test_a_row_has_one_client_unless_sharing_is_meant():
    parts = {"a": [0, 1], "b": [2, 3], "c": [4, 3]}
    for make in (Federation, federate):
        with pytest.raises(DataError, match="row 3 is given to clients 'b' and 'c'"):
            make(toy(), parts)
    assert Federation(toy(), parts, shared=True).sizes().tolist() == [2, 2, 2]
    options = {"clients": 4, "samples": 12}
    assert federate(toy(), "dirichlet-environment", **options).sizes().sum() > len(Y)


def test_names_sort_as_numbers():
    assert federate(toy(), "iid", clients=3).clients == ("client-0", "client-1", "client-2")
    names = federate(toy(), "iid", clients=11).clients
    assert names[0] == "client-00"
    assert names[-1] == "client-10"
    data = load("digits")
    names = federate(data, "iid", clients=1001).clients
    assert list(names) == [f"client-{i:04d}" for i in range(1001)]


def test_a_name_and_its_function_are_the_same_and_options_arrive():
    by_name = federate(toy(), "iid", clients=4, seed=3, min_size=5)
    by_call = federate(toy(), iid, clients=4, seed=3, min_size=5)
    assert all(np.array_equal(by_name.parts[c], by_call.parts[c]) for c in by_name.clients)
    by_text = federate(toy(), "iid:min_size=5", clients=4, seed=3)
    assert all(np.array_equal(by_name.parts[c], by_text.parts[c]) for c in by_name.clients)
    skewed = federate(toy(), "skewness", clients=4, xi="H")
    assert ((skewed.label_counts() > 0).sum(axis=1) == 2).all()


def test_natural_clients_all_or_some():
    ids = np.repeat(["ann", "bob", "eve", "joe"], 5)
    data = from_arrays(X, Y, ids, X, Y, test_client_ids=ids)
    whole = federate(data, "natural")
    assert whole.clients == ("ann", "bob", "eve", "joe")
    assert whole.test_parts()["bob"].tolist() == [5, 6, 7, 8, 9]
    setting = DataConfig(partition="natural")
    assert len(federation_of(setting, data, seed=4).clients) == 4
    two = federation_of(dataclasses.replace(setting, clients=2), data, seed=4)
    assert len(two.clients) == 2
    assert list(two.test_parts()) == list(two.clients)
    assert two.clients == federate(data, "natural", clients=2, seed=4).clients
    drawn = {federate(data, "natural", clients=2, seed=s).clients for s in range(40)}
    assert len(drawn) == 6  # each of the six pairs; one is missed with probability 0.004


@pytest.mark.parametrize(
    ("partition", "options", "message"),
    [
        ("dirichlet", {"clients": 2}, "'dirichlet'"),
        ("iid", {}, "iid.*how many clients"),
        ("iid", {"clients": 2, "alpha": 1.0}, "'alpha'.*min_size"),
        ("iid:alpha=1", {"clients": 2}, "'alpha'.*min_size"),
        ("dirichlet-prior", {"clients": 2}, "'alpha'"),
        ("natural", {}, "no natural clients"),
        ([[0]], {"clients": 2}, "index arrays"),
        ([[0]], {"alpha": 2}, "index arrays"),
    ],
)
def test_bad_partitions_are_refused(partition, options, message):
    with pytest.raises(ConfigError, match=message):
        federate(toy(), partition, **options)


def test_natural_options_are_checked():
    data = from_arrays(X, Y, np.repeat(["ann", "bob"], 10), test_fraction=0)
    with pytest.raises(ConfigError, match=r"'alpha'.*'natural'"):
        federate(data, "natural", alpha=1.0)
    with pytest.raises(ConfigError, match="clients=3 must be from 1 to 2"):
        federate(data, "natural", clients=3)
    with pytest.raises(ConfigError, match="min_size=11"):
        federate(data, "natural", min_size=11)


def test_datasets_can_be_built_by_hand():
    x, y = X.astype(np.float32), Y.astype(np.int64)
    with pytest.raises(DataError, match="unequal lengths: x_test 20, y_test 19"):
        Dataset("own", x, y, x, y[1:], 3)
