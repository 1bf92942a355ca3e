"""What fedcohort saves and reads again: sketches, checkpoints, budgets, the folders of runs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from .mutate import damaged_document, damaged_lines, damaged_sketch, damaged_zip
from .target import Target, example_sketch, saved, write


class Sketch(Target):
    name = "sketch"
    imports = ("fedcohort.files.sketching",)

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
    """Also gives what can be read to a session of the policy that it names, by default uniform."""

    name = "checkpoint"
    policies = ("uniform", "oort", "fedacs", "active-fl")

    def examples(self):
        from fedcohort import storage

        states = [after_three_rounds(session_of(policy)) for policy in self.policies]
        self.named = {state["policy"]: p for state, p in zip(states, self.policies, strict=True)}
        return [saved(lambda path, s=state: storage.save(path, s)) for state in states]

    def damaged(self, data, rng):
        return damaged_zip(data, rng)

    def parse(self):
        from fedcohort import storage

        state = storage.load(self.path)
        stated = state.get("policy")
        policy = self.named.get(stated, "uniform") if isinstance(stated, str) else "uniform"
        storage.restore(self.path, session_of(policy).load_state_dict, state)


def session_of(policy):
    from fedcohort.policies import POLICIES
    from fedcohort.session import Session

    return Session(POLICIES[policy](), cohort_size=2, seed=0)


def after_three_rounds(session):
    """Return the state of a session of six clients."""
    clients = [f"c{i}" for i in range(6)]
    for _ in range(3):
        cohort = session.begin(clients, lambda signal, asked: dict.fromkeys(asked, 1.0))
        wanted = session.policy.needs.reply
        replies = {signal: dict.fromkeys(cohort.clients, 0.5) for signal in wanted}
        session.finish(replies, cohort.clients)
    return session.state_dict()


class Budget(Target):
    name = "budget"

    def examples(self):
        from fedcohort.privacy.budget import BudgetLedger
        from fedcohort.privacy.release import noise_for

        def save(path):
            ledger = BudgetLedger(path, 10.0, 1e-6)
            ledger.charge_and_store(
                [noise_for(10, 0.5, 0.0, "add-remove")], lambda: b"noise", request="r1"
            )

        return [saved(save)]

    def damaged(self, data, rng):
        return damaged_document(data, rng)

    def write(self, data):  # spending replaces the file
        write(self.path, data)

    def parse(self):
        from fedcohort.privacy.budget import BudgetLedger
        from fedcohort.privacy.release import noise_for

        ledger = BudgetLedger(self.path, 10.0, 1e-6)
        ledger.charge(noise_for(10, 0.5, 0.0, "add-remove"))
        ledger.remaining()


class Folder(Target):
    """The files of a run: one of them is damaged, then all are read."""

    name = "run-folder"
    needs = ("torch",)
    imports = ("fedcohort.experiments.results",)
    files = ("config.json", "rounds.jsonl", "federation.json")
    last = None  # the file that was damaged before; None while there are no files

    def examples(self):
        from fedcohort.experiments import config, run

        experiment = config.parse(
            {
                "rounds": 3,
                "cohort_size": 2,
                "device": "cpu",
                "data": {"dataset": "digits", "clients": 6, "options": {"per_client": 2}},
            }
        )
        with tempfile.TemporaryDirectory() as made:
            run.run(experiment, made)
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
