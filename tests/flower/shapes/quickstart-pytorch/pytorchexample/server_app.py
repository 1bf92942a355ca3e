"""The server: FedAvg over all clients."""

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from pytorchexample.task import Net, accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    fraction_evaluate = float(config["fraction-evaluate"])
    strategy = FedAvg(fraction_evaluate=fraction_evaluate)

    strategy.start(
        grid,
        ArrayRecord(Net().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord({"lr": float(config["learning-rate"])}),
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"accuracy": accuracy(arrays)})
