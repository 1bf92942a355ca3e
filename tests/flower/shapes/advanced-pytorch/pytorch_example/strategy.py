"""A strategy with a learning-rate schedule, and a start that saves results round by round."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.serverapp.strategy import FedAvg, Result


class CustomFedAvg(FedAvg):
    """FedAvg that halves the learning rate in round 3 and writes results.json."""

    def set_save_path(self, path: Path) -> None:
        self.save_path = path

    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 3:
            config["lr"] = config["lr"] / 2
        return super().configure_train(server_round, arrays, config, grid)

    def start(
        self,
        grid,
        initial_arrays,
        num_rounds=3,
        timeout=3600,
        train_config=None,
        evaluate_config=None,
        evaluate_fn=None,
    ) -> Result:
        self.best, result, arrays = 0.0, Result(), initial_arrays
        self.summary()
        for number in range(1, num_rounds + 1):
            messages = self.configure_train(number, arrays, train_config, grid)
            replies = grid.send_and_receive(messages, timeout=timeout)
            found, metrics = self.aggregate_train(number, replies)
            if found is not None:
                result.arrays = arrays = found
            if metrics is not None:
                result.train_metrics_clientapp[number] = metrics
            measured = evaluate_fn(number, arrays)
            result.evaluate_metrics_serverapp[number] = measured
            self._save(number, float(measured["accuracy"]))
        return result

    def _save(self, number: int, accuracy: float) -> None:
        self.best = max(self.best, accuracy)
        if self.save_path is not None:
            line = {"round": number, "accuracy": accuracy, "best": self.best}
            with open(self.save_path / "results.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
