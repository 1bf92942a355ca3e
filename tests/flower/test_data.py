"""What `attach(data=...)` takes: everything becomes batches of inputs and labels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedcohort.exceptions import ConfigError
from fedcohort.flower.client.data import Examples, data_function
from fedcohort.flower.client.privacy import sketch

X = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
Y = np.arange(10) % 3


def context(**run):
    config = {"partition-id": 2, "num-partitions": 5}
    return Context(0, 1, config, RecordDict(), {k.replace("_", "-"): v for k, v in run.items()})


def same(data):
    examples = Examples(data)
    x, y = examples.arrays()
    assert len(examples) == 10 and y.dtype.kind == "i"
    np.testing.assert_allclose(x, X, rtol=1e-6)
    np.testing.assert_array_equal(y, Y)


DATA = {
    "arrays": (X, Y),
    "lists": (X.tolist(), Y.tolist()),
    "column": (X, Y.astype(np.float32)[:, None]),
    "four": (X, Y, X[:2], Y[:2]),
    "dicts": [{"img": x, "label": y} for x, y in zip(X, Y, strict=True)],
    "named": [{"features": x, "weight": 1.0, "target": y} for x, y in zip(X, Y, strict=True)],
    "split": {"train": (X, Y), "test": (X[:1], Y[:1])},
    "pairs": list(zip(X, Y, strict=True)),
    "batched": [{"image": X[i : i + 5], "label": Y[i : i + 5]} for i in (0, 5)],
}


@pytest.mark.parametrize("name", DATA)
def test_data_without_a_framework(name):
    same(DATA[name])


def test_torchs_loaders_and_data_sets():
    class Dicts(Dataset):
        def __len__(self):
            return len(X)

        def __getitem__(self, i):
            return {"img": torch.from_numpy(X[i]), "label": int(Y[i])}

    tensors = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    for data in (
        tensors,
        DataLoader(tensors, batch_size=3),
        Dicts(),
        DataLoader(Dicts(), batch_size=4),
        (DataLoader(tensors, batch_size=3), DataLoader(tensors, batch_size=3)),
        (torch.from_numpy(X).requires_grad_(), torch.from_numpy(Y)),
    ):
        same(data)


def test_a_loader_is_read_batch_by_batch():
    """A sketch of a large data set never holds more than one batch."""
    rows = [{"img": x, "label": int(y)} for x, y in zip(X, Y, strict=True)]
    examples = Examples(DataLoader(rows, batch_size=2))
    assert [len(x) for x, _ in examples] == [2] * 5
    streamed = sketch(examples, {"rows": 30, "bits": 3})
    whole = sketch(Examples((X, Y)), {"rows": 30, "bits": 3})
    np.testing.assert_array_equal(streamed.counts, whole.counts)


def test_data_of_a_jax_or_tensorflow_kind():
    """Arrays of another framework are anything with __array__."""

    class Tensor:
        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.values, dtype)

        def __len__(self):
            return len(self.values)

    same((Tensor(X), Tensor(Y)))


FUNCTIONS = {
    "context": lambda context: (X[: context.node_config["partition-id"]], Y[:2]),
    "two": lambda partition_id, batch_size: (X[:partition_id], Y[: batch_size - 30]),
    "default": lambda partition_id, batch_size=7: (X[:partition_id], Y[: batch_size - 30]),
    "unknown default": lambda partition_id, alpha=0.5: (X[:partition_id], Y[: int(4 * alpha)]),
    "clients": lambda partition_id, num_clients: (X[:partition_id], Y[: num_clients - 3]),
    "any name": lambda partition_number: (X[: partition_number.node_config["partition-id"]], Y[:2]),
    "none": lambda: (X[:2], Y[:2]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_get_what_they_ask_for(name):
    x, y = data_function(FUNCTIONS[name])(context(batch_size=32)).arrays()
    np.testing.assert_array_equal(x, X[:2])
    np.testing.assert_array_equal(y, Y[:2])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"a": X[0], "b": X[1], "c": 1}], "attach\\(keys="),
        ((X, Y[:3]), "10 inputs and 3 labels"),
        (3, "int is not understood"),
        ([(1, 2, 3)], "a batch is a tuple"),
        ([], "no examples"),
    ],
)
def test_data_that_is_not_understood_is_named(data, message):
    with pytest.raises(ConfigError, match=message):
        Examples(data).arrays()


def test_keys_and_settings_that_are_missing_are_named():
    rows = [{"a": X[0], "b": 1}]
    assert Examples(rows, ("a", "b")).arrays()[1].tolist() == [1]
    with pytest.raises(ConfigError, match=r"among \['a', 'b'\]"):
        Examples(rows, ("a", "c")).arrays()
    with pytest.raises(ConfigError, match="wants 'depth'"):
        data_function(lambda partition_id, num_partitions, batch_size, depth: 0)(
            context(batch_size=1)
        )
