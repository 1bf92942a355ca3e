"""Logistic regression whose parameters travel as plain arrays."""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord
from sklearn.linear_model import LogisticRegression

from fedcohort.datasets import federate, load

LABELS = list(range(10))


def load_data(partition_id: int, num_partitions: int):
    """Return this client's digits as x_train, y_train, x_test, y_test."""
    federation = federate(load("digits"), "iid", num_partitions, seed=0)
    mine = federation.parts[federation.clients[partition_id]]
    x = federation.dataset.x[mine].reshape(len(mine), -1).astype(float)
    y = federation.dataset.y[mine]
    cut = max(1, int(0.8 * len(x)))
    return x[:cut], y[:cut], x[cut:], y[cut:]


def create_model(arrays: list[np.ndarray] | None = None) -> LogisticRegression:
    """Return a model that goes on from the given parameters, or from zeros."""
    model = LogisticRegression(max_iter=3, warm_start=True, solver="saga", tol=1e-3)
    model.classes_ = np.array(LABELS)
    model.coef_, model.intercept_ = arrays or [np.zeros((10, 64)), np.zeros(10)]
    return model


def parameters(model: LogisticRegression) -> list[np.ndarray]:
    """Return the parameters of the labels that the client has, zeros for the others."""
    coefficients, intercepts = np.zeros((10, 64)), np.zeros(10)
    coefficients[model.classes_], intercepts[model.classes_] = model.coef_, model.intercept_
    return [coefficients, intercepts]


def accuracy(arrays: ArrayRecord) -> float:
    """Accuracy on the images that the server holds."""
    dataset = load("digits")
    model = create_model(arrays.to_numpy_ndarrays())
    return float(model.score(dataset.x_test.reshape(len(dataset.x_test), -1), dataset.y_test))
