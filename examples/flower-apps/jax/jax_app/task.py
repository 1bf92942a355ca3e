"""A network of two layers in plain JAX."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord

from fedcohort.datasets import federate, load


def create_model() -> list[np.ndarray]:
    """Return the initial parameters."""
    rng = np.random.default_rng(0)
    sizes = (64, 32, 10)
    weights = [rng.normal(0, 1 / np.sqrt(n), (n, m)) for n, m in pairwise(sizes)]
    return [np.float32(part) for w in weights for part in (w, np.zeros(w.shape[1]))]


def logits(params, x):
    w1, b1, w2, b2 = params
    return jax.nn.relu(x @ w1 + b1) @ w2 + b2


def loss_fn(params, x, y):
    return -jnp.mean(jax.nn.log_softmax(logits(params, x))[jnp.arange(len(y)), y])


step = jax.jit(jax.value_and_grad(loss_fn))


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """Return batches for training and for testing, as dicts of JAX arrays."""
    federation = federate(load("digits"), "dirichlet-per-client", num_partitions, seed=0, alpha=0.5)
    mine = federation.parts[federation.clients[partition_id]]
    x = jnp.asarray(federation.dataset.x[mine].reshape(len(mine), -1))
    y = jnp.asarray(federation.dataset.y[mine])
    cut = max(1, int(0.8 * len(x)))
    rows = range(0, cut, batch_size), range(cut, len(x), batch_size)
    ends = cut, len(x)
    return tuple(
        [
            {"image": x[i : min(i + batch_size, end)], "label": y[i : min(i + batch_size, end)]}
            for i in part
        ]
        for part, end in zip(rows, ends, strict=True)
    )


def train(params, batches, lr: float):
    """Train an epoch; return the parameters and the mean loss."""
    losses = []
    for batch in batches:
        loss, gradients = step(params, batch["image"], batch["label"])
        params = [p - lr * g for p, g in zip(params, gradients, strict=True)]
        losses.append(float(loss))
    return [np.asarray(p) for p in params], float(np.mean(losses))


def accuracy(arrays: ArrayRecord) -> float:
    """Accuracy on the images that the server holds."""
    dataset = load("digits")
    x = dataset.x_test.reshape(len(dataset.x_test), -1)
    outputs = np.asarray(logits(arrays.to_numpy_ndarrays(), x))
    return float((outputs.argmax(1) == dataset.y_test).mean())
