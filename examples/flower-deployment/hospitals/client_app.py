"""A hospital: its images stay, its sketch leaves once, with noise of its own choice.

These limits bind the server of this app. They do not bind its author, who ships this very file: see
"Privacy of sketches" in fedcohort's docs on Flower.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp

from fedcohort.datasets import federate, load
from fedcohort.flower import Privacy, attach
from fedcohort.simulate import LocalTraining, build


def my_images(context: Context):
    """Return this hospital's images and labels.

    They come from the file that the node config names, an .npz with x and y. Without one, as in a
    simulation, they are a part of the handwritten digits.
    """
    if "data-path" in context.node_config:
        with np.load(str(context.node_config["data-path"])) as file:
            return file["x"], file["y"]
    number, among = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    federation = federate(load("digits"), "dirichlet-per-client", among, seed=0, alpha=0.5)
    mine = federation.parts[federation.clients[number]]
    return federation.dataset.x[mine], federation.dataset.y[mine]


app = ClientApp()
attach(
    app,
    data=my_images,
    model=lambda: build("mlp-64-30", (1, 8, 8), classes=10, seed=0),
    local=LocalTraining(epochs=2, lr=0.2),
    # Nothing else about the data leaves, whoever asks.
    signals=["race_sketch"],
    # Two releases in all, even if the server is replaced by one that keeps asking. The operator of
    # a node sets another folder or budget in the node config.
    privacy=Privacy(epsilon=2.0, delta=1e-6, total=4.0),
)
