"""The server: runs what the plan says, and writes down what happened."""

from __future__ import annotations

import itertools
import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedcohort.flower import CohortStrategy, Pace
from fedcohort.flower.server.asking import CohortGrid
from fedcohort.gates import GATES
from fedcohort.policies import POLICIES
from trial.task import CLIENTS, WithLosses, accuracy, bytes_of, fault, model, plan

PATIENCE = 600  # seconds for what takes a few on a quiet machine

app = ServerApp()


class Recorder(CohortGrid):
    """Counts the bytes of numbers in all that crosses, and waits for those who will answer.

    A round's outcome must not depend on how busy the machine is. Replies of clients that the plan
    lets answer are waited for, whatever the strategy's time limit is. The limit then applies to the
    clients that never answer.
    """

    def __init__(self, grid, waits):
        super().__init__(grid, timeout=PATIENCE)
        self.waits = waits
        self.bytes = {"down": 0, "up": 0}
        self.waited = 0.0
        self.seen, self._awaited = set(), set()

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            message.metadata.ttl = PATIENCE
            self.bytes["down"] += bytes_of(message)
        ids = list(self.grid.push_messages(messages))
        pairs = zip(ids, messages, strict=True)
        self._awaited |= {i for i, message in pairs if i and not hopeless(message)}
        return ids

    def pull_messages(self, message_ids):
        start, left, replies = time.monotonic(), set(message_ids), []
        while True:
            found = list(self.grid.pull_messages(left))
            replies += found
            left -= {reply.metadata.reply_to_message_id for reply in found}
            if not self.waits or not left & self._awaited or time.monotonic() - start > PATIENCE:
                break
            time.sleep(0.3)
        self._awaited -= left
        self.waited += time.monotonic() - start
        self.bytes["up"] += sum(map(bytes_of, replies))
        return replies

    def get_nodes(self):
        nodes = list(self.grid.get_nodes())
        self.seen |= {node.node_id for node in nodes}
        return nodes

    def wait_for_nodes(self, number):
        """Wait until so many nodes have been online, gone ones included."""
        end = time.monotonic() + PATIENCE
        while len(self.seen) < number and time.monotonic() < end:
            self.get_nodes()
            time.sleep(0.1)


def hopeless(message):
    """Whether nobody will answer a message."""
    config = message.content.config_records.get("config", {})
    if "fedcohort" not in config:
        return False
    client = json.loads(config["fedcohort"])["client"]
    number = config.get("server-round", 0)
    return fault(client, message.metadata.message_type, number).get("does") == "hang"


def run(grid, part):
    """Run one part of the plan and return what happened."""
    recorder = Recorder(grid, waits="pace" not in part)
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
        checkpoint=part.get("checkpoint"),
        out=part.get("out"),
        pace=Pace(**part.get("pace", {})),
    )
    accuracies, waited = [], []

    def evaluate(number, arrays):
        accuracies.append(accuracy(arrays))
        waited.append(recorder.waited)
        if number == part.get("joined", {}).get("after"):
            recorder.wait_for_nodes(part["joined"]["nodes"])
        if number == 1 and "late until" in part:
            strategy.inner.min_available_nodes = 1  # one of them is dead
            Path(part["late until"]).touch()
        return MetricRecord({"accuracy": accuracies[-1]})

    arrays = ArrayRecord(model().state_dict())
    strategy.start(recorder, arrays, part["rounds"], evaluate_fn=evaluate)
    session = strategy.session
    return {
        "history": [asdict(report) for report in strategy.history],
        "lines": [report.line() for report in strategy.history],
        "accuracies": accuracies[1:],
        "waited": [b - a for a, b in itertools.pairwise(waited)],
        "ledger": {way: session.ledger.total(way) for way in ("down", "up")},
        "crossed": recorder.bytes,
        "refused": strategy.refused,
    }


@app.main()
def main(grid, context):
    try:
        results = [run(grid, part) for part in plan()["parts"]]
    except Exception:  # or the test would wait for results that never come
        results = traceback.format_exc()
    target = Path(plan()["out"])
    target.with_suffix(".part").write_text(json.dumps(results))
    target.with_suffix(".part").rename(target)
