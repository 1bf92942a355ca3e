"""A Flower server with a checkpoint, over a federation in the same process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .job import Job

TESTS = Path(__file__).resolve().parents[2]
SERVER_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import Digits, identify_process
import torch
from flwr.serverapp.strategy import FedAdam
from fedcohort.flower import CohortStrategy
torch.set_num_threads(1)
identify_process()
digits = Digits()
inner = FedAdam(fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=0,
                min_available_nodes=1)
path = Path(sys.argv[1]) / "server.ckpt"
strategy = CohortStrategy(inner, "active-fl", cohort_size=3, seed=0, checkpoint=path)
strategy.start(digits.grid(), digits.arrays(), 6)
"""


def server_of(folder):
    """The state of a finished server, without durations and the random name of its run."""
    from fedcohort import storage

    state = storage.load(folder / "server.ckpt")
    reports = [
        {k: v for k, v in report.items() if k != "seconds"} for report in state.pop("history")
    ]
    arrays = {"arrays": state["arrays"], "inner": state["inner"], "initial": state["initial"]}
    ledger = state["session"]["ledger"]
    return repr((reports, ledger)), repr_exact(arrays)


def repr_exact(value):
    """Return nested values with their arrays as bytes."""
    if isinstance(value, dict):
        return {k: repr_exact(v) for k, v in value.items()}
    if isinstance(value, list):
        return [repr_exact(v) for v in value]
    return value.tobytes() if isinstance(value, np.ndarray) else repr(value)


FLOWER = Job(
    SERVER_SCRIPT,
    lambda inputs, folder: [folder, TESTS / "flower"],
    server_of,
    ("flwr", "torch", "pytest"),
    ("fedcohort.flower", "flwr.serverapp.strategy", "fedcohort.simulate", "sklearn.datasets"),
)
