"""What fedcohort saves and reads again: sketches, checkpoints, budgets, the folders of runs."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np

from fedcohort.exceptions import FedcohortError

from .mutate import damaged_document, damaged_lines, damaged_sketch, damaged_zip
from .target import Target, example_sketch, saved


class Sketch(Target):
    name = "sketch"

    def examples(self):
        plain = example_sketch()
        private = plain.privatize(1.0, rng=np.random.default_rng(0))
        return [plain.to_bytes(), private.to_bytes()]

    def damaged(self, data, rng):
        return damaged_sketch(data, rng)

    def parse(self):
        from fedcohort.files.sketching import load_sketch
        from fedcohort.sketch.race import distance

        sketch = load_sketch(self.path)
        if sketch.spec == (known := example_sketch()).spec and sketch.n >= 2:
            distance(sketch, known, "mmd")


class Checkpoint(Target):
    """Also gives what can be read to a session of every policy that remembers something."""

    name = "checkpoint"

    def examples(self):
        from fedcohort import checkpoint

        return [
            saved(lambda path, session=session: checkpoint.save(path, session.state_dict()))
            for session in self.sessions(rounds=3)
        ]

    def sessions(self, rounds=0):
        from fedcohort import POLICIES, Session

        for name in ("uniform", "oort", "fedacs", "active-fl"):
            session = Session(POLICIES[name](), cohort_size=2, seed=0)
            clients = [f"c{i}" for i in range(6)]
            for _ in range(rounds):
                cohort = session.begin(clients, lambda signal, asked: dict.fromkeys(asked, 1.0))
                replies = {
                    signal: dict.fromkeys(cohort.clients, 0.5)
                    for signal in session.policy.needs.reply
                }
                session.finish(replies, cohort.clients)
            yield session

    def damaged(self, data, rng):
        return damaged_zip(data, rng)

    def parse(self):
        from fedcohort import checkpoint

        state = checkpoint.load(self.path)
        for session in self.sessions():
            with contextlib.suppress(FedcohortError):
                checkpoint.restore(self.path, session.load_state_dict, state)


class Budget(Target):
    name = "budget"

    def examples(self):
        from fedcohort.privacy.budget import BudgetLedger
        from fedcohort.privacy.release import noise_for

        def save(path):
            ledger = BudgetLedger(path, 10.0, 1e-6)
            for client in ("ann", "bob"):
                ledger.spend(client, noise_for(10, 0.5, 0.0, "add-remove"))

        return [saved(save)]

    def damaged(self, data, rng):
        return damaged_document(data, rng)

    def parse(self):
        from fedcohort.privacy.budget import BudgetLedger
        from fedcohort.privacy.release import noise_for

        ledger = BudgetLedger(self.path, 10.0, 1e-6)
        ledger.spend("ann", noise_for(10, 0.5, 0.0, "add-remove"))
        ledger.remaining("bob")


class Folder(Target):
    """The files of a run: one of them is damaged, then all are read."""

    name = "run-folder"
    needs = ("torch",)
    files = ("config.json", "rounds.jsonl", "summary.json", "federation.json")
    last = None  # the file that was damaged before; None while there are no files

    def examples(self):
        from fedcohort.experiments import config, folder

        experiment = config.parse(
            {
                "rounds": 3,
                "cohort_size": 2,
                "device": "cpu",
                "data": {"dataset": "digits", "clients": 6, "options": {"per_client": 2}},
            }
        )
        with tempfile.TemporaryDirectory() as made:
            folder.run(experiment, made)
            self.good = {name: (Path(made) / name).read_bytes() for name in self.files}
        return [name.encode() + b"\n" + self.good[name] for name in self.files]

    def damaged(self, data, rng):
        name, _, content = data.partition(b"\n")
        change = damaged_lines if name.endswith(b"jsonl") else damaged_document
        return name + b"\n" + change(content, rng)

    def parse(self):
        from fedcohort.experiments import results

        name, _, content = self.path.read_bytes().partition(b"\n")
        run = self.folder / "run"
        run.mkdir(exist_ok=True)
        for key in {name.decode(), *(self.good if self.last is None else [self.last])}:
            (run / key).write_bytes(content if key.encode() == name else self.good[key])
        self.last = name.decode()
        found = results.read(run)
        for result in found:
            result.members()
        if hasattr(found, "to_arrow"):
            found.to_arrow()
