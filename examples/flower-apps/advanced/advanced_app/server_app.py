"""The server: a strategy of one's own, whose methods and start keep working."""

from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from advanced_app.strategy import CustomFedAvg
from advanced_app.task import Net, accuracy
from fedcohort.flower import CohortStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = CustomFedAvg(fraction_train=float(config["fraction-train"]), fraction_evaluate=0.0)
    strategy = CohortStrategy(strategy, config["policy"])
    strategy.set_save_path(Path(str(config["results"])) if config["results"] else None)
    strategy.start(
        grid,
        ArrayRecord(Net().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        train_config=ConfigRecord({"lr": float(config["learning-rate"])}),
        evaluate_fn=lambda number, arrays: MetricRecord({"accuracy": accuracy(arrays)}),
    )
