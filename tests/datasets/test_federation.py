from __future__ import annotations

import numpy as np
import pytest

from fedcohort.datasets import Federation, federate, from_arrays
from fedcohort.exceptions import ConfigError, DataError
from fedcohort.experiments.config import DataConfig
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


def test_a_name_and_its_function_are_the_same_and_options_arrive():
    names = federate(toy(), "iid", clients=11).clients  # they sort as numbers
    assert list(names) == [f"client-{i:02d}" for i in range(11)]
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
    assert DataConfig(partition="natural").num_clients is None  # all of them
    asked = DataConfig(partition="natural", clients=2).num_clients
    two = federate(data, "natural", asked, seed=4)
    assert len(two.clients) == 2
    with pytest.raises(ConfigError, match="clients=5 must be from 1 to 4"):
        federate(data, "natural", clients=5)
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
