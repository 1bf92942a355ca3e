"""The server: a strategy of one's own, whose methods and start keep working."""

from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch.utils.data import DataLoader

from pytorch_example.strategy import CustomFedAvg
from pytorch_example.task import Net, accuracy, held_out

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = CustomFedAvg(
        fraction_train=float(config["fraction-train"]),
        fraction_evaluate=0.0,
    )

    # Define directory for results and save config
    strategy.set_save_path(Path(str(config["results"])) if config["results"] else None)
    strategy.start(
        grid,
        ArrayRecord(Net().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord({"lr": float(config["learning-rate"])}),
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    loader = DataLoader(held_out(), batch_size=256)
    return MetricRecord({"accuracy": accuracy(arrays, loader)})
