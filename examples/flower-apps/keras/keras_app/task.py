"""A Keras model; the backend is TensorFlow, JAX or PyTorch (KERAS_BACKEND)."""

from __future__ import annotations

import keras
from flwr.app import ArrayRecord

from fedcohort.datasets import federate, load


def load_model(learning_rate: float = 0.1):
    """Return a compiled model with the same initial weights everywhere."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(32, activation="relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])
    model.compile(
        keras.optimizers.SGD(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


def load_data(partition_id: int, num_partitions: int):
    """Return this client's digits as x_train, y_train, x_test, y_test."""
    federation = federate(load("digits"), "dirichlet-per-client", num_partitions, seed=0, alpha=0.5)
    mine = federation.parts[federation.clients[partition_id]]
    x, y = federation.dataset.x[mine].reshape(len(mine), -1), federation.dataset.y[mine]
    cut = max(1, int(0.8 * len(x)))
    return x[:cut], y[:cut], x[cut:], y[cut:]


def accuracy(arrays: ArrayRecord) -> float:
    """Accuracy on the images that the server holds."""
    dataset, model = load("digits"), load_model()
    model.set_weights(arrays.to_numpy_ndarrays())
    x = dataset.x_test.reshape(len(dataset.x_test), -1)
    return float(model.evaluate(x, dataset.y_test, verbose=0)[1])
