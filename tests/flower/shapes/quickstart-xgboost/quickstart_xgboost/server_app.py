"""The server: Flower's bagging of trees."""

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedXgbBagging

from quickstart_xgboost.task import accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FedXgbBagging(
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=0.0,
    )

    # Start strategy, run FedXgbBagging for `num_rounds`
    strategy.start(
        grid,
        ArrayRecord([np.frombuffer(b"", dtype=np.uint8)]),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
    correct = accuracy(arrays)
    return None if correct is None else MetricRecord({"accuracy": correct})
