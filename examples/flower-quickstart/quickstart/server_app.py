"""The server: Flower's FedAvg, over cohorts that a k-DPP picks."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcohort.flower import CohortStrategy
from fedcohort.gates import SketchToSkip
from fedcohort.policies import KDPP
from quickstart.task import build_model, evaluate

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = CohortStrategy(
        FedAvg(fraction_train=float(config["fraction-train"]), fraction_evaluate=0.0),
        policy=KDPP(),
        gate=SketchToSkip(threshold=float(config["threshold"])),
        seed=int(config["seed"]),
        out=str(config["out"]) or None,
    )
    strategy.start(
        grid,
        ArrayRecord(build_model().state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    ledger = strategy.session.ledger
    print(f"{ledger.total('down')} bytes down, {ledger.total('up')} up: {ledger.by_kind('up')}")
