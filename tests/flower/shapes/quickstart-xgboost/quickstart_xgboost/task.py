"""Boosted trees; a model travels as the bytes of XGBoost's JSON."""

from __future__ import annotations

import numpy as np
import xgboost as xgb
from flwr.app import ArrayRecord

from fedcohort.datasets import federate, load

PARAMS = {"objective": "binary:logistic", "eta": 0.3, "max_depth": 4, "nthread": 1}


def matrix(x: np.ndarray, y: np.ndarray) -> xgb.DMatrix:
    """Return images with the question whether the digit is at least 5."""
    return xgb.DMatrix(x.reshape(len(x), -1), label=(y >= 5).astype(int))


def load_data(partition_id: int, num_clients: int):
    """Return this client's data for training and for testing, and their sizes."""
    federation = federate(load("digits"), "dirichlet-per-client", num_clients, seed=0, alpha=0.5)
    mine = federation.parts[federation.clients[partition_id]]
    x, y = federation.dataset.x[mine], federation.dataset.y[mine]
    cut = max(1, int(0.8 * len(x)))
    return matrix(x[:cut], y[:cut]), matrix(x[cut:], y[cut:]), cut, len(x) - cut


def booster(arrays: ArrayRecord) -> xgb.Booster | None:
    """Return the global model, None before the first round."""
    data = arrays["0"].numpy().tobytes()
    if not data:
        return None
    model = xgb.Booster(params=PARAMS)
    model.load_model(bytearray(data))
    return model


def accuracy(arrays: ArrayRecord) -> float | None:
    """Accuracy on the images that the server holds, None before there are trees."""
    model, dataset = booster(arrays), load("digits")
    if model is None:
        return None
    test = matrix(dataset.x_test, dataset.y_test)
    return float(((model.predict(test) > 0.5) == test.get_label()).mean())
