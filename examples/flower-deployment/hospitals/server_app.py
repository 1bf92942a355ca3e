"""The server: cohorts of hospitals whose data differ, and no upload that changes nothing."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcohort.datasets import load
from fedcohort.flower import CohortStrategy
from fedcohort.gates import SketchToSkip
from fedcohort.policies import KDPP
from fedcohort.simulate import build

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy on images that the server holds."""
    dataset, model = load("digits"), build("mlp-64-30", (1, 8, 8), classes=10, seed=0)
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        right = model(torch.from_numpy(dataset.x_test)).argmax(1).numpy() == dataset.y_test
    return MetricRecord({"accuracy": float(right.mean())})


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = CohortStrategy(
        FedAvg(min_available_nodes=int(config["nodes"]), fraction_evaluate=0.0),
        policy=KDPP(signal="race_sketch"),
        cohort_size=int(config["cohort-size"]),
        gate=SketchToSkip(threshold=float(config["threshold"])),
        timeout=float(config["timeout"]),
        # In a deployment, the names under which the operator registered the nodes, vouched for by
        # their keys; in a simulation, the partitions.
        identity="auto",
        out=str(config["out"]) or None,
    )
    arrays = ArrayRecord(build("mlp-64-30", (1, 8, 8), classes=10, seed=0).state_dict())
    strategy.start(grid, arrays, int(config["num-server-rounds"]), evaluate_fn=evaluate)
