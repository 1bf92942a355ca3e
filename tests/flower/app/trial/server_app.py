"""The server: runs what the plan says, and writes down what happened."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcohort.flower import CohortStrategy
from fedcohort.flower.grid import TimedGrid
from fedcohort.gates import GATES
from fedcohort.policies import POLICIES
from trial.task import CLIENTS, WithLosses, federation, model, plan

app = ServerApp()


class Recorder(TimedGrid):
    """Counts the bytes of numbers in all that crosses."""

    def __init__(self, grid):
        super().__init__(grid, timeout=60)
        self.bytes = {"down": 0, "up": 0}

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            self._count("down", message)
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids):
        replies = list(self.grid.pull_messages(message_ids))
        for message in replies:
            self._count("up", message)
        return replies

    def _count(self, way, message):
        if message.has_error():
            return
        for record in message.content.array_records.values():
            self.bytes[way] += sum(a.numpy().nbytes for a in record.values())
        for record in message.content.config_records.values():
            self.bytes[way] += sum(len(v) for v in record.values() if isinstance(v, bytes))


def accuracy(arrays):
    network, dataset = model(), federation().dataset
    network.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        predicted = network(torch.from_numpy(dataset.x_test)).argmax(dim=1).numpy()
    return float((predicted == dataset.y_test).mean())


def run(grid, part):
    """Run one part of the plan and return what happened."""
    recorder = Recorder(grid)
    gate = None if part.get("gate") is None else GATES[part["gate"]](**part["gate_options"])
    policies = {**POLICIES, "with-losses": WithLosses}
    strategy = CohortStrategy(
        FedAvg(
            fraction_evaluate=0.0,
            min_evaluate_nodes=0,
            min_available_nodes=part.get("nodes", CLIENTS),
        ),
        policies[part["policy"]](**part.get("options", {})),
        cohort_size=part["cohort_size"],
        gate=gate,
        seed=part["seed"],
        timeout=part["timeout"],
        wait=60,
        checkpoint=part.get("checkpoint"),
    )
    accuracies, times = [], []

    def evaluate(number, arrays):
        accuracies.append(accuracy(arrays))
        times.append(time.monotonic())
        return MetricRecord({"accuracy": accuracies[-1]})

    arrays = ArrayRecord(model().state_dict())
    strategy.start(recorder, arrays, part["rounds"], evaluate_fn=evaluate)
    session = strategy.session
    return {
        "history": [report._asdict() for report in strategy.history],
        "lines": [report.line() for report in strategy.history],
        "accuracies": accuracies[1:],
        "seconds": [b - a for a, b in itertools.pairwise(times)],
        "ledger": {way: session.ledger.total(way) for way in ("down", "up")},
        "crossed": recorder.bytes,
        "refused": strategy.refused,
        "dropped": session.signals.dropped,
        "known": session.signals.known("race_sketch", federation().clients),
    }


@app.main()
def main(grid, context):
    torch.set_num_threads(1)
    results = [run(grid, part) for part in plan()["parts"]]
    target = Path(plan()["out"])
    target.with_suffix(".part").write_text(json.dumps(results))
    target.with_suffix(".part").rename(target)
