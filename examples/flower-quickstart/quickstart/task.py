"""What server and clients share: the model, the data and the test."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, MetricRecord

from fedcohort.datasets import federate, load
from fedcohort.flower import own_id
from fedcohort.simulate import build


def build_model() -> torch.nn.Module:
    """Any nn.Module without batch norm will do; this one has layers of 64, 64, 30 and 10."""
    return build("mlp-64-30", (1, 8, 8), classes=10, seed=0)


def load_my_data(context: Context):
    """Return this client's images and labels.

    In a deployment they come from the file that the node config names, an .npz with x and y. In a
    simulation each client has a part of the handwritten digits, with few classes.
    """
    if "data-path" in context.node_config:
        with np.load(str(context.node_config["data-path"])) as file:
            return file["x"], file["y"]
    clients = int(context.node_config["num-partitions"])
    federation = federate(load("digits"), "dirichlet-per-client", clients, seed=0, alpha=0.5)
    mine = federation.parts[own_id(context)]
    return federation.dataset.x[mine], federation.dataset.y[mine]


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on the test set, which the server holds."""
    dataset, model = load("digits"), build_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        right = model(torch.from_numpy(dataset.x_test)).argmax(1).numpy() == dataset.y_test
    return MetricRecord({"accuracy": float(right.mean())})
